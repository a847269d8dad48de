"""The invariants: silent on sound books, and each kind of break is found."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import connection
from django.utils import timezone

from billing import reconcile
from billing.models import ApiKey, GatewayWorker, LedgerEntry, Organization, UsageEvent
from tests.billing.world import COST, lift_triggers, served

PICODOLLAR = Decimal("0.000000000001")


def findings() -> list[str]:
    """Return what is found now, of everything and of the last hour: a fresh break is in both."""
    everything, recent = (
        [line for invariant in reconcile.INVARIANTS for line in invariant(since).findings]
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


def test_what_is_older_is_left_to_the_full_run(event: UsageEvent) -> None:
    UsageEvent.objects.filter(pk=event.pk).update(
        finished_at=timezone.now() - timedelta(hours=2), completion_tokens=11
    )
    assert reconcile.costs(timezone.now() - timedelta(hours=1)).findings == []
    assert len(reconcile.costs(None).findings) == 1


def _one(matches: Callable[[str], bool]) -> bool:
    return len([line for line in findings() if matches(line)]) == 1
