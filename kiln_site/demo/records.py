"""What the demo model server saw: every request and how its answer ended, for tests to ask about.

Written by the server's loop, read by any thread. Waiters sleep on one condition and are woken by
what they wait for. The newest 10,000 requests are kept, so that a load run ends within memory.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

CHAT_PATH: Final = "/v1/chat/completions"
KEPT_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as it came in, body included; `time` is of the monotonic clock."""

    number: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    time: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The last value of this header, None if it was not sent."""
        found = [value for key, value in self.headers if key.lower() == name.lower()]
        return found[-1] if found else None


@dataclass(slots=True)
class Outcome:
    """How the answer to one request goes; times are of the monotonic clock.

    `tokens_made` counts what the model made, sent or not; `completed` says that the whole answer
    was written. `client_closed_at` is set if the client left before that.
    """

    request: ReceivedRequest
    status: int | None = None
    chunks_sent: int = 0
    tokens_sent: int = 0
    tokens_made: int = 0
    completed: bool = False
    client_closed_at: float | None = None
    ended_at: float | None = None


@dataclass(slots=True)
class Records:
    """Everything since the last reset."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _outcomes: deque[Outcome] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    _waiting: int = 0
    _numbers: int = 0
    _chats: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    # Written by the server

    def begin(
        self, method: str, path: str, headers: tuple[tuple[str, str], ...], body: bytes
    ) -> Outcome:
        with self._changed:
            self._numbers += 1
            request = ReceivedRequest(self._numbers, method, path, headers, body, time.monotonic())
            outcome = Outcome(request)
            self._outcomes.append(outcome)
            if path == CHAT_PATH:
                self._chats += 1
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._changed.notify_all()
        return outcome

    def end(self, outcome: Outcome, *, completed: bool, client_closed: bool = False) -> None:
        """Close the books on one answer; the second call for the same answer does nothing."""
        with self._changed:
            if outcome.ended_at is not None:
                return
            outcome.ended_at = time.monotonic()
            outcome.completed = completed
            outcome.client_closed_at = outcome.ended_at if client_closed else None
            if outcome.request.path == CHAT_PATH:
                self.in_flight -= 1
            self._changed.notify_all()

    def sent(self, outcome: Outcome, tokens: int) -> None:
        """Count one chunk. The lock is taken only when somebody waits: this runs per chunk."""
        outcome.chunks_sent += 1
        outcome.tokens_sent += tokens
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    # Read by tests

    def outcomes(self, path: str | None = None) -> list[Outcome]:
        with self._changed:
            return [one for one in self._outcomes if path in (None, one.request.path)]

    def reset(self) -> None:
        """Forget all that has ended; what is still in flight stays counted."""
        with self._changed:
            running = [one for one in self._outcomes if one.ended_at is None]
            self._outcomes.clear()
            self._outcomes.extend(running)
            self._chats = sum(one.request.path == CHAT_PATH for one in running)
            self.most_in_flight = self.in_flight

    def wait_for_requests(self, count: int, timeout: float, path: str) -> list[Outcome]:
        def arrived() -> bool:
            if path == CHAT_PATH:
                return self._chats >= count
            return sum(one.request.path == path for one in self._outcomes) >= count

        self.wait(arrived, timeout, f"{count} requests of {path}")
        return self.outcomes(path)

    def find(self, request: ReceivedRequest) -> Outcome:
        for outcome in self.outcomes():
            if outcome.request is request:
                return outcome
        raise LookupError("This request is not among the records: reset, or too long ago.")

    def wait(self, true: Callable[[], bool], timeout: float, what: str) -> None:
        """Block until this is true; raise TimeoutError naming what did not happen."""
        with self._changed:
            self._waiting += 1
            try:
                if not self._changed.wait_for(true, timeout):
                    raise TimeoutError(f"Not within {timeout} s: {what}.")
            finally:
                self._waiting -= 1
