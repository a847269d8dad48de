"""The ledger page: every line once, with the balance right after it."""

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from billing import ledger
from billing.models import ApiKey, LedgerEntry, Membership, Organization
from dashboard import credits
from dashboard.models import User
from dashboard.templatetags import figures
from tests.dashboard import world

Key = tuple[ApiKey, str]
LIST = "/o/acme/credits/"


@pytest.fixture
def client(client: Client, ada: User) -> Client:
    """A browser in which ada of acme is logged in."""
    client.force_login(ada)
    return client


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credits, "PAGE_SIZE", 5)


def rows(html: str) -> list[tuple[int, str]]:
    """Return the lines of a page with their balances."""
    found = re.findall(r'data-label="Balance">(.*?)</td>.*?data-label="Line">(\d+)<', html, re.S)
    return [(int(line), balance) for balance, line in found]


def expected(organization: Organization) -> list[tuple[int, str]]:
    """Return what the page must show, added up line by line."""
    shown, balance = [], Decimal(0)
    lines = LedgerEntry.objects.filter(organization=organization).order_by("created_at", "id")
    for line in lines:
        balance += line.amount
        shown.append((line.pk, figures.usd(balance)))
    return shown[::-1]


def follow(client: Client, html: str, rel: str) -> str | None:
    link = re.search(rf'rel="{rel}"[^>]*href="([^"]+)"', html)
    return client.get(LIST + link[1]).text if link else None


def test_it_shows_lines_with_the_balance_after_each(client: Client, acme_key: Key) -> None:
    event = world.request(acme_key[0])
    page = client.get(LIST).text
    assert rows(page) == expected(event.organization)
    assert [balance for _, balance in rows(page)] == ["$24.99999592", "$25"]
    for text in ("−$0.00000408", "Charge", "Grant", "Opening credits", f"requests/{event.pk}/"):
        assert text in page


def many(of: Organization, number: int) -> None:
    """Write lines of which several are of one moment, some with the database's own clock."""
    start = timezone.now() - timedelta(hours=1)
    for i in range(number):
        world.line(of, Decimal(i + 1), at=start + timedelta(seconds=i // 3))
    entries = [
        LedgerEntry(organization=of, kind="adjustment", amount=Decimal(-1), actor="tests")
        for _ in range(number)
    ]
    with ledger.locked_accounts([of.pk]) as accounts:
        ledger._post(entries, accounts)


def test_older_pages_show_each_line_once_while_others_arrive(
    client: Client, acme: Organization, small_pages: None
) -> None:
    many(acme, 12)
    wanted = expected(acme)
    seen: list[tuple[int, str]] = []
    html: str | None = client.get(LIST).text
    while html:
        assert 0 < len(rows(html)) <= 5
        seen += rows(html)
        world.line(acme, Decimal(1))
        html = follow(client, html, "next")
    assert seen == wanted


def test_newer_pages_lead_back_and_on_to_what_has_arrived(
    client: Client, acme: Organization, small_pages: None
) -> None:
    many(acme, 9)
    html = client.get(LIST).text
    while older := follow(client, html, "next"):
        html = older
    world.line(acme, Decimal(1))
    seen = rows(html)
    while newer := follow(client, html, "prev"):
        html = newer
        seen = rows(html) + seen
    assert seen == expected(acme)
    assert f'<a href="{LIST}">Newest</a>' in html


def test_a_cursor_of_another_list_is_a_bad_request(client: Client) -> None:
    for cursor in ("x", "1-" + "0" * 32, "1-" + "9" * 19, "1-", "-1", "1--1"):
        assert client.get(LIST, {"before": cursor}).status_code == 400
        assert client.get(LIST, {"after": cursor}).status_code == 400
    assert client.get("/o/acme/requests/", {"before": "1-2"}).status_code == 400


def test_nothing_yet(client: Client, ada: User, broke: Organization) -> None:
    Membership.objects.create(user=ada, organization=broke)
    assert "nothing was paid, granted or charged" in client.get("/o/broke/credits/").text
    assert "on this side" in client.get("/o/broke/credits/", {"before": "1-2"}).text


def test_reasons_are_escaped_and_operators_not_named(client: Client, acme: Organization) -> None:
    world.line(acme, Decimal(1), reason="<b>hi</b>", actor="operator@kiln.test")
    page = client.get(LIST).text
    assert "&lt;b&gt;hi&lt;/b&gt;" in page
    assert "operator@kiln.test" not in page


def test_nothing_of_another_organization(
    client: Client, acme_key: Key, globex: Organization
) -> None:
    theirs = world.line(globex, Decimal(7), reason="Theirs")
    page = client.get(LIST).text
    assert "Theirs" not in page
    assert theirs.pk not in [line for line, _ in rows(page)]


def test_it_is_only_read(client: Client) -> None:
    assert client.post(LIST).status_code == 405


def test_it_costs_the_same_few_queries_however_long_it_is(
    client: Client, acme: Organization, django_assert_max_num_queries: Any
) -> None:
    for number in (1, 40):
        many(acme, number)
        with django_assert_max_num_queries(9) as asked:
            assert client.get(LIST).status_code == 200
        assert not [q for q in asked if "COUNT(*)" in q["sql"].upper()]
