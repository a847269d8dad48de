"""The completions endpoint: the straight line of a request. Only this module knows its order.

    bearer, authenticate 401 403 · glance 402 429 · maintenance 503 · read and parse 415 413 408 400
    · find 404 403 503 · check 400 · choose 503 · admit 402 429 503 · send and relay 400 502 503
    · settle · the last chunk and [DONE]

The event is durable before the generation ID is sent, the cost before it is named.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from django.conf import settings

from billing.keys import Caller
from billing.usage import Settlement, State
from gateway import bearer, generation, payload, process, routing, sse, upstream
from gateway.catalog import Backend, Model
from gateway.errors import (
    ApiError,
    BackendFailed,
    InternalError,
    MethodNotAllowed,
    ModelNotAllowed,
    Unavailable,
)
from gateway.generation import Generation
from gateway.meter import ErrorEvent, NotACompletion
from gateway.payload import ChatRequest
from gateway.process import Process
from gateway.refusals import rate_limit_headers
from gateway.streaming import ReaderStalled, StreamingConsumer, TotalTimeReached

_SILENT = BackendFailed("The model backend stopped answering.")
_LATE = BackendFailed("The model backend did not answer in time.")
_UNRECORDED = BackendFailed("The answer could not be recorded. It was not billed.")

# What the log of a web server calls a request whose client left before the answer.
_CLIENT_CLOSED = 499

_AFTER_FINISH_SECONDS = 1.0


class ChatCompletions(StreamingConsumer):
    """POST /v1/chat/completions, from the bearer token to the last byte."""

    _generation: Generation | None = None

    async def respond(self) -> None:
        if self.scope["method"] != "POST":
            raise MethodNotAllowed(self.scope["method"], "POST")
        secret = bearer.secret_from(self.headers, self.scope["query_string"])
        running = await process.running()
        caller = await running.callers.authenticate(secret)
        try:
            await self._respond_to(running, caller)
        except ApiError as error:
            if not (self._generation and self._generation.is_admitted):
                running.refusals.count(caller.organization_id, caller.key_id, error)
            raise

    async def _respond_to(self, running: Process, caller: Caller) -> None:
        """Decide on the request of a good key, and serve it."""
        await running.commits.glance(caller)
        running.catalog.refuse_maintenance()
        body = await self.read_body()
        request = payload.parse(body, depth_max=settings.KILN_JSON_DEPTH_MAX)
        model = running.catalog.find(request.model)
        _refuse_unlisted(caller, model)
        model.refuse_maintenance()
        payload.check(request, image_input=model.image_input)
        request = payload.apply_policy(request, model.cells)
        with running.answering(self):
            await self._serve(running, caller, model, request)

    async def _serve(
        self, running: Process, caller: Caller, model: Model, request: ChatRequest
    ) -> None:
        """Admit, forward, relay, and settle whatever happens."""
        current = self._generation = generation.begin(
            caller,
            model,
            request,
            routing.choose(model),
            worker_id=running.worker_id,
            hold_output_tokens_max=settings.KILN_HOLD_OUTPUT_TOKENS_MAX,
        )
        try:
            current.minute = await running.commits.admit(current.admission)
            current.is_admitted = True
            self.id_headers = [
                ("x-neocloud-generation-id", current.id),
                ("x-request-id", current.id),
            ]
            async with self._forward(running, model, request, current) as answer:
                await (self._relay if request.stream else self._read)(answer, current)
        except BaseException as error:
            # A cancelled admission may have been committed all the same: it is closed by ID, and
            # closing one that was refused does nothing.
            if current.is_admitted or isinstance(error, asyncio.CancelledError):
                ending = self._ending(current, error)
                with suppress(Unavailable):  # no database: the event will be closed as lost
                    current.log(ending, await running.commits.settle(ending))
            raise
        settlement = current.settlement(State.SUCCEEDED, status=200)
        try:
            cost = await running.commits.settle(settlement)
        except Unavailable:
            raise _UNRECORDED from None
        current.log(settlement, cost)
        used = current.used(State.SUCCEEDED)
        if request.stream:
            last = [current.meter.usage_chunk(used, cost)] if request.include_usage else []
            await self.send_frames([*last, sse.DONE], is_last=True)
        else:
            await self.send_whole(
                200, [("content-type", "application/json")], current.meter.answer(used, cost)
            )

    @asynccontextmanager
    async def _forward(
        self, running: Process, model: Model, request: ChatRequest, current: Generation
    ) -> AsyncIterator[upstream.Answer]:
        """Forward to the chosen backend, or to another where this one surely did not begin."""
        tried: set[int] = set()
        if request.stream:
            self.expect_stream()
        while True:
            backend = current.backend
            body = payload.forward(
                request,
                served_model_name=backend.served_model_name,
                continuous_usage=backend.continuous_usage,
            )
            self.wait_at_most(settings.KILN_FIRST_BYTE_SECONDS, _LATE)
            current.is_sent = True
            try:
                async with running.upstream.send(backend, body, request_id=current.id) as answer:
                    yield answer
                    return
            except upstream.TryAnother as failure:
                current.is_sent = False
                tried.add(backend.id)
                current.backend = _another(model, tried, failure)

    async def _relay(self, answer: upstream.Answer, current: Generation) -> None:
        """Pass a stream on, event by event, up to but without its end."""
        meter = current.meter
        async for frames in answer.frames():
            visible: list[bytes] = []
            try:
                for data in frames:
                    if data == sse.DONE:
                        meter.is_done = True
                        break
                    if (seen := meter.read(data)) is not None:
                        visible.append(seen)
            except ErrorEvent as event:
                if visible:
                    await self.send_frames(visible)
                raise upstream.error_event(event.error) from None
            current.note_first_token()
            if visible:
                await self.send_frames(visible)
            if meter.is_done:
                answer.done()
                break
            self.wait_at_most(settings.KILN_IDLE_SECONDS, _SILENT)
        self.waited()
        if not meter.is_complete:
            raise BackendFailed(upstream.BROKE_OFF)

    async def _read(self, answer: upstream.Answer, current: Generation) -> None:
        """Take a whole answer."""
        try:
            current.meter.read_body(await answer.body())
        except NotACompletion:
            raise BackendFailed(upstream.FAILED) from None
        except ErrorEvent as event:
            raise upstream.error_event(event.error) from None
        self.waited()

    def more_headers(self) -> Iterable[tuple[str, str]]:
        minute = self._generation.minute if self._generation else None
        return rate_limit_headers(minute) if minute else ()

    async def client_left(self) -> None:
        meter = self._generation.meter if self._generation else None
        if meter and meter.is_finished and not meter.has_usage:
            # The whole answer went out; its usage follows at once (rulings.md 15).
            await asyncio.sleep(_AFTER_FINISH_SECONDS)

    def _ending(self, current: Generation, error: BaseException) -> Settlement:
        """Say who pays for a request that did not succeed: customers for what they received,
        never for our failures (beyond-the-page.md section 7, rulings.md 16)."""
        status = 200 if self.is_started else _CLIENT_CLOSED
        if isinstance(error, ApiError):
            return _failed(current, error, is_started=self.is_started)
        if not isinstance(error, asyncio.CancelledError):
            return _failed(current, InternalError(), is_started=self.is_started)
        if self.client_gone:
            return current.settlement(State.CANCELLED, status=status, error="The client left.")
        if isinstance(self.given_up, TotalTimeReached | ReaderStalled):
            message = self.given_up.message
            return current.settlement(State.CANCELLED, status=status, error=message)
        if self.given_up:
            return _failed(current, self.given_up, is_started=self.is_started)
        return current.settlement(State.FAILED, status=status, error="The gateway was stopped.")


def _failed(current: Generation, error: ApiError, *, is_started: bool) -> Settlement:
    status = 200 if is_started else error.status
    return current.settlement(State.FAILED, status=status, error=error.message)


def _refuse_unlisted(caller: Caller, model: Model) -> None:
    if caller.allowed_models and model.id not in caller.allowed_models:
        raise ModelNotAllowed(model.id)


def _another(model: Model, tried: set[int], failure: upstream.TryAnother) -> Backend:
    try:
        return routing.choose(model, except_for=tried)
    except Unavailable:
        if failure.is_busy:
            raise
        raise BackendFailed(upstream.UNREACHABLE) from None
