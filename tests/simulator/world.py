"""Workers, customers and operators of one seed, and what happens to them."""

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from django.conf import settings
from django.db import connection

from billing import ledger, pricing, usage
from billing.models import ApiKey, Organization, UsageEvent
from billing.pricing import Prices
from tests.simulator.disk import DISK
from tests.simulator.faults import FAULTS, Killed
from tests.simulator.worker import State, Told, Worker, settlement

PRICES = Prices(Decimal("0.08"), Decimal("0.04"), Decimal("0.28"))
_TICKS = 280

# What can come next, and how often.
_WEIGHTS = {
    "send": 26.0,
    "write": 26.0,
    "turn": 24.0,
    "answer": 22.0,
    "leave": 7.0,
    "wait": 12.0,
    "take_database": 1.8,
    "fill_disk": 0.8,
    "kill": 0.8,
    "stop": 0.3,
    "pause": 0.4,
    "grant": 1.0,
}


class World:
    """Everything of one seed. `run` it; then look at what was told and at the books."""

    def __init__(self, seed: int, spool: Path) -> None:
        self.chance = random.Random(seed)
        self.told = Told()
        self.limit = self.chance.randint(1, 8)
        self.most_in_flight = 0
        self.kills = 0
        # Long after nothing failed any more: requests without an end, and events of living workers.
        self.unanswered = self.left_open = 0
        self._spool = spool
        FAULTS.begin(self.chance)
        DISK.begin(self._between)
        self._grants = 0
        self._database_from = self._disk_from = 0.0
        Organization.objects.update(max_in_flight=self.limit)
        self._keys = list(ApiKey.objects.select_related("organization").order_by("pk"))
        credits = self.chance.choice([Decimal("0.001"), Decimal(10)])
        for key in self._keys:
            self._give(key.organization, credits)
        self._turning: list[Worker] = []
        self.workers: list[Worker] = []
        for _ in range(self.chance.randint(1, 3)):
            self._start()

    def run(self) -> None:
        names, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        for _ in range(_TICKS):
            [name] = self.chance.choices(names, weights)
            getattr(self, f"_{name}")()
        self._recover()

    # --- requests ---------------------------------------------------------------------------------

    def _send(self) -> None:
        if (worker := self._some_worker()) and worker.ready_at <= FAULTS.now:
            worker.send(self._admission(worker))

    def _write(self) -> None:
        if worker := self._some_worker():
            self._let(worker, worker.write)

    def _turn(self) -> None:
        if worker := self._some_worker():
            worker.turn()

    def _answer(self) -> None:
        """Let a backend end its answer."""
        if (worker := self._some_worker()) and worker.running:
            admission, answer = self.chance.choice(worker.running)
            answer.set_result(self._ending(admission))

    def _leave(self) -> None:
        """Let a client leave, wherever its request is."""
        if (worker := self._some_worker()) and worker.requests:
            self.chance.choice(list(worker.requests)).cancel()

    def _admission(self, worker: Worker) -> usage.Admission:
        key = self.chance.choice(self._keys)
        return usage.Admission(
            generation_id=uuid.UUID(int=self.chance.getrandbits(128)),
            organization_id=key.organization_id,
            key_id=key.pk,
            worker_id=worker.id,
            model="qwen3-32b",
            backend="rack-1",
            streamed=True,
            prices=PRICES,
            hold=pricing.hold(prompt_tokens=100, output_tokens=500, choices=1, prices=PRICES),
            created_at=datetime.fromtimestamp(FAULTS.now, UTC),
        )

    def _ending(self, admission: usage.Admission) -> usage.Settlement:
        if self.chance.random() < 0.2:
            return settlement(admission, State.FAILED)
        tokens = self.chance.randint(0, 600)
        return settlement(admission, State.SUCCEEDED, prompt_tokens=100, completion_tokens=tokens)

    # --- time and faults --------------------------------------------------------------------------

    def _wait(self) -> None:
        self._pass(self.chance.choice([0.01, 0.1, 0.5, 1.0, 2.0, 5.0]))

    def _pass(self, seconds: float) -> None:
        if seconds >= 0.5:  # no writer sleeps that long over what is queued
            for worker in self._awake():
                self._let(worker, worker.write)
        FAULTS.now += seconds
        FAULTS.is_database_away = FAULTS.now < self._database_from
        FAULTS.is_disk_full = FAULTS.now < self._disk_from
        for worker in self._awake():
            if worker.beat_at <= FAULTS.now:
                self._let(worker, worker.beat)

    def _take_database(self) -> None:
        self._database_from = FAULTS.now + self.chance.choice([0.5, 4.0, 8.0, 15.0])
        FAULTS.is_database_away = True

    def _fill_disk(self) -> None:
        self._disk_from = FAULTS.now + self.chance.choice([1.0, 10.0])
        FAULTS.is_disk_full = True

    def _kill(self) -> None:
        spooling = [worker for worker in self.workers if worker in DISK.owners.values()]
        self._bury(self.chance.choice(spooling or self.workers))

    def _stop(self) -> None:
        if worker := self._some_worker():
            self._let(worker, worker.stop)
            if worker in self.workers:
                self._bury(worker)

    def _pause(self) -> None:
        worker = self.chance.choice(self.workers)
        worker.paused_until = FAULTS.now + 3 * settings.KILN_HEARTBEAT_TTL_SECONDS

    def _grant(self) -> None:
        if not FAULTS.is_database_away:
            self._give(self.chance.choice(self._keys).organization, Decimal("0.0005"))

    # --- how --------------------------------------------------------------------------------------

    def _start(self) -> None:
        worker = Worker(self.chance, self._spool, self.told)
        # A limit that is known: who starts as an outage ends knows nothing of it, and could admit
        # before the others have beaten again. Here nobody sends it anything before that.
        worker.ready_at = self._database_from + 2 * settings.KILN_HEARTBEAT_SECONDS
        self.workers.append(worker)
        self._let(worker, worker.beat)

    def _some_worker(self) -> Worker | None:
        awake = self._awake()
        return self.chance.choice(awake) if awake else None

    def _awake(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.paused_until <= FAULTS.now]

    def _let(self, worker: Worker, turn: Callable[[], None]) -> None:
        """Let a worker do something, in which it may be killed."""
        owner, DISK.owner = DISK.owner, worker
        self._turning.append(worker)
        try:
            with FAULTS.may_happen():
                turn()
        except Killed:
            self._bury(worker)
        finally:
            self._turning.pop()
            DISK.owner = owner
        if not FAULTS.is_database_away:
            self.most_in_flight = max(self.most_in_flight, _most_in_flight())

    def _between(self) -> None:
        """Another worker may come between two calls of the disk."""
        others = [worker for worker in self.workers if worker not in self._turning]
        if others and not connection.in_atomic_block and FAULTS.happens("another worker's turn"):
            other = self.chance.choice(others)
            if other.paused_until <= FAULTS.now:
                self._let(other, other.write)

    def _bury(self, worker: Worker) -> None:
        """End a process as kill -9 does, and start another in its place."""
        self.kills += 1
        self.workers.remove(worker)
        worker.bury()
        connection.close()
        self._start()

    def _give(self, organization: Organization, amount: Decimal) -> None:
        self._grants += 1
        ledger.grant(
            organization=organization,
            amount=amount,
            actor="simulator",
            reason="credits",
            idempotency_key=str(self._grants),
        )

    def _recover(self) -> None:
        """Let nothing fail any more, until nothing is left to do."""
        FAULTS.end()
        calm = 0
        while calm < 10:  # until all is answered, and all spools are replayed
            self._pass(2.0)
            self._go_on()
            is_whole = len(self._awake()) == len(self.workers) and not FAULTS.is_database_away
            calm = calm + 1 if is_whole else 0
        self.unanswered = sum(len(worker.requests) for worker in self.workers)
        living = [worker.id for worker in self.workers]
        self.left_open = UsageEvent.objects.filter(worker__in=living, state=State.IN_FLIGHT).count()
        self._pass(usage.LOST_AFTER.total_seconds() + 5)  # until what dead workers left is lost
        self._go_on()

    def _go_on(self) -> None:
        for worker in self._awake():
            worker.turn()
            for admission, answer in worker.running:
                answer.set_result(self._ending(admission))
            worker.turn()
            worker.write()
            worker.turn()


def _most_in_flight() -> int:
    """Return the most live requests that an organization has. By hand, as it is asked so often."""
    fresh = datetime.fromtimestamp(FAULTS.now - settings.KILN_HEARTBEAT_TTL_SECONDS, UTC)
    with FAULTS.may_happen(False), connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(max(number), 0) FROM (SELECT count(*) AS number "
            "FROM billing_usageevent event JOIN billing_gatewayworker worker "
            "ON worker.id = event.worker_id WHERE state = 'in_flight' AND heartbeat_at > %s "
            "GROUP BY organization_id)",
            [fresh.isoformat(sep=" ", timespec="milliseconds").partition("+")[0]],
        )
        [number] = cursor.fetchone()
    return int(number)
