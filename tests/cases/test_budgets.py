"""Section C: budgets and concurrency."""

import asyncio
import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET, create_connection, create_server, socket

import httpx
import pytest
from django.db import connections

from billing import ledger
from billing.models import Organization
from gateway.transport import Request, Transport
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess, gateway
from tests.test_completions import body
from tests.test_document import Api, error, wait_until
from tests.test_refusals import head
from tests.test_settlement import COUNTS, estimate, price, sent, settled

MIB = 2**20


@pytest.fixture
def two(api: Api, uvicorn_served: GatewayProcess) -> list[Api]:
    """Two processes of the same gateway."""
    return [api, replace(api, gateway=uvicorn_served)]


def test_c22_as_many_as_the_balance_covers_are_admitted_at_once(
    two: list[Api], tenant: Callable[..., Tenant]
) -> None:
    text = "demo:gate"
    hold = price(estimate(text), 0, 1000)
    # Credits for three holds and a picodollar: the fourth begins on what is left, the fifth not.
    poor = tenant("poor", credits=str(3 * hold + Decimal("1e-12")))
    apis = [each.of(poor) for each in two]
    with ThreadPoolExecutor(8) as threads:
        asked = [
            threads.submit(apis[number % 2].post, body(text, max_tokens=1000))
            for number in range(8)
        ]
        # Nobody who was admitted is answered before the gate opens.
        answered = as_completed(asked, timeout=60)
        refusals = [next(answered).result() for _ in range(4)]
        apis[0].backend.wait_for_requests(4, timeout=60)
        apis[0].backend.open_gate()
        admitted = [one.result() for one in answered]
    assert [answer.status_code for answer in refusals] == [402] * 4
    assert {error(answer)["code"] for answer in refusals} == {"insufficient_credits"}
    assert [answer.status_code for answer in admitted] == [200] * 4
    assert len(poor.events()) == apis[0].backend.most_in_flight == 4


def test_c23_charges_and_top_ups_at_once_are_all_in_the_balance(
    two: list[Api], tenant: Callable[..., Tenant]
) -> None:
    busy = tenant("busy", credits="1", max_in_flight=100)
    apis = [each.of(busy) for each in two]

    def top_up(number: int) -> None:
        try:
            ledger.grant(
                organization=Organization.objects.get(pk=busy.organization.pk),
                amount=Decimal(5),
                actor="tests",
                reason="Top-up",
                idempotency_key=f"{busy.organization.pk}-{number}",
            )
        finally:
            connections.close_all()

    with ThreadPoolExecutor(24) as threads:
        answers = [threads.submit(apis[number % 2].post, body(COUNTS)) for number in range(40)]
        top_ups = [threads.submit(top_up, number) for number in range(5)]
        assert {one.result().status_code for one in answers} == {200}
        for one in top_ups:
            one.result()
    assert len(busy.charges()) == 40
    assert busy.balance == 26 - 40 * price(30, 20, 5)


def test_c26_a_small_balance_is_used_up_and_a_hold_is_no_spend(
    api: Api, tenant: Callable[..., Tenant]
) -> None:
    # A context window at the output price costs 0.011 USD; this is a hundred-thousandth of it.
    poor = api.of(tenant("poor", credits="0.0000001"))
    with poor.streaming(f"{COUNTS} demo:hang_after=2", model="gpt-oss-120b") as answer:
        assert answer.status_code == 200
        credits = poor.get("credits").json()
        assert credits["balance"] == "0.0000001"
        assert Decimal(credits["held"]) > Decimal(credits["balance"])
        refusal = error(poor.post(body()))
        assert refusal["code"] == "insufficient_credits"
        assert "0.0000001 USD" in refusal["message"]
    wait_until(lambda: poor.tenant.standing.in_flight == 0)


@contextmanager
def reading(api: Api, text: str, *, reset: bool) -> Iterator[None]:
    """Read a stream's first event on a connection that ends in a reset or properly."""
    content = json.dumps(body(text, stream=True)).encode()
    with create_connection(("127.0.0.1", api.gateway.port), timeout=60) as connection:
        if reset:
            connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(head(api, f"Content-Length: {len(content)}") + content)
        received = b""
        while b"data: {" not in received:
            received += connection.recv(65536)
        yield


@pytest.mark.parametrize("reset", [True, False])
def test_c27_eight_that_are_broken_off_leave_eight_slots(api: Api, reset: bool) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(reading(api, "demo:hang_after=2", reset=reset))
        assert api.post(body()).status_code == 429
    wait_until(lambda: api.tenant.standing.in_flight == 0)
    with api.in_flight(8) as streams:
        assert {stream.status_code for stream in streams} == {200}
    assert {event.state for event in settled(api)} == {"cancelled"}


def test_c28_an_upload_that_breaks_off_takes_no_slot(api: Api) -> None:
    for _ in range(20):
        with suppress(OSError), create_connection(("127.0.0.1", api.gateway.port)) as connection:
            connection.sendall(head(api, "Content-Length: 1000") + b"{")
    assert api.post(body()).status_code == 200
    assert len(api.tenant.events()) == 1


def test_c28_one_good_request_after_many_bad_ones(api: Api) -> None:
    bad: list[object] = [
        b"{",
        json.dumps(body(model="no such model")).encode(),
        body("demo:eof"),
        body(model="unreachable"),
    ]
    with ThreadPoolExecutor(4) as threads:
        for answer in threads.map(api.post, bad * 20):
            assert answer.status_code in (400, 404, 502)
    assert api.tenant.standing.in_flight == 0
    assert api.post(body()).status_code == 200


def test_c32_readers_that_stop_cost_little_memory(on_uvicorn: Api, catalog: None) -> None:
    # Each answer has tens of MiB; daphne is exempt, see docs/cases.md.
    text = "demo:tokens=30000"
    with gateway(KILN_STALLED_READER_SECONDS="1") as running:
        api = replace(on_uvicorn, gateway=running)
        assert api.post(body(n=4, stream=True)).status_code == 200
        before = _most_memory(running)
        with ExitStack() as stack:
            for _ in range(8):
                api.backend.reset_counters()
                stack.enter_context(sent(api, text, stream=True, n=4))
            wait_until(lambda: api.tenant.standing.in_flight == 0)
            after = _most_memory(running)
        answers = [each for each in api.tenant.events() if each.state == "cancelled"]
    assert len(answers) == 8
    assert all(0 < each.completion_tokens < 120_000 for each in answers)
    assert after - before <= 8 * 2 * MIB


def _most_memory(running: GatewayProcess) -> int:
    """Return the most bytes that the process has had in memory at any time."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def test_c33_a_connect_that_hangs_is_given_up() -> None:
    async def connect(port: int) -> None:
        transport = Transport(connect_seconds=0.2)
        url = httpx.URL(f"http://127.0.0.1:{port}/")
        with pytest.raises(httpx.ConnectTimeout):
            await transport.handle_async_request(Request("POST", url, {}, b"{}"))
        await transport.aclose()

    with ExitStack() as stack:
        # Nobody accepts, and the queue of those who wait for it is full.
        busy = stack.enter_context(create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket())
            waiting.setblocking(False)
            waiting.connect_ex(busy.getsockname())
        asyncio.run(connect(busy.getsockname()[1]))
