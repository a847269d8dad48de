"""The pages: login, what there is to spend, the list of requests, one request."""

import re
import uuid
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth import SESSION_KEY
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from billing import organizations, refusals
from billing.models import ApiKey, Membership, Organization, UsageEvent
from dashboard import pages, paging
from dashboard.models import User
from dashboard.templatetags import figures
from gateway.models import CatalogModel
from tests.dashboard import world

Key = tuple[ApiKey, str]
LIST = "/o/acme/requests/"


@pytest.fixture
def client(client: Client, ada: User) -> Client:
    """A browser in which ada of acme is logged in."""
    client.force_login(ada)
    return client


def listed(html: str) -> list[str]:
    """Return the generation IDs that a page of the list links to, in order."""
    return re.findall(rf'href="{LIST}([0-9a-f-]{{36}})/"', html)


# --- Login ---------------------------------------------------------------------------------------


def test_login_with_email_and_password(password: str) -> None:
    browser = Client()
    assert browser.get(reverse("login")).status_code == 200
    answer = browser.post(
        reverse("login"), {"username": "ada@acme.test", "password": password}, follow=True
    )
    assert answer.redirect_chain[-1] == (LIST, 302)


def test_a_wrong_password_is_refused_without_saying_what_was_wrong(password: str) -> None:
    browser = Client()
    texts = set()
    for email in ("ada@acme.test", "nobody@acme.test"):
        answer = browser.post(reverse("login"), {"username": email, "password": "wrong"})
        assert answer.status_code == 200
        texts.add(re.search(r'role="alert">(.*?)</p>', answer.text)[1])  # type: ignore[index]
    assert len(texts) == 1
    assert SESSION_KEY not in browser.session


def test_login_leads_back_to_the_page_that_asked_for_it(acme_key: Key, password: str) -> None:
    page = f"{LIST}{world.request(acme_key[0]).pk}/"
    browser = Client()
    login = browser.get(page)["Location"]
    answer = browser.post(login, {"username": "ada@acme.test", "password": password, "next": page})
    assert answer["Location"] == page


def test_logout_is_a_post(client: Client) -> None:
    assert client.get(reverse("logout")).status_code == 405
    assert client.post(reverse("logout"))["Location"] == reverse("login")
    assert client.get(LIST).status_code == 302


def test_forms_want_a_csrf_token(password: str) -> None:
    browser = Client(enforce_csrf_checks=True)
    for url in (reverse("login"), reverse("logout")):
        answer = browser.post(url, {"username": "ada@acme.test", "password": password})
        assert answer.status_code == 403
        assert "Form refused" in answer.text


def test_home_leads_to_the_only_organization(client: Client) -> None:
    assert client.get("/")["Location"] == LIST


def test_home_leads_an_operator_to_the_admin(operator: User) -> None:
    browser = Client()
    browser.force_login(operator)
    assert browser.get("/")["Location"] == reverse("admin:index")


def test_home_tells_who_is_nowhere_a_member(db: None) -> None:
    browser = Client()
    browser.force_login(world.person("new@acme.test"))
    assert "No organization yet" in browser.get("/").text


# --- What there is to spend ----------------------------------------------------------------------


def test_it_shows_balance_holds_and_what_is_available_exactly(
    client: Client, acme_key: Key
) -> None:
    world.request(acme_key[0])
    world.start(acme_key[0], hold=Decimal("0.002000000001"))
    page = client.get(LIST).text
    assert "$24.99999592" in page  # balance: 25 less 9 × 0.08 and 12 × 0.28 per million
    assert "$0.002000000001" in page
    assert "$24.997995919999" in page
    assert "1 of 8" in page


def test_it_tells_who_has_no_credits_what_that_means(
    client: Client, ada: User, broke: Organization
) -> None:
    Membership.objects.create(user=ada, organization=broke)
    assert "No credits are available" in client.get("/o/broke/requests/").text
    assert "No credits are available" not in client.get(LIST).text


def test_it_tells_why_an_organization_is_suspended(client: Client, acme: Organization) -> None:
    organizations.suspend(acme, reason="Invoice <7> is open.")
    page = client.get(LIST).text
    assert "This organization is suspended" in page
    assert "Invoice &lt;7&gt; is open." in page


# --- The list ------------------------------------------------------------------------------------


def test_it_lists_a_request_with_its_figures(client: Client, acme_key: Key) -> None:
    event = world.request(acme_key[0], prompt_tokens=12345, cached_tokens=64)
    page = client.get(LIST).text
    assert listed(page) == [str(event.pk)]
    assert f"{event.created_at:%Y-%m-%d %H:%M:%S}" in page
    for figure in ("qwen3-32b", "12,345", ">64<", ">12<", "840 ms", "120 ms", "Succeeded", "200"):
        assert figure in page
    assert "secret-backend" not in page


def test_a_tiny_cost_is_shown_exactly(client: Client, acme_key: Key) -> None:
    world.request(acme_key[0], prompt_tokens=1, completion_tokens=0)
    assert "$0.00000008<" in client.get(LIST).text


def test_a_request_in_flight_is_shown_as_such(client: Client, acme_key: Key) -> None:
    running = world.start(acme_key[0])
    page = client.get(LIST).text
    assert listed(page) == [str(running.generation_id)]
    assert "In flight" in page
    detail = client.get(f"{LIST}{running.generation_id}/").text
    assert "still running" in detail
    assert "Nothing is charged before a request ends" in detail


@pytest.mark.parametrize(
    ("state", "status", "word"),
    [("cancelled", 200, "Cancelled"), ("failed", 502, "Failed"), ("lost", None, "Lost")],
)
def test_a_state_is_a_word(
    client: Client, acme_key: Key, state: str, status: int | None, word: str
) -> None:
    world.request(acme_key[0], state=state, status_code=status)
    row = re.search(r'status status-(\w+)">\s*(\w+)', client.get(LIST).text)
    assert row is not None
    assert row.groups() == (state, word)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pages, "PAGE_SIZE", 5)
    return 5


def many(by: ApiKey, number: int) -> list[str]:
    """Make requests, several of them at one moment, and return their IDs, newest first."""
    start = timezone.now() - timedelta(hours=1)
    made = [world.request(by, at=start + timedelta(seconds=i // 3)) for i in range(number)]
    made.sort(key=lambda event: (event.created_at, event.pk.hex), reverse=True)
    return [str(event.pk) for event in made]


def follow(client: Client, html: str, rel: str) -> str | None:
    link = re.search(rf'rel="{rel}"[^>]*href="([^"]+)"', html)
    return client.get(LIST + link[1]).text if link else None


def test_older_pages_show_each_request_once_while_others_arrive(
    client: Client, acme_key: Key, small_pages: int
) -> None:
    expected = many(acme_key[0], 17)
    seen: list[str] = []
    html: str | None = client.get(LIST).text
    while html:
        page = listed(html)
        assert 0 < len(page) <= small_pages
        seen += page
        world.request(acme_key[0])
        html = follow(client, html, "next")
    assert seen == expected


def test_newer_pages_lead_back_and_on_to_what_has_arrived(
    client: Client, acme_key: Key, small_pages: int
) -> None:
    expected = many(acme_key[0], 12)
    html = client.get(LIST).text
    while older := follow(client, html, "next"):
        html = older
    arrived = str(world.request(acme_key[0]).pk)
    seen = listed(html)
    while newer := follow(client, html, "prev"):
        html = newer
        seen = listed(html) + seen
    assert seen == [arrived, *expected]
    assert f'<a href="{LIST}">Newest</a>' in html


def test_a_damaged_cursor_is_a_bad_request(client: Client) -> None:
    for cursor in ("x", "1-2", "9" * 18 + "-" + "0" * 32, "٣-" + "0" * 32):
        assert client.get(LIST, {"before": cursor}).status_code == 400
        assert client.get(LIST, {"after": cursor}).status_code == 400


def test_a_cursor_survives_its_text() -> None:
    for moment in (timezone.now(), datetime.fromisoformat("2999-12-31T23:59:59.999999+00:00")):
        cursor = paging.Cursor(moment, uuid.uuid4())
        assert paging.Cursor.parse(str(cursor)) == cursor


def test_a_generation_id_leads_to_its_request(client: Client, acme_key: Key) -> None:
    event = world.request(acme_key[0])
    answer = client.get(LIST, {"id": f"  {str(event.pk).upper()} "})
    assert answer["Location"] == f"{LIST}{event.pk}/"


def test_an_id_that_is_not_found_is_told_and_escaped(client: Client, acme_key: Key) -> None:
    world.request(acme_key[0])
    page = client.get(LIST, {"id": '"><script>alert(1)</script>'}).text
    assert "No request of Acme" in page
    assert "<script>alert" not in page
    assert len(listed(page)) == 1


def test_an_empty_list_says_why_and_how_to_begin(client: Client, acme: Organization) -> None:
    CatalogModel.objects.create(model_id="a-first-model", context_window=32768)
    page = client.get(LIST, headers={"host": "localhost"}).text
    assert "has no API key" in page
    assert "curl http://localhost/v1/chat/completions" in page
    assert "a-first-model" in page
    world.key(acme)
    assert "has no API key" not in client.get(LIST).text


def test_a_list_costs_the_same_few_queries_however_long_it_is(
    client: Client, acme_key: Key, django_assert_max_num_queries: Any
) -> None:
    for number in (1, 60):
        many(acme_key[0], number)
        with django_assert_max_num_queries(9) as asked:
            page = client.get(LIST)
        assert page.status_code == 200
        assert not [q for q in asked if "COUNT(*)" in q["sql"].upper()]


def refuse(key: ApiKey, times: int, *, hours_ago: int = 0, code: str = "model_not_found") -> None:
    minute = timezone.now().replace(second=0, microsecond=0) - timedelta(hours=hours_ago)
    refusals.add({refusals.Refused(key.organization_id, key.pk, minute, 404, code): times})


def test_what_was_refused_is_summed_by_key_and_reason(client: Client, acme_key: Key) -> None:
    assert "Refused in the last 24 hours" not in client.get(LIST).text
    refuse(acme_key[0], 1200)
    refuse(acme_key[0], 34, hours_ago=23)
    refuse(acme_key[0], 5, hours_ago=25)
    refuse(acme_key[0], 1, code="")
    html = client.get(LIST).text
    rows = re.findall(r"<td>404</td>\s*<td class=\"mono\">(.*?)</td>\s*<td .*?>(.*?)</td>", html)
    assert rows == [("model_not_found", "1,234"), ("–", "1")]
    assert f"…{acme_key[0].last4}" in html


def test_nobody_sees_what_was_refused_of_others(
    client: Client, acme_key: Key, globex_key: Key
) -> None:
    refuse(globex_key[0], 7)
    assert "Refused in the last 24 hours" not in client.get(LIST).text
    refuse(acme_key[0], 1)
    html = client.get(LIST).text
    assert html.count("model_not_found") == 1
    assert globex_key[0].last4 not in html


# --- One request ---------------------------------------------------------------------------------


def test_a_request_shows_its_arithmetic_and_its_ledger_line(
    client: Client, acme_key: Key, django_assert_max_num_queries: Any
) -> None:
    event = world.request(acme_key[0], prompt_tokens=100, cached_tokens=64, completion_tokens=50)
    line = event.ledger.get()
    with django_assert_max_num_queries(7):
        page = client.get(f"{LIST}{event.pk}/").text
    products = [figures.usd(line.amount) for line in pages._lines(event)]
    assert products == ["$0.00000288", "$0.00000256", "$0.000014"]
    assert sum(line.amount for line in pages._lines(event)) == event.cost
    for figure in [*products, "$0.00001944", "−$0.00001944", f'class="mono">{line.pk}<', "Charge"]:
        assert figure in page
    assert "$0.08, cached input $0.04, output $0.28" in page
    assert "secret-backend" not in page


def test_a_request_that_failed_is_free(client: Client, acme_key: Key) -> None:
    event = world.request(
        acme_key[0], state=UsageEvent.State.FAILED, status_code=502, error="backend <closed>"
    )
    page = client.get(f"{LIST}{event.pk}/").text
    assert "Requests that fail are free" in page
    assert "the ledger has no line" in page
    assert "backend &lt;closed&gt;" in page


@pytest.mark.parametrize("generation_id", ["x", "0" * 32, "019ae000-0000-7000-8000-000000000000"])
def test_a_request_that_is_not_there(client: Client, generation_id: str) -> None:
    answer = client.get(f"{LIST}{generation_id}/")
    assert answer.status_code == 404
    assert "Nothing here" in answer.text


# --- All pages -----------------------------------------------------------------------------------


def test_names_are_escaped(client: Client, ada: User) -> None:
    evil = '=HYPERLINK("x")<img src=x onerror=alert(1)>'
    organization = Organization(name=evil, slug="evil")
    organizations.register(organization)
    Membership.objects.create(user=ada, organization=organization)
    key, _ = world.key(organization, evil)
    organization.overdraft_limit = Decimal(1)
    organization.save()
    event = world.finish(world.start(key, model=evil), finish_reason="<b>stop")
    for page in ("/", "/o/evil/requests/", f"/o/evil/requests/{event.pk}/"):
        html = client.get(page).text
        assert "&lt;img src=x" in html
        assert "<img src=x" not in html
        assert "<b>stop" not in html


def test_pages_run_no_inline_code_and_are_not_kept(client: Client, acme_key: Key) -> None:
    event = world.request(acme_key[0])
    for page in (LIST, f"{LIST}{event.pk}/", "/o/none/requests/", reverse("login")):
        answer = Client().get(page) if page == reverse("login") else client.get(page)
        policy = answer["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<style|style=|\son\w+=|<script(?! src=)", answer.text)
        if answer.status_code == 200:
            assert "no-store" in answer["Cache-Control"]


def test_every_page_has_a_language_a_title_and_a_main_part(client: Client, acme_key: Key) -> None:
    event = world.request(acme_key[0])
    for page in (LIST, f"{LIST}{event.pk}/", "/o/none/requests/"):
        html = client.get(page).text
        assert '<html lang="en">' in html
        assert re.search(r"<title>[^<]+ – Kiln</title>", html)
        assert html.count("<main ") == 1
        assert html.count("<h1") == 1


def test_the_admin_makes_a_user_by_email(operator: User) -> None:
    browser = Client()
    browser.force_login(operator)
    assert browser.get(reverse("admin:dashboard_user_changelist")).status_code == 200
    form = {"email": "new@acme.test", "name": "", "usable_password": "true"}
    form |= {"password1": world.PASSWORD, "password2": world.PASSWORD}
    answer = browser.post(reverse("admin:dashboard_user_add"), form)
    user = User.objects.get(email="new@acme.test")
    change = reverse("admin:dashboard_user_change", args=[user.pk])
    assert answer["Location"] == change
    assert browser.get(change).status_code == 200
    assert user.check_password(world.PASSWORD)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1.00 s"),
        (9_994, "9.99 s"),
        (9_995, "10.0 s"),
        (59_949, "59.9 s"),
        (59_950, "1 min 00 s"),
        (192_400, "3 min 12 s"),
    ],
)
def test_durations(milliseconds: int | None, text: str) -> None:
    assert figures.duration(milliseconds) == text


def test_amounts() -> None:
    assert figures.usd(Decimal("0.000001155000")) == "$0.000001155"
    assert figures.usd(Decimal("-1.50")) == "−$1.5"
    assert figures.usd(Decimal(0)) == "$0"
    assert figures.usd(None) == figures.count(None) == "–"
