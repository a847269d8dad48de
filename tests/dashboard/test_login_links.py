"""One-time login links."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth import SESSION_KEY
from django.contrib.auth.tokens import default_token_generator
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from dashboard import login_links
from dashboard.models import User


def test_it_works(client: Client, ada: User) -> None:
    answer = client.get(login_links.make(ada))
    assert answer.status_code == 302
    assert answer["Location"] == reverse("home")
    assert client.session[SESSION_KEY] == str(ada.pk)
    assert "no-store" in answer["Cache-Control"]


def test_it_works_once(client: Client, ada: User) -> None:
    client.get(login_links.make(ada))  # so that the link is made in the second of a login
    ada.refresh_from_db()
    link = login_links.make(ada)
    assert Client().get(link).status_code == 302
    again = Client()
    answer = again.get(link)
    assert answer.status_code == 410
    assert "no longer works" in answer.text
    assert SESSION_KEY not in again.session


def test_of_two_visits_at_once_one_gets_in(client: Client, ada: User) -> None:
    visits: list[str] = []

    def another_first(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("UPDATE") and not visits:
            visits.append(sql)
            User.objects.filter(pk=ada.pk).update(last_login=timezone.now())
        return execute(sql, *args)

    link = login_links.make(ada)
    with connection.execute_wrapper(another_first):
        assert client.get(link).status_code == 410
    assert visits


def test_a_password_change_ends_it(client: Client, ada: User) -> None:
    link = login_links.make(ada)
    ada.set_password("another horse entirely")
    ada.save()
    assert client.get(link).status_code == 410


def test_it_expires(client: Client, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    link = login_links.make(ada)
    later = datetime.now() + login_links.VALID_FOR + timedelta(seconds=2)  # noqa: DTZ005
    monkeypatch.setattr(login_links._tokens, "_now", lambda: later)
    assert client.get(link).status_code == 410


def test_it_lets_no_disabled_user_in(client: Client, ada: User) -> None:
    link = login_links.make(ada)
    User.objects.filter(pk=ada.pk).update(is_active=False)
    assert client.get(link).status_code == 410


def test_it_is_for_its_user_only(client: Client, ada: User, gus: User) -> None:
    token = login_links.make(ada).rstrip("/").rpartition("/")[2]
    for user_id in (gus.pk, 0, 10**30):
        assert client.get(reverse("login-link", args=[user_id, token])).status_code == 410


@pytest.mark.parametrize("token", ["x", "x-y", "-", "zzzzzz-0", "é-é"])
def test_a_damaged_link_is_refused(client: Client, ada: User, token: str) -> None:
    assert client.get(reverse("login-link", args=[ada.pk, token])).status_code == 410


def test_a_password_reset_token_is_no_login_link(client: Client, ada: User) -> None:
    token = default_token_generator.make_token(ada)
    assert client.get(reverse("login-link", args=[ada.pk, token])).status_code == 410


def test_a_look_at_the_head_does_not_spend_it(client: Client, ada: User) -> None:
    link = login_links.make(ada)
    assert client.head(link).status_code == 405
    assert client.get(link).status_code == 302


def test_it_leads_on_within_the_site_only(client: Client, operator: User) -> None:
    link = login_links.make(operator, next="/admin/")
    assert client.get(link)["Location"] == "/admin/"
    for elsewhere in ("https://evil.test/", "//evil.test/", "javascript:alert(1)"):
        operator.refresh_from_db()
        link = login_links.make(operator, next=elsewhere)
        assert client.get(link)["Location"] == reverse("home")
