"""The listening socket of the demo model server and the connections that came through it."""

import asyncio
import functools
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kiln_site.demo.connection import Connection, HttpRequest
from kiln_site.demo.exchange import Exchange
from kiln_site.demo.state import State

HOST: Final = "127.0.0.1"
MODELS: Final = ("qwen3-32b", "gpt-oss-120b")
BACKLOG: Final = 4096


class Listener:
    """One listening socket and its connections, within a running loop."""

    def __init__(self, state: State, port: int = 0) -> None:
        self._state = state
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        # Bound for the listener's life but never listening: while the server is down its port
        # refuses connections, and nobody else can be given the port.
        self._reservation = _bound(port)
        self.port: int = self._reservation.getsockname()[1]

    async def open(self) -> None:
        async def answer(connection: Connection, request: HttpRequest) -> bool:
            return await Exchange(self._state, connection, request).run()

        self._server = await asyncio.get_running_loop().create_server(
            functools.partial(Connection, answer, self._connections),
            sock=_bound(self.port),
            backlog=BACKLOG,
        )

    async def close(self) -> None:
        """Refuse new connections and break off the ones that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        connections = list(self._connections)
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.ended()

    def release(self) -> None:
        self._reservation.close()


async def serve(
    port: int = 0,
    *,
    api_key: str = "",
    pace: float = 0.0,
    models: Sequence[str] = MODELS,
    context_window: int = 32768,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve within the running loop until cancelled; `ready` is told the base URL."""
    state = State(tuple(models), api_key=api_key, pace=pace, context_window=context_window)
    listener = Listener(state, port)
    try:
        await listener.open()
        if ready is not None:
            ready(f"http://{HOST}:{listener.port}/v1")
        await asyncio.get_running_loop().create_future()
    finally:
        await listener.close()
        listener.release()


def _bound(port: int) -> socket.socket:
    # The protocol is named because asyncio turns Nagle's algorithm off only where it sees it:
    # without it every stream waits 40 ms for a delayed acknowledgement.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((HOST, port))
    except OSError:
        sock.close()
        raise
    return sock
