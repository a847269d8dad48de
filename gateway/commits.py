"""The one door to billing: reads on a few threads, writes through the writer.

What was handed to the writer is committed whatever becomes of the task that handed it over, so a
client that leaves loses nothing.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections

from billing import keys, standing, usage
from billing.limits import Minute
from gateway import errors
from gateway.refusals import in_words_of_api
from gateway.writer import NO_DATABASE, Operation, Writer

log = logging.getLogger(__name__)

_BACKLOG_MAX = 2000


class Commits:
    """Admissions, settlements and reads of one process."""

    def __init__(self, worker_id: uuid.UUID, spool_folder: Path) -> None:
        self._open: dict[uuid.UUID, int] = {}  # generations this process answers for
        self._in_flight: Counter[int] = Counter()  # of them, by organization
        self._suspects: set[int] = set()  # keys whose last request was refused with 402 or 429
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader")
        self._writer = Writer(worker_id, spool_folder, self._close)
        self._writer.start()

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
        exact read (rulings.md 6). Raises ApiErrors of 401, 402, 403 and 429.
        """
        if (
            caller.has_credits
            and caller.key_id not in self._suspects
            and self._in_flight[caller.organization_id] < caller.max_in_flight
        ):
            return
        try:
            await self.read(standing.refuse_one_more, caller.key_id)
        except (standing.NotAdmitted, keys.KeyRefused) as refusal:
            raise in_words_of_api(refusal) from None
        self._suspects.discard(caller.key_id)

    async def admit(self, admission: usage.Admission) -> Minute | None:
        """Open the event, durably, or raise why not: 401, 402, 403, 429, 503.

        Returns what is left of the organization's limits per minute, if it has any.
        """
        if self._writer.backlog > _BACKLOG_MAX:
            raise errors.Unavailable(NO_DATABASE)
        self._open[admission.generation_id] = admission.organization_id
        self._in_flight[admission.organization_id] += 1
        answer: Minute | Exception | None = await self._submit(admission)
        if not isinstance(answer, Exception):
            return answer
        self._writer.forget_refusal(admission.generation_id)
        if isinstance(answer, standing.NotAdmitted):
            self._suspects.add(admission.key_id)
        raise in_words_of_api(answer)

    def settle(self, settlement: usage.Settlement) -> "asyncio.Future[Decimal]":
        """Hand over the end of a request; the future is its cost in USD once that is durable.

        Whoever does not care may drop the future: the settlement is made all the same.
        """
        return self._submit(settlement)

    def is_open(self, generation_id: uuid.UUID) -> bool:
        return generation_id in self._open

    def stop(self) -> None:
        """Commit or spool what was handed over, then end the threads."""
        self._writer.stop()
        self._readers.shutdown()

    def _submit(self, what: usage.Admission | usage.Settlement) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        operation = Operation(what, loop, loop.create_future())
        operation.done.add_done_callback(_retrieve)
        self._writer.submit(operation)
        return operation.done

    def _close(self, admission: usage.Admission) -> None:
        if self._open.pop(admission.generation_id, None) is not None:
            self._in_flight[admission.organization_id] -= 1


def _retrieve(done: "asyncio.Future[Any]") -> None:
    # A settlement that nobody waits for was logged by the writer when it failed.
    if not done.cancelled():
        done.exception()
