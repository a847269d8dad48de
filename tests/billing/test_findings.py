"""Runs and findings: every look is recorded, a break is one row until it is fixed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, connections
from django.test import Client
from django.utils import timezone

from billing import checks, findings, locks, tasks
from billing.models import (
    CreditAccount,
    Finding,
    LedgerEntry,
    Organization,
    ReconciliationRun,
    UsageEvent,
)
from billing.reconcile import Break, Check, Report

BALANCES = checks.CHECKS["balances"]


def check_of(*breaks: Break) -> Check:
    def look(_: datetime | None) -> Report:
        return Report("tests", 7, list(breaks))

    return Check("tests", look)


def stored() -> list[tuple[str, str, str]]:
    rows = Finding.objects.filter(invariant="tests").order_by("pk")
    return list(rows.values_list("subject", "detail", "state"))


def test_a_run_is_recorded(db: None) -> None:
    since = timezone.now()
    findings.run(check_of(Break("a", "1")), since)
    run = ReconciliationRun.objects.get(invariant="tests")
    assert (run.since, run.counted, run.found) == (since, 7, 1)
    assert since <= run.started_at <= run.finished_at


def test_a_break_found_again_is_the_same_finding(db: None) -> None:
    findings.run(check_of(Break("a", "1"), Break("b", "1")), None)
    first = Finding.objects.get(invariant="tests", subject="a")
    findings.run(check_of(Break("a", "2")), None)
    assert stored() == [("a", "2", "open"), ("b", "1", "open")]
    again = Finding.objects.get(pk=first.pk)
    assert again.first_seen_at == first.first_seen_at
    assert again.last_seen_at > first.last_seen_at


def test_what_is_no_longer_found_stays_until_somebody_says_fixed(db: None) -> None:
    findings.run(check_of(Break("a", "1")), None)
    findings.run(check_of(), None)
    assert stored() == [("a", "1", "open")]


def test_a_fixed_finding_found_again_is_a_new_one(operator: Any) -> None:
    findings.run(check_of(Break("a", "1")), None)
    finding = Finding.objects.get(invariant="tests")
    findings.acknowledge(finding, by=operator, note="Looking.")
    findings.run(check_of(Break("a", "2")), None)
    assert stored() == [("a", "2", "acknowledged")]
    finding.refresh_from_db()
    findings.fix(finding, by=None, note="Booked adjustment 7.")
    finding.refresh_from_db()
    assert (finding.owner, finding.note) == (operator, "Looking.\nBooked adjustment 7.")
    findings.run(check_of(Break("a", "3")), None)
    assert stored() == [("a", "2", "fixed"), ("a", "3", "open")]


def test_fixed_needs_a_note_and_is_the_end(operator: Any) -> None:
    findings.run(check_of(Break("a", "1")), None)
    finding = Finding.objects.get(invariant="tests")
    with pytest.raises(findings.FindingRefused, match="how it was fixed"):
        findings.fix(finding, by=operator, note=" ")
    findings.fix(finding, by=operator, note="Done.")
    for move in (findings.acknowledge, findings.fix):
        with pytest.raises(findings.FindingRefused, match="was fixed before"):
            move(finding, by=operator, note="Again.")
    assert stored() == [("a", "1", "fixed")]


def test_long_subjects_fit(db: None) -> None:
    findings.run(check_of(Break("x" * 500, "1"), Break("x" * 501, "2")), None)
    assert stored() == [("x" * 200, "2", "open")]


def test_old_runs_are_forgotten(db: None) -> None:
    findings.run(check_of(), None)
    findings.run(check_of(), None)
    oldest = ReconciliationRun.objects.filter(invariant="tests").earliest("pk")
    past = timezone.now() - findings.RUNS_KEPT - timedelta(minutes=1)
    ReconciliationRun.objects.filter(pk=oldest.pk).update(started_at=past)
    tasks.forget_old_runs()
    assert ReconciliationRun.objects.filter(invariant="tests").count() == 1


def test_one_process_runs_a_check_at_a_time(db: None) -> None:
    """A second connection stands for the second process."""
    check = check_of()

    def elsewhere() -> Report | None:
        try:
            return findings.run_alone(check)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool, locks.only_one("reconcile recent tests") as is_ours:
        assert is_ours
        if connection.vendor == "postgresql":
            assert pool.submit(elsewhere).result() is None
    assert findings.run_alone(check) is not None
    with locks.only_one("reconcile recent tests") as is_ours:
        assert is_ours  # given back


def test_ten_at_once_change_nothing(tenant: Callable[..., Any]) -> None:
    """Case C74: jobs that run twice, or ten times at the same moment, do what one does."""
    acme: Organization = tenant("acme").organization
    account = CreditAccount.objects.filter(pk=acme.pk)
    account.update(balance=Decimal(6))

    def books() -> list[Any]:
        of_acme = [model.objects.filter(organization=acme) for model in (LedgerEntry, UsageEvent)]
        return [list(rows.order_by("pk").values()) for rows in (*of_acme, account)]

    def everything() -> None:
        try:
            for name in ("balances", "charges", "costs"):
                tasks.check(name, is_full=True)
                tasks.check(name)
        finally:
            connections.close_all()

    before = books()
    mine = Finding.objects.filter(subject=f"organization {acme}")
    try:
        with ThreadPoolExecutor(10) as pool:
            for done in [pool.submit(everything) for _ in range(10)]:
                done.result()
        assert books() == before
        assert [finding.state for finding in mine] == ["open"]
    finally:
        account.update(balance=Decimal(5))  # this test is committed
        mine.delete()


def test_the_same_break_recorded_at_once_is_one_finding(tenant: Callable[..., Any]) -> None:
    """Without the lock, as two operators' commands are."""
    subject = str(tenant("acme").organization)

    def look() -> None:
        try:
            findings.run(check_of(Break(subject, "1")), None)
        finally:
            connections.close_all()

    mine = Finding.objects.filter(subject=subject)
    try:
        with ThreadPoolExecutor(10) as pool:
            for done in [pool.submit(look) for _ in range(10)]:
                done.result()
        assert mine.count() == 1
    finally:
        mine.delete()
        ReconciliationRun.objects.filter(invariant="tests").delete()


def test_an_operator_moves_findings(operator: Any, client: Client) -> None:
    findings.run(check_of(Break("a", "1")), None)
    finding = Finding.objects.get(invariant="tests")
    client.force_login(operator)

    def act(action: str, note: str) -> str:
        sent = {"action": action, "note": note, "_selected_action": [finding.pk]}
        answer = client.post("/admin/billing/finding/", sent, follow=True)
        finding.refresh_from_db()
        return answer.content.decode()

    act("acknowledge", "")
    assert (finding.state, finding.owner) == ("acknowledged", operator)
    assert "Say in the note how it was fixed." in act("fix", "")
    act("fix", "Booked adjustment 7.")
    assert (finding.state, finding.note) == ("fixed", "Booked adjustment 7.")
    told = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert told == ["Acknowledged", "Fixed: Booked adjustment 7."]
    page = client.get(f"/admin/billing/finding/{finding.pk}/change/")
    assert page.status_code == 200
    assert b'name="_save"' not in page.content
    changed = client.post(f"/admin/billing/finding/{finding.pk}/change/", {"state": "open"})
    assert changed.status_code == 403
