"""The ledger: append-only in the database, one line per movement, each movement once per key."""

import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import ProtectedError

from billing import ledger, reconcile
from billing.models import ApiKey, GatewayWorker, LedgerEntry, Organization, UsageEvent
from billing.money import MONEY_MAX
from tests.billing.world import COST, balance, served


def grant(organization: Organization, amount: str = "5", **fields: Any) -> LedgerEntry:
    words = {"actor": "tests", "reason": "gift", "idempotency_key": "gift-1", **fields}
    return ledger.grant(organization=organization, amount=Decimal(amount), **words)


def test_it_works(acme: Organization) -> None:
    entry = grant(acme, "0.000000000001")
    assert balance(acme) == Decimal("10.000000000001")
    assert (entry.kind, entry.amount) == ("grant", Decimal("0.000000000001"))
    assert (entry.actor, entry.reason) == ("tests", "gift")


def test_a_grant_is_made_once_per_idempotency_key(acme: Organization, globex: Organization) -> None:
    assert grant(acme) == grant(acme) == grant(acme, "5.00")
    assert balance(acme) == 15
    grant(globex)  # another organization's keys are its own
    assert balance(globex) == 15


@pytest.mark.parametrize("other", [{"amount": "6"}, {"reason": "refund"}])
def test_an_idempotency_key_cannot_mean_something_else(
    acme: Organization, other: dict[str, str]
) -> None:
    grant(acme)
    with pytest.raises(ledger.LedgerError, match=r"'gift-1' was used before for grant of 5 USD"):
        grant(acme, **other)
    assert balance(acme) == 15


@pytest.mark.parametrize(
    "unfit",
    [
        {"amount": "0"},
        {"amount": "-1"},
        {"amount": str(MONEY_MAX)},  # the balance would leave its bounds
        {"amount": str(MONEY_MAX + 1)},
        {"amount": "0.0000000000001"},
        {"reason": "x" * 301},
        {"idempotency_key": "x" * 201},
        {"reason": " "},
        {"idempotency_key": ""},
    ],
)
def test_a_grant_that_does_not_fit_is_refused(acme: Organization, unfit: dict[str, str]) -> None:
    with pytest.raises(ledger.LedgerError):
        grant(acme, **unfit)
    assert balance(acme) == 10


def test_a_request_is_charged_its_cost(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    event = served(key, worker)
    line = LedgerEntry.objects.get(event=event)
    assert (line.kind, line.amount, line.organization) == ("charge", -COST, acme)
    assert balance(acme) == 10 - COST


def test_an_event_is_charged_once(acme: Organization, key: ApiKey, worker: GatewayWorker) -> None:
    event = served(key, worker)
    with (
        pytest.raises(IntegrityError),
        ledger.locked_accounts([acme.pk]) as accounts,
    ):
        ledger.charge([event], accounts)
    assert balance(acme) == 10 - COST


@pytest.mark.parametrize(
    "change",
    [
        lambda: LedgerEntry.objects.update(reason="forged"),
        lambda: LedgerEntry.objects.all().delete(),
        lambda: LedgerEntry.objects.order_by("pk")[0].delete(),
    ],
    ids=["update", "delete all", "delete one"],
)
def test_a_line_cannot_be_changed_or_deleted(
    acme: Organization, change: Callable[[], object]
) -> None:
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        change()
    assert LedgerEntry.objects.get(organization=acme).reason == "Opening credits"


def test_the_ledger_cannot_be_truncated(acme: Organization) -> None:
    # SQLite has no TRUNCATE, but turns a DELETE of everything into one where no trigger watches.
    emptying = {"postgresql": "TRUNCATE {} CASCADE", "sqlite": "DELETE FROM {}"}
    with (
        pytest.raises(IntegrityError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        if connection.vendor == "postgresql":
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute(emptying[connection.vendor].format("billing_ledgerentry"))


@pytest.mark.parametrize(
    ("kind", "amount"),
    [
        ("grant", "-1"),
        ("refund", "-1"),
        ("purchase", "0"),
        ("payment_reversal", "1"),
        ("adjustment", "0"),
        ("charge", "-1"),  # a charge needs its event
        ("present", "1"),
    ],
)
def test_the_database_knows_the_sign_of_each_kind(
    acme: Organization, kind: str, amount: str
) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        LedgerEntry.objects.create(
            organization=acme, kind=kind, amount=Decimal(amount), actor="tests"
        )


def test_an_organization_with_money_cannot_be_deleted(acme: Organization) -> None:
    with pytest.raises(ProtectedError):
        acme.delete()


def test_an_account_is_opened_once(acme: Organization) -> None:
    assert ledger.open_account(acme).balance == 10


# --- Purchases, adjustments, refunds, reversals --------------------------------------------------

WORDS: ledger.Because = {"actor": "tests", "reason": "why", "idempotency_key": "k1"}


def words(key: str, **other: str) -> Any:
    return {**WORDS, "idempotency_key": key, **other}


@pytest.fixture
def charge(key: ApiKey, worker: GatewayWorker) -> LedgerEntry:
    """The charge of a request of acme."""
    return ledger.find_charge(str(served(key, worker).pk))


@pytest.fixture
def purchase(acme: Organization) -> LedgerEntry:
    """Acme paid 5 USD, on top of its opening 10."""
    return ledger.purchase(organization=acme, amount=Decimal(5), **words("invoice-1"))


def test_a_purchase_is_found_by_its_reference(acme: Organization, purchase: LedgerEntry) -> None:
    assert balance(acme) == 15
    assert purchase.kind == "purchase"
    assert ledger.find_purchase(acme, "invoice-1") == purchase
    with pytest.raises(ledger.LedgerError, match="no purchase with the reference 'opening-"):
        ledger.find_purchase(acme, "opening-credits")


@pytest.mark.parametrize("amount", ["2.5", "-2.5", "-11"])
def test_an_adjustment_has_a_sign(acme: Organization, amount: str) -> None:
    line = ledger.adjust(organization=acme, amount=Decimal(amount), **WORDS)
    assert ledger.adjust(organization=acme, amount=Decimal(amount), **WORDS) == line
    assert (line.kind, line.amount, line.actor) == ("adjustment", Decimal(amount), "tests")
    assert balance(acme) == 10 + Decimal(amount)


@pytest.mark.parametrize("amount", ["0", "9000000", "-9000011", "0.0000000000001"])
def test_an_adjustment_that_does_not_fit_is_refused(acme: Organization, amount: str) -> None:
    with pytest.raises(ledger.LedgerError):
        ledger.adjust(organization=acme, amount=Decimal(amount), **WORDS)
    assert balance(acme) == 10


def test_a_charge_is_refunded_in_parts_and_never_more(
    acme: Organization, charge: LedgerEntry
) -> None:
    part = COST / 4
    for number in range(3):
        line = ledger.refund(charge=charge, amount=part, **words(f"r{number}"))
        assert (line.kind, line.amount, line.reverses) == ("refund", part, charge)
        assert line.event == charge.event
    with pytest.raises(ledger.LedgerError, match=r"Only 0\.0000023 USD are left"):
        ledger.refund(charge=charge, amount=part * 2, **words("r3"))
    assert ledger.refund(charge=charge, amount=None, **words("r4")).amount == part
    for amount in (None, Decimal("0.000000000001")):
        with pytest.raises(ledger.LedgerError, match="Nothing is left"):
            ledger.refund(charge=charge, amount=amount, **words("r5"))
    assert balance(acme) == 10
    assert UsageEvent.objects.get(ledger=charge).cost == COST


def test_a_refund_sent_twice_refunds_once(acme: Organization, charge: LedgerEntry) -> None:
    first = ledger.refund(charge=charge, amount=None, **WORDS)
    # Nothing is left, but this is the same refund.
    assert ledger.refund(charge=charge, amount=None, **WORDS) == first
    assert ledger.refund(charge=charge, amount=COST, **WORDS) == first
    assert balance(acme) == 10


def test_one_idempotency_key_is_one_movement_of_any_kind(
    acme: Organization, charge: LedgerEntry, key: ApiKey, worker: GatewayWorker
) -> None:
    ledger.refund(charge=charge, amount=COST, **WORDS)
    other = ledger.find_charge(str(served(key, worker).pk))
    before = balance(acme)
    moves: list[Callable[[], LedgerEntry]] = [
        lambda: ledger.refund(charge=other, amount=COST, **WORDS),
        lambda: ledger.refund(charge=charge, amount=COST / 2, **WORDS),
        lambda: ledger.refund(charge=charge, amount=COST, **words("k1", reason="else")),
        lambda: ledger.grant(organization=acme, amount=COST, **WORDS),
        lambda: ledger.purchase(organization=acme, amount=COST, **WORDS),
        lambda: ledger.adjust(organization=acme, amount=COST, **WORDS),
    ]
    for move in moves:
        with pytest.raises(ledger.LedgerError, match=r"'k1' was used before for refund of 0\.0000"):
            move()
    assert balance(acme) == before


def test_a_payment_is_reversed_in_parts_and_never_more(
    acme: Organization, purchase: LedgerEntry
) -> None:
    line = ledger.reverse_payment(purchase=purchase, amount=Decimal(2), **words("d1"))
    assert (line.kind, line.amount, line.reverses) == ("payment_reversal", -2, purchase)
    with pytest.raises(ledger.LedgerError, match="Only 3 USD are left of purchase"):
        ledger.reverse_payment(purchase=purchase, amount=Decimal(4), **words("d2"))
    assert ledger.reverse_payment(purchase=purchase, amount=None, **words("d3")).amount == -3
    with pytest.raises(ledger.LedgerError, match="Nothing is left"):
        ledger.reverse_payment(purchase=purchase, amount=None, **words("d4"))
    assert balance(acme) == 10


def test_a_reversed_payment_may_leave_less_than_nothing(broke: Organization) -> None:
    paid = ledger.purchase(organization=broke, amount=Decimal(5), **words("invoice-1"))
    ledger.adjust(organization=broke, amount=Decimal(-4), **words("spent"))
    ledger.reverse_payment(purchase=paid, amount=None, **words("d1"))
    assert balance(broke) == -4


def test_only_a_charge_is_refunded_and_only_a_purchase_reversed(
    charge: LedgerEntry, purchase: LedgerEntry
) -> None:
    with pytest.raises(ledger.LedgerError, match="not a charge"):
        ledger.refund(charge=purchase, amount=None, **WORDS)
    with pytest.raises(ledger.LedgerError, match="not a purchase"):
        ledger.reverse_payment(purchase=charge, amount=None, **WORDS)


@pytest.mark.parametrize("amount", ["0", "-1"])
def test_what_is_taken_back_is_above_zero(
    charge: LedgerEntry, purchase: LedgerEntry, amount: str
) -> None:
    with pytest.raises(ledger.LedgerError, match="above zero"):
        ledger.refund(charge=charge, amount=Decimal(amount), **WORDS)
    with pytest.raises(ledger.LedgerError, match="above zero"):
        ledger.reverse_payment(purchase=purchase, amount=Decimal(amount), **WORDS)


def test_what_cost_nothing_has_no_charge_to_refund(key: ApiKey, worker: GatewayWorker) -> None:
    failed = served(key, worker, state="failed", status_code=502)
    with pytest.raises(ledger.LedgerError, match="was not charged"):
        ledger.find_charge(str(failed.pk))
    for unknown in ("x", str(uuid.uuid4())):
        with pytest.raises(ledger.LedgerError, match="No request has the generation ID"):
            ledger.find_charge(unknown)


def test_the_database_wants_a_reversal_to_name_its_line(
    acme: Organization, purchase: LedgerEntry
) -> None:
    for kind, amount, reverses in (
        ("refund", 1, None),
        ("payment_reversal", -1, None),
        ("grant", 1, purchase),
        ("adjustment", 1, purchase),
    ):
        with pytest.raises(IntegrityError), transaction.atomic():
            LedgerEntry.objects.create(
                organization=acme, kind=kind, amount=amount, reverses=reverses, actor="tests"
            )


def test_a_balance_is_the_sum_of_its_lines(
    acme: Organization, charge: LedgerEntry, purchase: LedgerEntry
) -> None:
    ledger.refund(charge=charge, amount=COST / 2, **words("a"))
    ledger.reverse_payment(purchase=purchase, amount=None, **words("b"))
    ledger.adjust(organization=acme, amount=Decimal("-0.000000000001"), **words("c"))
    lines = LedgerEntry.objects.filter(organization=acme)
    assert balance(acme) == sum(line.amount for line in lines)
    assert reconcile.balances(None).findings == []
