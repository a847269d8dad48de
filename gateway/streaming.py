"""The ASGI side of the completions endpoint: a consumer that hears its client leave.

Keeps one request's connection: reads the body up to its limit, sends whole messages, sends
keepalive comments, and ends the work when the client leaves or a time limit is reached. Knows
nothing of models or money. Why not channels' AsyncHttpConsumer: it hears of a disconnect after
11 s by being killed (daphne), or never (uvicorn).
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

from channels.consumer import AsyncConsumer
from django.conf import settings

from gateway import sse
from gateway.errors import (
    ApiError,
    BackendFailed,
    InternalError,
    RequestTooLarge,
    UnsupportedEncoding,
    UploadTimeout,
)

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),  # nginx would gather a stream into blocks
]


class ClientGone(Exception):
    """The client left before its request was read."""


class StreamingConsumer(AsyncConsumer):  # type: ignore[misc]
    """Answer one HTTP request with `respond`, which a subclass writes.

    `respond` may raise any ApiError: before the head it becomes the answer, after it the last
    event of the stream. `id_headers` go out with every answer.
    """

    scope: dict[str, Any]

    async def respond(self) -> None:
        raise NotImplementedError

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._begin(scope, receive, send)
        try:
            await self._answer()
        finally:
            if self._timer:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()

    def _begin(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.id_headers = [("x-request-id", str(uuid.uuid4()))]
        self.is_started = False  # the head of the answer is out
        self.client_gone = False
        self.given_up: ApiError | None = None  # why a time limit ended the work
        self._is_ended = False
        self._is_stream = False
        # HTTP/1.0 knows no chunks, and uvicorn would send them: such a stream goes out whole.
        self._gathered: list[bytes] | None = [] if scope["http_version"] == "1.0" else None
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.current_task(self._loop)
        self._now = self._loop.time
        self._began = self._last_sent = self._now()
        self._sending_since: float | None = None
        self._deadline: tuple[float, ApiError] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def _answer(self) -> None:
        try:
            await self.respond()
        except ApiError as error:
            await self._refuse(error)
        except ClientGone:
            return
        except asyncio.CancelledError:
            if not self.client_gone and self.given_up is None:
                raise  # the server ends this task
            if self._work:
                self._work.uncancel()
            if self.given_up and not self.client_gone:
                await self._refuse(self.given_up)
        except Exception:
            log.exception("request failed")
            await self._refuse(InternalError())

    # --- the request ------------------------------------------------------------------------------

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def read_body(self) -> bytes:
        """Read the body. From its end on, the client's leaving cancels `respond`.

        Raises UnsupportedEncoding, RequestTooLarge (before more than the limit is in memory),
        UploadTimeout, ClientGone.
        """
        if self.header(b"content-encoding").lower() not in (b"", b"identity"):
            raise UnsupportedEncoding
        size_max = settings.KILN_BODY_MAX_MIB * 2**20
        length = self.header(b"content-length")
        if length.isdigit() and int(length) > size_max:
            _refuse_size()
        try:
            async with asyncio.timeout(settings.KILN_UPLOAD_SECONDS):
                body = await self._read_up_to(size_max)
        except TimeoutError:
            raise UploadTimeout from None
        self._watch(self._listen())
        self._tick()
        return body

    async def _read_up_to(self, size_max: int) -> bytes:
        pieces, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > size_max:
                _refuse_size()
            if not message.get("more_body"):
                return b"".join(pieces)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        await self.client_left()
        self._cancel_work()

    async def client_left(self) -> None:
        """Called when the client left, before the work is cancelled; may wait a moment."""

    # --- time limits ------------------------------------------------------------------------------

    def wait_at_most(self, seconds: float, error: ApiError) -> None:
        """Give up with `error` unless this is called again, or `waited`, within `seconds`."""
        self._deadline = (self._now() + seconds, error)
        if self._timer and self._deadline[0] < self._timer.when():
            self._timer.cancel()  # it would look only when this limit is long past
            self._tick()

    def waited(self) -> None:
        self._deadline = None

    def expect_stream(self) -> None:
        """Send comments while nothing else is sent, the head before the first of them."""
        self._is_stream = True

    def give_up(self, error: ApiError) -> None:
        """End the work; the client is told `error`."""
        if self.given_up is None:
            self.given_up = error
            self._cancel_work()

    def _cancel_work(self) -> None:
        if self._work is not None and not self._is_ended:
            self._work.cancel()

    def _tick(self) -> None:
        """Look at the clock, and come back when the next limit can be reached.

        One timer a request instead of one a chunk: the chunks only note the time.
        """
        now = self._now()
        keepalive, stalled = settings.KILN_KEEPALIVE_SECONDS, settings.KILN_STALLED_READER_SECONDS
        if self._is_ended or self.client_gone or self.given_up:
            return
        if now >= self._began + settings.KILN_TOTAL_SECONDS:
            self.give_up(TotalTimeReached())
            return
        if self._sending_since is not None:
            if now >= self._sending_since + stalled:
                self.give_up(ReaderStalled())
                return
        elif self._deadline and now >= self._deadline[0]:
            self.give_up(self._deadline[1])
            return
        elif self._is_stream and now >= self._last_sent + keepalive:
            self._watch(self._send_keepalive())
        looks = [
            now + stalled,
            self._began + settings.KILN_TOTAL_SECONDS,
            max(self._last_sent + keepalive, now + keepalive / 10),
        ]
        if self._deadline:
            looks.append(self._deadline[0])
        if self._sending_since is not None:
            looks.append(self._sending_since + stalled)
        self._timer = self._loop.call_at(max(min(looks), now + 0.01), self._tick)

    # --- the answer -------------------------------------------------------------------------------

    async def send_whole(
        self, status: int, headers: Iterable[tuple[str, str]], body: bytes
    ) -> None:
        """Send an answer of one piece."""
        length = ("content-length", str(len(body)))
        await self._send_head(status, [*headers, length])
        await self._send_body(body, more=False)

    async def start_stream(self) -> None:
        """Send the head of a stream, once."""
        if not self.is_started and self._gathered is None:
            self._is_stream = True
            await self._send_head(200, STREAM_HEADERS)

    async def send_frames(self, frames: Iterable[bytes], *, is_last: bool = False) -> None:
        """Send events, each of which is the data of one; after the last the answer is over."""
        body = b"".join(map(sse.frame, frames))
        if self._gathered is None:
            await self.start_stream()
            await self._send_body(body, more=not is_last)
            return
        self._gathered.append(body)
        if is_last:
            await self.send_whole(200, STREAM_HEADERS, b"".join(self._gathered))

    def more_headers(self) -> Iterable[tuple[str, str]]:
        """Called when the head goes out, for what it carries beside the answer's own headers."""
        return ()

    async def _send_keepalive(self) -> None:
        if self._gathered is not None:
            return
        await self.start_stream()
        if not self._is_ended:
            await self._send_body(sse.KEEPALIVE, more=True)

    async def _refuse(self, error: ApiError) -> None:
        if self._is_ended or self.client_gone:
            return
        if not self.is_started:
            await self.send_whole(error.status, error.headers(), error.body())
        elif self._is_stream:
            # Both OpenAI SDKs raise on such an event; a body that just ends looks like success.
            await self._send_body(sse.frame(error.body_of_event()), more=False)

    async def _send_head(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.is_started = True
        await self._timed_send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (name.encode(), value.encode("latin-1"))
                    for name, value in [*headers, *self.more_headers(), *self.id_headers]
                ],
            }
        )

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        self._is_ended = not more
        await self._timed_send({"type": "http.response.body", "body": body, "more_body": more})

    async def _timed_send(self, message: dict[str, Any]) -> None:
        self._sending_since = self._now()
        try:
            await self._send(message)
        finally:
            self._sending_since = None
            self._last_sent = self._now()

    def _watch(self, work: Any) -> None:
        """Run something beside the request, ended with it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class TotalTimeReached(BackendFailed):
    """The answer took longer than KILN_TOTAL_SECONDS; what was produced is paid."""

    def __init__(self) -> None:
        super().__init__("The answer took too long and was cut off.")


class ReaderStalled(BackendFailed):
    """The client did not read for KILN_STALLED_READER_SECONDS; what was produced is paid."""

    def __init__(self) -> None:
        super().__init__("The client stopped reading.")


def _refuse_size() -> NoReturn:
    raise RequestTooLarge(
        f"The request body is larger than the limit of {settings.KILN_BODY_MAX_MIB} MiB."
    )
