"""Statements as page, CSV, JSON and over the API: the same figures everywhere."""

import csv
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from billing import ledger
from billing.models import ApiKey, Organization
from dashboard import exports, statements
from dashboard.models import User
from tests.dashboard import world

Key = tuple[ApiKey, str]
LIST = "/o/acme/statements/"
MARCH = f"{LIST}2026-03"
EVIL = '=HYPERLINK("http://x"),\r\n@SUM(1)'


@pytest.fixture
def client(client: Client, ada: User) -> Client:
    """A browser in which ada of acme is logged in."""
    client.force_login(ada)
    return client


@pytest.fixture
def march(acme: Organization) -> Organization:
    """Acme, which had 3 USD, bought 5 and had 1.000000000001 taken away in March 2026."""
    world.line(acme, Decimal(3), at=moment(month=2), kind="grant")
    world.line(acme, Decimal(5), at=moment(), kind="purchase", reason=EVIL)
    world.line(acme, Decimal("-1.000000000001"), at=moment(20), reason="Ends <here>")
    return acme


def moment(day: int = 1, month: int = 3) -> datetime:
    return datetime(2026, month, day, 12, tzinfo=UTC)


def this_month() -> str:
    return f"{timezone.now():%Y-%m}"


def get(path: str, secret: str, **headers: str) -> Any:
    return Client().get(path, headers={"Authorization": f"Bearer {secret}", **headers})


# --- The page ------------------------------------------------------------------------------------


def test_it_lists_the_months(client: Client, march: Organization) -> None:
    page = client.get(LIST).text
    assert page.index(f"{LIST}{this_month()}/") < page.index(f"{MARCH}/")
    assert f"{LIST}2026-02/" in page
    assert f"{LIST}2026-01/" not in page


def test_it_shows_what_moved(client: Client, march: Organization) -> None:
    page = client.get(f"{MARCH}/").text
    for text in ("March 2026", "$3<", "$5<", "−$1.000000000001<", "$6.999999999999<", "Closing"):
        assert text in page
    assert "Ends &lt;here&gt;" in page
    assert f"{MARCH}.csv" in page
    assert f"{MARCH}.json" in page


def test_it_shows_charges_by_day_and_model(client: Client, acme_key: Key) -> None:
    event = world.request(acme_key[0])
    world.request(acme_key[0])
    charge = ledger.find_charge(str(event.pk))
    ledger.refund(charge=charge, amount=None, actor="op", reason="Slow", idempotency_key="r")
    page = client.get(f"{LIST}{this_month()}/").text
    for text in ("qwen3-32b", ">2<", "−$0.00000816<", "$0.00000408<", "Slow", "Balance now"):
        assert text in page
    assert f"/o/acme/requests/{event.pk}/" in page


def test_a_long_list_of_credits_is_cut_on_the_page_only(
    client: Client, march: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "CREDITS_SHOWN_MAX", 1)
    page = client.get(f"{MARCH}/").text
    assert "1 more are in the files" in page
    assert "Ends &lt;here&gt;" not in page
    assert "Ends <here>" in client.get(f"{MARCH}.csv").text


@pytest.mark.parametrize("month", ["2026-13", "2026-3", "1999-01", "2999-01", "x", "0000-00"])
@pytest.mark.parametrize("end", ["/", ".csv", ".json"])
def test_what_is_no_month_is_not_found(client: Client, month: str, end: str) -> None:
    assert client.get(f"{LIST}{month}{end}").status_code == 404


@pytest.mark.parametrize("page", [LIST, f"{MARCH}/", f"{MARCH}.csv", f"{MARCH}.json"])
def test_it_is_only_read(client: Client, march: Organization, page: str) -> None:
    for method in (client.post, client.put, client.delete):
        assert method(page).status_code == 405
    assert "no-store" in client.get(page)["Cache-Control"]


def test_it_costs_few_queries(
    client: Client, march: Organization, django_assert_max_num_queries: Any
) -> None:
    for page in (f"{MARCH}/", f"{MARCH}.csv", f"{MARCH}.json", LIST):
        with django_assert_max_num_queries(8):
            assert client.get(page).status_code == 200


# --- Files ---------------------------------------------------------------------------------------


def test_the_csv_adds_up(client: Client, march: Organization) -> None:
    answer = client.get(f"{MARCH}.csv")
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    assert answer["Content-Disposition"] == 'attachment; filename="acme-2026-03.csv"'
    assert answer.text.startswith("row,day,model,requests,line,generation_id,reason,amount_usd\r\n")
    assert answer.text.endswith("\r\n")
    rows = list(csv.DictReader(StringIO(answer.text, newline="")))
    assert [row["row"] for row in rows] == [
        *("opening_balance", "purchase", "adjustment", "closing_balance")
    ]
    *parts, closing = [Decimal(row["amount_usd"]) for row in rows]
    assert sum(parts) == closing == Decimal("6.999999999999")
    assert rows[1]["reason"] == f"'{EVIL}"
    assert [row["day"] for row in rows] == ["2026-03-01", "2026-03-01", "2026-03-20", "2026-04-01"]


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r", "\n", " =", " \t@"])
def test_no_cell_is_a_formula(begin: str) -> None:
    text = exports.csv_text(["a"], [[f"{begin}1+1"]])
    [_, [cell]] = csv.reader(StringIO(text, newline=""))
    assert cell == f"'{begin}1+1"


def test_amounts_are_plain_and_may_be_below_zero() -> None:
    row: list[exports.Cell] = [
        Decimal("-0.000000000001"),
        Decimal("100.50"),
        Decimal(0),
        7,
        None,
        'a,"b"\nc',
    ]
    assert exports.csv_text(["x"], [row]) == ('x\r\n-0.000000000001,100.5,0,7,,"a,""b""\nc"\r\n')


def test_the_json_says_the_same(client: Client, march: Organization) -> None:
    answer = client.get(f"{MARCH}.json")
    assert answer["Content-Type"] == "application/json"
    assert answer["Content-Disposition"] == 'attachment; filename="acme-2026-03.json"'
    found = answer.json()
    assert found["opening_balance"] == "3"
    assert found["closing_balance"] == "6.999999999999"
    assert found["totals"] == {"charge": "0", "purchase": "5", "adjustment": "-1.000000000001"}
    assert [line["amount"] for line in found["credits"]] == ["5", "-1.000000000001"]


# --- The API -------------------------------------------------------------------------------------


def test_a_key_reads_its_organizations_statement(acme_key: Key) -> None:
    world.request(acme_key[0])
    today = timezone.now().astimezone(UTC)
    answer = get(f"/v1/statements/{this_month()}", acme_key[1])
    assert answer.status_code == 200
    found = answer.json()
    [credit] = found["credits"]
    assert found == {
        "object": "statement",
        "month": this_month(),
        "organization": {"name": "Acme", "slug": "acme"},
        "start": f"{this_month()}-01T00:00:00.000000Z",
        "end": found["end"],
        "final": False,
        "opening_balance": "0",
        "charges": [
            {
                "day": str(today.date()),
                "model": "qwen3-32b",
                "requests": 1,
                "amount": "-0.00000408",
            }
        ],
        "credits": [credit],
        "totals": {"charge": "-0.00000408", "grant": "25"},
        "closing_balance": "24.99999592",
    }
    assert list(credit) == ["line", "created_at", "kind", "amount", "reason", "generation_id"]
    assert "actor" not in answer.text  # who moved the money is the operators' own


def test_a_month_that_is_over_is_final(acme_key: Key, march: Organization) -> None:
    found = get("/v1/statements/2026-03", acme_key[1]).json()
    assert (found["final"], found["end"]) == (True, "2026-04-01T00:00:00.000000Z")


@pytest.mark.parametrize(
    ("query", "accept", "kind"),
    [
        ("", "*/*", "application/json"),
        ("", "text/html", "application/json"),
        ("", "text/csv", "text/csv; charset=utf-8"),
        ("", "text/csv;q=0.5, application/json", "application/json"),
        ("", "application/json;q=0.5, text/csv", "text/csv; charset=utf-8"),
        ("?format=csv", "application/json", "text/csv; charset=utf-8"),
        ("?format=json", "text/csv", "application/json"),
    ],
)
def test_csv_by_accept_or_by_format(
    acme_key: Key, client: Client, query: str, accept: str, kind: str
) -> None:
    path = f"/v1/statements/{this_month()}"
    answer = get(path + query, acme_key[1], Accept=accept)
    assert (answer.status_code, answer["Content-Type"]) == (200, kind)
    if kind.startswith("text/csv"):
        assert answer.text == client.get(f"{LIST}{this_month()}.csv").text
        assert answer["x-request-id"]


def error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status
    found: dict[str, Any] = json.loads(answer.content)["error"]
    return found


def test_an_unknown_format_is_refused(acme_key: Key) -> None:
    refusal = error(get(f"/v1/statements/{this_month()}?format=xml", acme_key[1]), 400)
    assert refusal["param"] == "format"


@pytest.mark.parametrize("month", ["x", "2026-13", "2999-01", "1999-01", "2026-11-01"])
def test_no_such_statement_is_404(acme_key: Key, month: str) -> None:
    assert error(get(f"/v1/statements/{month}", acme_key[1]), 404)["code"] == "not_found"


def test_another_organizations_lines_are_not_in_it(
    acme_key: Key, globex_key: Key, march: Organization
) -> None:
    world.request(globex_key[0])
    found = get(f"/v1/statements/{this_month()}", acme_key[1]).json()
    assert found["charges"] == []
    assert "Globex" not in str(found)
    # Of a month before its own first line, another organization has none.
    assert get("/v1/statements/2026-03", globex_key[1]).status_code == 404


def test_a_statement_is_open_until_its_month_is_over(acme_key: Key) -> None:
    last = timezone.now().replace(day=1) - timedelta(days=1)
    world.line(acme_key[0].organization, Decimal(1), at=last)
    assert get(f"/v1/statements/{last:%Y-%m}", acme_key[1]).json()["final"] is True
    assert get(f"/v1/statements/{this_month()}", acme_key[1]).json()["final"] is False
