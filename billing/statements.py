"""Monthly statements of an organization, and its balance at any line of its ledger. Reads only.

A line belongs to the UTC month in which the database wrote it, whenever its request began, so a
month that is over never changes. What a statement adds up comes from one statement of SQL, which
is one snapshot: opening balance and lines are the closing balance, to the picodollar.
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.models import Case, Count, F, Max, Q, QuerySet, Sum, When
from django.db.models.functions import TruncDate
from django.utils import timezone

from billing.models import LedgerDigest, LedgerEntry, Organization

_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")
_MICROSECOND = timedelta(microseconds=1)


class NoStatement(Exception):
    """The text names no month, or one before the organization's first or after this month."""


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """A calendar month in UTC; its text is as in 2026-11."""

    year: int
    month: int

    @classmethod
    def of(cls, moment: datetime) -> "Month":
        moment = moment.astimezone(UTC)
        return cls(moment.year, moment.month)

    @classmethod
    def parse(cls, text: str) -> "Month":
        """Read what `str` wrote. Raises NoStatement."""
        found = _MONTH.fullmatch(text)
        if not found:
            raise NoStatement(text)
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.year:04}-{self.month:02}"

    @property
    def next(self) -> "Month":
        return Month(self.year + 1, 1) if self.month == 12 else Month(self.year, self.month + 1)

    @property
    def start(self) -> datetime:
        return datetime(self.year, self.month, 1, tzinfo=UTC)

    @property
    def end(self) -> datetime:
        """The first moment that is no longer in this month."""
        return self.next.start

    @property
    def is_over(self) -> bool:
        return self < Month.of(timezone.now())


@dataclass(frozen=True, slots=True)
class DayOfModel:
    """The charges of one UTC day for one model; the amount is below zero, as in the ledger."""

    day: date
    model: str
    requests: int
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Credit:
    """One line of the ledger that is no charge; what it belongs to, if to a request."""

    line: int
    created_at: datetime
    kind: str
    amount: Decimal
    reason: str
    generation_id: UUID | None


@dataclass(frozen=True, slots=True)
class Statement:
    """What an organization had, what moved, and what it had then."""

    organization: Organization
    month: Month
    opening: Decimal
    charges: list[DayOfModel]
    credits: list[Credit]

    @property
    def charged(self) -> Decimal:
        return sum((each.amount for each in self.charges), Decimal(0))

    @property
    def credited(self) -> dict[str, Decimal]:
        """The credits by kind."""
        by_kind: dict[str, Decimal] = {}
        for each in self.credits:
            by_kind[each.kind] = by_kind.get(each.kind, Decimal(0)) + each.amount
        return by_kind

    @property
    def closing(self) -> Decimal:
        return self.opening + self.charged + sum(self.credited.values(), Decimal(0))


def months(organization: Organization) -> list[Month]:
    """Return the months that have a statement, newest first: from the first line to now."""
    this, found = Month.of(timezone.now()), []
    month = _first_month(organization)
    while month <= this:
        found.append(month)
        month = month.next
    return found[::-1]


def statement(organization: Organization, month: Month) -> Statement:
    """Return the organization's statement of this month. Raises NoStatement."""
    if not _first_month(organization) <= month <= Month.of(timezone.now()):
        raise NoStatement(str(month))
    charges, credits = [], []
    for row in _summed(_lines(organization.pk).filter(_within(month.start, month.end))):
        if row["kind"] == LedgerEntry.Kind.CHARGE:
            each = DayOfModel(row["day"], row["model"], row["number"], row["total"])
            charges.append(each)
            continue
        credits.append(
            Credit(
                line=row["line"],
                created_at=row["at"],
                kind=row["kind"],
                amount=row["total"],
                reason=row["why"],
                generation_id=row["generation_id"],
            )
        )
    return Statement(
        organization=organization,
        month=month,
        opening=balance_before(organization, month.start),
        charges=sorted(charges, key=lambda each: (each.day, each.model)),
        credits=sorted(credits, key=lambda each: (each.created_at, each.line)),
    )


def balance_before(organization: Organization, moment: datetime) -> Decimal:
    """Return the sum of the lines before `moment`."""
    return _sum_from_seal(organization.pk, moment, Q(created_at__lt=moment))


def balance_at(line: LedgerEntry) -> Decimal:
    """Return the balance right after this line, in the order of (created_at, id)."""
    moment = line.created_at
    # SQLite compares times as text, where a line's time, made by the database, has three decimals
    # and a parameter six or none. A microsecond to either side compares right on both databases.
    up_to_here = Q(created_at__lt=moment + _MICROSECOND) & (
        Q(created_at__lte=moment - _MICROSECOND) | Q(pk__lte=line.pk)
    )
    return _sum_from_seal(line.organization_id, moment, up_to_here)


def _sum_from_seal(organization_id: int, moment: datetime, wanted: Q) -> Decimal:
    """Sum the wanted lines, all of them no later than `moment`.

    The balance of the last sealed day before it stands for all lines up to then, so the sum reads
    the lines since, not the whole history.
    """
    lines = _lines(organization_id).filter(wanted)
    day = moment.astimezone(UTC).date()
    seal = LedgerDigest.objects.filter(organization=organization_id, day__lt=day)
    sealed = seal.order_by("-day").values_list("day", "balance").first()
    balance = Decimal(0)
    if sealed is not None:
        last_day, balance = sealed
        lines = lines.filter(created_at__gte=start_of(last_day + timedelta(days=1)))
    total: Decimal = balance + lines.aggregate(sum=Sum("amount", default=Decimal(0)))["sum"]
    return total


def start_of(day: date) -> datetime:
    return datetime.combine(day, time(), tzinfo=UTC)


def _lines(organization_id: int) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.filter(organization=organization_id)


def _within(start: datetime, end: datetime) -> Q:
    return Q(created_at__gte=start, created_at__lt=end)


def _first_month(organization: Organization) -> Month:
    lines = (
        _lines(organization.pk).order_by("created_at", "id").values_list("created_at", flat=True)
    )
    return Month.of(min(lines.first() or organization.created_at, organization.created_at))


def _summed(lines: QuerySet[LedgerEntry]) -> QuerySet[LedgerEntry, Any]:
    """Group the lines: charges by day and model, every other line by itself."""
    is_credit = ~Q(kind=LedgerEntry.Kind.CHARGE)
    return (
        lines.order_by()
        .annotate(
            day=TruncDate("created_at", tzinfo=UTC),
            model=F("event__model"),
            line=Case(When(is_credit, then="id")),
            generation_id=Case(When(is_credit, then="event_id")),
        )
        .values("kind", "day", "model", "line", "generation_id")
        .annotate(number=Count("pk"), total=Sum("amount"), why=Max("reason"), at=Max("created_at"))
    )
