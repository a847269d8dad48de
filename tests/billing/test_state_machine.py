"""Billing's own functions in any order, beside a model of them; the invariants after each step.

    KILN_TEST_EXAMPLES=5000 pytest tests/billing/test_state_machine.py

looks at so many new examples. Without it the examples are the same each time: what fails then was
broken by the change at hand.
"""

import os
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from hypothesis import HealthCheck
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from billing import keys, ledger, organizations, reconcile, usage, workers
from billing.ledger import LedgerError
from billing.models import ApiKey, GatewayWorker, LedgerEntry, Organization
from billing.pricing import Prices
from gateway import spool
from gateway.writer import settle_again
from tests import environment
from tests.billing import books, world
from tests.billing.model import Account, Event, Key, Model

EXAMPLES = os.environ.get("KILN_TEST_EXAMPLES")
IN_CI, STEPS = (200, 50) if environment.KIND == "sqlite" else (50, 30)

# Long enough that nothing here becomes silent because the machine is busy.
TTL = timedelta(hours=1)
LOST_AFTER = timedelta(hours=2)

FREE = Prices(Decimal(0), Decimal(0), Decimal(0))
TINY = Prices(Decimal("0.000001"), Decimal("0"), Decimal("0.000003"))
TOKEN = world.PRICES.output.scaleb(-6)

_KINDS = {ledger.grant: "grant", ledger.purchase: "purchase", ledger.adjust: "adjustment"}
_TWO = st.integers(0, 1)
_AMOUNTS = st.integers(1, 1000).map(lambda tokens: tokens * TOKEN)
_REQUESTS = st.fixed_dictionaries(
    {
        "key": st.integers(0, 3),
        "worker": _TWO,
        "hold": st.integers(0, 300).map(lambda tokens: tokens * TOKEN),
        "prices": st.sampled_from([world.PRICES, world.PRICES, FREE, TINY]),
        "day": st.sampled_from([datetime(2026, 11, day, 12, tzinfo=UTC) for day in (28, 29)]),
    }
)
_ENDINGS = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["succeeded", "succeeded", "cancelled", "failed"]),
        "prompt_tokens": st.integers(20, 200),
        "cached_tokens": st.integers(0, 20),
        "completion_tokens": st.integers(0, 600),
    }
)


def _actor(number: int) -> ledger.Because:
    return {"actor": "tests", "reason": "a reason", "idempotency_key": f"key-{number}"}


class Billing(RuleBasedStateMachine):
    """Two organizations with two keys each, and two places where a worker runs."""

    generations: Bundle[usage.Admission] = Bundle("generations")
    purchases: Bundle[LedgerEntry] = Bundle("purchases")

    def __init__(self) -> None:
        super().__init__()
        self._rolled_back = transaction.atomic()
        self._rolled_back.__enter__()
        self.organizations = [
            organizations.create(name=f"machine-{name}", actor="tests")[0] for name in "ab"
        ]
        self.keys = [
            keys.issue(organization=organization, name=name)[0]
            for organization in self.organizations
            for name in "ab"
        ]
        self.workers = [uuid.uuid4(), uuid.uuid4()]
        self.spooled: dict[uuid.UUID, bytes] = {}
        self.before = self._read()

    def teardown(self) -> None:
        try:
            assert [each for check in reconcile.INVARIANTS for each in check(None).findings] == []
            connection.check_constraints()  # as a commit would
        finally:
            transaction.set_rollback(True)
            self._rolled_back.__exit__(None, None, None)

    @initialize(
        overdraft=st.sampled_from([0, 0, 300]),
        max_in_flight=st.integers(1, 6),
        spend_limit=st.none() | _AMOUNTS,
        credits=st.sampled_from([1, 500, 5000, 5000]).map(lambda tokens: tokens * TOKEN),
    )
    def begin(
        self, overdraft: int, max_in_flight: int, spend_limit: Decimal | None, credits: Decimal
    ) -> None:
        accounts = {}
        for number, organization in enumerate(self.organizations):
            accounts[organization.pk] = Account(
                overdraft_limit=overdraft * TOKEN,
                max_in_flight=max_in_flight + number,
                counts_minutes=bool(number),
            )
            Organization.objects.filter(pk=organization.pk).update(
                overdraft_limit=overdraft * TOKEN,
                max_in_flight=max_in_flight + number,
                # Never reached: what is counted is looked at here, refusals in test_limits.
                requests_per_minute=10**6 if number else None,
                tokens_per_minute=10**9 if number else None,
            )
        limits = {self.keys[0].pk: spend_limit}
        ApiKey.objects.filter(pk=self.keys[0].pk).update(spend_limit=spend_limit)
        api_keys = {key.pk: Key(key.organization_id, limits.get(key.pk)) for key in self.keys}
        self.model = Model(accounts, api_keys)
        for worker_id in self.workers:
            self._beat(worker_id)
        for number, organization in enumerate(self.organizations):
            self._move(ledger.grant, organization, credits, 100 + number)

    # --- requests ---------------------------------------------------------------------------------

    @rule(target=generations, requests=st.lists(_REQUESTS, min_size=1, max_size=5))
    def admit(self, requests: list[dict[str, Any]]) -> MultipleResults[usage.Admission]:
        wanted = [self._admission(**request) for request in requests]
        # One whose heartbeat is not fresh admits nothing (gateway.process).
        batch = [admission for admission in wanted if admission.worker_id in self.model.live]
        expected = [self.model.admit(admission) for admission in batch]
        answers = world.admit(*batch)
        refusals = [type(one) if isinstance(one, Exception) else None for one in answers]
        assert refusals == expected
        in_flight = [one for one, no in zip(batch, refusals, strict=True) if no is None]
        return multiple(*in_flight)

    @rule(target=generations, request=_REQUESTS)
    def admit_what_the_database_forgets(self, request: dict[str, Any]) -> usage.Admission:
        """As a failover to a replica that lags does: only the settlement will be stored."""
        return self._admission(**request)

    @rule(place=_TWO, number=st.integers(0, 3), ending=_ENDINGS)
    def settle_what_runs(self, place: int, number: int, ending: dict[str, Any]) -> None:
        running = self.model.running(self.organizations[place].pk)
        if running:
            self._settle([(running[number % len(running)], ending)])

    @rule(ends=st.lists(st.tuples(generations, _ENDINGS), min_size=1, max_size=3))
    def settle(self, ends: list[tuple[usage.Admission, dict[str, Any]]]) -> None:
        """Once or again, together or alone, in any state that the event may be in."""
        self._settle(ends)

    @rule(opened=generations, ending=_ENDINGS)
    def spool(self, opened: usage.Admission, ending: dict[str, Any]) -> None:
        """The database is away: the cost is named, the settlement waits on the disk."""
        event = self.model.events.get(opened.generation_id, Event(opened))
        if event.state not in {"in_flight", "lost"} or opened.generation_id in self.spooled:
            return
        settlement = world.settlement(opened, **ending)
        self.spooled[opened.generation_id] = spool.dump(settlement)
        self.model.told[opened.generation_id] = settlement.cost

    @rule(times=st.integers(1, 2))
    def replay(self, times: int) -> None:
        settlements = [spool.load(line) for line in self.spooled.values()]
        for settlement in settlements:
            self.model.settle(settlement)
        for _ in range(times):
            assert settle_again(settlements) == []
        self.spooled = {}

    # --- workers ----------------------------------------------------------------------------------

    @rule(place=_TWO, what=st.sampled_from(["kill", "wake", "start"]))
    def disturb_worker(self, place: int, what: str) -> None:
        """Its heartbeat stops: its slots and holds no longer count. Or it was only paused, and
        gives up what it ran before it beats again. Or another starts in its place."""
        worker_id = self.workers[place]
        if what == "kill":
            world.silence(GatewayWorker(pk=worker_id), TTL.total_seconds() + 1)
            self.model.live.discard(worker_id)
        elif worker_id not in self.model.live and what == "wake":
            self._close_abandoned(usage.in_flight_of(worker_id))
            self._beat(worker_id)
        elif worker_id not in self.model.live:
            self.workers[place] = uuid.uuid4()
            self._beat(self.workers[place])

    @rule()
    def close_lost(self) -> None:
        """Long after the last beat of those that are silent."""
        silent = {event.admission.worker_id for event in self.model.events.values()}
        silent -= self.model.live
        for worker_id in silent:
            world.silence(GatewayWorker(pk=worker_id), LOST_AFTER.total_seconds() + 1)
        expected = self.model.lose(self.model.of_worker(*silent))
        assert set(usage.close_lost(after=LOST_AFTER).generation_ids) >= expected

    @rule(opened=generations)
    def close_abandoned(self, opened: usage.Admission) -> None:
        self._close_abandoned([opened.generation_id])

    # --- customers and operators ------------------------------------------------------------------

    @rule(number=st.integers(0, 3), what=st.sampled_from(["pause", "suspend", "revoke"]))
    def refuse(self, number: int, what: str) -> None:
        """Pause a key or suspend its organization, or let it run again; or revoke the key."""
        key = self.keys[number]
        known = self.model.keys[key.pk]
        organization, account = key.organization, self.model.accounts[key.organization_id]
        if what == "pause":
            (keys.resume if known.is_paused else keys.pause)(key)
            known.is_paused = not known.is_paused
        elif what == "revoke" and number % 2:  # the organization's other key stays
            keys.revoke(key)
            known.is_revoked = True
        elif what == "suspend" and account.is_suspended:
            organizations.activate(organization)
            account.is_suspended = False
        elif what == "suspend":
            organizations.suspend(organization, reason="late")
            account.is_suspended = True

    @rule(
        target=purchases,
        function=st.sampled_from([ledger.purchase, ledger.grant, ledger.adjust]),
        place=_TWO,
        amount=_AMOUNTS,
        is_negative=st.booleans(),
        number=st.integers(0, 5),
    )
    def move_money(
        self, function: Any, place: int, amount: Decimal, is_negative: bool, number: int
    ) -> MultipleResults[LedgerEntry]:
        if is_negative and function is ledger.adjust:
            amount = -amount
        line = self._move(function, self.organizations[place], amount, number)
        return multiple(*([line] if line and function is ledger.purchase else []))

    @rule(opened=generations, amount=st.none() | _AMOUNTS, number=st.integers(0, 20))
    def refund(self, opened: usage.Admission, amount: Decimal | None, number: int) -> None:
        event = self.model.events.get(opened.generation_id)
        try:
            charge = ledger.find_charge(str(opened.generation_id))
        except LedgerError:
            assert event is None or not event.cost
            return
        assert event
        assert charge.amount == -event.cost
        self._reverse(charge, amount, number)

    @rule(purchase=purchases, amount=st.none() | _AMOUNTS, number=st.integers(0, 20))
    def reverse_payment(self, purchase: LedgerEntry, amount: Decimal | None, number: int) -> None:
        self._reverse(purchase, amount, number)

    @rule(place=_TWO, statement=st.sampled_from(["UPDATE {} SET amount = 0", "DELETE FROM {}"]))
    def change_history(self, place: int, statement: str) -> None:
        sql = statement.format("billing_ledgerentry") + " WHERE organization_id = %s"
        with (
            pytest.raises(IntegrityError),
            transaction.atomic(),
            connection.cursor() as cursor,
        ):
            cursor.execute(sql, [self.organizations[place].pk])

    # --- what must be true after each step --------------------------------------------------------

    @invariant()
    def the_books_are_sound(self) -> None:
        now = self._read()
        books.check(now)
        books.check_step(self.before, now)
        self.before = now
        self._compare(now)

    def _compare(self, now: books.Books) -> None:
        """Check the books against the model: I6, I8, I9, I10, and that all else is equal."""
        model = self.model
        assert {pk: (row["state"], row["cost"]) for pk, row in now.events.items()} == {
            pk: (event.state, event.cost) for pk, event in model.events.items()
        }, "I8"
        charged = now.sums("charge", "event_id")
        for pk, cost in model.told.items():
            assert pk in self.spooled or charged.get(pk, 0) == -cost, "I9"
        for number, account in model.accounts.items():
            running = model.running(number)
            assert len(running) <= account.max_in_flight, "I6"
            assert now.balances[number] == account.balance
            free = account.balance + account.overdraft_limit - sum(each.hold for each in running)
            assert free >= account.floor, "I10"
            if account.counts_minutes and (account.requests or account.tokens):
                assert now.minutes[number] == (account.requests, account.tokens), "I14"
            else:
                assert number not in now.minutes

    # --- how --------------------------------------------------------------------------------------

    def _read(self) -> books.Books:
        return books.read([organization.pk for organization in self.organizations])

    def _admission(
        self, key: int, worker: int, hold: Decimal, prices: Prices, day: datetime
    ) -> usage.Admission:
        return world.admission(
            self.keys[key],
            GatewayWorker(pk=self.workers[worker]),
            hold=hold,
            prices=prices,
            created_at=day,
        )

    def _settle(self, ends: list[tuple[usage.Admission, dict[str, Any]]]) -> None:
        batch = [
            world.settlement(opened, **ending)
            for opened, ending in ends
            if opened.generation_id not in self.spooled
        ]
        expected = [self.model.settle(settlement) for settlement in batch]
        assert world.settle(*batch) == expected
        for settlement, cost in zip(batch, expected, strict=True):
            self.model.told[settlement.admission.generation_id] = cost

    def _beat(self, worker_id: uuid.UUID) -> None:
        workers.beat(worker_id=worker_id, host="tests", pid=1)
        self.model.live.add(worker_id)

    def _close_abandoned(self, generation_ids: list[uuid.UUID]) -> None:
        lost = usage.close_abandoned(generation_ids).generation_ids
        assert set(lost) == self.model.lose(generation_ids)

    def _move(
        self, function: Any, organization: Organization, amount: Decimal, number: int
    ) -> LedgerEntry | None:
        """Move money under an idempotency key that may have been used before."""
        account = self.model.accounts[organization.pk]
        because = _actor(number)
        what = (_KINDS[function], amount, None)
        try:
            line: LedgerEntry = function(organization=organization, amount=amount, **because)
        except LedgerError:
            assert account.movements.get(because["idempotency_key"], what) != what
            return None
        if because["idempotency_key"] not in account.movements:
            account.movements[because["idempotency_key"]] = what
            account.move(amount)
        assert (line.kind, line.amount, line.reverses_id) == what
        assert account.movements[because["idempotency_key"]] == what
        return line

    def _reverse(self, line: LedgerEntry, amount: Decimal | None, number: int) -> None:
        """Give back a charge or take back a payment, or a part of it, or more than that."""
        account, undone = self.model.accounts[line.organization_id], self.model.undone
        because = _actor(number)
        sign = 1 if line.amount < 0 else -1
        left = abs(line.amount) - undone[line.pk]
        moved = sign * (left if amount is None else amount)
        try:
            if line.amount < 0:
                reversal = ledger.refund(charge=line, amount=amount, **because)
            else:
                reversal = ledger.reverse_payment(purchase=line, amount=amount, **because)
        except LedgerError:
            used = because["idempotency_key"] in account.movements
            assert used or not left or abs(moved) > left
            return
        what = (reversal.kind, reversal.amount, line.pk)
        if because["idempotency_key"] not in account.movements:
            assert reversal.amount == moved
            account.movements[because["idempotency_key"]] = what
            account.move(moved)
            undone[line.pk] += abs(moved)
        assert account.movements[because["idempotency_key"]] == what


def test_the_books_are_sound_whatever_happens(db: None, settings: Any) -> None:
    settings.KILN_HEARTBEAT_TTL_SECONDS = TTL.total_seconds()
    run_state_machine_as_test(
        Billing,
        settings=profile(
            max_examples=int(EXAMPLES or IN_CI),
            stateful_step_count=STEPS,
            derandomize=EXAMPLES is None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
