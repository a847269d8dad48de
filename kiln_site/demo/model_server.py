"""The bundled demo model server: an OpenAI-compatible backend on a real socket, and the tests' one.

It answers honestly and always alike, counts tokens as it says it does, and misbehaves exactly as
the words `demo:NAME` in the last user message ask it to (`faults.py` has the table). It needs
nothing but the standard library and it never leaves the loopback interface.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from kiln_site.demo import faults
from kiln_site.demo.listener import HOST, MODELS, Listener, serve
from kiln_site.demo.records import CHAT_PATH, Outcome, ReceivedRequest
from kiln_site.demo.state import State

THREAD_SECONDS: Final = 10.0
T = TypeVar("T")


class DemoModelServer:
    """The server in a thread and a loop of its own, and what it saw.

    `with DemoModelServer() as server:` listens on a free port; `server.url` is the base URL that
    an OpenAI client takes. Waiting methods block until what they name has happened and raise
    TimeoutError if it does not.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        api_key: str = "",
        pace: float = 0.0,
        models: Sequence[str] = MODELS,
        context_window: int = 32768,
        always: str = "",
    ) -> None:
        self._state = State(
            tuple(models),
            api_key=api_key,
            pace=pace,
            context_window=context_window,
            always=always,
        )
        self.scripts = self._state.scripts
        self._records = self._state.records
        self._wanted_port = port
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Up and down

    def start(self) -> None:
        """Listen; on the same port as before if the server has been stopped."""
        # First the port: if somebody else has it, nothing is left behind.
        if self._listener is None:
            self._listener = Listener(self._state, self._wanted_port)
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="demo-model-server", daemon=True
            )
            self._thread.start()
        self._in_loop(self._listener.open)

    def stop(self) -> None:
        """Be down: refuse connections, break off the open ones, keep the port and the records."""
        if self._listener is not None:
            self._in_loop(self._listener.close)

    def close(self) -> None:
        """End for good: the port, the loop and the thread."""
        if self._thread is None:
            return
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(THREAD_SECONDS)
        self._loop.close()
        self._thread = None
        if self._listener is not None:
            self._listener.release()
            self._listener = None

    @property
    def port(self) -> int:
        if self._listener is None:
            raise RuntimeError("The server has not been started.")
        return self._listener.port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    # What tests change while it runs

    @property
    def always(self) -> str:
        """Words that count as if every chat request said them, such as "demo:status=503"."""
        return self._state.always

    @always.setter
    def always(self, words: str) -> None:
        faults.read(words)  # An unknown word fails here, in the test that wrote it.
        self._state.always = words

    @property
    def healthy(self) -> bool:
        """Whether GET /health answers 200 or 503."""
        return self._state.healthy

    @healthy.setter
    def healthy(self, healthy: bool) -> None:
        self._state.healthy = healthy

    def open_gate(self) -> None:
        """Let go on all that wait at `demo:gate` or `demo:gate_after`, and all to come."""
        self._loop.call_soon_threadsafe(self._state.gate.set)

    def reset_counters(self) -> None:
        """Forget what has ended, the prefix cache, `always`, `healthy` and an opened gate."""
        self._in_loop(self._forget)

    async def _forget(self) -> None:
        self._records.reset()
        self._state.cache.clear()
        self._state.gate.clear()
        self._state.always, self._state.healthy = "", True

    # What it saw

    @property
    def requests(self) -> list[ReceivedRequest]:
        return [outcome.request for outcome in self._records.outcomes()]

    @property
    def chat_requests(self) -> list[ReceivedRequest]:
        return [outcome.request for outcome in self.answers]

    @property
    def answers(self) -> list[Outcome]:
        """How each chat request went, in the order of their arrival."""
        return self._records.outcomes(CHAT_PATH)

    @property
    def in_flight(self) -> int:
        return self._records.in_flight

    @property
    def most_in_flight(self) -> int:
        return self._records.most_in_flight

    def answer_to(self, request: ReceivedRequest) -> Outcome:
        return self._records.find(request)

    def wait_for_requests(
        self, count: int, timeout: float = 5.0, path: str = CHAT_PATH
    ) -> list[ReceivedRequest]:
        """Wait until `count` requests of this path have come; return all of them."""
        outcomes = self._records.wait_for_requests(count, timeout, path)
        return [outcome.request for outcome in outcomes]

    def wait_for_chunks(
        self, request: ReceivedRequest, count: int, timeout: float = 5.0
    ) -> Outcome:
        outcome = self.answer_to(request)
        self._records.wait(
            lambda: outcome.chunks_sent >= count, timeout, f"{count} chunks of one answer"
        )
        return outcome

    def wait_for_end(self, request: ReceivedRequest, timeout: float = 5.0) -> Outcome:
        """Wait until this answer is over, in whichever way."""
        outcome = self.answer_to(request)
        self._records.wait(lambda: outcome.ended_at is not None, timeout, "the end of an answer")
        return outcome

    def wait_for_close(self, request: ReceivedRequest, timeout: float = 5.0) -> Outcome:
        """Wait until the client has left this answer; an answer that ends otherwise is an error."""
        outcome = self.wait_for_end(request, timeout)
        if outcome.client_closed_at is None:
            raise AssertionError("The answer came to its end: the client did not close it.")
        return outcome

    def wait_until_idle(self, timeout: float = 5.0) -> None:
        self._records.wait(lambda: self._records.in_flight == 0, timeout, "no request in flight")

    def _in_loop(self, work: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(THREAD_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kiln_site.demo.model_server",
        description="Serve a demo model in OpenAI's chat format on 127.0.0.1.",
        epilog="Words in the last user message make it misbehave:\n\n" + "\n".join(faults.lines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--pace", type=float, default=50.0, help="tokens a second; 0: no limit")
    parser.add_argument("--models", default=",".join(MODELS), help="IDs, separated by commas")
    parser.add_argument("--api-key", default="", help="refuse requests with another bearer token")
    parser.add_argument("--context", type=int, default=32768, help="context window in tokens")
    options = parser.parse_args(arguments)

    def ready(url: str) -> None:
        sys.stdout.write(f"LISTENING {url}\n")
        sys.stdout.flush()

    async def run() -> None:
        task = asyncio.current_task()
        if task is not None:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serve(
                options.port,
                api_key=options.api_key,
                pace=options.pace,
                models=tuple(options.models.split(",")),
                context_window=options.context,
                ready=ready,
            )

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
