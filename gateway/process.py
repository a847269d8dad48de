"""What lives as long as the process: worker ID, writer, heartbeat, catalog, connections.

Started by the server's lifespan, or by the first request where a server has none (daphne).
"""

import asyncio
import logging
import threading
import uuid

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections

from gateway import catalog
from gateway.callers import Callers
from gateway.commits import NO_DATABASE, Commits
from gateway.errors import Unavailable
from gateway.heartbeat import Heartbeat
from gateway.upstream import Upstream

log = logging.getLogger(__name__)

_CATALOG_SECONDS = 1.0


class Process:
    """The parts of one gateway process. `start` before use; `stop` settles what is queued."""

    def __init__(self) -> None:
        self.worker_id = uuid.uuid4()
        self.commits = Commits(self.worker_id)
        self.callers = Callers(self.commits)
        self.heartbeat = Heartbeat(
            self.worker_id,
            seconds=settings.KILN_HEARTBEAT_SECONDS,
            ttl_seconds=settings.KILN_HEARTBEAT_TTL_SECONDS,
            is_open=self.commits.is_open,
        )
        self.upstream = Upstream(
            connect_seconds=settings.KILN_CONNECT_SECONDS,
            frame_max=settings.KILN_FRAME_MAX_MIB * 2**20,
        )
        self.catalog = catalog.Catalog(models={}, maintenance=None)
        self._stop = threading.Event()
        self._catalog_reader = threading.Thread(
            target=self._read_catalog_forever, name="catalog", daemon=True
        )

    async def start(self) -> None:
        """Beat once and read the catalog, then keep doing both. Raises Unavailable."""
        await self.commits.read(self.heartbeat.beat)
        await self.commits.read(self._read_catalog)
        self.heartbeat.start()
        self._catalog_reader.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop_threads)
        await self.upstream.aclose()

    def refuse_while_stale(self) -> None:
        """Raise Unavailable while other workers may take this one for dead (rulings.md 20)."""
        if not self.heartbeat.is_fresh:
            raise Unavailable(NO_DATABASE)

    def _stop_threads(self) -> None:
        self._stop.set()
        self.commits.stop()
        if self.heartbeat.is_alive():
            self.heartbeat.stop()
            self._catalog_reader.join()

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
                close_old_connections()


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


async def stop() -> None:
    """Stop what `running` started."""
    global _current
    if _current is not None:
        process, _current = _current, None
        await process.stop()
