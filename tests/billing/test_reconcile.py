"""The invariants: silent on sound books, and each kind of break is found."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from billing import reconcile
from billing.models import ApiKey, GatewayWorker, LedgerEntry, Organization, UsageEvent
from tests.billing.world import COST, admission, admit, lift_triggers, orphan, served, silence

PICODOLLAR = Decimal("0.000000000001")


def findings() -> list[str]:
    """Return what is found now, of everything and of the last hour: a fresh break is in both."""
    everything, recent = (
        [str(broken) for invariant in reconcile.INVARIANTS for broken in invariant(since).findings]
        for since in (None, timezone.now() - timedelta(hours=1))
    )
    assert everything == recent
    return everything


@pytest.fixture
def event(key: ApiKey, worker: GatewayWorker) -> UsageEvent:
    """A request of acme that was charged."""
    return served(key, worker)


def test_it_works(event: UsageEvent, key: ApiKey, worker: GatewayWorker) -> None:
    served(key, worker, state="cancelled")
    served(key, worker, state="failed", status_code=502)
    served(key, worker, prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    assert findings() == []
    counted = {
        report.invariant.split()[0]: report.counted
        for report in (invariant(None) for invariant in reconcile.INVARIANTS)
    }
    assert counted["I1"] >= 1
    assert counted["I2"] >= 4
    assert counted["I4"] >= 4


def test_it_finds_a_balance_that_was_changed(event: UsageEvent, acme: Organization) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE billing_creditaccount SET balance = balance + 1 WHERE organization_id = %s",
            [acme.pk],
        )
    assert findings() == ["organization acme: balance 9.999990800001, sum of the ledger 9.9999908"]


def test_it_finds_a_line_without_its_balance(event: UsageEvent, acme: Organization) -> None:
    LedgerEntry.objects.create(organization=acme, kind="grant", amount=5, actor="intruder")
    [finding] = findings()
    assert finding.startswith("organization acme: balance")


def test_it_finds_a_missing_charge(event: UsageEvent) -> None:
    lift_triggers()
    LedgerEntry.objects.filter(event=event).delete()
    assert f"event {event.pk}: cost 0.0000092, no charge" in findings()


def test_it_finds_a_charge_of_the_wrong_amount(event: UsageEvent) -> None:
    lift_triggers()
    LedgerEntry.objects.filter(event=event).update(amount=-COST - PICODOLLAR)
    assert _one(lambda line: line.startswith("charge ") and str(event.pk) in line)


def test_it_finds_a_charge_in_another_organization(event: UsageEvent, globex: Organization) -> None:
    lift_triggers()
    LedgerEntry.objects.filter(event=event).update(organization=globex)
    assert _one(lambda line: line.startswith("charge ") and str(event.pk) in line)


def test_it_finds_a_charge_for_what_cost_nothing(
    key: ApiKey, worker: GatewayWorker, acme: Organization
) -> None:
    failed = served(key, worker, state="failed", status_code=502)
    LedgerEntry.objects.create(
        organization=acme, kind="charge", amount=-COST, event=failed, actor="intruder"
    )
    assert _one(lambda line: line.startswith("charge ") and str(failed.pk) in line)


def test_it_finds_a_cost_that_its_tokens_do_not_make(event: UsageEvent) -> None:
    UsageEvent.objects.filter(pk=event.pk).update(cost=COST + PICODOLLAR)
    assert f"event {event.pk}: cost 0.000009200001 is not its tokens' cost" in findings()


def test_it_finds_tokens_that_do_not_make_the_cost(event: UsageEvent) -> None:
    UsageEvent.objects.filter(pk=event.pk).update(completion_tokens=11)
    assert _one(lambda line: line == f"event {event.pk}: cost 0.0000092 is not its tokens' cost")


def test_it_finds_tokens_that_were_not_paid(key: ApiKey, worker: GatewayWorker) -> None:
    free = served(key, worker, prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    UsageEvent.objects.filter(pk=free.pk).update(prompt_tokens=1)
    assert _one(lambda line: line == f"event {free.pk}: cost 0 is not its tokens' cost")


def test_it_finds_a_second_charge(event: UsageEvent, acme: Organization) -> None:
    lift_triggers()
    with connection.cursor() as cursor:
        cursor.execute("DROP INDEX ledger_entry_one_charge_per_event")
    LedgerEntry.objects.create(
        organization=acme, kind="charge", amount=-COST, event=event, actor="intruder"
    )
    assert f"event {event.pk}: 2 charges" in findings()


def test_it_finds_a_charge_whose_event_is_gone(event: UsageEvent) -> None:
    lift_triggers()
    orphan(LedgerEntry.objects.get(event=event))
    line = LedgerEntry.objects.get(organization=event.organization, kind="charge")
    told = findings()
    assert f"event {event.pk}: cost 0.0000092, no charge" in told
    assert f"charge {line.pk}: -0.0000092, its event {line.event_id} is missing" in told
    LedgerEntry.objects.filter(pk=line.pk).update(event=event)  # or the database refuses the end


def test_it_finds_a_failed_request_that_costs(key: ApiKey, worker: GatewayWorker) -> None:
    failed = served(key, worker, state="failed", status_code=502)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            cursor.execute(
                "ALTER TABLE billing_usageevent DROP CONSTRAINT usage_event_unpaid_while_unserved"
            )
        else:
            cursor.execute("PRAGMA ignore_check_constraints = ON")
        UsageEvent.objects.filter(pk=failed.pk).update(cost=COST)
        if connection.vendor == "sqlite":
            cursor.execute("PRAGMA ignore_check_constraints = OFF")
    assert f"event {failed.pk}: cost 0.0000092 is not its tokens' cost" in findings()


def test_a_look_lists_a_bounded_number(
    key: ApiKey, worker: GatewayWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        served(key, worker)
    UsageEvent.objects.filter(organization=key.organization).update(completion_tokens=11)
    monkeypatch.setattr("billing.reconcile.usage.LISTED_MAX", 2)
    assert len(reconcile.costs(None).findings) == 2


def test_the_ledgers_by_kind_add_up_to_the_balances(event: UsageEvent, acme: Organization) -> None:
    def sums() -> dict[str, Decimal]:
        notes = (note.split() for note in reconcile.trial_balance(None).notes)
        return {kind: Decimal(amount) for kind, amount in notes}

    before = sums()
    assert before["sum"] == before["balances"] == before["grant"] + before["charge"]
    assert reconcile.trial_balance(None).findings == []
    LedgerEntry.objects.create(organization=acme, kind="purchase", amount=5, actor="intruder")
    after = sums()
    assert after["sum"] - before["sum"] == after["purchase"] == 5
    [broken] = reconcile.trial_balance(None).findings
    assert broken.subject == "all accounts"


def test_a_request_that_never_ends_is_found_while_its_process_lives(
    key: ApiKey, worker: GatewayWorker, settings: Any
) -> None:
    settings.KILN_TOTAL_SECONDS = 100
    young, old = (
        admission(key, worker, created_at=timezone.now() - timedelta(seconds=age))
        for age in (150, 170)
    )
    admit(young, old)
    report = reconcile.stuck(None)
    assert report.counted >= 2
    [broken] = report.findings
    assert broken.subject == f"event {old.generation_id}"
    assert broken.detail.endswith(" UTC in tests:1")
    silence(worker, 11)  # then it is the reaper's
    assert reconcile.stuck(None).findings == []


def test_what_is_older_is_left_to_the_full_run(event: UsageEvent) -> None:
    UsageEvent.objects.filter(pk=event.pk).update(
        finished_at=timezone.now() - timedelta(hours=2), completion_tokens=11
    )
    assert reconcile.costs(timezone.now() - timedelta(hours=1)).findings == []
    assert len(reconcile.costs(None).findings) == 1


def _one(matches: Callable[[str], bool]) -> bool:
    return len([line for line in findings() if matches(line)]) == 1
