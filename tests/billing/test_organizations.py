"""Organizations: made once, found by slug or name, suspended and let run again."""

from decimal import Decimal

import pytest

from billing import ledger, organizations
from billing.models import CreditAccount, LedgerEntry, Organization


def create(name: str = "Acme Inc.", **fields: object) -> tuple[Organization, bool]:
    return organizations.create(name=name, actor="tests", **fields)  # type: ignore[arg-type]


def test_it_works(db: None) -> None:
    acme, created = create(opening_credits=Decimal(10), max_in_flight=3)
    assert created
    assert (acme.name, acme.slug, acme.max_in_flight) == ("Acme Inc.", "acme-inc", 3)
    assert acme.account.balance == 10
    [line] = LedgerEntry.objects.filter(organization=acme)
    assert (line.kind, line.amount, line.actor) == ("grant", 10, "tests")


def test_without_credits_it_has_an_empty_account(db: None) -> None:
    acme, _ = create()
    assert CreditAccount.objects.get(organization=acme).balance == 0
    assert not LedgerEntry.objects.filter(organization=acme).exists()
    assert acme.max_in_flight == 8


@pytest.mark.parametrize("again", ["Acme Inc.", "acme-inc", "ACME, Inc."])
def test_again_it_changes_nothing_and_grants_nothing(db: None, again: str) -> None:
    acme, _ = create(opening_credits=Decimal(10))
    same, created = create(again, opening_credits=Decimal(99), max_in_flight=1)
    assert (same, created) == (acme, False)
    assert (same.name, same.max_in_flight) == ("Acme Inc.", 8)
    assert same.account.balance == 10


def test_a_renamed_organization_is_still_the_one_of_its_slug(db: None) -> None:
    acme, _ = create()
    Organization.objects.filter(pk=acme.pk).update(name="Umbrella")
    assert create("Umbrella") == (acme, False)
    assert create("Acme Inc.") == (acme, False)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("", {}), ("!?", {}), ("x" * 201, {}), ("Acme", {"max_in_flight": 0})],
)
def test_it_refuses_what_cannot_be(db: None, name: str, fields: dict[str, object]) -> None:
    with pytest.raises(organizations.OrganizationRefused):
        create(name, **fields)


def test_no_organization_without_its_credits(db: None) -> None:
    with pytest.raises(ledger.LedgerError):
        create(opening_credits=Decimal(-1))
    assert not Organization.objects.filter(slug="acme-inc").exists()


def test_a_long_name_gets_a_short_slug(db: None) -> None:
    assert len(create("a-very-long-name " * 10)[0].slug) <= 64


def test_it_is_found_by_slug_and_by_name(db: None) -> None:
    acme, _ = create()
    assert organizations.find("acme-inc") == organizations.find("Acme Inc.") == acme


def test_a_slug_wins_over_a_name(db: None) -> None:
    acme, _ = create()
    other, _ = create("Other")
    Organization.objects.filter(pk=other.pk).update(name="acme-inc")
    assert organizations.find("acme-inc") == acme


def test_it_says_that_none_is_found(db: None) -> None:
    with pytest.raises(organizations.OrganizationNotFound, match="name or slug 'nobody'"):
        organizations.find("nobody")


def test_a_name_of_two_is_not_guessed(db: None) -> None:
    create("Acme One")
    create("Acme Two")
    Organization.objects.filter(slug__startswith="acme-").update(name="Acme")
    with pytest.raises(organizations.OrganizationNotFound, match="acme-one, acme-two"):
        organizations.find("Acme")


def test_suspend_and_activate(db: None) -> None:
    acme, _ = create()
    organizations.suspend(acme, reason="Invoice 7 is open.")
    acme.refresh_from_db()
    assert (acme.status, acme.status_reason) == ("suspended", "Invoice 7 is open.")
    organizations.activate(acme)
    acme.refresh_from_db()
    assert (acme.status, acme.status_reason) == ("active", "")


def test_a_reason_has_its_length(db: None) -> None:
    acme, _ = create()
    with pytest.raises(organizations.OrganizationRefused):
        organizations.suspend(acme, reason="x" * 201)
