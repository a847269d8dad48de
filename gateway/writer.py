"""The writer: one thread that commits admissions and settlements in groups.

It takes everything that is queued, commits it in one transaction and wakes who waits; while it
commits, the next group gathers. No timer: waiting for company was slower than any group that
gathers by itself. Settlements come first, then admissions, replays of the spool last.

    a group fails           each operation alone, so that a poisoned one takes no other with it
    the database is away    admissions are refused at once; settlements wait up to two seconds,
                            then go to the spool, and the customer hears the cost
    the spool fails too     the settlement is refused: nothing is named, nothing is billed

Both operations are safe to repeat, so an unknown outcome is simply tried again.
"""

import asyncio
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    ProgrammingError,
    connection,
)

from billing import ledger, usage
from gateway import spool
from gateway.errors import Unavailable

log = logging.getLogger(__name__)

NO_DATABASE = "The service cannot admit requests at the moment. Try again later."

# A group's locks are waited for this long; then each operation goes alone, so that one account
# that somebody else has locked does not stall the others.
_LOCK_WAIT_MS = 250
_GROUP_MAX = 256
_SETTLE_WITHIN_SECONDS = 2.0
_AGAIN_SECONDS = 0.2
_REPLAY_EVERY_SECONDS = 1.0
_ORPHANS_EVERY_SECONDS = 2.0

_FAILURES = (DatabaseError, InterfaceError)
_configured = threading.local()
# What the same operation would meet again; everything else may pass with time.
_FINAL = (DataError, IntegrityError, ProgrammingError, NotSupportedError)


@dataclass(eq=False, slots=True)
class Operation:
    """Something to commit, and who waits for it."""

    what: usage.Admission | usage.Settlement
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Any]"
    since: float = 0.0  # when the writer got it

    @property
    def admission(self) -> usage.Admission:
        return self.what if isinstance(self.what, usage.Admission) else self.what.admission

    @property
    def is_settlement(self) -> bool:
        return isinstance(self.what, usage.Settlement)


class Writer(threading.Thread):
    """Commit what is submitted. `on_closed` is told of each generation that needs no more of it:
    refused, settled, replayed, or given up."""

    def __init__(
        self,
        worker_id: uuid.UUID,
        folder: Path,
        on_closed: Callable[[usage.Admission], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(name="writer", daemon=True)
        self._folder = folder
        self._on_closed = on_closed
        self._clock = clock
        self._spool = spool.Spool(folder, worker_id)
        self._queue: deque[Operation] = deque()
        self._waiting: list[Operation] = []  # settlements that the database did not take yet
        self._arrived = threading.Condition()
        self._is_stopping = False
        self._refused: set[uuid.UUID] = set()  # admissions that were refused: nothing to settle
        self._replay_at = 0.0
        self._orphans_at = 0.0

    @property
    def backlog(self) -> int:
        return len(self._queue) + len(self._waiting)

    def submit(self, operation: Operation) -> None:
        operation.since = self._clock()
        with self._arrived:
            self._queue.append(operation)
            self._arrived.notify()

    def forget_refusal(self, generation_id: uuid.UUID) -> None:
        """Say that nobody will settle this refused admission."""
        self._refused.discard(generation_id)

    def stop(self) -> None:
        """Commit or spool what was submitted, then end."""
        with self._arrived:
            self._is_stopping = True
            self._arrived.notify()
        self.join()

    def run(self) -> None:
        is_over = False
        while not is_over:
            self._wait()
            is_over = self.step()
        self._spool_all(self._waiting)
        self._spool.close()
        _give_connection_back()

    def step(self) -> bool:
        """Commit what is queued, then replay what is spooled; return whether that was the last."""
        group = self._take()
        try:
            self._write(group)
            group = []  # answered: a replay that fails is nothing to them
            if self._is_stopping and not self._queue:
                return True
            self._replay()
        except Exception:
            # A fault of ours must not end the thread: everybody would wait for ever.
            log.exception("the writer failed on %d operations", len(group))
            _give_connection_back()
            self._answer(group, [Unavailable(NO_DATABASE)] * len(group))
        return False

    # --- taking -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for operations, or until it is time to look around."""
        with self._arrived:
            if not self._queue and not self._is_stopping:
                self._arrived.wait(self._until_next_look())

    def _take(self) -> list[Operation]:
        """Take what is queued, which may be nothing.

        A settlement whose admission is in the same group waits for the next one.
        """
        with self._arrived:
            group = [self._queue.popleft() for _ in range(min(len(self._queue), _GROUP_MAX))]
            admitted = {
                operation.admission.generation_id
                for operation in group
                if not operation.is_settlement
            }
            early = [
                operation
                for operation in group
                if operation.is_settlement and operation.admission.generation_id in admitted
            ]
            self._queue.extendleft(reversed(early))
        waited, self._waiting = self._waiting, []
        return [*waited, *(operation for operation in group if operation not in early)]

    def _until_next_look(self) -> float:
        if self._waiting:
            return _AGAIN_SECONDS
        look_at = self._replay_at if self._spool.count else self._orphans_at
        return max(look_at - self._clock(), 0.01)

    # --- committing -------------------------------------------------------------------------------

    def _write(self, group: list[Operation]) -> None:
        if not group:
            return
        try:
            self._answer(group, self._commit(group))
        except _FAILURES as error:
            log.warning("commit of %d operations failed: %s", len(group), error)
            is_away = connection.connection is None
            _give_connection_back()
            if is_away:
                self._put_off(group)
            else:
                self._write_one_by_one(group)

    def _write_one_by_one(self, group: list[Operation]) -> None:
        for position, operation in enumerate(group):
            try:
                if not operation.is_settlement and usage.is_in_flight(
                    operation.admission.generation_id
                ):
                    self._answer([operation], [None])  # the failed commit had been one after all
                else:
                    self._answer([operation], self._commit([operation]))
            except _FINAL as error:
                log.error("%s is refused: %s", operation.admission.generation_id, error)
                self._answer([operation], [Unavailable(NO_DATABASE)])
            except _FAILURES as error:
                is_away = connection.connection is None
                _give_connection_back()
                log.warning("%s: %s", operation.admission.generation_id, error)
                # With the database away each further try would only wait for its time-out.
                self._put_off(group[position:] if is_away else [operation])
                if is_away:
                    return

    def _put_off(self, operations: Sequence[Operation]) -> None:
        """Refuse admissions; keep settlements for another try, or spool what is overdue."""
        admissions = [operation for operation in operations if not operation.is_settlement]
        self._answer(admissions, [Unavailable(NO_DATABASE)] * len(admissions))
        settlements = [operation for operation in operations if operation.is_settlement]
        wait_from = self._clock() - _SETTLE_WITHIN_SECONDS
        self._waiting += [operation for operation in settlements if operation.since >= wait_from]
        self._spool_all([operation for operation in settlements if operation.since < wait_from])

    def _commit(self, group: list[Operation]) -> list[Any]:
        """Commit a group in one transaction and return its results, in its order."""
        settlements = [
            operation.what
            for operation in group
            if isinstance(operation.what, usage.Settlement)
            and operation.admission.generation_id not in self._refused
        ]
        admissions = [
            operation.what for operation in group if isinstance(operation.what, usage.Admission)
        ]
        organizations = {operation.admission.organization_id for operation in group}
        results: dict[int, Any] = {}
        _wait_briefly_for_locks()
        with ledger.locked_accounts(organizations) as accounts:
            if settlements:
                _note(results, settlements, usage.settle(settlements, accounts))
            if admissions:
                _note(results, admissions, usage.admit(admissions, accounts))
        return [results.get(id(operation.what)) for operation in group]

    def _answer(self, group: Sequence[Operation], results: Iterable[Any]) -> None:
        """Close what needs no more of this process, and wake who waits."""
        answers = list(zip(group, results, strict=True))
        for operation, result in answers:
            admission = operation.admission
            if operation.is_settlement:
                self._refused.discard(admission.generation_id)
                self._on_closed(admission)
            elif isinstance(result, Exception):
                self._refused.add(admission.generation_id)
                self._on_closed(admission)
        _wake(answers)

    # --- the spool --------------------------------------------------------------------------------

    def _spool_all(self, operations: Sequence[Operation]) -> None:
        """Write settlements to the spool and say their cost; where that fails too, refuse them."""
        if not operations:
            return
        settlements = [
            operation.what
            for operation in operations
            if isinstance(operation.what, usage.Settlement)
        ]
        try:
            self._spool.append(settlements)
        except OSError as error:
            log.error("%d settlements could not be spooled: %s", len(settlements), error)
            self._answer(operations, [Unavailable(NO_DATABASE)] * len(operations))
            return
        log.warning("spooled %d settlements", len(settlements))
        # Not closed yet: this process answers for them until they are replayed.
        costs = [settlement.cost for settlement in settlements]
        _wake(list(zip(operations, costs, strict=True)))

    def _replay(self) -> None:
        """Settle what is spooled, by this process or by dead ones, when it is time to."""
        now = self._clock()
        try:
            if self._spool.count and now >= self._replay_at:
                self._replay_at = now + _REPLAY_EVERY_SECONDS
                replayed = self._spool.replay(settle_again)
                log.warning("replayed %d settlements", len(replayed))
                for settlement in replayed:
                    self._on_closed(settlement.admission)
            if now >= self._orphans_at:
                self._orphans_at = now + _ORPHANS_EVERY_SECONDS
                if orphans := spool.replay_orphans(self._folder, settle_again):
                    log.warning("replayed %d settlements of dead processes", len(orphans))
        except _FAILURES as error:
            _give_connection_back()
            log.warning("the spool waits for the database: %s", error)
        except OSError as error:
            log.error("the spool could not be read: %s", error)


def _wait_briefly_for_locks() -> None:
    """Set the lock time-out of this thread's connection, once for each new one."""
    if connection.vendor != "postgresql":
        return
    connection.ensure_connection()
    if getattr(_configured, "connection", None) is not connection.connection:
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = '{_LOCK_WAIT_MS}ms'")
        _configured.connection = connection.connection


def _give_connection_back() -> None:
    """Close this thread's connection; the pool may hand it to others, who wait for locks."""
    if connection.vendor == "postgresql" and connection.connection is not None:
        with suppress(*_FAILURES), connection.cursor() as cursor:
            cursor.execute("RESET lock_timeout")
    _configured.connection = None
    connection.close()


def settle_again(settlements: list[usage.Settlement]) -> list[usage.Settlement]:
    """Settle what was spooled: together, else one by one; return what is refused for good."""
    organizations = {settlement.admission.organization_id for settlement in settlements}
    try:
        with ledger.locked_accounts(organizations) as accounts:
            usage.settle(settlements, accounts)
    except _FINAL as error:
        if len(settlements) > 1:
            return [refused for one in settlements for refused in settle_again([one])]
        log.error("%s: %s", settlements[0].admission.generation_id, error)
        return settlements
    return []


def _note(results: dict[int, Any], operations: Sequence[Any], answers: Sequence[Any]) -> None:
    for operation, answer in zip(operations, answers, strict=True):
        results[id(operation)] = answer


def _wake(answers: Sequence[tuple[Operation, Any]]) -> None:
    """Tell who waits, each event loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Operation, Any]]] = {}
    for operation, result in answers:
        loops.setdefault(operation.loop, []).append((operation, result))
    for loop, theirs in loops.items():
        try:
            loop.call_soon_threadsafe(_set_results, theirs)
        except RuntimeError:  # the loop has ended: nobody waits any more
            continue


def _set_results(answers: list[tuple[Operation, Any]]) -> None:
    for operation, result in answers:
        if operation.done.done():  # who waited was cancelled; the commit stands
            continue
        if operation.is_settlement and isinstance(result, Exception):
            operation.done.set_exception(result)
        else:
            operation.done.set_result(result)
