"""The ledger: append-only in the database, one line per movement, one grant per key."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import ProtectedError

from billing import ledger
from billing.models import ApiKey, GatewayWorker, LedgerEntry, Organization
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
    emptying = "TRUNCATE" if connection.vendor == "postgresql" else "DELETE FROM"
    with (
        pytest.raises(IntegrityError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        if connection.vendor == "postgresql":
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute(f"{emptying} billing_ledgerentry")


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
