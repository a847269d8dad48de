"""The connection side of the backends: send a request, read its answer. The only httpx.

httpx's Request and Response go straight to our transport: its AsyncClient carries one answer's
cookies into the next request. What the transport raises is mapped here, once, and nothing of it
reaches a customer.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import Any

import httpx
import orjson

from gateway.catalog import Backend
from gateway.errors import ApiError, BackendFailed, BackendRefused
from gateway.sse import FrameParser, FrameTooLarge
from gateway.transport import Request, Transport

log = logging.getLogger(__name__)

_ERROR_BODY_MAX = 64 * 1024
_MESSAGE_MAX = 2000

FAILED = "The model backend returned an error. Try again later."
UNREACHABLE = "The model backend could not be reached. Try again later."
BROKE_OFF = "The model backend broke off its answer."


class TryAnother(Exception):
    """The backend surely did not begin to serve the request: another one may be asked.

    No connection, 429, 503 (rulings.md 13). `is_busy` tells the last two, whose customer
    hears 503 when no other backend is left.
    """

    def __init__(self, *, is_busy: bool) -> None:
        super().__init__(is_busy)
        self.is_busy = is_busy


class Upstream:
    """The connections of one event loop to all backends."""

    def __init__(self, *, connect_seconds: float, frame_max: int) -> None:
        self._frame_max = frame_max
        self._transport = Transport(connect_seconds=connect_seconds)

    @asynccontextmanager
    async def send(
        self, backend: Backend, body: bytes, *, request_id: str
    ) -> AsyncIterator["Answer"]:
        """Send a completion request and yield its answer, closed at the end whatever happens.

        Raises TryAnother, BackendRefused or BackendFailed. None of the customer's headers go
        along: the backend gets its own credential, and the ID to find the request by.
        """
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "kiln-gateway",
            "x-request-id": request_id,
        }
        if backend.api_key:
            headers["authorization"] = f"Bearer {backend.api_key}"
        request = Request("POST", _completions_url(backend.url), headers, body)
        with _mapped(backend, is_sent=False):
            response = await self._transport.handle_async_request(request)
        try:
            answer = Answer(backend, response, self._frame_max)
            await answer.refuse_errors()
            yield answer
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()


class Answer:
    """A backend's answer with status 200."""

    def __init__(self, backend: Backend, response: httpx.Response, frame_max: int) -> None:
        self.backend = backend
        self._response = response
        self._frame_max = frame_max

    async def refuse_errors(self) -> None:
        """Raise what another status than 200 means for the customer."""
        status = self._response.status_code
        if status == 200 and not self._response.headers.get("content-encoding"):
            return
        if status in (429, 503):
            raise TryAnother(is_busy=True)
        if status in (400, 413, 422):
            body = b""
            async for chunk in self._chunks():
                body += chunk
                if len(body) > _ERROR_BODY_MAX:
                    break
            raise refusal(_parsed(body[:_ERROR_BODY_MAX]))
        log.warning("backend %s answered with status %d", self.backend.name, status)
        raise BackendFailed(FAILED)

    async def body(self) -> bytes:
        """Read the whole answer. Raises BackendFailed."""
        chunks, size = [], 0
        async for chunk in self._chunks():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._frame_max:
                raise BackendFailed(FAILED)
        return b"".join(chunks)

    async def frames(self) -> AsyncIterator[list[bytes]]:
        """Read the stream: the data of the events that each read completed. Raises BackendFailed.

        A read that completed none (a comment, part of an event) yields nothing.
        """
        parser = FrameParser(self._frame_max)
        try:
            async for chunk in self._chunks():
                if frames := parser.feed(chunk):
                    yield frames
        except FrameTooLarge:
            log.warning("backend %s sent an event beyond the limit", self.backend.name)
            raise BackendFailed(BROKE_OFF) from None
        if frames := parser.close():
            yield frames

    def done(self) -> None:
        """Say that the rest of the answer is of no interest."""
        self._response.stream.is_done = True  # type: ignore[union-attr]

    async def _chunks(self) -> AsyncIterator[bytes]:
        with _mapped(self.backend, is_sent=True):
            async for chunk in self._response.stream:  # type: ignore[union-attr]
                yield chunk


@lru_cache(maxsize=1024)
def _completions_url(base: str) -> httpx.URL:
    # Parsing the URL anew took a tenth of a request's time.
    return httpx.URL(f"{base}/chat/completions")


def refusal(error: Any) -> BackendRefused:
    """Return a backend's refusal in our shape: its message and param, none of its codes.

    Accepts what real servers send: {"error": {...}}, {"error": "text"}, {"detail": text or list},
    {"message": ...}, plain text, nothing (backends.md section 5).
    """
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict):
            message = inner.get("message") or inner.get("detail")
            param = inner.get("param")
        else:
            message, param = inner, None
    else:
        message, param = error, None
    if isinstance(message, list):
        message = "; ".join(
            str(item.get("msg", item)) if isinstance(item, dict) else str(item) for item in message
        )
    text = str(message).strip() if message else "The model server rejected the request."
    return BackendRefused(
        text[:_MESSAGE_MAX],
        param=param.removeprefix("body.")[:200] if isinstance(param, str) else None,
    )


def error_event(error: Any) -> ApiError:
    """Return what an error event of a 200 stream means: the model server's 400, or a failure."""
    code = error.get("code") if isinstance(error, dict) else None
    if code in (400, 413, 422, "400", "413", "422"):
        return refusal(error)
    return BackendFailed(FAILED)


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")


@contextmanager
def _mapped(backend: Backend, *, is_sent: bool) -> Iterator[None]:
    """Map what the transport raises to what the customer is told."""
    try:
        yield
    except httpx.TransportError as error:
        log.warning("backend %s: %s %s", backend.name, type(error).__name__, error)
        if is_sent:
            raise BackendFailed(BROKE_OFF) from None
        if isinstance(error, httpx.ConnectError):
            raise TryAnother(is_busy=False) from None
        raise BackendFailed(UNREACHABLE) from None
