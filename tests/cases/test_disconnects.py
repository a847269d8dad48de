"""Section D: disconnects, cancellation, shutdown."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from gateway.streaming import StreamingConsumer
from tests.gateway_process import GatewayProcess, gateway
from tests.test_completions import body
from tests.test_document import Api, wait_until
from tests.test_settlement import read, settled


class Endless(StreamingConsumer):
    """Never answers, and needs a moment to tidy up when it is ended."""

    is_tidy = False

    async def respond(self) -> None:
        await self.read_body()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            self.is_tidy = True


def test_c38_the_application_ends_by_itself_when_its_client_left() -> None:
    # A server that has to kill it does so after ten seconds, and whatever it still had to settle.
    async def leave() -> Endless:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b"{}"})
        messages.put_nowait({"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            raise AssertionError(message)

        consumer = Endless()
        scope = {"type": "http", "http_version": "1.1", "headers": []}
        await asyncio.wait_for(consumer(scope, messages.get, send), 60)
        return consumer

    consumer = asyncio.run(leave())
    assert consumer.client_gone
    assert consumer.is_tidy


def test_c39_cancelled_streams_leave_no_connection_behind(api: Api) -> None:
    def open_files() -> int:
        return len(list(Path(f"/proc/{api.gateway.process.pid}/fd").iterdir()))

    def leave(number: int) -> None:
        with api.streaming(f"demo:hang_after={number % 4 + 1}") as answer:
            if answer.status_code == 200 and number % 2:
                read(answer, 1)

    with ThreadPoolExecutor(8) as threads:
        assert {one.status_code for one in threads.map(api.post, [body()] * 8)} == {200}
        before = open_files()
        list(threads.map(leave, range(100)))
        wait_until(lambda: api.tenant.standing.in_flight == 0)
        api.backend.wait_until_idle(30)
        assert {one.status_code for one in threads.map(api.post, [body()] * 8)} == {200}
    # As many as before, and those that are being closed; a hundred would be a leak.
    wait_until(lambda: open_files() <= before + 8)


def test_c40_a_stream_in_flight_ends_whole_when_the_gateway_is_stopped(
    on_uvicorn: Api, catalog: None
) -> None:
    # Killed instead of stopped: `make chaos`. On daphne there is no promise to drain.
    with gateway("uvicorn") as running:
        api = replace(on_uvicorn, gateway=running)
        with ExitStack() as stack:
            answers = [
                stack.enter_context(api.streaming("demo:tokens=5 demo:gate_after=2"))
                for _ in range(5)
            ]
            running.process.terminate()
            wait_until(lambda: _is_closed(running))
            api.backend.open_gate()
            for answer in answers:
                assert answer.read().endswith(b"data: [DONE]\n\n")
        running.process.wait(60)
    assert [event.state for event in settled(on_uvicorn)] == ["succeeded"] * 5


def _is_closed(running: GatewayProcess) -> bool:
    try:
        httpx.get(f"{running.url}/healthz")
    except httpx.TransportError:
        return True
    return False
