"""What an organization has, what is held of it, and what it has in flight: reads only.

The rule of 402 and 429 lives here, so that the early look and the admission under the lock say
the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal

from django.db.models import Count, Sum
from django.db.models.functions import Now

from billing import keys, limits
from billing.models import ApiKey, CreditAccount, Organization, UsageEvent
from billing.workers import is_live


class NotAdmitted(Exception):
    """Base of what keeps a request of a good key from running: nothing is held or billed."""


class InsufficientCredits(NotAdmitted):
    def __init__(self, standing: Standing) -> None:
        super().__init__(standing)
        self.standing = standing


class SpendLimitReached(NotAdmitted):
    def __init__(self, spending: Spending) -> None:
        super().__init__(spending)
        self.spending = replace(spending)


class TooManyInFlight(NotAdmitted):
    def __init__(self, standing: Standing) -> None:
        super().__init__(standing)
        self.standing = standing


class RateLimitReached(NotAdmitted):
    """`which` is the name of the limit, as it stands on the organization."""

    def __init__(self, minute: limits.Minute, which: str) -> None:
        super().__init__(minute, which)
        self.minute = replace(minute)
        self.which = which


@dataclass(slots=True)
class Spending:
    """What a key with a spend limit spent in its period and holds, in USD."""

    limit: Decimal
    period: str
    resets_at: datetime | None
    spent: Decimal
    held: Decimal


@dataclass(slots=True)
class Standing:
    """What an organization has and has running, in USD and requests, at one moment.

    `spending` is of its keys that have a limit and were asked for; `minute` is None without a
    limit per minute.
    """

    balance: Decimal
    overdraft_limit: Decimal
    max_in_flight: int
    held: Decimal = Decimal(0)
    in_flight: int = 0
    spending: dict[int, Spending] = field(default_factory=dict)
    minute: limits.Minute | None = None

    @property
    def available(self) -> Decimal:
        return self.balance + self.overdraft_limit - self.held

    def refuse_one_more(self, key_id: int) -> None:
        """Raise NotAdmitted if one more request of this key may not run.

        The request's own hold is not counted, so that the last picodollar can be spent; the
        overdraft stays bounded by what is in flight (rulings.md 18).
        """
        if self.available <= 0:
            raise InsufficientCredits(self)
        spending = self.spending.get(key_id)
        if spending and spending.spent + spending.held >= spending.limit:
            raise SpendLimitReached(spending)
        if self.in_flight >= self.max_in_flight:
            raise TooManyInFlight(self)
        if self.minute and (which := self.minute.full()):
            raise RateLimitReached(self.minute, which)

    def add(self, key_id: int, *, hold: Decimal, held_tokens: int) -> limits.Minute | None:
        """Count one more request, for those of the same batch; return the minute it left."""
        self.in_flight += 1
        self.held += hold
        if key_id in self.spending:
            self.spending[key_id].held += hold
        if self.minute is None:
            return None
        self.minute.add(held_tokens)
        return replace(self.minute)


def standing(organization_id: int) -> Standing:
    """Return what the organization has, held and in flight now, exactly."""
    account = CreditAccount.objects.select_related("organization").get(pk=organization_id)
    return standings({organization_id: account}, [account.organization])[organization_id]


def refuse_one_more(key_id: int) -> None:
    """Raise KeyRefused or NotAdmitted if one more request of this key could not run now.

    An exact read of what admission decides under the lock.
    """
    found_keys, now = read_keys([key_id])
    for key in found_keys.values():  # none when it was deleted: then admission says so
        keys.refuse_unusable(key)
        account = CreditAccount.objects.get(pk=key.organization_id)
        found = standings({account.pk: account}, [key.organization], [key], now)
        found[account.pk].refuse_one_more(key_id)


def read_keys(key_ids: Iterable[int]) -> tuple[dict[int, ApiKey], datetime | None]:
    """Return these keys by ID, with their organizations, and the database's time if there are any.

    One statement for both: the limits need a time on which all hosts agree.
    """
    timed = ApiKey.objects.select_related("organization").annotate(now=Now())
    found = timed.in_bulk(set(key_ids))
    return {**found}, next((key.now for key in found.values()), None)


def standings(
    accounts: dict[int, CreditAccount],
    organizations: Iterable[Organization],
    api_keys: Iterable[ApiKey] = (),
    now: datetime | None = None,
) -> dict[int, Standing]:
    """Return by ID what these organizations have; with `now`, also where their limits per minute
    and the spend limits of these keys stand then."""
    organizations = [each for each in organizations if each.pk in accounts]
    found = {
        organization.pk: Standing(
            balance=accounts[organization.pk].balance,
            overdraft_limit=organization.overdraft_limit,
            max_in_flight=organization.max_in_flight,
        )
        for organization in organizations
    }
    if now is not None:
        _add_limits(found, organizations, api_keys, now)
    live = (
        UsageEvent.objects.filter(
            is_live(), organization__in=found, state=UsageEvent.State.IN_FLIGHT
        )
        .values_list("organization_id", "api_key_id")
        .annotate(Count("pk"), Sum("hold"), Sum("held_tokens"))
        .order_by()
    )
    for organization_id, key_id, number, held, held_tokens in live:
        one = found[organization_id]
        one.in_flight += number
        one.held += held
        if key_id in one.spending:
            one.spending[key_id].held = held
        if one.minute:
            one.minute.tokens += int(held_tokens)  # PostgreSQL's sum of BIGINT is a numeric
    return found


def _add_limits(
    found: dict[int, Standing],
    organizations: Iterable[Organization],
    api_keys: Iterable[ApiKey],
    now: datetime,
) -> None:
    for organization_id, minute in limits.minutes(organizations, now).items():
        found[organization_id].minute = minute
    limited = {key.pk: key for key in api_keys if key.spend_limit is not None}
    for key_id, spent in limits.spends(limited.values(), now).items():
        key = limited[key_id]
        if key.organization_id in found:
            found[key.organization_id].spending[key_id] = Spending(
                limit=key.spend_limit,
                period=key.spend_period,
                resets_at=limits.span(key.spend_period, now).resets_at,
                spent=spent,
                held=Decimal(0),
            )
