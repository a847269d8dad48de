"""What the books say, and where that is not what customers were told."""

import time
from dataclasses import dataclass
from pathlib import Path

from django.db import connection
from django.db.models import Count

from billing import reconcile
from billing.models import LedgerEntry, UsageEvent
from billing.workers import is_live
from tests.chaos.customers import Told


@dataclass
class Verdict:
    """The figures; all but the first must be zero."""

    events: int
    lost_events: int
    double_debits: int
    unpaid_acknowledgements: int
    wrong_balances: int
    other_findings: int
    spooled_left: int

    @property
    def is_clean(self) -> bool:
        return not any(
            (
                self.lost_events,
                self.double_debits,
                self.unpaid_acknowledgements,
                self.wrong_balances,
                self.other_findings,
                self.spooled_left,
            )
        )


def most_in_flight() -> int:
    """Return the most live requests that any organization has now."""
    rows = (
        UsageEvent.objects.filter(is_live(), state=UsageEvent.State.IN_FLIGHT)
        .values("organization")
        .annotate(number=Count("pk"))
        .order_by("-number")
    )
    return rows[0]["number"] if rows else 0


def spooled(spool: Path) -> int:
    files = [*spool.glob("*.jsonl"), *spool.glob("*.rejected")]
    return sum(len(_lines(file)) for file in files)


def wait_until_replayed(spool: Path, seconds: float) -> float:
    """Wait until no settlement is in any spool; return how long it took."""
    began = time.monotonic()
    while spooled(spool) and time.monotonic() - began < seconds:
        time.sleep(0.05)
    return time.monotonic() - began


def judge(told: Told, spool: Path) -> Verdict:
    connection.close()  # it may be one from before a crash
    known = {str(pk) for pk in UsageEvent.objects.values_list("pk", flat=True)}
    charged = {
        str(event): -amount
        for event, amount in LedgerEntry.objects.filter(kind="charge").values_list(
            "event", "amount"
        )
    }
    twice = (
        LedgerEntry.objects.filter(kind="charge")
        .values("event")
        .annotate(number=Count("pk"))
        .filter(number__gt=1)
    )
    balances = reconcile.balances(None)
    others = [
        finding
        for check in reconcile.INVARIANTS
        if check is not reconcile.balances
        for finding in check(None).findings
    ]
    for finding in [*balances.findings, *others]:
        print("FINDING", finding)
    return Verdict(
        events=len(known),
        lost_events=len(told.ids - known),
        double_debits=len(twice),
        unpaid_acknowledgements=sum(
            charged.get(generation_id, 0) != cost for generation_id, cost in told.costs.items()
        ),
        wrong_balances=len(balances.findings),
        other_findings=len(others),
        spooled_left=spooled(spool),
    )


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except FileNotFoundError:
        return []
