"""HTTP/1.1 to model servers: an httpx transport on asyncio and httptools.

Keeps connections and the bytes on them; knows nothing of completions. A request goes out on a kept
connection if one is fresh enough, else on a new one; an answer is read as it arrives, and no more
than `_BUFFER_MAX` bytes of it lie here unread. Never follows a redirect, decompresses, or carries
anything from one request to the next.

Why not a stock transport: httpx's walks its whole pool for each request (552 requests/s on one
core), aiohttp's takes a fifth of a request's time and reports "refused" and "closed without an
answer" alike.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import httptools
import httpx

# llama.cpp and uvicorn close idle connections after 5 s; one reused at that moment is lost.
_KEPT_SECONDS = 3.0
_BUFFER_MAX = 256 * 1024
# After its last event a stream ends in a moment; a connection that does not is not kept.
_DRAIN_SECONDS = 1.0
_DRAIN_BYTES = 64 * 1024

_Origin = tuple[str, str, int | None]


class Transport(httpx.AsyncBaseTransport):
    """Connections of one event loop. Raises httpx.ConnectTimeout, ConnectError, ReadError,
    RemoteProtocolError and LocalProtocolError; other time limits are the caller's."""

    def __init__(self, *, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._kept: dict[_Origin, list[_Connection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        origin = (url.scheme, url.host, url.port)
        head = _head(request)
        connection = self._take_kept(origin)
        if connection is not None:
            try:
                return await connection.send(request, head)
            except _NeverAnswered:
                # It was closed while it lay idle; the server never saw the request.
                connection.abort()
        connection = await self._connect(origin)
        try:
            return await connection.send(request, head)
        except _NeverAnswered:
            connection.abort()
            raise httpx.RemoteProtocolError("closed without an answer") from None

    async def aclose(self) -> None:
        for connections in self._kept.values():
            for connection in connections:
                connection.abort()
        self._kept.clear()

    def keep(self, connection: "_Connection") -> None:
        connection.kept_since = monotonic()
        self._kept.setdefault(connection.origin, []).append(connection)

    def _take_kept(self, origin: _Origin) -> "_Connection | None":
        """Return the connection that was used last; close those that have lain for too long."""
        kept = self._kept.get(origin)
        while kept:
            connection = kept.pop()
            if connection.is_open and monotonic() - connection.kept_since < _KEPT_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: _Origin) -> "_Connection":
        scheme, host, port = origin
        is_tls = scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, origin),
                    host,
                    port or (443 if is_tls else 80),
                    ssl=self._tls if is_tls else None,
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except (OSError, ssl.SSLError) as error:
            raise httpx.ConnectError(type(error).__name__) from error
        return connection


class _NeverAnswered(Exception):
    """The connection was closed before a byte of an answer."""


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, pool: Transport, origin: _Origin) -> None:
        self._pool = pool
        self.origin = origin
        self.kept_since = 0.0
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self._is_complete = False
        self._is_draining = False
        self._drained = 0
        self._has_answered = False
        self._error: Exception | None = None
        self._more: asyncio.Future[None] | None = None

    # --- the transport's side ---------------------------------------------------------------------

    async def send(self, request: httpx.Request, head: bytes) -> httpx.Response:
        """Send a request and wait for the head of its answer."""
        if not self.is_open or self._transport is None:
            raise _NeverAnswered
        self._begin()
        self._head = self._loop.create_future()
        self._transport.write(head + request.content)
        try:
            await self._head
        except BaseException:
            self.abort()
            raise
        return httpx.Response(
            self._status, headers=self._headers, stream=_Body(self), request=request
        )

    async def body(self) -> AsyncIterator[bytes]:
        """Yield what has arrived, until the answer is complete."""
        while True:
            if self._pieces:
                data = b"".join(self._pieces)
                self._pieces.clear()
                self._size = 0
                if self._is_paused and self._transport:
                    self._is_paused = False
                    self._transport.resume_reading()
                yield data
            elif self._error:
                raise self._error
            elif self._is_complete:
                return
            else:
                self._more = self._loop.create_future()
                await self._more

    def release(self, *, is_done: bool) -> None:
        """Keep the connection if its answer is complete, or will be in a moment; else close it."""
        if self._is_complete:
            self._keep_or_close()
        elif is_done and self.is_open and self._transport:
            self._is_draining = True
            if self._is_paused:
                self._transport.resume_reading()
            self._loop.call_later(_DRAIN_SECONDS, self._end_draining)
        else:
            self.abort()

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _keep_or_close(self) -> None:
        self._is_draining = False
        if self.is_open and self._parser.should_keep_alive():
            self._pool.keep(self)
        else:
            self.abort()

    def _end_draining(self) -> None:
        if self._is_draining:
            self.abort()

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._head is None or self._is_complete:
            self.abort()  # nobody asked for anything
            return
        self._has_answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(httpx.RemoteProtocolError("not HTTP"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._is_draining = False
        if self._head is None or self._is_complete:
            return
        if self._head.done() and error is None and self._ends_with_connection():
            self.on_message_complete()
        elif self._has_answered:
            self._fail(httpx.ReadError("broke off"))
        else:
            self._fail(_NeverAnswered())

    # --- httptools' side --------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers.clear()  # an interim answer: the real one follows
            return
        self._status = status
        if self._head and not self._head.done():
            self._head.set_result(None)

    def on_body(self, data: bytes) -> None:
        if self._is_draining:
            self._drained += len(data)
            if self._drained > _DRAIN_BYTES:
                self.abort()
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _BUFFER_MAX and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if not self._status:
            return  # the interim answer's
        self._is_complete = True
        if self._is_draining:
            self._keep_or_close()
        self._wake()

    def _ends_with_connection(self) -> bool:
        """Tell whether the answer has neither a length nor chunks (RFC 9112 section 6.3)."""
        framing = {b"content-length", b"transfer-encoding"}
        return not any(name.lower() in framing for name, _ in self._headers)

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._head and not self._head.done():
            self._head.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


class _Body(httpx.AsyncByteStream):
    """The body of an answer. Set `is_done` when the rest of it is of no interest."""

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection | None = connection
        self.is_done = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._connection is not None:
            async for data in self._connection.body():
                yield data

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(is_done=self.is_done)


class Request(httpx.Request):
    """A request with a body of bytes. httpx's own constructor copies and parses the URL again,
    which took a tenth of a request's time."""

    def __init__(self, method: str, url: httpx.URL, headers: Any, content: bytes) -> None:
        self.method = method
        self.url = url
        self.headers = httpx.Headers(headers)
        self.extensions = {}
        self.stream = httpx.ByteStream(content)
        self._content = content


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines.append(b"host: " + request.url.netloc)
    for name, value in request.headers.raw:
        if b"\r" in value or b"\n" in value:
            raise httpx.LocalProtocolError("a header value with a line end")
        lines.append(name + b": " + value)
    lines.append(b"content-length: %d" % len(request.content))
    return b"\r\n".join(lines) + b"\r\n\r\n"
