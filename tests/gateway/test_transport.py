"""The transport to model servers, against a real socket."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest

from gateway.transport import Request, Transport
from kiln_site.demo.model_server import DemoModelServer


@pytest.fixture(scope="module")
def server() -> Iterator[DemoModelServer]:
    with DemoModelServer() as running:
        yield running


@asynccontextmanager
async def opened() -> AsyncIterator[Transport]:
    transport = Transport(connect_seconds=5)
    try:
        yield transport
    finally:
        await transport.aclose()


def request(server: DemoModelServer, text: str, **fields: Any) -> Request:
    body = {"model": "qwen3-32b", "messages": [{"role": "user", "content": text}], **fields}
    url = httpx.URL(f"{server.url}/chat/completions")
    return Request("POST", url, {"content-type": "application/json"}, orjson.dumps(body))


async def read(response: httpx.Response) -> bytes:
    body = b"".join([data async for data in response.stream])  # type: ignore[union-attr]
    await response.aclose()
    return body


def test_it_works(server: DemoModelServer) -> None:
    async def run() -> None:
        async with opened() as transport:
            response = await transport.handle_async_request(request(server, "Hello!"))
            assert response.status_code == 200
            assert response.headers["content-type"] == "application/json"
            assert orjson.loads(await read(response))["object"] == "chat.completion"

    asyncio.run(run())


def test_a_large_answer_waits_in_the_socket_until_it_is_read(server: DemoModelServer) -> None:
    size = 8 * 2**20

    async def run() -> None:
        async with opened() as transport:
            response = await transport.handle_async_request(
                request(server, f"demo:big={size}", stream=True)
            )
            pieces = [len(data) async for data in response.stream]  # type: ignore[union-attr]
            await response.aclose()
            assert sum(pieces) > size
            # What lay here unread at any moment: the limit, and one read more.
            assert max(pieces) <= 2 * 2**20

    asyncio.run(run())


@pytest.mark.parametrize("words", ["demo:split=1", "demo:split=7", "demo:tokens=200"])
def test_it_reads_the_same_however_the_bytes_are_cut(server: DemoModelServer, words: str) -> None:
    async def run() -> bytes:
        async with opened() as transport:
            return await read(
                await transport.handle_async_request(request(server, words, stream=True))
            )

    assert asyncio.run(run()).endswith(b"data: [DONE]\n\n")


def test_a_connection_closed_while_it_lay_idle_costs_nothing(server: DemoModelServer) -> None:
    async def run() -> list[int]:
        async with opened() as transport:
            statuses = []
            for words in ("Hello!", "demo:drop_next", "Again!"):
                response = await transport.handle_async_request(request(server, words))
                await read(response)
                statuses.append(response.status_code)
            return statuses

    assert asyncio.run(run()) == [200, 200, 200]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("demo:reset", httpx.RemoteProtocolError),
        ("demo:eof", httpx.RemoteProtocolError),
        ("demo:not_http", httpx.RemoteProtocolError),
    ],
)
def test_no_answer_is_an_error(
    server: DemoModelServer, words: str, error: type[httpx.TransportError]
) -> None:
    async def run() -> None:
        async with opened() as transport:
            with pytest.raises(error):
                await transport.handle_async_request(request(server, words))

    asyncio.run(run())


@pytest.mark.parametrize("words", ["demo:reset_after=3", "demo:eof_after=3"])
def test_an_answer_that_breaks_off_is_an_error_after_what_came(
    server: DemoModelServer, words: str
) -> None:
    async def run() -> None:
        async with opened() as transport:
            response = await transport.handle_async_request(request(server, words, stream=True))
            came = b""
            with pytest.raises(httpx.ReadError):
                async for data in response.stream:  # type: ignore[union-attr]
                    came += data
            assert came.startswith(b"data: ")
            await response.aclose()

    asyncio.run(run())


def test_a_port_where_nobody_listens_is_a_connect_error() -> None:
    async def run() -> None:
        async with opened() as transport:
            with pytest.raises(httpx.ConnectError):
                url = httpx.URL("http://127.0.0.1:9/v1/chat/completions")
                await transport.handle_async_request(Request("POST", url, {}, b"{}"))

    asyncio.run(run())


def test_an_answer_that_is_given_up_closes_its_connection(server: DemoModelServer) -> None:
    async def run() -> None:
        async with opened() as transport:
            response = await transport.handle_async_request(
                request(server, "demo:hang_after=2", stream=True)
            )
            await response.aclose()

    server.reset_counters()
    asyncio.run(run())
    (received,) = server.wait_for_requests(1)
    server.wait_for_close(received)


def test_a_header_value_with_a_line_end_is_refused() -> None:
    async def run() -> None:
        async with opened() as transport:
            url = httpx.URL("http://127.0.0.1:9/")
            with pytest.raises(httpx.LocalProtocolError):
                await transport.handle_async_request(
                    Request("POST", url, {"x-request-id": "a\r\nx-evil: b"}, b"")
                )

    asyncio.run(run())
