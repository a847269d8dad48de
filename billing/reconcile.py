"""The invariants of the money, each a function that counts what it looked at and what it found.

    I1  an account's balance is the sum of its ledger
    I2  an event that cost something has exactly one charge, and only such an event has one
    I3  a charge is minus the cost of its event, in the ledger of the event's organization
    I4  a cost is its tokens times its prices

Reads only: a finding is told, never repaired silently.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from django.db.models import Count, Exists, ExpressionWrapper, F, OuterRef, Q, QuerySet, Sum

from billing.fields import MoneyField
from billing.models import CreditAccount, LedgerEntry, UsageEvent
from billing.money import plain


@dataclass(slots=True)
class Report:
    """One invariant: how many rows were looked at, and a sentence for each that breaks it."""

    invariant: str
    counted: int
    findings: list[str] = field(default_factory=list)


def balances(since: datetime | None) -> Report:
    """I1, over the accounts whose ledger moved since `since`, or all."""
    accounts = CreditAccount.objects.select_related("organization")
    entries = LedgerEntry.objects.order_by()
    if since is not None:
        moved = entries.filter(created_at__gte=since).values("organization_id")
        accounts = accounts.filter(pk__in=moved)
        entries = entries.filter(organization__in=accounts.values("pk"))
    # Sums before accounts: a charge between the two reads must not look like a finding, so a
    # suspect is read once more, in one snapshot.
    sums = dict(entries.values_list("organization_id").annotate(Sum("amount")))
    report = Report("I1 balance = sum of the ledger", 0)
    for account in accounts:
        report.counted += 1
        if account.balance != sums.get(account.pk, 0):
            report.findings += _confirm_balance(account)
    return report


def _confirm_balance(account: CreditAccount) -> Iterator[str]:
    row = (
        CreditAccount.objects.filter(pk=account.pk)
        .annotate(total=Sum("organization__ledger__amount"))
        .get()
    )
    total = row.total or Decimal(0)
    if row.balance != total:
        yield (
            f"organization {account.organization}: balance {plain(row.balance)}, "
            f"sum of the ledger {plain(total)}"
        )


def charges(since: datetime | None) -> Report:
    """I2 and I3, over the events finished since `since`, or all."""
    events = _finished(since)
    charge = LedgerEntry.objects.filter(event=OuterRef("pk"), kind=LedgerEntry.Kind.CHARGE)
    report = Report("I2 I3 one charge per cost, of that cost", events.count())
    for event in events.filter(~Exists(charge), cost__gt=0).iterator():
        report.findings.append(f"event {event.pk}: cost {plain(event.cost)}, no charge")
    lines = LedgerEntry.objects.filter(kind=LedgerEntry.Kind.CHARGE).select_related("event")
    if since is not None:
        lines = lines.filter(created_at__gte=since)
    # Both columns count picodollars.
    minus_cost = ExpressionWrapper(-F("event__cost"), output_field=MoneyField())
    for line in lines.filter(
        ~Q(amount=minus_cost) | ~Q(organization=F("event__organization"))
    ).iterator():
        report.findings.append(
            f"charge {line.pk} of {plain(line.amount)}: its event {line.event_id} "
            f"cost {plain(line.event.cost) if line.event else '-'}"
        )
    repeated = lines.order_by().values("event_id").annotate(n=Count("pk")).filter(n__gt=1)
    report.findings += [f"event {row['event_id']}: {row['n']} charges" for row in repeated]
    return report


def costs(since: datetime | None) -> Report:
    """I4, over the events finished since `since`, or all."""
    events = _finished(since)
    # Tokens times picodollars per token: the columns are whole numbers, the product is exact.
    expected = ExpressionWrapper(
        (F("prompt_tokens") - F("cached_tokens")) * F("input_price")
        + F("cached_tokens") * F("cached_input_price")
        + F("completion_tokens") * F("output_price"),
        output_field=MoneyField(),
    )
    paid = [UsageEvent.State.SUCCEEDED, UsageEvent.State.CANCELLED]
    report = Report("I4 cost = tokens x prices", events.count())
    wrong = events.filter(state__in=paid).alias(expected=expected).exclude(cost=F("expected"))
    for event in wrong.iterator():
        report.findings.append(
            f"event {event.pk}: cost {plain(event.cost)} is not its tokens' cost"
        )
    return report


INVARIANTS: list[Callable[[datetime | None], Report]] = [balances, charges, costs]


def _finished(since: datetime | None) -> QuerySet[UsageEvent]:
    events = UsageEvent.objects.filter(finished_at__isnull=False)
    return events if since is None else events.filter(finished_at__gte=since)
