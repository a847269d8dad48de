"""Statements: exact sums, closed months that stay, and few queries."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing import digests, ledger, organizations, statements
from billing.models import ApiKey, GatewayWorker, LedgerEntry, Organization
from billing.statements import Month, NoStatement, Statement
from tests.billing.world import balance, charged, line, served

MARCH = Month(2026, 3)
PICODOLLAR = Decimal("0.000000000001")


def at(day: int, hour: int = 0, minute: int = 0, second: int = 0, *, month: int = 3) -> datetime:
    return datetime(2026, month, day, hour, minute, second, tzinfo=UTC)


def of(organization: Organization, month: Month = MARCH) -> Statement:
    return statements.statement(organization, month)


def test_it_works(acme: Organization, key: ApiKey, worker: GatewayWorker) -> None:
    line(acme, Decimal(3), at=at(27, month=2), kind="purchase", reason="Invoice 1")
    cents = Decimal("0.01")
    charged(key, worker, cents, at=at(1))
    charged(key, worker, cents, at=at(1, 23, 59, 59))
    charge = charged(key, worker, 2 * cents, at=at(2), model="gpt-oss-120b")
    line(
        *(acme, cents),
        at=at(31, 23, 59, 59),
        kind="refund",
        reverses=charge,
        event=charge.event,
        reason="Sorry",
    )
    line(acme, Decimal(1), at=at(1, month=4), kind="purchase")
    found = of(acme)
    assert found.opening == 3
    assert found.closing == 3 - 3 * cents
    assert [(str(day.day), day.model, day.requests, day.amount) for day in found.charges] == [
        ("2026-03-01", "qwen3-32b", 2, -2 * cents),
        ("2026-03-02", "gpt-oss-120b", 1, -2 * cents),
    ]
    [credit] = found.credits
    assert (credit.kind, credit.amount, credit.reason) == ("refund", cents, "Sorry")
    assert credit.generation_id == charge.event_id
    assert (found.charged, found.credited) == (-4 * cents, {"refund": cents})
    assert of(acme, Month(2026, 4)).opening == found.closing


def test_a_line_belongs_to_the_month_that_the_database_wrote_it_in(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    last_month = timezone.now().replace(day=1) - timedelta(days=1)
    event = served(key, worker)
    type(event).objects.filter(pk=event.pk).update(created_at=last_month)
    now = of(acme, Month.of(timezone.now()))
    assert now.opening == 0
    assert now.charged == -event.cost
    assert [day.requests for day in now.charges] == [1]


def test_a_month_is_half_open(acme: Organization) -> None:
    moments = [
        at(1) - timedelta(microseconds=1),
        at(1),
        at(1, month=4) - timedelta(microseconds=1),
        at(1, month=4),
    ]
    for number, moment in enumerate(moments):
        line(acme, Decimal(10**number), at=moment)
    found = of(acme)
    assert found.opening == 1
    assert found.closing == 111


def test_an_empty_month_changes_nothing(acme: Organization) -> None:
    line(acme, Decimal(3), at=at(1, month=1))
    found = of(acme)
    assert found.opening == found.closing == 3
    assert found.charges == []
    assert found.credits == []
    assert found.month.is_over


def test_there_are_months_from_the_first_line_to_now(acme: Organization) -> None:
    this = Month.of(timezone.now())
    assert statements.months(acme) == [this]
    line(acme, Decimal(1), at=at(31, 23, month=12).replace(year=2024))
    found = statements.months(acme)
    assert (found[0], found[-1]) == (this, Month(2024, 12))
    assert found == sorted(set(found), reverse=True)
    assert not this.is_over


@pytest.mark.parametrize(
    "text",
    ["", "2026", "2026-3", "2026-00", "2026-13", "2026-03-01", "2026-03 ", "٢٠٢٦-03", "-026-03"],
)
def test_what_is_no_month(text: str) -> None:
    with pytest.raises(NoStatement):
        Month.parse(text)


def test_a_month_survives_its_text() -> None:
    for month in (Month(1, 1), MARCH, Month(9999, 12)):
        assert Month.parse(str(month)) == month


@pytest.mark.parametrize("text", ["0000-01", "0001-01", "1999-12", "2999-01", "9999-12"])
def test_before_the_first_and_after_this_month_there_is_none(acme: Organization, text: str) -> None:
    with pytest.raises(NoStatement):
        of(acme, Month.parse(text))


def test_nothing_of_another_organization_is_in_it(
    acme: Organization, globex: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    charged(key, worker, Decimal(1), at=at(5))
    line(globex, Decimal(7), at=at(5))
    assert of(acme).closing == -1
    assert of(globex).closing == 7


def test_it_asks_few_queries_and_counts_nothing(
    acme: Organization, key: ApiKey, worker: GatewayWorker, django_assert_num_queries: Any
) -> None:
    for number in (1, 40):
        for day in range(1, number + 1):
            charged(key, worker, PICODOLLAR, at=at(1 + day % 28))
            line(acme, Decimal(1), at=at(1 + day % 28))
        with django_assert_num_queries(4) as asked:
            of(acme)
        assert not [q for q in asked if "COUNT(*)" in q["sql"].upper()]


def test_a_sealed_day_spares_the_sum_of_what_came_before(
    acme: Organization, django_assert_num_queries: Any
) -> None:
    line(acme, Decimal(3), at=at(1, month=1))
    late = line(acme, Decimal(4), at=at(9))
    before = of(acme), statements.balance_at(late)
    digests.seal(at(28, month=2).date())
    with django_assert_num_queries(4) as asked:
        assert of(acme) == before[0]
    assert any("2026-01-02" in q["sql"] for q in asked)
    assert statements.balance_at(late) == before[1] == 7


def test_lines_of_one_moment_have_their_order(acme: Organization) -> None:
    # Without a time of ours the database sets its own, the same for all of one statement.
    entries = [
        LedgerEntry(organization=acme, kind="adjustment", amount=Decimal(1), actor="tests")
        for _ in range(5)
    ]
    with ledger.locked_accounts([acme.pk]) as accounts:
        ledger._post(entries, accounts)
    lines = LedgerEntry.objects.filter(organization=acme).order_by("created_at", "id")
    assert [statements.balance_at(each) for each in lines] == [10, 11, 12, 13, 14, 15]


MOVES = st.tuples(
    st.integers(min_value=0, max_value=63 * 86_400 * 10**6).map(
        lambda microseconds: at(30, month=1) + timedelta(microseconds=microseconds)
    ),
    st.integers(min_value=1, max_value=10**15),
    st.sampled_from(["purchase", "grant", "charge", "adjustment"]),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(moves=st.lists(MOVES, max_size=12), sealed=st.dates(at(1, month=1).date(), at(30).date()))
def test_opening_and_all_lines_are_the_closing_balance(
    key: ApiKey, worker: GatewayWorker, moves: list[tuple[datetime, int, str]], sealed: Any
) -> None:
    slug = f"o{Organization.objects.count()}"
    organization, _ = organizations.create(name=slug, actor="tests")
    key.organization = organization
    for moment, picodollars, kind in moves:
        amount = picodollars * PICODOLLAR
        if kind == "charge":
            charged(key, worker, amount, at=moment, model=f"m{picodollars % 3}")
        else:
            line(organization, amount, at=moment, kind=kind)
    digests.seal(sealed)
    lines = LedgerEntry.objects.filter(organization=organization).order_by("created_at", "id")
    running = Decimal(0)
    for each in lines:
        running += each.amount
        assert statements.balance_at(each) == running
    carried = Decimal(0)
    for month in reversed(statements.months(organization)):
        found = of(organization, month)
        moved = [each.amount for each in lines if Month.of(each.created_at) == month]
        assert found.opening == carried
        assert found.closing == found.opening + sum(moved)
        carried = found.closing
    assert carried == running == balance(organization)
