"""The ASGI application: the completions endpoint to its consumer, everything else to Django.

Serve it with `uvicorn kiln_site.asgi:application`. Channels' router knows no lifespan, so this
wraps it: the parts of the process start before the first request and settle before the end.
"""

import asyncio
import gc
import logging
import os
import signal
import threading
from typing import Any

from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "kiln_site.settings")
django_application: Any = get_asgi_application()  # before anything that imports models

from django.urls import path, re_path  # noqa: E402

from gateway import process  # noqa: E402
from gateway.consumers import ChatCompletions  # noqa: E402
from gateway.errors import Unavailable  # noqa: E402

log = logging.getLogger(__name__)

_router = ProtocolTypeRouter(
    {
        "http": URLRouter(
            [
                path("v1/chat/completions", ChatCompletions.as_asgi()),
                re_path(r"", django_application),
            ]
        )
    }
)


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    if scope["type"] == "http" and scope["path"].startswith("//"):
        # A base URL that ends in a slash makes //v1/…; Django would take v1 for a host name.
        scope = {**scope, "path": "/" + scope["path"].lstrip("/")}
    await _router(scope, receive, send)


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            _drain_on_signal(asyncio.get_running_loop())
            try:
                await process.running()
            except Unavailable:
                # It serves 503 until the database answers; a restart would not bring that nearer.
                log.error("no database yet; requests get 503 until it answers")
            _freeze_what_was_imported()
            await send({"type": "lifespan.startup.complete"})
        else:
            try:
                await process.stop()
            except Exception:
                # uvicorn takes an exception here for "knows no lifespan" and says nothing of it.
                log.exception("the process did not stop cleanly")
            await send({"type": "lifespan.shutdown.complete"})
            return


def _freeze_what_was_imported() -> None:
    """Leave what was imported out of every later collection.

    A full collection walks all of Django and stops the loop: p99 at saturation was 92 to 110 ms.
    """
    gc.collect()
    gc.freeze()


def _drain_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """Begin to drain at SIGTERM: uvicorn ends the lifespan only when all connections have ended."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread hears signals; whoever runs a server in another stops it
    for number in (signal.SIGTERM, signal.SIGINT):
        servers = signal.getsignal(number)

        def drain(number: int, frame: Any, servers: Any = servers) -> None:
            loop.call_soon_threadsafe(process.drain)
            if callable(servers):
                servers(number, frame)

        signal.signal(number, drain)
