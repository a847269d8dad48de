"""The demo's running parts, all in this process: gateway and pages, Celery's worker and beat.

Each is the real one; only the broker is in memory. Stops what it started.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from celery.beat import Scheduler, Service
from celery.worker import WorkController

from kiln_site.celery import app

HOST = "127.0.0.1"


class Server(uvicorn.Server):
    """uvicorn, which calls `on_ready` once it serves."""

    def __init__(self, port: int, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            "kiln_site.asgi:application",
            host=HOST,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()


def free_port(wanted: int) -> int:
    """Return `wanted`, or the next port that is free."""
    for port in range(wanted, wanted + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {wanted} to {wanted + 99}")


@contextmanager
def celery() -> Iterator[None]:
    """Run Celery's worker and beat as threads on the broker in memory."""
    logging.getLogger("celery").setLevel(logging.WARNING)
    worker = WorkController(app=app, pool_cls="threads", concurrency=1, loglevel="WARNING")
    thread = threading.Thread(target=worker.start, name="celery-worker", daemon=True)
    thread.start()
    beat = Service(app, scheduler_cls=Scheduler, max_interval=1)  # seconds until it hears stop
    beat_thread = threading.Thread(target=beat.start, name="celery-beat", daemon=True)
    beat_thread.start()
    try:
        yield
    finally:
        beat.stop()
        worker.stop()
        beat_thread.join(5)
        thread.join(5)
