"""Usage events: who is admitted, what is held, and that each is settled and charged once."""

import uuid
from decimal import Decimal

import pytest

from billing import keys, organizations, usage, workers
from billing.keys import KeyInvalid, KeyPaused, OrganizationSuspended
from billing.models import (
    ApiKey,
    CreditAccount,
    GatewayWorker,
    LedgerEntry,
    Organization,
    UsageEvent,
)
from billing.standing import InsufficientCredits, TooManyInFlight, standing
from tests.billing.world import COST, admission, admit, balance, served, settle, settlement, silence


def state(opened: usage.Admission) -> str:
    return UsageEvent.objects.get(pk=opened.generation_id).state


def spend(organization: Organization, *, down_to: str) -> None:
    CreditAccount.objects.filter(pk=organization.pk).update(balance=Decimal(down_to))


def test_it_works(acme: Organization, key: ApiKey, worker: GatewayWorker) -> None:
    opened = admission(key, worker)
    assert admit(opened) == [None]
    assert state(opened) == "in_flight"
    assert settle(settlement(opened)) == [COST]
    event = UsageEvent.objects.get(pk=opened.generation_id)
    assert (event.state, event.cost, event.prompt_tokens) == ("succeeded", COST, 100)
    assert balance(acme) == 10 - COST


def test_eight_are_admitted_and_not_nine(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    batch = [admission(key, worker) for _ in range(5)]
    assert admit(*batch) == [None] * 5
    answers = admit(*[admission(key, worker) for _ in range(5)])
    assert answers[:3] == [None] * 3
    assert all(isinstance(answer, TooManyInFlight) for answer in answers[3:])
    assert standing(acme.pk).in_flight == 8
    settle(settlement(batch[0]))
    assert admit(admission(key, worker)) == [None]


def test_the_limit_is_the_organizations_own(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    Organization.objects.filter(pk=acme.pk).update(max_in_flight=1)
    assert admit(admission(key, worker)) == [None]
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, TooManyInFlight)
    assert refusal.standing.max_in_flight == 1


def test_another_organization_does_not_notice(
    key: ApiKey, globex: Organization, worker: GatewayWorker
) -> None:
    other, _ = keys.issue(organization=globex, name="default")
    admit(*[admission(key, worker) for _ in range(8)])
    mixed = admit(admission(key, worker), admission(other, worker))
    assert isinstance(mixed[0], TooManyInFlight)
    assert mixed[1] is None


def test_nothing_runs_without_credits(broke: Organization, worker: GatewayWorker) -> None:
    key, _ = keys.issue(organization=broke, name="default")
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, InsufficientCredits)
    assert not UsageEvent.objects.filter(organization=broke).exists()


def test_the_last_picodollar_can_be_spent(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    spend(acme, down_to="0.000000000001")
    first = admission(key, worker, hold=Decimal("0.5"))
    assert admit(first) == [None]
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, InsufficientCredits)
    assert refusal.standing.held == Decimal("0.5")
    # The hold ends with the request; what is left is what it did not cost.
    settle(settlement(first, state="failed", status_code=502))
    assert admit(admission(key, worker)) == [None]


def test_holds_of_one_batch_count_against_each_other(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    spend(acme, down_to="1")
    answers = admit(*[admission(key, worker, hold=Decimal("0.6")) for _ in range(3)])
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], InsufficientCredits)


def test_an_overdraft_limit_lets_the_balance_go_below_zero(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    spend(acme, down_to="0")
    Organization.objects.filter(pk=acme.pk).update(overdraft_limit=Decimal("0.000000000001"))
    assert admit(admission(key, worker)) == [None]


def test_credits_are_asked_for_before_the_limit_in_flight(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    Organization.objects.filter(pk=acme.pk).update(max_in_flight=0)
    spend(acme, down_to="0")
    assert isinstance(admit(admission(key, worker))[0], InsufficientCredits)


def test_a_key_revoked_since_authentication_is_refused(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    secret_key, secret = keys.issue(organization=acme, name="second")
    keys.authenticate(secret)
    keys.revoke(secret_key)
    assert isinstance(admit(admission(secret_key, worker))[0], KeyInvalid)
    keys.pause(key)
    assert isinstance(admit(admission(key, worker))[0], KeyPaused)
    keys.resume(key)
    organizations.suspend(acme, reason="late")
    assert isinstance(admit(admission(key, worker))[0], OrganizationSuspended)
    assert not UsageEvent.objects.filter(organization=acme).exists()


def test_an_unknown_key_is_refused(key: ApiKey, worker: GatewayWorker) -> None:
    assert isinstance(admit(admission(key, worker, key_id=0))[0], KeyInvalid)


def test_slots_and_holds_of_a_silent_worker_do_not_count(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    admit(*[admission(key, worker) for _ in range(8)])
    silence(worker, 11)
    assert standing(acme.pk).in_flight == 0
    assert standing(acme.pk).held == 0
    alive = uuid.uuid4()
    workers.beat(worker_id=alive, host="tests", pid=2)
    assert admit(admission(key, GatewayWorker(pk=alive))) == [None]
    # It was only paused: with its next beat its requests count again.
    workers.beat(worker_id=worker.pk, host="tests", pid=1)
    assert standing(acme.pk).in_flight == 9


def test_settling_twice_changes_nothing(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    opened = admission(key, worker)
    admit(opened)
    other = settlement(opened, completion_tokens=999)
    assert settle(settlement(opened), other) == [COST, COST]
    assert settle(other) == [COST]
    assert balance(acme) == 10 - COST
    assert LedgerEntry.objects.filter(event=opened.generation_id).count() == 1


def test_a_settlement_makes_the_event_that_was_lost_with_the_database(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    opened = admission(key, worker)
    assert settle(settlement(opened)) == [COST]
    event = UsageEvent.objects.get(pk=opened.generation_id)
    assert (event.model, event.hold, event.api_key) == ("qwen3-32b", opened.hold, key)
    assert balance(acme) == 10 - COST


def test_a_settlement_names_the_backend_that_answered(key: ApiKey, worker: GatewayWorker) -> None:
    assert served(key, worker, backend="rack-2").backend == "rack-2"


@pytest.mark.parametrize("ended", ["failed", "lost"])
def test_a_request_that_failed_costs_nothing(
    acme: Organization, key: ApiKey, worker: GatewayWorker, ended: str
) -> None:
    event = served(key, worker, state=ended, status_code=502, error="backend_failed")
    assert (event.state, event.cost) == (ended, 0)
    assert balance(acme) == 10
    assert not LedgerEntry.objects.filter(event=event).exists()


def test_a_cancelled_request_pays_what_was_produced(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    assert served(key, worker, state="cancelled").cost == COST
    assert balance(acme) == 10 - COST


def test_an_event_keeps_the_prices_of_its_admission(key: ApiKey, worker: GatewayWorker) -> None:
    event = served(key, worker)
    assert event.prices == admission(key, worker).prices


def test_it_closes_what_a_dead_worker_left(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    opened = admission(key, worker)
    admit(opened)
    silence(worker, 60)
    assert opened.generation_id not in usage.close_lost().generation_ids
    silence(worker, 121)
    assert opened.generation_id in usage.close_lost().generation_ids
    event = UsageEvent.objects.get(pk=opened.generation_id)
    assert (event.state, event.cost, event.error) == ("lost", 0, "worker_lost")
    assert opened.generation_id not in usage.close_lost().generation_ids
    assert balance(acme) == 10


def test_a_late_settlement_wins_over_lost_once(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    opened = admission(key, worker)
    admit(opened)
    assert usage.close_abandoned([opened.generation_id]).generation_ids == [opened.generation_id]
    assert settle(settlement(opened, state="failed", status_code=502)) == [0]
    assert state(opened) == "lost"
    assert settle(settlement(opened)) == [COST]
    assert settle(settlement(opened)) == [COST]
    assert (state(opened), balance(acme)) == ("succeeded", 10 - COST)


def test_a_settled_event_is_not_closed_as_lost(key: ApiKey, worker: GatewayWorker) -> None:
    event = served(key, worker)
    silence(worker, 121)
    assert event.pk not in usage.close_lost().generation_ids
    assert usage.close_abandoned([event.pk]).generation_ids == []


def test_a_worker_knows_what_it_has_in_flight(key: ApiKey, worker: GatewayWorker) -> None:
    opened = admission(key, worker)
    admit(opened)
    served(key, worker)
    assert usage.in_flight_of(worker.pk) == [opened.generation_id]
