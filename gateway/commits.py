"""The one door to billing: reads on a few threads, writes by one writer that commits in groups.

The writer takes everything that is queued, commits it in one transaction and wakes those who
wait; while it commits, the next group gathers. No timer: waiting for company was slower than any
group that gathers by itself. What was handed to the writer is committed whatever becomes of the
task that handed it over, so a client that leaves loses nothing.
"""

import asyncio
import logging
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from billing import keys, ledger, standing, usage
from gateway import errors
from gateway.refusals import in_words_of_api

log = logging.getLogger(__name__)

# A group's locks are waited for this long; then each operation goes alone, so that one account
# that somebody else has locked does not stall the others.
_LOCK_WAIT_MS = 250
_GROUP_MAX = 256
_WAITING_MAX = 2000
_SETTLE_TRIES = 5
_TRY_AGAIN_SECONDS = 0.4

NO_DATABASE = "The service cannot admit requests at the moment. Try again later."


@dataclass(eq=False, slots=True)
class _Operation:
    """Something to commit, and who waits for it."""

    what: usage.Admission | usage.Settlement
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Any]"
    tries: int = field(default=0)

    @property
    def admission(self) -> usage.Admission:
        return self.what if isinstance(self.what, usage.Admission) else self.what.admission

    @property
    def is_settlement(self) -> bool:
        return isinstance(self.what, usage.Settlement)


class Commits:
    """Admissions, settlements and reads of one process."""

    def __init__(self, worker_id: uuid.UUID) -> None:
        self.worker_id = worker_id
        self._queue: deque[_Operation] = deque()
        self._arrived = threading.Condition()
        self._is_stopping = False
        self._refused: set[uuid.UUID] = set()  # admissions that were refused; nothing to settle
        self._open: dict[uuid.UUID, int] = {}  # generations this process answers for
        self._in_flight: Counter[int] = Counter()  # of them, by organization
        self._broke: set[int] = set()  # organizations whose balance was not positive at last look
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader")
        self._writer = threading.Thread(target=self._write_forever, name="writer", daemon=True)
        self._writer.start()

    # --- the event loop's side --------------------------------------------------------------------

    async def read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a read of the database on a reader thread. Raises Unavailable without a database."""

        def run() -> Any:
            try:
                return function(*arguments)
            finally:
                close_old_connections()

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._readers, run)
        except (DatabaseError, InterfaceError) as error:
            log.error("database: %s", error)
            raise errors.Unavailable(NO_DATABASE) from None

    async def glance(self, caller: keys.Caller) -> None:
        """Refuse early, before the body is read, what would be refused at admission.

        Memory may let a request pass, it never refuses alone: a suspicion is confirmed by an
        exact read (rulings.md 6). Raises InsufficientCredits or TooManyInFlight.
        """
        organization = caller.organization_id
        if (
            caller.has_credits
            and organization not in self._broke
            and self._in_flight[organization] < caller.max_in_flight
        ):
            return
        now = await self.read(standing.standing, organization)
        if now.available > 0:
            self._broke.discard(organization)
        try:
            now.refuse_one_more()
        except standing.NotAdmitted as refusal:
            raise in_words_of_api(refusal) from None

    async def admit(self, admission: usage.Admission) -> None:
        """Open the event, durably, or raise why not: 401, 402, 403, 429, 503."""
        if len(self._queue) > _WAITING_MAX:
            raise errors.Unavailable(NO_DATABASE)
        self._open[admission.generation_id] = admission.organization_id
        self._in_flight[admission.organization_id] += 1
        refusal = await self._submit(admission)
        if refusal is None:
            return
        self._refused.discard(admission.generation_id)  # its caller will not settle it
        if isinstance(refusal, standing.InsufficientCredits):
            self._broke.add(admission.organization_id)
        raise in_words_of_api(refusal)

    def settle(self, settlement: usage.Settlement) -> "asyncio.Future[Decimal]":
        """Hand over the end of a request; the future is its cost in USD once that is durable.

        Whoever does not care may drop the future: the settlement is made all the same.
        """
        return self._submit(settlement)

    def is_open(self, generation_id: uuid.UUID) -> bool:
        return generation_id in self._open

    @property
    def open_count(self) -> int:
        return len(self._open)

    def stop(self) -> None:
        """Commit what is queued, then end the threads."""
        with self._arrived:
            self._is_stopping = True
            self._arrived.notify()
        self._writer.join()
        self._readers.shutdown()

    def _submit(self, what: usage.Admission | usage.Settlement) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        operation = _Operation(what, loop, loop.create_future())
        operation.done.add_done_callback(_retrieve)
        with self._arrived:
            self._queue.append(operation)
            self._arrived.notify()
        return operation.done

    # --- the writer's side ------------------------------------------------------------------------

    def _write_forever(self) -> None:
        while group := self._take():
            self._write(group)
        connection.close()

    def _take(self) -> list[_Operation]:
        """Wait for operations and take them; empty when it is time to end.

        A settlement whose admission is in the same group waits for the next one: settlements go
        first within a group, so that money and slots are free for the admissions after them.
        """
        with self._arrived:
            while not self._queue and not self._is_stopping:
                self._arrived.wait()
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
            return [operation for operation in group if operation not in early]

    def _write(self, group: list[_Operation]) -> None:
        try:
            results = self._commit(group)
        except (DatabaseError, InterfaceError) as error:
            log.warning("commit of %d operations failed: %s", len(group), error)
            connection.close()
            self._write_one_by_one(group)
        else:
            self._answer(group, results)

    def _write_one_by_one(self, group: list[_Operation]) -> None:
        """Commit each alone, so that one that cannot be committed takes no other with it.

        The outcome of a failed commit is unknown, and both operations are safe to repeat.
        """
        for position, operation in enumerate(group):
            try:
                self._answer([operation], self._commit([operation]))
            except (DatabaseError, InterfaceError) as error:
                is_away = connection.connection is None
                connection.close()
                # With the database away each further try would only wait for its time-out.
                for failed in group[position:] if is_away else [operation]:
                    self._give_up_or_try_again(failed, error)
                if is_away:
                    return

    def _give_up_or_try_again(self, operation: _Operation, error: Exception) -> None:
        operation.tries += 1
        if operation.is_settlement and operation.tries < _SETTLE_TRIES:
            timer = threading.Timer(_TRY_AGAIN_SECONDS, self._again, [operation])
            timer.daemon = True
            timer.start()
            return
        log.error(
            "%s of %s could not be committed: %s",
            type(operation.what).__name__,
            operation.admission.generation_id,
            error,
        )
        self._answer([operation], [errors.Unavailable(NO_DATABASE)])

    def _again(self, operation: _Operation) -> None:
        with self._arrived:
            self._queue.append(operation)
            self._arrived.notify()

    def _commit(self, group: list[_Operation]) -> list[Any]:
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
        with ledger.locked_accounts(organizations, wait_ms=_LOCK_WAIT_MS) as accounts:
            if settlements:
                _note(results, settlements, usage.settle(settlements, accounts))
            if admissions:
                _note(results, admissions, usage.admit(admissions, accounts))
        return [results.get(id(operation.what)) for operation in group]

    def _answer(self, group: Sequence[_Operation], results: Iterable[Any]) -> None:
        """Wake who waits, each event loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Operation, Any]]] = {}
        for operation, result in zip(group, results, strict=True):
            admission = operation.admission
            if operation.is_settlement:
                self._refused.discard(admission.generation_id)
                self._close(admission)
            elif result is not None:
                self._refused.add(admission.generation_id)
                self._close(admission)
            loops.setdefault(operation.loop, []).append((operation, result))
        for loop, answers in loops.items():
            try:
                loop.call_soon_threadsafe(_set_results, answers)
            except RuntimeError:  # the loop has ended: nobody waits any more
                continue

    def _close(self, admission: usage.Admission) -> None:
        if self._open.pop(admission.generation_id, None) is not None:
            self._in_flight[admission.organization_id] -= 1


def _note(results: dict[int, Any], operations: Sequence[Any], answers: Sequence[Any]) -> None:
    for operation, answer in zip(operations, answers, strict=True):
        results[id(operation)] = answer


def _set_results(answers: list[tuple[_Operation, Any]]) -> None:
    for operation, result in answers:
        if operation.done.done():  # who waited was cancelled; the commit stands
            continue
        if operation.is_settlement and isinstance(result, Exception):
            operation.done.set_exception(result)
        else:
            operation.done.set_result(result)


def _retrieve(done: "asyncio.Future[Any]") -> None:
    # A settlement that nobody waits for was logged by the writer when it failed.
    if not done.cancelled():
        done.exception()
