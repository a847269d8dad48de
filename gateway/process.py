"""What lives as long as the process: worker ID, writer, heartbeat, catalog, connections.

Started by the server's lifespan, or by the first request where a server has none (daphne).
"""

import asyncio
import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from gateway import catalog
from gateway.callers import Callers
from gateway.commits import Commits
from gateway.errors import ApiError, BackendFailed, Unavailable
from gateway.heartbeat import Heartbeat
from gateway.refusal_counts import RefusalCounts
from gateway.upstream import Upstream
from gateway.writer import NO_DATABASE

log = logging.getLogger(__name__)

_CATALOG_SECONDS = 1.0


class Cut(BackendFailed):
    """The gateway ends an answer for reasons of its own; it is not billed."""


class Answering(Protocol):
    """A request that is being answered."""

    def give_up(self, error: ApiError) -> None: ...


class Process:
    """The parts of one gateway process. `start` before use; `stop` settles what is queued."""

    def __init__(self) -> None:
        self.worker_id = uuid.uuid4()
        self.commits = Commits(self.worker_id, settings.KILN_VAR_DIR / "spool")
        self.refusals = RefusalCounts()
        self.callers = Callers(self.commits, self.refusals)
        self.heartbeat = Heartbeat(
            self.worker_id,
            seconds=settings.KILN_HEARTBEAT_SECONDS,
            ttl_seconds=settings.KILN_HEARTBEAT_TTL_SECONDS,
            is_open=self.commits.is_open,
            on_pause=self._cut_soon,
        )
        self.upstream = Upstream(
            connect_seconds=settings.KILN_CONNECT_SECONDS,
            frame_max=settings.KILN_FRAME_MAX_MIB * 2**20,
        )
        self.catalog = catalog.Catalog(models={}, maintenance=None)
        self.is_draining = False
        self._answering: set[Answering] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()
        self._catalog_reader = threading.Thread(
            target=self._read_catalog_forever, name="catalog", daemon=True
        )

    async def start(self) -> None:
        """Beat once and read the catalog, then keep doing both. Raises Unavailable."""
        self._loop = asyncio.get_running_loop()
        await self.commits.read(self.heartbeat.beat)
        await self.commits.read(self._read_catalog)
        self.heartbeat.start()
        self._catalog_reader.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop_threads)
        await self.upstream.aclose()

    @contextmanager
    def answering(self, request: Answering) -> Iterator[None]:
        """Count a request as being answered. Raises Unavailable when none may begin.

        None begins while the process drains, or while other workers may take this one for dead
        (rulings.md 20).
        """
        if self.is_draining:
            raise Unavailable("The gateway is restarting. Try again.")
        if not self.heartbeat.is_fresh:
            raise Unavailable(NO_DATABASE)
        self._answering.add(request)
        try:
            yield
        finally:
            self._answering.discard(request)

    def drain(self) -> None:
        """Begin no request; cut those that are not done within KILN_DRAIN_SECONDS."""
        if not self.is_draining and self._loop:
            self.is_draining = True
            log.info("draining %d requests", len(self._answering))
            cut = Cut("The gateway is restarting and cut the answer off. It was not billed.")
            self._loop.call_later(settings.KILN_DRAIN_SECONDS, self._cut, cut)

    def _cut_soon(self) -> None:
        # Called by the heartbeat's thread after a pause longer than the TTL: others have admitted
        # requests in place of these.
        if self._loop:
            cut = Cut("The gateway was paused and cut the answer off. It was not billed.")
            self._loop.call_soon_threadsafe(self._cut, cut)

    def _cut(self, error: Cut) -> None:
        for request in list(self._answering):
            request.give_up(error)

    def _stop_threads(self) -> None:
        self._stop.set()
        self.commits.stop()
        if self.heartbeat.is_alive():
            self.heartbeat.stop()
            self._catalog_reader.join()  # and with it the last flush of refusals

    def _read_catalog(self) -> None:
        self.catalog = catalog.load()

    def _read_catalog_forever(self) -> None:
        while not self._stop.wait(_CATALOG_SECONDS):
            try:
                self._read_catalog()
            except (DatabaseError, InterfaceError) as error:
                # The last one that was read stays: admission will refuse without a database.
                log.error("the catalog could not be read: %s", error)
            finally:
                self.refusals.flush()
                close_old_connections()
        self.refusals.flush()
        connection.close()


_current: Process | None = None
_starting: asyncio.Lock | None = None


async def running() -> Process:
    """Return this process's parts, started. Raises Unavailable when there is no database."""
    global _current, _starting
    if _current is not None:
        return _current
    _starting = _starting or asyncio.Lock()
    async with _starting:
        if _current is None:
            process = Process()
            try:
                await process.start()
            except Unavailable:
                await process.stop()
                raise
            _current = process
    return _current


def drain() -> None:
    """Drain what `running` started, if it did."""
    if _current is not None:
        _current.drain()


async def stop() -> None:
    """Stop what `running` started."""
    global _current
    if _current is not None:
        process, _current = _current, None
        await process.stop()
