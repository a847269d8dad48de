"""Amounts: exact between Decimal and database, plain as text, never rounded, never a float."""

import json
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db.models import Sum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.fields import MoneyField, PriceField
from billing.models import LedgerEntry, Organization
from billing.money import MONEY_MAX, plain

AMOUNTS = st.decimals(-MONEY_MAX, MONEY_MAX, places=12)
# A line of a ledger: not zero, and eight of them within what an account can hold.
MOVED = st.decimals(-MONEY_MAX / 8, MONEY_MAX / 8, places=12).filter(bool)
PRICES = st.decimals(0, MONEY_MAX, places=6)


def test_it_works() -> None:
    assert MoneyField().get_prep_value(Decimal("0.000001155")) == 1_155_000
    assert MoneyField().from_db_value(1_155_000, None, None) == Decimal("0.000001155")
    assert plain(Decimal("0.000001155000")) == "0.000001155"


@given(AMOUNTS)
def test_an_amount_survives_the_database(amount: Decimal) -> None:
    stored = MoneyField().get_prep_value(amount)
    assert isinstance(stored, int)
    assert MoneyField().from_db_value(stored, None, None) == amount


@given(st.lists(AMOUNTS, max_size=20))
def test_a_sum_in_the_database_is_the_sum(amounts: list[Decimal]) -> None:
    stored = sum(MoneyField().get_prep_value(amount) or 0 for amount in amounts)
    # PostgreSQL's SUM arrives as a Decimal, SQLite's as an int.
    assert MoneyField().from_db_value(Decimal(stored), None, None) == sum(amounts)
    assert MoneyField().from_db_value(stored, None, None) == sum(amounts)


@given(st.lists(MOVED, min_size=1, max_size=8))
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_amounts_and_their_sum_survive_the_real_database(
    acme: Organization, amounts: list[Decimal]
) -> None:
    lines = LedgerEntry.objects.bulk_create(
        LedgerEntry(organization=acme, kind="adjustment", amount=amount, actor="tests")
        for amount in amounts
    )
    stored = LedgerEntry.objects.filter(pk__in=[line.pk for line in lines]).order_by("pk")
    assert [line.amount for line in stored] == amounts
    assert stored.aggregate(Sum("amount")) == {"amount__sum": sum(amounts)}


@given(PRICES)
def test_a_price_is_stored_in_picodollars_per_token(price: Decimal) -> None:
    assert PriceField().get_prep_value(price) == price * 10**6


@given(AMOUNTS)
def test_the_text_is_plain_and_exact(amount: Decimal) -> None:
    text = plain(amount)
    assert Decimal(text) == amount
    assert set(text) <= set("-0123456789.")
    assert not text.startswith("-0") or "." in text
    assert "." not in text or text[-1] not in "0."


@given(AMOUNTS)
def test_the_text_is_a_number_of_json(amount: Decimal) -> None:
    assert json.loads(plain(amount), parse_int=Decimal, parse_float=Decimal) == amount


@pytest.mark.parametrize(
    ("amount", "text"),
    [("0", "0"), ("-0", "0"), ("0E-12", "0"), ("1E+3", "1000"), ("1E-12", "0.000000000001")],
)
def test_the_text_has_no_exponent(amount: str, text: str) -> None:
    assert plain(Decimal(amount)) == text


@given(AMOUNTS.filter(bool), st.integers(1, 9))
def test_it_refuses_a_thirteenth_place(amount: Decimal, digit: int) -> None:
    with pytest.raises(ValidationError, match="more than 12 decimal places"):
        MoneyField().get_prep_value(amount + Decimal(digit).scaleb(-13))


def test_a_price_has_at_most_six_places() -> None:
    with pytest.raises(ValidationError, match="more than 6 decimal places"):
        PriceField().get_prep_value(Decimal("0.0000001"))


@pytest.mark.parametrize("value", [0.5, "a lot", "NaN", Decimal("NaN"), "Infinity", object()])
def test_it_refuses_what_is_no_exact_number(value: Any) -> None:
    with pytest.raises(ValidationError):
        MoneyField().get_prep_value(value)


def test_it_refuses_more_than_the_column_holds() -> None:
    with pytest.raises(ValidationError):
        MoneyField().clean(MONEY_MAX + 1, None)
