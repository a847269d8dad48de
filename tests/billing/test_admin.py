"""The operators' admin: every page opens, money moves only through the ledger, keys show once."""

import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing import keys, organizations, refusals
from billing.admin import records
from billing.models import (
    ApiKey,
    CreditAccount,
    Finding,
    GatewayWorker,
    LedgerDigest,
    LedgerEntry,
    Notice,
    Organization,
    ReconciliationRun,
    RefusalCount,
    UsageEvent,
)
from gateway.models import BackendReading
from tests.billing.world import balance, served

READ_ONLY = [CreditAccount, GatewayWorker, LedgerEntry, RefusalCount, UsageEvent]
NEVER_ADDED = [*READ_ONLY, BackendReading, Finding, LedgerDigest, Notice, ReconciliationRun]
OURS = [model for model in admin.site._registry if model._meta.app_label in {"billing", "gateway"}]


@pytest.fixture
def page(operator: Any, client: Client) -> Client:
    """A browser of the operator."""
    client.force_login(operator)
    return client


@pytest.fixture
def clerk(django_user_model: Any) -> Callable[..., Client]:
    """Make a browser of somebody with these permissions of billing and no others."""

    def make(*codenames: str) -> Client:
        user = django_user_model.objects.create_user("clerk@kiln.test", is_staff=True)
        user.user_permissions.set(
            Permission.objects.filter(content_type__app_label="billing", codename__in=codenames)
        )
        client = Client()
        client.force_login(user)
        return client

    return make


def path(model: Any, rest: str = "") -> str:
    return f"/admin/{model._meta.app_label}/{model._meta.model_name}/{rest}"


def grant_path(organization: Organization) -> str:
    return path(Organization, f"{organization.pk}/grant/")


GRANT = {"amount": "2.5", "reason": "Invoice 7", "idempotency_key": "invoice-7"}
# What the inlines of the organization's page post when nothing is added to them.
NO_MEMBERS = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}


@pytest.mark.parametrize("model", OURS, ids=lambda model: model._meta.label)
def test_every_page_opens(page: Client, key: ApiKey, worker: GatewayWorker, model: Any) -> None:
    event = served(key, worker)
    for query in ("", "?q=acme", f"?q={event.pk}"):
        assert page.get(path(model, query)).status_code == 200
    row = model._default_manager.first()
    if row is not None:
        assert page.get(path(model, f"{row.pk}/change/")).status_code == 200
        assert page.get(path(model, f"{row.pk}/history/")).status_code == 200
    expected = 403 if model in NEVER_ADDED else 200
    assert page.get(path(model, "add/")).status_code == expected


@pytest.mark.parametrize("model", READ_ONLY, ids=lambda model: model._meta.label)
def test_records_cannot_be_changed_or_deleted(
    page: Client, key: ApiKey, worker: GatewayWorker, model: Any
) -> None:
    served(key, worker)
    refused = refusals.Refused(key.organization_id, key.pk, timezone.now(), 404, "model_not_found")
    refusals.add({refused: 3})
    row = model._default_manager.first()
    content = page.get(path(model, f"{row.pk}/change/")).content.decode()
    assert 'type="submit"' not in content.replace('<button type="submit">Log out', "")
    assert page.post(path(model, f"{row.pk}/change/"), {"balance": "1"}).status_code == 403
    assert page.post(path(model, f"{row.pk}/delete/"), {"post": "yes"}).status_code == 403


@pytest.mark.parametrize("model", [ApiKey, Organization], ids=lambda model: model._meta.label)
def test_what_money_hangs_on_is_not_deleted(page: Client, key: ApiKey, model: Any) -> None:
    row = model._default_manager.first()
    assert page.post(path(model, f"{row.pk}/delete/"), {"post": "yes"}).status_code == 403


def test_an_organization_gets_its_account(page: Client) -> None:
    fields = {
        "name": "Initech",
        "slug": "initech",
        "max_in_flight": "4",
        "overdraft_limit": "0",
        "balance": "1000",
        **NO_MEMBERS,
    }
    assert page.post(path(Organization, "add/"), fields).status_code == 302
    initech = organizations.find("initech")
    assert initech.max_in_flight == 4
    assert balance(initech) == 0


def test_a_negative_overdraft_limit_is_an_error_of_the_form(page: Client) -> None:
    fields = {"name": "I", "slug": "i", "max_in_flight": "4", "overdraft_limit": "-1"}
    answer = page.post(path(Organization, "add/"), {**fields, **NO_MEMBERS})
    assert answer.status_code == 200
    assert not Organization.objects.filter(slug="i").exists()


def test_no_form_edits_the_balance_or_the_status(page: Client, acme: Organization) -> None:
    change = path(Organization, f"{acme.pk}/change/")
    content = page.get(change).content.decode()
    assert not re.search(r'name="(balance|status|status_reason|slug)"', content)
    fields = {
        "name": "Acme",
        "max_in_flight": "9",
        "overdraft_limit": "0",
        "balance": "1000",
        "status": "suspended",
        **NO_MEMBERS,
    }
    assert page.post(change, fields).status_code == 302
    acme.refresh_from_db()
    assert (acme.max_in_flight, acme.status) == (9, "active")
    assert balance(acme) == 10


def test_an_old_form_does_not_undo_a_suspension(page: Client, acme: Organization) -> None:
    """The form is checked against the row as it was read; what was not edited is not written."""
    stale = Organization.objects.get(pk=acme.pk)
    organizations.suspend(acme, reason="late")
    site_admin = admin.site._registry[Organization]
    stale.max_in_flight = 9

    class Form:
        changed_data = ["max_in_flight"]

    site_admin.save_model(None, stale, Form(), change=True)  # type: ignore[arg-type]
    acme.refresh_from_db()
    assert (acme.status, acme.max_in_flight) == ("suspended", 9)


def test_suspend_and_activate(page: Client, acme: Organization) -> None:
    selected = {"_selected_action": [acme.pk], "reason": "Invoice 7 is open."}
    page.post(path(Organization), {"action": "suspend", **selected})
    acme.refresh_from_db()
    assert (acme.status, acme.status_reason) == ("suspended", "Invoice 7 is open.")
    assert LogEntry.objects.get().get_change_message() == "Suspended: Invoice 7 is open."
    page.post(path(Organization), {"action": "activate", **selected})
    acme.refresh_from_db()
    assert (acme.status, acme.status_reason) == ("active", "")


def test_a_grant_is_a_line_with_the_operator_as_actor(page: Client, acme: Organization) -> None:
    form = page.get(grant_path(acme)).content.decode()
    assert "Balance now: 10 USD." in form
    assert re.search(r'name="idempotency_key" value="admin-[0-9a-f-]{36}"', form)
    assert page.post(grant_path(acme), GRANT).status_code == 302
    line = LedgerEntry.objects.get(organization=acme, idempotency_key="invoice-7")
    assert (line.kind, line.amount, line.reason) == ("grant", Decimal("2.5"), "Invoice 7")
    assert line.actor == "operator@kiln.test"
    assert balance(acme) == Decimal("12.5")
    told = LogEntry.objects.get().get_change_message()
    assert told == f"2.5 USD granted (ledger entry {line.pk}): Invoice 7"


def test_a_grant_sent_twice_grants_once(page: Client, acme: Organization) -> None:
    page.post(grant_path(acme), GRANT)
    page.post(grant_path(acme), GRANT)
    assert balance(acme) == Decimal("12.5")
    answer = page.post(grant_path(acme), {**GRANT, "amount": "3"})
    assert b"was used before" in answer.content
    assert balance(acme) == Decimal("12.5")


@pytest.mark.parametrize(
    "amount", ["", "0", "-1", "NaN", "0.0000000000001", "9000001", "8999999", "much"]
)
def test_a_bad_amount_is_not_granted(page: Client, acme: Organization, amount: str) -> None:
    answer = page.post(grant_path(acme), {**GRANT, "amount": amount})
    assert answer.status_code == 200
    assert b"errorlist" in answer.content
    assert balance(acme) == 10


def test_a_grant_needs_its_permission(acme: Organization, clerk: Callable[..., Client]) -> None:
    browser = clerk("view_organization", "change_organization", "view_ledgerentry")
    change = browser.get(path(Organization, f"{acme.pk}/change/")).content.decode()
    assert "Grant credits" not in change
    assert browser.get(grant_path(acme)).status_code == 403
    assert browser.post(grant_path(acme), GRANT).status_code == 403
    assert balance(acme) == 10


def test_with_its_permission_a_grant_is_offered(
    acme: Organization, clerk: Callable[..., Client]
) -> None:
    browser = clerk("view_organization", "add_ledgerentry")
    change = browser.get(path(Organization, f"{acme.pk}/change/")).content.decode()
    assert grant_path(acme) in change
    browser.post(grant_path(acme), GRANT)
    assert LedgerEntry.objects.filter(actor="clerk@kiln.test").count() == 1


@pytest.mark.parametrize(
    ("name", "amount", "kind", "did"),
    [
        ("purchase", "2.5", "purchase", "purchased"),
        ("adjust", "2.5", "adjustment", "adjusted"),
        ("adjust", "-2.5", "adjustment", "adjusted"),
    ],
)
def test_purchases_and_adjustments_go_through_the_ledger(
    page: Client, acme: Organization, name: str, amount: str, kind: str, did: str
) -> None:
    where = path(Organization, f"{acme.pk}/{name}/")
    assert where in page.get(path(Organization, f"{acme.pk}/change/")).text
    assert "Balance now: 10 USD." in page.get(where).text
    for _ in range(2):
        assert page.post(where, {**GRANT, "amount": amount}).status_code == 302
    line = LedgerEntry.objects.get(organization=acme, idempotency_key="invoice-7")
    assert (line.kind, line.amount, line.actor) == (kind, Decimal(amount), "operator@kiln.test")
    assert balance(acme) == 10 + Decimal(amount)
    told = LogEntry.objects.first()
    assert told is not None
    assert f"{amount} USD {did} (ledger entry {line.pk})" in told.get_change_message()


def refund_path(event: UsageEvent) -> str:
    return path(UsageEvent, f"{event.pk}/refund/")


def test_a_refund_goes_through_the_ledger(page: Client, key: ApiKey, worker: GatewayWorker) -> None:
    event = served(key, worker)
    assert refund_path(event) in page.get(path(UsageEvent, f"{event.pk}/change/")).text
    assert "was charged 0.0000092 USD; 0.0000092 USD are left" in page.get(refund_path(event)).text
    sent = {"amount": "0.0000002", "reason": "Slow", "idempotency_key": "t1"}
    assert page.post(refund_path(event), sent).status_code == 302
    line = LedgerEntry.objects.get(kind="refund")
    assert (line.event, line.amount) == (event, Decimal("0.0000002"))
    assert line.actor == "operator@kiln.test"
    too_much = page.post(refund_path(event), {**sent, "amount": "1", "idempotency_key": "t2"})
    assert "Only 0.000009 USD are left" in too_much.text
    rest = {"amount": "", "reason": "All of it", "idempotency_key": "t3"}
    assert page.post(refund_path(event), rest).status_code == 302
    assert balance(key.organization) == 10
    told = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert told[1].startswith("0.000009 USD refunded")


def test_what_was_not_charged_has_no_refund(
    page: Client, key: ApiKey, worker: GatewayWorker
) -> None:
    failed = served(key, worker, state="failed", status_code=502)
    assert refund_path(failed) not in page.get(path(UsageEvent, f"{failed.pk}/change/")).text
    assert page.get(refund_path(failed)).status_code == 404


def test_moving_money_needs_its_permission(
    key: ApiKey, worker: GatewayWorker, clerk: Callable[..., Client]
) -> None:
    event, organization = served(key, worker), key.organization
    before = balance(organization)
    browser = clerk(
        *("view_organization", "change_organization", "view_ledgerentry", "view_usageevent")
    )
    for where in (
        path(Organization, f"{organization.pk}/purchase/"),
        path(Organization, f"{organization.pk}/adjust/"),
        refund_path(event),
    ):
        assert browser.get(where).status_code == 403
        assert browser.post(where, GRANT).status_code == 403
    assert refund_path(event) not in browser.get(path(UsageEvent, f"{event.pk}/change/")).text
    assert balance(organization) == before


def test_the_admin_is_for_staff(acme: Organization, client: Client) -> None:
    answer = client.post(grant_path(acme), GRANT)
    assert answer.status_code == 302
    assert "/admin/login/" in answer.headers["Location"]
    assert balance(acme) == 10


def issue(browser: Client, organization: Organization, **fields: str) -> Any:
    sent = {"organization": organization.pk, "name": "ci", "allowed_models": "[]", **fields}
    sent.setdefault("spend_period", "none")
    return browser.post(path(ApiKey, "add/"), sent)


def test_a_key_is_shown_once(page: Client, acme: Organization, operator: Any) -> None:
    issued = issue(page, acme, allowed_models='["qwen3-32b"]')
    assert "no-store" in issued.headers["Cache-Control"]
    [secret] = set(re.findall(r"sk-bk-\w{38}", issued.content.decode()))
    caller, key = keys.authenticate(secret)
    assert caller.allowed_models == {"qwen3-32b"}
    assert key.created_by == operator
    for rest in ("", f"{key.pk}/change/", f"{key.pk}/history/"):
        content = page.get(path(ApiKey, rest)).content.decode()
        assert secret not in content
        assert keys.digest(secret).hex() not in content
        # The menu names the ledger's digests.
        assert "digest" not in re.sub("ledger ?digest", "", content, flags=re.IGNORECASE)
    [entry] = LogEntry.objects.all()
    assert entry.action_flag == 1
    assert secret not in entry.object_repr + entry.change_message


def test_a_live_name_is_an_error_of_the_form(page: Client, key: ApiKey) -> None:
    answer = issue(page, key.organization, name=key.name)
    assert b"acme has a live key of that name." in answer.content
    assert ApiKey.objects.filter(organization=key.organization).count() == 1


@pytest.mark.parametrize("models", ['{"a": 1}', "[1]", '"qwen3-32b"', "qwen3-32b"])
def test_allowed_models_are_a_list_of_names(page: Client, acme: Organization, models: str) -> None:
    assert b"errorlist" in issue(page, acme, allowed_models=models).content
    assert not ApiKey.objects.filter(organization=acme).exists()


def test_a_key_has_a_few_things_to_edit(page: Client, key: ApiKey, globex: Organization) -> None:
    content = page.get(path(ApiKey, f"{key.pk}/change/")).content.decode()
    form = content[content.index('id="apikey_form"') :]
    named = set(re.findall(r'name="([a-z_0-9]+)"', form)) - {"csrfmiddlewaretoken"}
    assert {name for name in named if not name.startswith("_")} == {
        *("name", "expires_at_0", "expires_at_1", "allowed_models", "spend_limit", "spend_period")
    } | {name for name in named if name.startswith("initial")}
    sent = {
        "name": "renamed",
        "allowed_models": '["a"]',
        "expires_at_0": "2090-01-01",
        "expires_at_1": "00:00",
        "spend_limit": "2.5",
        "spend_period": "day",
        "organization": globex.pk,
        "revoked_at": "2020-01-01",
    }
    assert page.post(path(ApiKey, f"{key.pk}/change/"), sent).status_code == 302
    changed = ApiKey.objects.get(pk=key.pk)
    assert (changed.name, changed.allowed_models) == ("renamed", ["a"])
    assert (changed.spend_limit, changed.spend_period) == (Decimal("2.5"), "day")
    assert (changed.organization, changed.revoked_at) == (key.organization, None)
    assert changed.expires_at is not None


def test_keys_are_revoked_paused_and_resumed(page: Client, key: ApiKey) -> None:
    def act(action: str) -> ApiKey:
        page.post(path(ApiKey), {"action": action, "_selected_action": [key.pk]})
        return ApiKey.objects.get(pk=key.pk)

    assert act("pause").paused_at is not None
    assert act("resume").paused_at is None
    assert act("revoke").revoked_at is not None
    told = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert told == ["Paused", "Resumed", "Revoked"]


def rotate(browser: Client, key: ApiKey, hours: str) -> Any:
    sent = {"action": "rotate", "_selected_action": [key.pk], "overlap_hours": hours}
    return browser.post(path(ApiKey), sent)


def test_a_rotated_key_shows_its_successor_once(page: Client, key: ApiKey) -> None:
    answer = rotate(page, key, "2")
    assert "no-store" in answer.headers["Cache-Control"]
    [secret] = set(re.findall(r"sk-bk-\w{38}", answer.content.decode()))
    _, successor = keys.authenticate(secret)
    assert successor.name == key.name
    old = ApiKey.objects.get(pk=key.pk)
    assert old.expires_at is not None
    assert timedelta(hours=1) < old.expires_at - timezone.now() <= timedelta(hours=2)
    told = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert told[0] == "Rotated: works for 2 more hours"
    assert secret not in "".join(told)


@pytest.mark.parametrize("hours", ["", "-1", "1.5", "9999999999", "x"])
def test_a_key_is_not_rotated_without_hours(page: Client, key: ApiKey, hours: str) -> None:
    assert rotate(page, key, hours).status_code == 302
    assert ApiKey.objects.filter(organization=key.organization).count() == 1


def test_keys_are_rotated_one_by_one_and_while_they_live(page: Client, key: ApiKey) -> None:
    other, _ = keys.issue(organization=key.organization, name="other")
    sent = {"action": "rotate", "_selected_action": [key.pk, other.pk], "overlap_hours": "2"}
    assert page.post(path(ApiKey), sent).status_code == 302
    keys.revoke(other)
    assert rotate(page, other, "2").status_code == 302
    assert ApiKey.objects.filter(organization=key.organization).count() == 2


def test_who_may_only_look_cannot_issue_or_revoke(
    key: ApiKey, clerk: Callable[..., Client]
) -> None:
    browser = clerk("view_apikey", "view_organization")
    assert issue(browser, key.organization, name="other").status_code == 403
    browser.post(path(ApiKey), {"action": "revoke", "_selected_action": [key.pk]})
    assert ApiKey.objects.get(pk=key.pk).revoked_at is None


@pytest.mark.parametrize(
    ("model", "query"),
    [
        (UsageEvent, ""),
        (UsageEvent, "?q=acme"),
        (UsageEvent, "?state=succeeded"),
        (UsageEvent, "?finished=day"),
        (LedgerEntry, ""),
        (LedgerEntry, "?q=acme&created=day"),
    ],
)
def test_a_list_of_records_counts_nothing(
    page: Client, key: ApiKey, worker: GatewayWorker, model: Any, query: str
) -> None:
    served(key, worker)
    with CaptureQueriesContext(connection) as queries:
        assert page.get(path(model, query)).status_code == 200
    table = model._meta.db_table
    read = [each["sql"] for each in queries if f'FROM "{table}"' in each["sql"]]
    assert any(f"LIMIT {records.NEWEST_MAX}" in sql for sql in read)
    assert not any("COUNT(" in sql for sql in read)
    # The rows come with their organizations: no query per row.
    assert len(queries) < 12


def test_a_list_of_records_ends_at_the_newest(
    page: Client, key: ApiKey, worker: GatewayWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "NEWEST_MAX", 3)
    monkeypatch.setattr(records.LedgerEntryAdmin, "list_per_page", 2)
    for _ in range(4):
        served(key, worker)
    pages = [page.get(path(LedgerEntry, f"?q=acme&p={number}")) for number in (1, 2)]
    listed = [row.pk for each in pages for row in each.context["cl"].result_list]
    entries = LedgerEntry.objects.filter(organization=key.organization)
    assert listed == list(entries.order_by("-pk").values_list("pk", flat=True)[:3])


def test_records_are_found(
    page: Client, key: ApiKey, worker: GatewayWorker, globex: Organization
) -> None:
    event, failed = served(key, worker), served(key, worker, state="failed")
    UsageEvent.objects.filter(pk=failed.pk).update(finished_at=timezone.now() - timedelta(days=2))

    def found(model: Any, query: str) -> list[Any]:
        return [row.pk for row in page.get(path(model, query)).context["cl"].result_list]

    assert found(UsageEvent, f"?q={event.pk}") == [event.pk]
    assert set(found(UsageEvent, "?q=acme")) == {event.pk, failed.pk}
    assert found(UsageEvent, "?q=globex") == []
    assert found(UsageEvent, "?q=nobody") == []
    assert found(UsageEvent, "?q=acme&state=failed") == [failed.pk]
    assert found(UsageEvent, "?q=acme&finished=day") == [event.pk]
    [charge] = found(LedgerEntry, f"?q={event.pk}")
    assert LedgerEntry.objects.get(pk=charge).event == event
    assert charge in found(LedgerEntry, "?q=acme&created=hour")
    assert charge not in found(LedgerEntry, "?q=globex")


def test_amounts_are_shown_to_the_last_digit(
    page: Client, key: ApiKey, worker: GatewayWorker
) -> None:
    event = served(key, worker)
    content = page.get(path(UsageEvent, f"{event.pk}/change/")).content.decode()
    assert ">0.0000092<" in content
    assert ">9.9999908<" in page.get(path(Organization, "?q=acme")).content.decode()
