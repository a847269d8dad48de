"""The books as the database has them at one moment, and what must be true of them.

Numbers are those of the invariants in billing.reconcile and docs/reliability.md. The rows are
added up here, in Python: what SQL says is what is to be proven.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.models import Sum

from billing.models import CreditAccount, KeySpend, LedgerEntry, MinuteUsage, UsageEvent
from billing.pricing import Prices, cost

_PAID = {"succeeded", "cancelled"}
_NEVER_CHANGES = ["id", "organization_id", "api_key_id", "worker_id", "hold", "created_at"]
_NEVER_CHANGES += ["input_price", "cached_input_price", "output_price", "model"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Books:
    balances: dict[int, Decimal]
    lines: list[Row]
    events: dict[UUID, Row]
    spends: dict[int, Decimal]  # by key
    minutes: dict[int, tuple[int, int]]  # requests and tokens by organization

    def sums(self, kind: str, of: str) -> dict[Any, Decimal]:
        """Add up the lines of a kind by one of their columns."""
        found: dict[Any, Decimal] = defaultdict(Decimal)
        for line in self.lines:
            if line["kind"] == kind:
                found[line[of]] += line["amount"]
        return found


def read(organizations: Collection[int]) -> Books:
    """Read all that belongs to these organizations."""
    of = {"organization__in": organizations}
    return Books(
        balances=dict(CreditAccount.objects.filter(**of).values_list("pk", "balance")),
        lines=[*LedgerEntry.objects.filter(**of).order_by("pk").values()],
        events={row["id"]: row for row in UsageEvent.objects.filter(**of).values()},
        spends=dict(
            KeySpend.objects.filter(api_key__organization__in=organizations)
            .values_list("api_key")
            .annotate(Sum("spend"))
        ),
        minutes={
            pk: (requests, int(tokens))
            for pk, requests, tokens in MinuteUsage.objects.filter(**of)
            .values_list("organization")
            .annotate(Sum("requests"), Sum("tokens"))
        },
    )


def check(books: Books) -> None:
    """Check what must be true at every moment: I1 to I4, I11, I12, I14."""
    totals: dict[int, Decimal] = defaultdict(Decimal)
    for line in books.lines:
        totals[line["organization_id"]] += line["amount"]
    assert books.balances == {pk: totals[pk] for pk in books.balances}, "I1"
    charges = books.sums("charge", "event_id")
    numbers = [line["event_id"] for line in books.lines if line["kind"] == "charge"]
    assert len(numbers) == len(set(numbers)), "I2: an event was charged twice"
    costs = {pk: event["cost"] for pk, event in books.events.items() if event["cost"]}
    assert charges == {pk: -amount for pk, amount in costs.items()}, "I2, I3"
    spends: dict[int, Decimal] = defaultdict(Decimal)
    for event in books.events.values():
        assert event["cost"] == _cost_of(event), "I4, I11"
        spends[event["api_key_id"]] += event["cost"]
    assert books.spends == {key: spend for key, spend in spends.items() if spend}, "I14"
    _check_reversals(books)


def _cost_of(event: Row) -> Decimal:
    if event["state"] not in _PAID:
        return Decimal(0)
    prices = Prices(event["input_price"], event["cached_input_price"], event["output_price"])
    return cost(_Tokens(event), prices)


class _Tokens:
    def __init__(self, event: Row) -> None:
        self.prompt_tokens: int = event["prompt_tokens"]
        self.cached_tokens: int = event["cached_tokens"]
        self.completion_tokens: int = event["completion_tokens"]


def _check_reversals(books: Books) -> None:
    amounts = {line["id"]: line["amount"] for line in books.lines}
    for kind in ("refund", "payment_reversal"):
        for pk, undone in books.sums(kind, "reverses_id").items():
            assert abs(undone) <= abs(amounts[pk]), "I12"


def check_step(before: Books, after: Books) -> None:
    """Check what may become of the books in one step: I5 and I13."""
    assert after.lines[: len(before.lines)] == before.lines, "I13: a line has changed"
    for pk, was in before.events.items():
        now = after.events[pk]
        if was["state"] == "in_flight":
            assert all(was[name] == now[name] for name in _NEVER_CHANGES), "I13"
        elif was["state"] == "lost" and now["state"] != "lost":
            assert now["state"] in _PAID, "I5"
        else:
            assert was == now, "I5: an event that had ended has changed"
