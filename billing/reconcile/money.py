"""Ledgers against balances, and ledgers against events."""

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db.models import (
    Count,
    Exists,
    ExpressionWrapper,
    F,
    OuterRef,
    Q,
    QuerySet,
    Sum,
    Value,
)

from billing.fields import MoneyField
from billing.models import CreditAccount, LedgerEntry, UsageEvent
from billing.money import plain
from billing.reconcile.report import LISTED_MAX, Report
from billing.reconcile.usage import finished


def balances(since: datetime | None) -> Report:
    """I1, over the accounts whose ledger moved since `since`, or all."""
    accounts = _moved(since)
    entries = LedgerEntry.objects.order_by()
    if since is not None:
        entries = entries.filter(organization__in=accounts.values("pk"))
    # Sums before accounts: a charge between the two reads must not look like a finding, so a
    # suspect is read once more, in one snapshot.
    sums = dict(entries.values_list("organization_id").annotate(Sum("amount")))
    report = Report("I1 balance = sum of the ledger", 0)
    for account in accounts.select_related("organization").order_by("pk"):
        report.counted += 1
        is_suspect = account.balance != sums.get(account.pk, 0)
        if is_suspect and len(report.findings) < LISTED_MAX:
            _confirm_balance(report, account)
    return report


def _confirm_balance(report: Report, account: CreditAccount) -> None:
    row = (
        CreditAccount.objects.filter(pk=account.pk)
        .annotate(total=Sum("organization__ledger__amount"))
        .get()
    )
    total = row.total or Decimal(0)
    if row.balance != total:
        report.add(
            f"organization {account.organization}",
            f"balance {plain(row.balance)}, sum of the ledger {plain(total)}",
        )


def charges(since: datetime | None) -> Report:
    """I2 and I3, over the events finished and the charges made since `since`, or all."""
    events = finished(since)
    lines = LedgerEntry.objects.order_by().filter(kind=LedgerEntry.Kind.CHARGE)
    if since is not None:
        lines = lines.filter(organization__in=_moved(since).values("pk"), created_at__gte=since)
    report = Report("I2 I3 one charge per cost, of that cost", events.count())
    for event in _uncharged(events)[:LISTED_MAX]:
        report.add(f"event {event.pk}", f"cost {plain(event.cost)}, no charge")
    for line in _mismatched(lines)[:LISTED_MAX]:
        # An event that is gone is only its ID here.
        cost = "is missing" if line.cost is None else f"cost {plain(line.cost)}"
        report.add(f"charge {line.pk}", f"{plain(line.amount)}, its event {line.event_id} {cost}")
    for event_id, number in _repeated(lines)[:LISTED_MAX]:
        report.add(f"event {event_id}", f"{number} charges")
    return report


def _moved(since: datetime | None) -> QuerySet[CreditAccount]:
    """Return the accounts whose ledger moved: one look into an index for each account."""
    if since is None:
        return CreditAccount.objects.all()
    recent = LedgerEntry.objects.filter(organization=OuterRef("pk"), created_at__gte=since)
    return CreditAccount.objects.filter(Exists(recent))


def _uncharged(events: QuerySet[UsageEvent]) -> QuerySet[UsageEvent]:
    charge = LedgerEntry.objects.filter(event=OuterRef("pk"), kind=LedgerEntry.Kind.CHARGE)
    return events.filter(~Exists(charge), cost__gt=0).only("cost")


def _mismatched(lines: QuerySet[LedgerEntry]) -> QuerySet[LedgerEntry, Any]:
    # Both columns count picodollars.
    minus_cost = ExpressionWrapper(-F("event__cost"), output_field=MoneyField())
    return lines.annotate(cost=F("event__cost")).filter(
        Q(event__cost__isnull=True)
        | ~Q(amount=minus_cost)
        | ~Q(organization=F("event__organization"))
    )


def _repeated(lines: QuerySet[LedgerEntry]) -> QuerySet[LedgerEntry, tuple[Any, int]]:
    return lines.values_list("event_id").annotate(n=Count("pk")).filter(n__gt=1)


def trial_balance(_: datetime | None) -> Report:
    """All ledgers by kind against all balances: what came in and did not go out is still owed."""
    report = Report("trial balance: all ledgers = all balances", 0)
    sums = dict(_sums())
    balance = sums.pop(_BALANCES, None) or Decimal(0)
    total = sum(sums.values(), Decimal(0))
    report.counted = len(sums)
    report.notes = [f"{kind:<16} {plain(amount):>24}" for kind, amount in sorted(sums.items())]
    report.notes += [f"{'sum':<16} {plain(total):>24}", f"{'balances':<16} {plain(balance):>24}"]
    if total != balance:
        report.add("all accounts", f"sum of balances {plain(balance)}, of ledgers {plain(total)}")
    return report


_BALANCES = "balances"


def _sums() -> Iterator[tuple[str, Decimal]]:
    """Sum the ledgers by kind and the balances in one statement: two would be two snapshots."""
    kinds = LedgerEntry.objects.order_by().values_list("kind").annotate(total=Sum("amount"))
    accounts = (
        CreditAccount.objects.order_by()
        .annotate(kind=Value(_BALANCES))
        .values_list("kind")
        .annotate(total=Sum("balance"))
    )
    yield from kinds.union(accounts, all=True)
