"""The optional limits: what a key may spend in its period, and what an organization may send in a
UTC minute. The only writer of KeySpend and MinuteUsage.

Both are counter rows that move in the transaction, and under the account lock, of what they count,
so they are exact over all processes. A limit that is not set costs no statement. Periods and
minutes are those of the database's clock: hosts whose clocks differ agree.

A request may begin while what was used and what others hold is below the limit; its own hold does
not count, as with credits. So a limit can be passed, by what the last request takes and by what
those in flight take beyond their holds.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

from django.db.models import Q, Sum

from billing import counters
from billing.models import ApiKey, KeySpend, MinuteUsage, Organization, UsageEvent

Period = ApiKey.SpendPeriod

_MINUTE = timedelta(minutes=1)
_MINUTES_KEPT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Span:
    """The period that a moment falls into: its begin, and that of the next (UTC midnights)."""

    since: datetime | None
    resets_at: datetime | None


def span(period: str, now: datetime) -> Span:
    """Return the day, the week from Monday or the month around `now`; all of time for none."""
    today = now.astimezone(UTC).date()
    if period == Period.DAY:
        first, next_first = today, today + timedelta(days=1)
    elif period == Period.WEEK:
        first = today - timedelta(days=today.weekday())
        next_first = first + timedelta(days=7)
    elif period == Period.MONTH:
        first = today.replace(day=1)
        next_first = (first + timedelta(days=31)).replace(day=1)
    else:
        return Span(None, None)
    return Span(*(datetime.combine(day, time(), UTC) for day in (first, next_first)))


def spends(keys: Iterable[ApiKey], now: datetime) -> dict[int, Decimal]:
    """Return by ID what each of these keys spent in its current period."""
    wanted = Q(pk__in=[])
    found: dict[int, Decimal] = {}
    for key in keys:
        since = span(key.spend_period, now).since
        wanted |= Q(api_key=key) if since is None else Q(api_key=key, day__gte=since.date())
        found[key.pk] = Decimal(0)
    if found:
        rows = KeySpend.objects.filter(wanted).order_by().values_list("api_key")
        found.update(rows.annotate(Sum("spend")))
    return found


def count_spend(events: Iterable[UsageEvent]) -> None:
    """Add the cost of these events to the spend of their keys, on the day they were admitted."""
    costs: dict[tuple[int, date], Decimal] = {}
    for event in events:
        if event.cost:
            of = (event.api_key_id, event.created_at.astimezone(UTC).date())
            costs[of] = costs.get(of, Decimal(0)) + event.cost
    rows = [KeySpend(api_key_id=key, day=day, spend=cost) for (key, day), cost in costs.items()]
    counters.add(rows, to=["spend"], of=["api_key", "day"])


@dataclass(slots=True)
class Minute:
    """What an organization sent in a UTC minute, and what it may; None where there is no limit.

    `tokens` are those settled in the minute and those that requests in flight hold.
    """

    starts_at: datetime
    requests_limit: int | None
    tokens_limit: int | None
    requests: int = 0
    tokens: int = 0
    admitted: int = 0  # of the requests, those that are not in the row yet

    @property
    def resets_at(self) -> datetime:
        return self.starts_at + _MINUTE

    def full(self) -> str | None:
        """Return the name of the limit that lets no more request begin, if one does."""
        if self.requests_limit is not None and self.requests >= self.requests_limit:
            return "requests_per_minute"
        if self.tokens_limit is not None and self.tokens >= self.tokens_limit:
            return "tokens_per_minute"
        return None

    def add(self, held_tokens: int) -> None:
        self.requests += 1
        self.admitted += 1
        self.tokens += held_tokens


def minutes(organizations: Iterable[Organization], now: datetime) -> dict[int, Minute]:
    """Return by ID the current minute of those organizations that have such a limit."""
    starts_at = now.replace(second=0, microsecond=0)
    found = {
        organization.pk: Minute(
            starts_at, organization.requests_per_minute, organization.tokens_per_minute
        )
        for organization in organizations
        if organization.requests_per_minute is not None
        or organization.tokens_per_minute is not None
    }
    if found:
        for row in MinuteUsage.objects.filter(organization__in=found, minute=starts_at):
            found[row.organization_id].requests = row.requests
            found[row.organization_id].tokens = row.tokens
    return found


def count_admitted(minutes: dict[int, Minute]) -> None:
    """Store the requests that these minutes admitted; remove rows that nobody asks for any more."""
    moved = {pk: minute for pk, minute in minutes.items() if minute.admitted}
    rows = [
        MinuteUsage(organization_id=pk, minute=minute.starts_at, requests=minute.admitted, tokens=0)
        for pk, minute in moved.items()
    ]
    counters.add(rows, to=["requests", "tokens"], of=["organization", "minute"])
    fresh = [pk for pk, minute in moved.items() if minute.requests == minute.admitted]
    if fresh:  # once a minute and organization
        old = moved[fresh[0]].starts_at - _MINUTES_KEPT
        MinuteUsage.objects.filter(organization__in=fresh, minute__lt=old).delete()


def count_settled(settled: Iterable[tuple[UsageEvent, datetime]]) -> None:
    """Add the tokens of these events to the minutes in which they were settled."""
    tokens: Counter[tuple[int, datetime]] = Counter()
    for event, now in settled:
        minute = now.replace(second=0, microsecond=0)
        tokens[event.organization_id, minute] += event.prompt_tokens + event.completion_tokens
    rows = [
        MinuteUsage(organization_id=pk, minute=minute, requests=0, tokens=number)
        for (pk, minute), number in tokens.items()
        if number
    ]
    counters.add(rows, to=["requests", "tokens"], of=["organization", "minute"])
