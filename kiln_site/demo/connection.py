"""One HTTP/1.1 connection of the demo model server: requests read, bytes written, breaks made.

It knows framing and nothing of completions. A client that leaves cancels the answer at once, as
real servers do. Reading is strict enough for a test's backend: it is no server for the open
internet.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast

logger = logging.getLogger(__name__)

HEAD_MAX_BYTES: Final = 64 * 1024
BODY_MAX_BYTES: Final = 64 * 1024 * 1024
Header = tuple[str, str]


class Hangup(Exception):
    """End the connection here and now; a reset, if asked for, instead of a close."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


class BadRequest(Exception):
    """Bytes that are no HTTP request this server reads."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    headers: tuple[Header, ...]
    body: bytes

    def header(self, name: str) -> str:
        """The first value of this header, "" if there is none."""
        return next((value for key, value in self.headers if key.lower() == name), "")


class Connection(asyncio.Protocol):
    """Read requests one after another and hand each to `answer`, which writes the reply."""

    def __init__(
        self,
        answer: "Callable[[Connection, HttpRequest], Awaitable[bool]]",
        open_connections: "set[Connection]",
    ) -> None:
        self._answer, self._open = answer, open_connections
        self._reader = asyncio.StreamReader(limit=HEAD_MAX_BYTES)
        self._writable: asyncio.Future[None] | None = None
        self._ended_by_us = False
        self.client_left = False

    # What the loop tells us

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's: only the type checker is told.
        self._transport = cast(asyncio.Transport, transport)
        self._reader.set_transport(self._transport)
        self._open.add(self)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._reader.feed_data(data)

    def eof_received(self) -> bool:
        # A client that has closed its side does not wait for the answer: stop at once.
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._leave()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # What an answer may do

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drain(self) -> None:
        """Wait while the client does not read."""
        if self._writable is not None:
            await self._writable

    def abort(self, *, reset: bool = False) -> None:
        if reset:
            # Lingering for 0 seconds makes the kernel send RST instead of FIN.
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._ended_by_us = True
        self._transport.abort()

    async def ended(self) -> None:
        await asyncio.wait({self._task})

    async def next_bytes(self) -> None:
        """Wait until the client sends something more."""
        await self._reader.read(1)

    # The one task of a connection

    async def _serve(self) -> None:
        try:
            while True:
                request = await self._read_request()
                if request is None or not await self._answer(self, request):
                    break
        except Hangup as hangup:
            if hangup.reset:
                self.abort(reset=True)
        except BadRequest as bad:
            self.write(head(bad.status, [("Content-Length", "0"), ("Connection", "close")]))
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass  # The client left; the answer has been told already.
        except Exception:
            logger.exception("demo model server: an answer failed")
        finally:
            self._transport.close()

    def _leave(self) -> None:
        self.client_left = not self._ended_by_us
        self._reader.feed_eof()
        self._task.cancel()

    async def _read_request(self) -> HttpRequest | None:
        """Read one request; None when the client has none left."""
        try:
            raw = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise BadRequest(431) from None
        except asyncio.IncompleteReadError as cut:
            if cut.partial:
                raise
            return None
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise BadRequest(400)
        pairs = [line.partition(":") for line in lines]
        headers = tuple((name, value.strip()) for name, _, value in pairs)
        request = HttpRequest(words[0], words[1], headers, b"")
        if request.header("expect").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._read_body(request)
        return HttpRequest(words[0], words[1], headers, body)

    async def _read_body(self, request: HttpRequest) -> bytes:
        if request.header("transfer-encoding").lower() == "chunked":
            return await self._read_chunks()
        length = request.header("content-length") or "0"
        if not length.isdecimal():
            raise BadRequest(400)
        if int(length) > BODY_MAX_BYTES:
            raise BadRequest(413)
        return await self._reader.readexactly(int(length)) if length != "0" else b""

    async def _read_chunks(self) -> bytes:
        pieces: list[bytes] = []
        left = BODY_MAX_BYTES
        while True:
            try:
                size = int((await self._reader.readline()).split(b";")[0], 16)
            except ValueError:
                raise BadRequest(400) from None
            left -= size
            if left < 0 or size < 0:
                raise BadRequest(413)
            if size == 0:
                break
            pieces.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        while (await self._reader.readline()).strip():
            pass  # Trailers mean nothing here.
        return b"".join(pieces)


def head(status: int, headers: Iterable[Header]) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {status} {phrase}", "Server: demo"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
