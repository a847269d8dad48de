"""One request and its answer: the order of things, from the key to the last byte.

It carries out what `stream.plan` and `replies` decide, keeps time, and books what was sent. It
decides nothing about the text of an answer.
"""

import asyncio
import gzip
import json
import secrets
import time
from collections.abc import Iterable
from typing import Final

from kiln_site.demo import asks, replies
from kiln_site.demo.answers import Answer, compose
from kiln_site.demo.asks import Ask, JsonObject, Refusal
from kiln_site.demo.connection import Connection, Hangup, HttpRequest, head
from kiln_site.demo.faults import NO_FAULTS, Faults
from kiln_site.demo.framing import Framing, chunk
from kiln_site.demo.records import CHAT_PATH, Outcome
from kiln_site.demo.replies import JSON, Ident, Reply
from kiln_site.demo.state import State
from kiln_site.demo.stream import Act, Event, Pause, Step, plan

ROUTES: Final = {CHAT_PATH: "POST", "/v1/models": "GET", "/health": "GET", "/metrics": "GET"}
TURN: Final = 16  # events written before other connections get their turn
WRITE_BYTES: Final = 64 * 1024
ENDLESS_PIECE: Final = b"x" * WRITE_BYTES


class Exchange:
    """Answer one request on its connection. `run` returns whether the connection may go on."""

    def __init__(self, state: State, connection: Connection, request: HttpRequest) -> None:
        self._state, self._connection, self._request = state, connection, request
        self._faults: Faults = NO_FAULTS
        self._model = ""
        self._keep = request.header("connection").lower() != "close"
        self._outcome: Outcome = state.records.begin(
            request.method, request.path.partition("?")[0], request.headers, request.body
        )

    async def run(self) -> bool:
        try:
            await self._respond()
        finally:
            # Does nothing if the answer has been completed.
            self._state.records.end(
                self._outcome, completed=False, client_closed=self._connection.client_left
            )
        if self._faults.on("drop_next"):
            await self._connection.next_bytes()
            raise Hangup()
        return self._keep and not self._faults.on("close")

    async def _respond(self) -> None:
        path = self._outcome.request.path
        if path not in ROUTES:
            await self._refuse(Refusal("Not Found", status=404, type_="NotFoundError"))
        elif self._request.method != ROUTES[path]:
            await self._refuse(Refusal("Method Not Allowed", status=405))
        elif path == "/health":
            await self._reply(Reply(200 if self._state.healthy else 503, JSON, b"{}"))
        elif path == "/metrics":
            state = self._state
            await self._reply(replies.metrics(state.models, state.counted, state.created))
        elif not self._authorized():
            await self._refuse(Refusal("Invalid API Key", status=401, type_="authentication_error"))
        elif path == "/v1/models":
            state = self._state
            await self._reply(replies.model_list(state.models, state.created, state.context_window))
        else:
            await self._chat()

    async def _chat(self) -> None:
        """The straight line: parse, misbehave before the head, check, compose, send."""
        try:
            body = self._parse()
            self._faults = asks.read_faults(body, self._state.always)
            await self._before_the_head()
            instead = replies.instead(self._faults)
            if instead is not None:
                await self._reply(instead)
                return
            ask = asks.read(body, self._faults, self._state.models)
            answer = compose(ask, self._state.cache, self._state.context_window)
        except Refusal as refusal:
            await self._refuse(refusal)
            return
        self._model = ask.model
        self._state.counted["prompt_tokens", ask.model] += answer.prompt_tokens
        # vLLM does the same: the caller's request ID comes back in the ID of the completion.
        own = self._request.header("x-request-id") or secrets.token_hex(12)
        ident = Ident(f"chatcmpl-{own}", int(time.time()))
        if ask.stream and not self._faults.on("whole"):
            await self._stream(plan(answer, ask, ident))
        else:
            await self._whole(answer, ask, ident)

    def _authorized(self) -> bool:
        key = self._state.api_key
        return not key or secrets.compare_digest(
            self._request.header("authorization").encode("latin-1"), f"Bearer {key}".encode()
        )

    def _parse(self) -> JsonObject:
        try:
            body = json.loads(self._request.body)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"JSON decode error: {error}", param="body") from None
        if not isinstance(body, dict):
            raise Refusal("Input should be a valid dictionary", param="body")
        return body

    async def _before_the_head(self) -> None:
        faults = self._faults
        if not faults:
            return
        if faults.on("gate"):
            await self._state.gate.wait()
        if faults.on("wait"):
            await asyncio.sleep(faults.seconds("wait"))
        if faults.on("hang"):
            await self._silence()
        if faults.on("reset") or faults.on("eof"):
            raise Hangup(reset=faults.on("reset"))
        if faults.on("not_http"):
            self._connection.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            raise Hangup()
        name = faults.text("script")
        if name is not None:
            await self._replay(name)
        if faults.on("pings"):
            await self._ping(float(faults.text("pings") or 100) / 1000)

    async def _silence(self) -> None:
        """Say nothing until the client leaves or the server stops: both cancel this task."""
        await asyncio.get_running_loop().create_future()

    async def _replay(self, name: str) -> None:
        """Write recorded bytes as they are, one write for each item of the list."""
        if name not in self._state.scripts:
            raise Refusal(f"No script is registered under {name!r}.", param="messages")
        pieces = self._state.scripts[name]
        for number, piece in enumerate(pieces, start=1):
            if number == len(pieces):
                self._book_completed()
            self._connection.write(piece)
            await self._connection.drain()
            await asyncio.sleep(0)
        raise Hangup()

    async def _ping(self, seconds: float) -> None:
        self._stream_head()
        while True:
            self._connection.write(chunk(b": ping\n\n"))
            await asyncio.sleep(seconds)

    # Whole answers

    async def _refuse(self, refusal: Refusal) -> None:
        await self._reply(replies.refused(refusal, self._faults.text("shape") or "object"))

    async def _whole(self, answer: Answer, ask: Ask, ident: Ident) -> None:
        """Make all tokens, then answer in one piece, or with the error that a stream would get."""
        faults = self._faults
        pace = self._seconds_a_token()
        for _ in range(answer.completion_tokens if pace else 0):
            await asyncio.sleep(pace)
            self._count_made(1)
        self._count_made(answer.completion_tokens - self._outcome.tokens_made)
        await asyncio.sleep(faults.seconds("think") + faults.seconds("finish_late"))
        if faults.on("gate_after"):
            await self._state.gate.wait()
        code = faults.count("error_first")
        if code is None and (faults.on("error_after") or faults.on("error_string")):
            code = 500
        if code is not None:
            await self._refuse(Refusal("EngineCore encountered an issue.", status=code))
            return
        self._outcome.tokens_sent = answer.completion_tokens
        await self._reply(replies.completion(answer, ident, faults))

    async def _reply(self, reply: Reply) -> None:
        """Write a whole answer, as far as the faults let it come."""
        faults, connection, body = self._faults, self._connection, reply.body
        headers = [("Content-Type", reply.content_type), *reply.headers]
        if faults.on("headers"):
            headers += replies.BAD_HEADERS
        if faults.on("gzip"):
            body = gzip.compress(body)
            headers.append(("Content-Encoding", "gzip"))
        headers.append(("Content-Length", str(len(body))))
        self._outcome.status = reply.status
        start = head(reply.status, headers)
        cut = self._cut_at(len(body))
        if cut is not None:
            connection.write(start + body[:cut])
            await self._break_off()
        size = faults.count("split") or WRITE_BYTES
        pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        if not faults.on("split"):
            pieces[0] = start + pieces[0]
        else:
            connection.write(start)
        for number, piece in enumerate(pieces, start=1):
            if number == len(pieces):
                # Booked before the client can have the last byte and look at the books.
                self._book_completed()
            connection.write(piece)
            if number < len(pieces):
                await connection.drain()
                await asyncio.sleep(0)

    def _cut_at(self, size: int) -> int | None:
        """How many bytes of a whole body are sent, if a fault cuts it off."""
        if self._faults.on("half_json"):
            return size // 2
        for name in ("hang_after", "reset_after", "eof_after", "end_after"):
            count = self._faults.count(name)
            if count is not None:
                return min(count, size - 1)
        return None

    async def _break_off(self) -> None:
        await self._connection.drain()
        if self._faults.on("hang_after"):
            await self._silence()
        raise Hangup(reset=self._faults.on("reset_after"))

    # Streams

    def _stream_head(self) -> None:
        headers = [
            ("Content-Type", "text/event-stream; charset=utf-8"),
            ("Cache-Control", "no-cache"),
            ("Transfer-Encoding", "chunked"),
        ]
        if self._faults.on("headers"):
            headers += replies.BAD_HEADERS
        if self._faults.on("gzip"):
            headers.append(("Content-Encoding", "gzip"))
        self._outcome.status = 200
        self._connection.write(head(200, headers))

    async def _stream(self, steps: Iterable[Step]) -> None:
        """Carry the plan out step by step; [DONE] leaves together with the end of the body."""
        self._stream_head()
        framing, pace, turn = Framing(self._faults), self._seconds_a_token(), 0
        loop = asyncio.get_running_loop()
        due, completed = loop.time(), True
        for step in steps:
            if not isinstance(step, Event):
                await self._write(framing.flush())
                if await self._act(step):
                    completed = False
                    break
                continue
            if pace and step.tokens:
                # Never more than a second behind: a burst would be no pace.
                due = max(due + pace * step.tokens, loop.time() - 1)
                await asyncio.sleep(due - loop.time())
            self._count_made(step.tokens)
            await self._write(framing.add(step))
            if step.is_chunk:
                self._state.records.sent(self._outcome, step.tokens)
            turn += 1
            if turn % TURN == 0:
                await asyncio.sleep(0)
        self._state.records.end(self._outcome, completed=completed)
        await self._write(framing.end())

    async def _write(self, writes: list[bytes]) -> None:
        for data in writes:
            self._connection.write(data)
            await self._connection.drain()
            if len(writes) > 1:
                await asyncio.sleep(0)

    async def _act(self, step: Act | Pause) -> bool:
        """Do what is no event; return whether the body ends here."""
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        elif step is Act.GATE:
            await self._state.gate.wait()
        elif step is Act.SILENCE:
            await self._silence()
        elif step is Act.ENDLESS:
            await self._never_end_the_line()
        elif step is not Act.END:
            raise Hangup(reset=step is Act.RESET)
        return step is Act.END

    async def _never_end_the_line(self) -> None:
        self._connection.write(chunk(b'data: {"choices":[{"index":0,"delta":{"content":"'))
        while True:
            self._connection.write(chunk(ENDLESS_PIECE))
            await self._connection.drain()
            await asyncio.sleep(0)

    # Both

    def _count_made(self, tokens: int) -> None:
        self._outcome.tokens_made += tokens
        self._state.counted["generation_tokens", self._model] += tokens

    def _seconds_a_token(self) -> float:
        milliseconds = self._faults.count("pace")
        if milliseconds is not None:
            return milliseconds / 1000
        return 1 / self._state.pace if self._state.pace else 0.0

    def _book_completed(self) -> None:
        self._state.records.end(self._outcome, completed=True)
