"""Settings of an organization: members read, owners write, the secret shows once."""

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from billing import keys, notices
from billing.models import ApiKey, Membership, Organization
from dashboard.models import User
from tests.dashboard import world

Key = tuple[ApiKey, str]
PAGE = "/o/acme/settings/"
REQUESTS = "/o/acme/requests/"
FORM = {"low_balance": "5.5", "webhook_url": "https://hooks.acme.test/kiln"}


@pytest.fixture
def owner(client: Client, ada: User) -> Client:
    """A browser of ada, who owns acme."""
    Membership.objects.filter(user=ada).update(role=Membership.Role.OWNER)
    client.force_login(ada)
    return client


def now(organization: Organization) -> Organization:
    return Organization.objects.get(pk=organization.pk)


def secrets(html: str) -> set[str]:
    return set(re.findall(r"whsec_[\w+/=]+", html))


def test_an_owner_sets_them_and_sees_the_secret_once(owner: Client, acme: Organization) -> None:
    answer = owner.post(PAGE, FORM)
    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    saved = now(acme)
    assert (saved.low_balance, saved.webhook_url) == (Decimal("5.5"), FORM["webhook_url"])
    assert secrets(answer.text) == {saved.webhook_secret}
    again = owner.get(PAGE).text
    assert not secrets(again)
    assert 'value="5.5"' in again
    assert FORM["webhook_url"] in again
    assert saved.webhook_secret not in str(dict(owner.session))


def test_saving_again_keeps_the_secret(owner: Client, acme: Organization) -> None:
    owner.post(PAGE, FORM)
    before = now(acme).webhook_secret
    answer = owner.post(PAGE, {**FORM, "low_balance": ""})
    assert (answer.status_code, answer["Location"]) == (302, PAGE)
    assert (now(acme).webhook_secret, now(acme).low_balance) == (before, None)
    answer = owner.post(PAGE, {**FORM, "new_secret": "on"})
    assert secrets(answer.text) == {now(acme).webhook_secret} != {before}


def test_without_a_url_there_is_no_secret(owner: Client, acme: Organization) -> None:
    owner.post(PAGE, FORM)
    assert owner.post(PAGE, {**FORM, "webhook_url": ""}).status_code == 302
    assert now(acme).webhook_secret == ""


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("low_balance", "-1", "greater than or equal to 0"),
        ("low_balance", "x", "Enter a number"),
        ("low_balance", "NaN", "Enter a number"),
        ("low_balance", "0.0000000000001", "12 decimal places"),
        ("webhook_url", "http://hooks.acme.test/", "needs an https:// URL"),
        ("webhook_url", "https://169.254.169.254/", "public address"),
        ("webhook_url", "https://x/" + "x" * 500, "at most 500"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_saved(
    owner: Client, acme: Organization, field: str, value: str, text: str
) -> None:
    answer = owner.post(PAGE, {**FORM, field: value})
    assert answer.status_code == 200
    assert text in answer.text
    assert "field-error" in answer.text
    assert (now(acme).low_balance, now(acme).webhook_url) == (None, "")


@pytest.mark.parametrize("role", ["viewer", "developer"])
def test_who_is_no_owner_reads_only(
    client: Client, acme: Organization, ada: User, role: str
) -> None:
    Membership.objects.filter(user=ada).update(role=role)
    notices.direct(acme, low_balance=Decimal(7), webhook_url=FORM["webhook_url"])
    client.force_login(ada)
    page = client.get(PAGE).text
    assert 'value="7"' in page
    assert "Only an owner of Acme" in page
    assert ">Save<" not in page
    assert not secrets(page)
    assert client.post(PAGE, FORM).status_code == 403
    assert now(acme).low_balance == 7


def test_an_owner_elsewhere_is_none_here(
    client: Client, acme: Organization, globex: Organization, gus: User
) -> None:
    Membership.objects.filter(user=gus).update(role=Membership.Role.OWNER)
    client.force_login(gus)
    assert client.post(PAGE, FORM).status_code == 404
    Membership.objects.create(user=gus, organization=acme)
    assert client.post(PAGE, FORM).status_code == 403
    assert now(acme).low_balance is None


def test_who_is_not_logged_in_cannot_write(client: Client, acme: Organization) -> None:
    assert client.post(PAGE, FORM).status_code == 302
    assert now(acme).low_balance is None


def test_the_form_wants_a_csrf_token(acme: Organization, ada: User) -> None:
    Membership.objects.filter(user=ada).update(role=Membership.Role.OWNER)
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(ada)
    assert browser.post(PAGE, FORM).status_code == 403
    assert now(acme).low_balance is None


def test_what_was_filled_in_is_escaped(owner: Client) -> None:
    page = owner.post(PAGE, {"low_balance": '"><script>', "webhook_url": '"><script>'}).text
    assert "<script>" not in page


# --- Notices on the Requests page ----------------------------------------------------------------


def test_a_low_balance_is_a_line_on_the_requests_page(owner: Client, acme: Organization) -> None:
    def shown() -> bool:
        return "The balance is low" in owner.get(REQUESTS).text

    assert not shown()
    notices.direct(acme, low_balance=Decimal(25), webhook_url="")
    assert not shown()
    world.line(acme, Decimal("-0.000000000001"))
    assert shown()
    world.line(acme, Decimal(-25))  # there is a stronger word for that
    assert not shown()
    assert "No credits are available" in owner.get(REQUESTS).text


def test_keys_that_expire_soon_are_a_line_on_the_requests_page(
    owner: Client, acme_key: Key, globex_key: Key
) -> None:
    key = acme_key[0]
    soon = timezone.now() + timedelta(days=3)

    def shown() -> Any:
        return "API keys expire soon" in owner.get(REQUESTS).text

    ApiKey.objects.filter(pk=globex_key[0].pk).update(expires_at=soon)
    assert not shown()
    ApiKey.objects.filter(pk=key.pk).update(expires_at=soon)
    assert shown()
    assert f"{soon:%Y-%m-%d %H:%M} UTC" in owner.get(REQUESTS).text
    ApiKey.objects.filter(pk=key.pk).update(expires_at=soon + timedelta(days=5))
    assert not shown()
    ApiKey.objects.filter(pk=key.pk).update(expires_at=soon)
    keys.revoke(key)
    assert not shown()
