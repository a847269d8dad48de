"""A simulated gateway worker: the real door to billing and the real heartbeat, step by step."""

import asyncio
import random
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from django.conf import settings

from billing import usage
from gateway import commits, heartbeat
from gateway.errors import ApiError, BackendFailed, Unavailable
from gateway.writer import Writer
from tests.chaos import customers
from tests.simulator.disk import DISK
from tests.simulator.faults import FAULTS

State = usage.State
Answer = asyncio.Future[usage.Settlement]


class SteppedHeartbeat(heartbeat.Heartbeat):
    """The heartbeat without its thread; its beat fails only where the database is away for all.

    A worker that alone cannot reach it for longer than the TTL is a limit that is known: others
    take its slots, and its requests go on.
    """

    def beat(self) -> None:
        with FAULTS.may_happen(False):
            super().beat()


class SteppedWriter(Writer):
    """The writer without its thread: who joins it lets it do the rest."""

    def __init__(
        self, worker_id: uuid.UUID, folder: Path, on_closed: Callable[[usage.Admission], None]
    ) -> None:
        super().__init__(worker_id, folder, on_closed, clock=FAULTS.clock)

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        self.run()


setattr(commits, "Writer", SteppedWriter)  # noqa: B010  these are no names that they export
setattr(heartbeat, "monotonic", FAULTS.clock)  # noqa: B010


@dataclass
class Told(customers.Told):
    """What customers heard, and what was handed over to be billed."""

    settlements: dict[uuid.UUID, usage.Settlement] = field(default_factory=dict)


def settlement(admission: usage.Admission, state: str, **tokens: Any) -> usage.Settlement:
    return usage.Settlement(
        admission=admission,
        backend=admission.backend,
        state=state,
        finished_at=datetime.fromtimestamp(FAULTS.now, UTC),
        status_code=200,
        usage_source="reported" if tokens else "none",
        **tokens,
    )


class Worker:
    """One process. Its turns raise Killed when that is what happens to it."""

    def __init__(self, chance: random.Random, folder: Path, told: Told) -> None:
        self.id = uuid.UUID(int=chance.getrandbits(128))
        self._told = told
        self._loop = asyncio.new_event_loop()
        self._commits = commits.Commits(self.id, folder)
        self._heartbeat = SteppedHeartbeat(
            self.id,
            seconds=settings.KILN_HEARTBEAT_SECONDS,
            ttl_seconds=settings.KILN_HEARTBEAT_TTL_SECONDS,
            is_open=self._commits.is_open,
            on_pause=self._cut,
        )
        self._is_cut = False
        self.beat_at = 0.0
        self.paused_until = self.ready_at = 0.0
        # By task: what it asks for, and the answer of its backend, when that comes.
        self.requests: dict[asyncio.Task[None], tuple[usage.Admission, Answer]] = {}

    # --- turns ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Let the event loop do what is due."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def write(self) -> None:
        self._commits._writer.step()

    def beat(self) -> None:
        self.beat_at = FAULTS.now + settings.KILN_HEARTBEAT_SECONDS
        self._heartbeat.turn()

    def stop(self) -> None:
        """End as after SIGTERM: what runs is cut, what was handed over is settled or spooled."""
        self._cut()
        for _ in range(3):
            self.turn()
        self._commits.stop()
        self.turn()

    def bury(self) -> None:
        """Be dead: nobody hears anything from this process any more."""
        DISK.crash(self)
        for request in self.requests:
            cast(Coroutine[Any, Any, None], request.get_coro()).close()
        self._loop.close()

    # --- requests ---------------------------------------------------------------------------------

    def send(self, admission: usage.Admission) -> None:
        self._told.sent += 1
        if not self._heartbeat.is_fresh:
            self._told.outcomes["503 not fresh"] += 1  # as Process.answering says
            return
        answer: Answer = self._loop.create_future()
        task = self._loop.create_task(self._serve(admission, answer))
        self.requests[task] = admission, answer
        task.add_done_callback(self._forget)

    @property
    def running(self) -> list[tuple[usage.Admission, Answer]]:
        """Return what waits for its backend."""
        return [request for request in self.requests.values() if not request[1].done()]

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self.requests[task]

    def _cut(self) -> None:
        self._is_cut = True
        for request in self.requests:
            request.cancel()

    async def _serve(self, admission: usage.Admission, backend: Answer) -> None:
        """Admit, wait for the backend, settle: the order of gateway.consumers."""
        is_admitted = False
        try:
            await self._commits.admit(admission)
            is_admitted = True
            self._told.ids.add(str(admission.generation_id))
            ending = await backend
            if ending.state == State.FAILED:
                raise BackendFailed("")
        except (ApiError, asyncio.CancelledError) as error:
            self._told.outcomes[type(error).__name__] += 1
            if is_admitted or isinstance(error, asyncio.CancelledError):
                is_paid = is_admitted and not self._is_cut and not isinstance(error, ApiError)
                tokens = {"prompt_tokens": 7} if is_paid else {}
                state = State.CANCELLED if is_paid else State.FAILED
                with suppress(Unavailable):
                    await self._settle(settlement(admission, state, **tokens))
            return
        with suppress(Unavailable):
            self._told.costs[str(admission.generation_id)] = await self._settle(ending)
            self._told.outcomes["served"] += 1

    def _settle(self, ending: usage.Settlement) -> Any:
        self._told.settlements[ending.admission.generation_id] = ending
        return self._commits.settle(ending)
