"""What an organization has, what is held of it, and what it has in flight: reads only.

The rule of 402 and 429 lives here, so that the early look and the admission under the lock say
the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from django.db.models import Count, Sum

from billing.models import CreditAccount, Organization, UsageEvent
from billing.workers import is_live


class NotAdmitted(Exception):
    """Base of what keeps a request of a good key from running: nothing is held or billed."""


class InsufficientCredits(NotAdmitted):
    def __init__(self, standing: Standing) -> None:
        super().__init__(standing)
        self.standing = standing


class TooManyInFlight(NotAdmitted):
    def __init__(self, standing: Standing) -> None:
        super().__init__(standing)
        self.standing = standing


@dataclass(slots=True)
class Standing:
    """What an organization has and has running, in USD and requests, at one moment."""

    balance: Decimal
    overdraft_limit: Decimal
    max_in_flight: int
    held: Decimal = Decimal(0)
    in_flight: int = 0

    @property
    def available(self) -> Decimal:
        return self.balance + self.overdraft_limit - self.held

    def refuse_one_more(self) -> None:
        """Raise InsufficientCredits or TooManyInFlight if one more request may not run.

        The request's own hold is not counted, so that the last picodollar can be spent; the
        overdraft stays bounded by what is in flight (rulings.md 18).
        """
        if self.available <= 0:
            raise InsufficientCredits(self)
        if self.in_flight >= self.max_in_flight:
            raise TooManyInFlight(self)


def standing(organization_id: int) -> Standing:
    """Return what the organization has, held and in flight now, exactly."""
    account = CreditAccount.objects.select_related("organization").get(pk=organization_id)
    return standings({organization_id: account}, [account.organization])[organization_id]


def standings(
    accounts: dict[int, CreditAccount], organizations: Iterable[Organization]
) -> dict[int, Standing]:
    found = {
        organization.pk: Standing(
            balance=accounts[organization.pk].balance,
            overdraft_limit=organization.overdraft_limit,
            max_in_flight=organization.max_in_flight,
        )
        for organization in organizations
        if organization.pk in accounts
    }
    live = (
        UsageEvent.objects.filter(
            is_live(), organization__in=found, state=UsageEvent.State.IN_FLIGHT
        )
        .values("organization_id")
        .annotate(number=Count("pk"), held=Sum("hold"))
        .order_by()
    )
    for row in live:
        found[row["organization_id"]].in_flight = row["number"]
        found[row["organization_id"]].held = row["held"]
    return found
