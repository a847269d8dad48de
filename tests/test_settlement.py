"""Who pays, what and when: the backend's answer, the client's, and the money, from outside.

Customers pay for what they received, never for our failures. Whatever happens, the event, the
ledger, the balance, `usage.cost` and `/v1/generations` tell one amount to the last digit.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any, NoReturn

import httpx
import pytest

from billing.models import UsageEvent
from billing.money import plain
from kiln_site.demo.model_server import DemoModelServer
from kiln_site.demo.records import ReceivedRequest
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess, gateway
from tests.test_completions import body
from tests.test_document import (
    CLIENT,
    USAGE_ASKED,
    WEATHER,
    Api,
    chunks,
    error,
    seen_by,
    wait_until,
)

CREDITS = Decimal(5)
COUNTS = "demo:prompt_tokens=30 demo:cached=20 demo:tokens=5"
QWEN = (Decimal("0.08"), Decimal("0.04"), Decimal("0.28"))
SWITCHED = (Decimal("1"), Decimal("0.5"), Decimal("2.000001"))


@pytest.fixture
def api(served: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """Acme's view of the gateway on either server."""
    return seen_by(acme, served, model_server)


@pytest.fixture
def on_uvicorn(uvicorn_served: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """Acme's view of a gateway on uvicorn, for what does not depend on the server."""
    return seen_by(acme, uvicorn_served, model_server)


def price(prompt: int, cached: int, completion: int, prices: tuple[Decimal, ...] = QWEN) -> Decimal:
    """Return what so many tokens cost, `cached` of the `prompt` at the price of cached ones."""
    of_input, of_cached, of_output = prices
    return ((prompt - cached) * of_input + cached * of_cached + completion * of_output) / 10**6


def estimate(text: str) -> int:
    """Return the tokens of a prompt that nobody counted: a quarter of its bytes, rounded up."""
    return -(-len(text.encode()) // 4)


def settled(api: Api) -> list[UsageEvent]:
    """Wait until nothing runs, check that all tell the same amounts, and return the events."""
    wait_until(lambda: api.tenant.standing.in_flight == 0)
    events = api.tenant.events()
    assert sorted(api.tenant.charges()) == sorted(-event.cost for event in events if event.cost)
    assert api.tenant.balance == CREDITS - sum(event.cost for event in events)
    credits = api.get("credits").json()
    assert credits == {
        "balance": plain(api.tenant.balance),
        "held": "0",
        "available": plain(api.tenant.balance),
    }
    for event in events:
        answer = api.get(f"generations/{event.pk}")
        assert f'"total_cost":{plain(event.cost)},' in answer.text
        told = answer.json()
        assert told["state"] == event.state
        assert told["usage_source"] == event.usage_source
        assert told["tokens_prompt"] == event.prompt_tokens
        assert told["cached_tokens"] == event.cached_tokens
        assert told["tokens_completion"] == event.completion_tokens
    return events


def one(api: Api) -> UsageEvent:
    [event] = settled(api)
    return event


def tokens(event: UsageEvent) -> tuple[int, int, int]:
    return event.prompt_tokens, event.cached_tokens, event.completion_tokens


def cost_in(answer: httpx.Response) -> str:
    """Return `usage.cost` as it is written."""
    [cost] = re.findall(r'"cost":([^,}]+)', answer.text)
    assert re.fullmatch(r"0|[0-9]+\.[0-9]*[1-9]", cost)
    return str(cost)


def events_of(content: bytes) -> list[bytes]:
    """Return the data of each event of a stream, comments left out."""
    *events, rest = content.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith((b"data: ", b": ")) and b"\n" not in event for event in events)
    return [event[6:] for event in events if event.startswith(b"data: ")]


def texts(events: list[bytes]) -> str:
    """Return the text of a stream's events, of valid JSON all of them."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(name)

    found = [json.loads(event, parse_constant=refuse) for event in events if event != b"[DONE]"]
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in found
        for choice in chunk.get("choices", ())
    )


# --- Complete answers -----------------------------------------------------------------------------

REPORTED = [
    "",
    "demo:usage=last_content",
    "demo:usage=last_content demo:no_done",
    "demo:usage=every_chunk",
    "demo:usage=zero_between",
    "demo:usage=null_between",
    "demo:usage=no_choices",
    "demo:usage=null_choices",
    "demo:usage=unasked",
    "demo:usage=twice",
    "demo:usage=wrong_total",
    "demo:finish_with_text",
    "demo:empty_chunks",
    "demo:error_null",
    "demo:comment",
    "demo:junk",
    "demo:no_done",
    "demo:done_twice",
    "demo:after_done",
    "demo:stay_open",
    "demo:close",
    "demo:split=1",
    "demo:glue=100",
    "demo:crlf",
    "demo:crlf demo:split=1",
    "demo:cr",
    "demo:no_space",
    "demo:bom",
    "demo:bom demo:split=1",
    "demo:no_final_blank",
    "demo:u2028 demo:split=2",
    "demo:other_model",
]


@pytest.mark.parametrize("words", REPORTED)
def test_a_complete_answer_costs_what_is_reported(on_uvicorn: Api, words: str) -> None:
    api, text = on_uvicorn, f"{COUNTS} {words}"
    whole = api.post(body(text))
    streamed = api.post(body(text, **USAGE_ASKED))
    silent = api.post(body(text, stream=True))
    assert "usage" not in silent.text
    assert chunks(streamed)[-1]["choices"] == []
    assert len(chunks(silent)) == len(chunks(streamed)) - 1
    for answer in (whole, streamed):
        assert cost_in(answer) == plain(price(30, 20, 5)) == "0.000003"
        assert '"total_tokens":35,' in answer.text
    for event in settled(api):
        assert event.state == "succeeded"
        assert event.usage_source == "reported"
        assert tokens(event) == (30, 20, 5)
        assert event.cost == price(30, 20, 5)
        assert event.finish_reason == "stop"
        assert (event.status_code, event.error) == (200, "")


def test_reasoning_tokens_are_paid_once(api: Api) -> None:
    text = f"{COUNTS} demo:reasoning=7"
    costs = {cost_in(api.post(body(text, **fields))) for fields in ({}, USAGE_ASKED)}
    assert costs == {plain(price(30, 20, 12))}
    for event in settled(api):
        assert (event.completion_tokens, event.reasoning_tokens) == (12, 7)


def test_all_choices_are_paid_once(api: Api) -> None:
    for fields in ({"n": 3}, {"n": 3, **USAGE_ASKED}):
        answer = api.post(body(COUNTS, **fields))
        assert cost_in(answer) == plain(price(30, 20, 15))
    assert {event.completion_tokens for event in settled(api)} == {15}


def test_tool_calls_cost_the_same_streamed_and_not(api: Api) -> None:
    text = "Weather in Oslo? demo:tool_calls=3 demo:cached=0"
    whole = api.post(body(text, tools=[WEATHER]))
    streamed = api.post(body(text, tools=[WEATHER], **USAGE_ASKED))
    assert cost_in(whole) == cost_in(streamed)
    first, second = settled(api)
    assert tokens(first) == tokens(second)
    assert first.cost == second.cost > 0


def test_a_model_without_a_cached_price_charges_its_input_price(api: Api) -> None:
    prices = (Decimal("0.015"), Decimal("0.015"), Decimal("0.085"))
    answer = api.post(body(COUNTS, model="gpt-oss-120b"))
    assert cost_in(answer) == plain(price(30, 20, 5, prices))
    assert one(api).cost == price(30, 0, 5, prices)


def test_the_smallest_cost_is_not_rounded(api: Api) -> None:
    text = "demo:prompt_tokens=0 demo:cached=0 demo:tokens=1"
    answer = api.post(body(text, model="acme/switched:1"))
    assert cost_in(answer) == "0.000002000001"
    assert one(api).cost == Decimal("0.000002000001")


def test_nothing_in_the_body_changes_the_price(api: Api) -> None:
    fields: dict[str, Any] = {
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cost": 0},
        "cost": 0,
        "prices": {"input": "0"},
        "organization": "globex",
        "metadata": {"_strip_usage": True, "model": "gpt-oss-120b"},
        "stream": True,
        "stream_options": {"include_usage": False, "continuous_usage_stats": True},
    }
    seen = chunks(api.post(body(COUNTS, **fields)))
    assert not any("usage" in chunk for chunk in seen)
    assert api.forwarded["stream_options"] == {"include_usage": True}
    assert one(api).cost == price(30, 20, 5)


# --- Usage that is not there, or cannot be believed ----------------------------------------------


@pytest.mark.parametrize("kind", ["none", "null", "null_counts"])
def test_missing_usage_is_counted_or_estimated(api: Api, kind: str) -> None:
    not_reported(api, kind)


@pytest.mark.parametrize("kind", ["negative", "string", "huge", "cached_over"])
def test_nonsense_counts_as_missing_and_is_flagged(api: Api, kind: str) -> None:
    for event in not_reported(api, kind):
        assert event.anomaly


def not_reported(api: Api, kind: str) -> list[UsageEvent]:
    text = f"demo:tokens=5 demo:usage={kind}"
    whole = api.post(body(text))
    streamed = api.post(body(text, **USAGE_ASKED))
    content = whole.json()["choices"][0]["message"]["content"]
    expected = [
        ("estimated", (estimate(text), 0, estimate(content))),
        ("counted", (estimate(text), 0, 5)),
    ]
    events = settled(api)
    assert [(event.usage_source, tokens(event)) for event in events] == expected
    for event, answer in zip(events, (whole, streamed), strict=True):
        assert event.state == "succeeded"
        assert event.cost == price(*tokens(event)) > 0
        assert cost_in(answer) == plain(event.cost)
    usage = whole.json()["usage"]
    assert usage["prompt_tokens"] == estimate(text)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return events


def test_prompts_are_estimated_by_the_bytes_of_their_texts(api: Api) -> None:
    messages = [
        {"role": "system", "content": "世界"},
        {"role": "user", "content": [{"type": "text", "text": "demo:usage=none"}, {"text": "é"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "demo:usage=none"},
    ]
    api.ask(messages=messages)
    assert one(api).prompt_tokens == -(-(6 + 15 + 2 + 15) // 4)


def test_reasoning_and_tool_arguments_are_counted_too(api: Api) -> None:
    api.stream("demo:usage=none demo:reasoning=4 demo:tokens=5")
    seen = api.stream("Weather in Oslo? demo:usage=none", tools=[WEATHER])
    fragments = [
        call["function"]["arguments"]
        for chunk in seen
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    first, second = settled(api)
    assert first.completion_tokens == 9
    assert second.completion_tokens == len([one for one in fragments if one]) > 0


def test_an_estimate_is_never_above_the_hold(api: Api) -> None:
    text = "demo:big=100000 demo:usage=none"
    answer = api.post(body(text, max_tokens=10))
    event = one(api)
    assert event.completion_tokens == 10
    assert event.cost == event.hold == price(estimate(text), 0, 10)
    assert cost_in(answer) == plain(event.cost)


def test_believable_usage_is_never_clamped(api: Api) -> None:
    # More than the hold, within the context window: the backend's word.
    api.post(body("demo:big=100000 demo:prompt_tokens=32768 demo:cached=0", max_tokens=10))
    event = one(api)
    assert tokens(event) == (32768, 0, 6250)
    assert event.cost == price(32768, 0, 6250) > event.hold


def test_a_prompt_beyond_the_context_window_is_nonsense(api: Api) -> None:
    api.post(body("demo:prompt_tokens=32769 demo:tokens=5"))
    event = one(api)
    assert (event.usage_source, bool(event.anomaly)) == ("estimated", True)


@pytest.mark.parametrize("fields", [{}, USAGE_ASKED])
def test_an_explicit_zero_is_respected(api: Api, fields: dict[str, Any]) -> None:
    answer = api.post(body("demo:tokens=5 demo:usage=zero", **fields))
    assert cost_in(answer) == "0"
    event = one(api)
    assert (event.state, event.usage_source, event.cost) == ("succeeded", "reported", 0)
    assert tokens(event) == (0, 0, 0)


def test_null_details_are_no_cached_tokens(api: Api) -> None:
    assert cost_in(api.post(body(f"{COUNTS} demo:usage=null_details"))) == plain(price(30, 0, 5))
    assert one(api).cached_tokens == 0


# --- The client leaves ----------------------------------------------------------------------------


@contextmanager
def sent(api: Api, text: str, **fields: Any) -> Iterator[ReceivedRequest]:
    """Send a request and read nothing; it is with the backend. At the end the client leaves."""
    content = json.dumps(body(text, **fields)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {api.tenant.secret}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", api.gateway.port), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        *_, request = api.backend.wait_for_requests(1, timeout=30)
        yield request


def left(api: Api, state: str = "cancelled") -> UsageEvent:
    """Check that the backend was cancelled and the slot is free, and return the event."""
    [request] = api.backend.chat_requests
    api.backend.wait_for_close(request, timeout=30)
    event = one(api)
    assert event.state == state
    return event


def read(answer: httpx.Response, events: int) -> None:
    """Read so many events of a stream."""
    received = b""
    for piece in answer.iter_raw():
        received += piece
        if received.count(b"\n\n") >= events:
            return
    raise AssertionError(received)


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_before_the_first_token_pays_the_prompt(api: Api, stream: bool) -> None:
    text = "Hello! demo:hang"
    with sent(api, text, stream=stream):
        assert api.tenant.standing.in_flight == 1
    event = left(api)
    assert tokens(event) == (estimate(text), 0, 0)
    assert event.cost == price(estimate(text), 0, 0) > 0


def test_who_leaves_in_the_middle_pays_what_was_produced(api: Api) -> None:
    text = "Hello! demo:hang_after=4"
    with api.streaming(text) as answer:
        read(answer, 4)
    event = left(api)
    assert event.usage_source == "counted"
    assert tokens(event) == (estimate(text), 0, 3)  # the first chunk carries the role, no token
    assert event.cost == price(estimate(text), 0, 3)
    assert event.status_code == 200


@pytest.mark.parametrize(
    ("model", "words", "prices"),
    [("acme/switched:1", "", SWITCHED), ("qwen3-32b", "demo:usage=every_chunk", QWEN)],
)
def test_who_leaves_pays_by_the_servers_own_count_where_there_is_one(
    api: Api, model: str, words: str, prices: tuple[Decimal, ...]
) -> None:
    with api.streaming(f"{COUNTS} demo:hang_after=4 {words}", model=model) as answer:
        read(answer, 4)
    event = left(api)
    assert event.usage_source == "continuous"
    assert tokens(event) == (30, 20, 3)
    assert event.cost == price(30, 20, 3, prices)


def test_who_leaves_after_the_last_word_pays_what_is_reported(api: Api) -> None:
    # Role, five tokens, finish_reason: the seventh chunk. The usage follows when the gate opens.
    with api.streaming(f"{COUNTS} demo:gate_after=7") as answer:
        read(answer, 7)
    api.backend.open_gate()
    event = one(api)
    assert event.usage_source == "reported"
    assert tokens(event) == (30, 20, 5)
    assert event.cost == price(30, 20, 5)


def test_who_leaves_after_the_last_word_pays_what_was_counted_if_nothing_follows(
    api: Api,
) -> None:
    text = f"{COUNTS} demo:hang_after=7"
    with api.streaming(text) as answer:
        read(answer, 7)
    event = left(api)
    assert event.usage_source == "counted"
    assert tokens(event) == (estimate(text), 0, 5)


def test_eight_who_leave_free_eight_slots(api: Api) -> None:
    for _ in range(2):
        with api.in_flight(8):
            assert api.post(body()).status_code == 429
    assert api.post(body()).status_code == 200
    states = [event.state for event in settled(api)]
    assert states == ["cancelled"] * 16 + ["succeeded"]


# --- The backend fails in the middle --------------------------------------------------------------

BROKEN = [
    "demo:reset_after=3",
    "demo:eof_after=3",
    "demo:end_after=3",
    "demo:error_after=3",
    "demo:error_string=3",
    "demo:error_after=3 demo:shape=old",
    "demo:error_after=3 demo:glue=100",
    "demo:error_after=7",
]


@pytest.mark.parametrize("words", BROKEN)
def test_who_was_failed_in_the_middle_pays_nothing(api: Api, words: str) -> None:
    answer = api.post(body(f"{COUNTS} {words}", **USAGE_ASKED))
    assert answer.status_code == 200
    *before, last = events_of(answer.content)
    assert before and b"[DONE]" not in answer.content
    assert texts(before)
    failure = json.loads(last)
    assert failure.keys() == {"error"}
    assert failure["error"].keys() == {"message", "type", "param", "code"}
    assert failure["error"]["type"] == "server_error"
    assert re.fullmatch(r"[A-Z][A-Za-z ,.]+\.", failure["error"]["message"])  # names no host
    assert "cost" not in answer.text
    event = one(api)
    assert (event.state, event.status_code, event.cost) == ("failed", 200, 0)
    assert event.usage_source == "none"
    assert event.error == failure["error"]["message"]


@pytest.mark.parametrize("words", BROKEN)
def test_who_was_failed_before_the_end_of_a_whole_answer_pays_nothing(api: Api, words: str) -> None:
    answer = api.post(body(f"{COUNTS} {words}"))
    assert answer.status_code == 502
    event = one(api)
    assert (event.state, event.status_code, event.cost) == ("failed", 502, 0)


def test_an_error_as_first_event_still_gets_a_status(api: Api) -> None:
    failed = api.post(body("demo:error_first", stream=True))
    refused = api.post(body("demo:error_first=400", stream=True))
    assert (failed.status_code, refused.status_code) == (502, 400)
    assert failed.headers["content-type"].partition(";")[0] == "text/plain"
    assert error(refused)["code"] is None
    assert [(event.state, event.cost) for event in settled(api)] == [("failed", 0)] * 2


# --- The bytes of a stream ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["", "demo:no_done", "demo:done_twice", "demo:after_done", "demo:stay_open"]
)
def test_done_comes_once_and_last(api: Api, words: str) -> None:
    answer = api.post(body(f"demo:tokens=5 {words}", stream=True))
    events = events_of(answer.content)
    assert events.count(b"[DONE]") == 1
    assert events[-1] == b"[DONE]"
    assert b"late" not in answer.content
    assert one(api).state == "succeeded"


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("demo:emoji demo:split=1", "👩\u200d👩\u200d👧 — und 日本"),
        ("demo:u2028", " one\u2028two three\u2029four five\u0085six"),
        ("demo:nan", ""),
        ("demo:nul", " \0"),
        ("demo:surrogate", " \ud800"),
        ("demo:big=500000", "x" * 500_000),
    ],
)
def test_texts_arrive_whole_and_as_valid_json(on_uvicorn: Api, words: str, end: str) -> None:
    api = on_uvicorn
    streamed = texts(events_of(api.post(body(f"Hi. {words}", **USAGE_ASKED)).content))
    whole = api.post(body(f"Hi. {words}"))
    assert b"NaN" not in whole.content and b"Infinity" not in whole.content
    assert streamed == whole.json()["choices"][0]["message"]["content"]
    assert streamed.endswith(end)
    first, second = settled(api)
    assert first.cost == second.cost > 0


def test_a_line_of_megabytes_passes_whole(on_uvicorn: Api) -> None:
    answer = on_uvicorn.post(body("demo:big=5000000", stream=True))
    assert texts(events_of(answer.content)) == "x" * 5_000_000
    assert one(on_uvicorn).state == "succeeded"


def test_events_are_relayed_byte_for_byte(api: Api) -> None:
    # Blanks, order and unknown fields as no serializer would write them.
    said = b'{ "id":"x", "choices":[ {"index":0, "delta":{"content":"a"}, "token_ids":[1]}],'
    said += b' "model" : "qwen3-32b", "prompt_logprobs": null, "odd": 1.50 }'
    ended = said.replace(b'"delta":{"content":"a"}', b'"delta":{}, "finish_reason":"stop"')
    usage = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
    api.backend.scripts["odd"] = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
        b"event: message\nid: 1\nretry: 5\ndata: " + said + b"\n\n",
        b"data:" + ended + b"\n\n: ping\n\ndata:\n\ndata: " + usage + b"\n\n",
    ]
    answer = api.post(body("demo:script=odd", stream=True))
    assert answer.content == b"data: %s\n\ndata: %s\n\ndata: [DONE]\n\n" % (said, ended)
    assert tokens(one(api)) == (3, 0, 1)


def test_comments_and_junk_never_become_data(api: Api) -> None:
    plain_answer = texts(events_of(api.post(body("Hi.", stream=True)).content))
    for words in ("demo:comment", "demo:junk", "demo:empty_chunks"):
        events = events_of(api.post(body(f"Hi. {words}", stream=True)).content)
        assert texts(events) == plain_answer
        assert all(event == b"[DONE]" or json.loads(event)["choices"] for event in events)


# --- Keepalive and limits -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def patient_gateway(catalog: None) -> Iterator[GatewayProcess]:
    with gateway(KILN_KEEPALIVE_SECONDS="0.3") as running:
        yield running


@pytest.fixture(scope="module")
def hasty_gateway(catalog: None) -> Iterator[GatewayProcess]:
    with gateway(
        KILN_FIRST_BYTE_SECONDS="1", KILN_IDLE_SECONDS="1", KILN_FRAME_MAX_MIB="1"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def short_gateway(catalog: None) -> Iterator[GatewayProcess]:
    with gateway(KILN_TOTAL_SECONDS="1.5", KILN_STALLED_READER_SECONDS="1") as running:
        yield running


def test_comments_keep_a_stream_alive_before_the_first_token(
    on_uvicorn: Api, patient_gateway: GatewayProcess
) -> None:
    api = replace(on_uvicorn, gateway=patient_gateway)
    with api.streaming(f"{COUNTS} demo:gate") as answer:
        assert answer.status_code == 200  # before the backend said anything
        assert answer.headers["x-neocloud-generation-id"]
        pieces = answer.iter_raw()
        received = b""
        while received.count(b": keepalive\n\n") < 2:
            received += next(pieces)
        assert received.replace(b": keepalive\n\n", b"") == b""
        api.backend.open_gate()
        received = b"".join(pieces)
    assert texts(events_of(received))
    assert received.endswith(b"data: [DONE]\n\n")
    event = one(api)
    assert tokens(event) == (30, 20, 5)


def test_comments_come_between_events_only(
    on_uvicorn: Api, patient_gateway: GatewayProcess
) -> None:
    api = replace(on_uvicorn, gateway=patient_gateway)
    with api.streaming(f"{COUNTS} demo:gate_after=3") as answer:
        pieces = answer.iter_raw()
        received = b""
        while received.count(b": keepalive\n\n") < 2:
            received += next(pieces)
        api.backend.open_gate()
        received += b"".join(pieces)
    assert events_of(received)[-1] == b"[DONE]"
    assert set(received.split(b"\n\n")) - {b"data: " + one for one in events_of(received)} == {
        b": keepalive",
        b"",
    }
    assert tokens(one(api)) == (30, 20, 5)


def test_a_backend_that_fails_after_the_first_comment_fails_the_stream(
    on_uvicorn: Api, patient_gateway: GatewayProcess
) -> None:
    api = replace(on_uvicorn, gateway=patient_gateway)
    with api.streaming("demo:gate demo:status=500") as answer:
        pieces = answer.iter_raw()
        received = next(pieces)
        api.backend.open_gate()
        received += b"".join(pieces)
    [failure] = events_of(received)
    assert json.loads(failure)["error"]["type"] == "server_error"
    event = one(api)
    assert (event.state, event.status_code, event.cost) == ("failed", 200, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("words", ["demo:hang", "demo:think=60", "demo:pings"])
def test_502_when_nothing_comes(
    on_uvicorn: Api, hasty_gateway: GatewayProcess, words: str, stream: bool
) -> None:
    # Comments are no answer: they do not put the limit off.
    api = replace(on_uvicorn, gateway=hasty_gateway)
    answer = api.post(body(words, stream=stream))
    assert answer.status_code == 502
    assert answer.headers["content-type"].partition(";")[0] == "text/plain"
    event = left(api, "failed")
    assert answer.headers["x-neocloud-generation-id"] == str(event.pk)
    assert (event.status_code, event.cost) == (502, 0)


@pytest.mark.parametrize("words", ["demo:hang_after=3", "demo:endless_line"])
def test_a_stream_that_falls_silent_or_never_ends_a_line_fails(
    on_uvicorn: Api, hasty_gateway: GatewayProcess, words: str
) -> None:
    api = replace(on_uvicorn, gateway=hasty_gateway)
    answer = api.post(body(words, stream=True))
    *_, last = events_of(answer.content)
    assert json.loads(last)["error"]["type"] == "server_error"
    assert b"[DONE]" not in answer.content
    event = left(api, "failed")
    assert (event.status_code, event.cost) == (200, 0)


def test_what_was_produced_until_the_total_limit_is_paid(
    on_uvicorn: Api, short_gateway: GatewayProcess
) -> None:
    api = replace(on_uvicorn, gateway=short_gateway)
    text = "demo:tokens=100000 demo:pace=50"
    answer = api.post(body(text, stream=True))
    *content, last = events_of(answer.content)
    assert json.loads(last)["error"]["type"] == "server_error"
    event = left(api)
    assert event.usage_source == "counted"
    assert tokens(event) == (estimate(text), 0, len(content) - 1)
    assert event.cost == price(estimate(text), 0, len(content) - 1) > 0


def test_a_client_that_does_not_read_is_given_up_and_pays(on_uvicorn: Api, catalog: None) -> None:
    text = "demo:tokens=30000"  # times four, and all of it more than sockets hold
    with gateway(KILN_STALLED_READER_SECONDS="1") as running:
        api = replace(on_uvicorn, gateway=running)
        with sent(api, text, stream=True, n=4):
            event = left(api)
    assert event.usage_source == "counted"
    assert event.prompt_tokens == estimate(text)
    assert 0 < event.completion_tokens < 120_000


# --- The event ------------------------------------------------------------------------------------


def test_the_event_is_readable_from_the_moment_the_header_is_out(api: Api) -> None:
    with api.streaming("Hello! demo:hang_after=2") as answer:
        generation_id = answer.headers["x-neocloud-generation-id"]
        assert answer.headers["x-request-id"] == generation_id
        told = api.get(f"generations/{generation_id}").json()
        assert told["id"] == generation_id
        assert told["state"] == "in_flight"
        assert (told["total_cost"], told["tokens_completion"]) == (0, 0)
        assert told["model"] == "qwen3-32b"
        assert told["streamed"] is True
        assert told["prices"] == {"input": "0.08", "cached_input": "0.04", "output": "0.28"}
        held = api.tenant.event(answer).hold
        credits = api.get("credits").json()
        assert credits["held"] == plain(held)
        assert held == price(estimate("Hello! demo:hang_after=2"), 0, 16384)
    assert one(api).state == "cancelled"


def test_the_event_tells_what_happened(api: Api) -> None:
    answer = api.post(body(f"{COUNTS} demo:reasoning=2"))
    streamed = api.post(body(COUNTS, stream=True))
    told = api.get(f"generations/{answer.headers['x-neocloud-generation-id']}").json()
    assert told["finish_reason"] == "stop"
    assert told["status_code"] == 200
    assert told["reasoning_tokens"] == 2
    assert told["api_key"] == {"name": "default", "last4": api.tenant.secret[-4:]}
    assert told["error"] is None
    assert told["latency_ms"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", told["created_at"])
    told = api.get(f"generations/{streamed.headers['x-neocloud-generation-id']}").json()
    assert told["latency_ms"] >= told["time_to_first_token_ms"] >= 0
    settled(api)


def test_404_for_the_generation_of_another_organization(api: Api, globex: Tenant) -> None:
    answer = api.post(body())
    path = f"generations/{answer.headers['x-neocloud-generation-id']}"
    assert api.get(path).status_code == 200
    refused = api.of(globex).get(path)
    assert refused.status_code == 404
    unknown = api.get("generations/01900000-0000-7000-8000-000000000000")
    assert (refused.status_code, error(refused)) == (unknown.status_code, error(unknown))


def test_the_hold_is_what_the_request_could_cost(api: Api) -> None:
    limits: list[tuple[dict[str, Any], int]] = [
        ({}, 16384),
        ({"max_tokens": 10}, 10),
        ({"max_completion_tokens": 20}, 20),
        ({"max_tokens": 10, "max_completion_tokens": 20}, 20),
        ({"max_tokens": 10, "n_predict": 30}, 30),
        ({"max_tokens": 10, "n": 3}, 30),
        ({"max_tokens": 10**9}, 16384),
        ({"max_tokens": None}, 16384),
    ]
    for fields, output in limits:
        event = api.tenant.event(api.post(body("Hello!", **fields)))
        assert event.hold == price(estimate("Hello!"), 0, output), fields
    event = api.tenant.event(api.post(body("Hello!", model="acme/switched:1")))
    assert event.hold == price(estimate("Hello!"), 0, 100, SWITCHED)
    settled(api)


# --- Other backends -------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, USAGE_ASKED])
def test_another_backend_is_asked_where_one_is_down(api: Api, fields: dict[str, Any]) -> None:
    for _ in range(3):
        answer = api.post(body(COUNTS, model="half-down", **fields))
        assert answer.status_code == 200
    for event in settled(api):
        assert (event.state, event.backend) == ("succeeded", "up")
    assert len(api.backend.chat_requests) == 3


def test_503_when_the_other_backend_is_busy(api: Api) -> None:
    answer = api.post(body("demo:status=503", model="half-down"))
    assert (answer.status_code, error(answer)["code"]) == (503, "no_backend_available")
    assert one(api).cost == 0


@pytest.mark.parametrize("words", ["demo:status=500", "demo:reset", "demo:eof_after=0"])
def test_a_request_that_a_backend_may_have_begun_is_not_repeated(api: Api, words: str) -> None:
    assert api.post(body(words, model="half-down")).status_code == 502
    assert len(api.backend.chat_requests) == 1
    assert one(api).cost == 0


def test_a_kept_connection_that_was_closed_costs_the_customer_nothing(api: Api) -> None:
    for words in ("demo:close", "demo:drop_next"):
        for fields in ({}, {"stream": True}):
            assert api.post(body(f"Hello! {words}", **fields)).status_code == 200
            assert api.post(body(COUNTS, **fields)).status_code == 200
    assert {event.state for event in settled(api)} == {"succeeded"}


# --- Headers --------------------------------------------------------------------------------------


def test_nothing_of_the_clients_headers_reaches_the_backend(api: Api) -> None:
    secret = "what-the-backend-must-not-see"
    headers = {
        **api.tenant.headers,
        **dict.fromkeys(
            [
                "x-api-key",
                "Cookie",
                "X-Forwarded-For",
                "Forwarded",
                "Proxy-Authorization",
                "User-Agent",
                "X-Request-Id",
                "X-Neocloud-Generation-Id",
                "OpenAI-Organization",
                "Referer",
                "Origin",
                "traceparent",
            ],
            secret,
        ),
        "Accept-Encoding": "gzip, br",
    }
    both: list[dict[str, Any]] = [{}, {"stream": True}]
    for fields in both:
        api.backend.reset_counters()
        url = f"{api.gateway.base_url}/chat/completions"
        answer = CLIENT.post(url, json=body(**fields), headers=headers)
        assert answer.status_code == 200
        [request] = api.backend.chat_requests
        assert {name.lower() for name, _ in request.headers} <= {
            "host",
            "content-type",
            "content-length",
            "accept",
            "accept-encoding",
            "user-agent",
            "x-request-id",
            "connection",
        }
        for _, value in request.headers:
            assert secret not in value
            assert api.tenant.secret not in value
        assert request.header("accept-encoding") == "identity"
        assert request.header("x-request-id") == answer.headers["x-neocloud-generation-id"]


def test_a_backend_gets_its_own_credential(api: Api) -> None:
    api.ask(model="with-credential")
    [request] = api.backend.chat_requests
    assert request.header("authorization") == "Bearer the-key-of-the-backend"


OURS = {
    "content-type",
    "content-length",
    "transfer-encoding",
    "connection",
    "date",
    "server",
    "x-neocloud-generation-id",
    "x-request-id",
    "x-should-retry",
    "cache-control",
    "x-accel-buffering",
}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"text": "demo:headers"}, 200),
        ({"text": "demo:headers", "stream": True}, 200),
        ({"text": "demo:headers demo:status=400"}, 400),
        ({"text": "demo:headers demo:status=500"}, 502),
        ({"text": "demo:headers demo:status=503"}, 503),
    ],
)
def test_nothing_of_the_backends_headers_reaches_the_client(
    api: Api, fields: dict[str, Any], status: int
) -> None:
    answer = api.post(body(**fields))
    assert answer.status_code == status
    assert set(answer.headers) <= OURS
    event = one(api)
    assert answer.headers["x-neocloud-generation-id"] == str(event.pk)
    assert answer.headers["x-request-id"] == str(event.pk)
    assert "demo" not in answer.headers.get("server", "")


def test_a_stream_is_not_buffered_or_compressed(api: Api) -> None:
    with api.streaming("demo:tokens=3") as answer:
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        assert answer.read().endswith(b"data: [DONE]\n\n")
    whole = api.post(body())
    assert int(whole.headers["content-length"]) == len(whole.content)
    settled(api)


# --- The parameter policy -------------------------------------------------------------------------


def test_stop_is_dropped_by_default_and_forwarded_where_an_operator_says_so(api: Api) -> None:
    text = "What do routers do?"
    full = api.ask(text, stop=[" "])["choices"][0]["message"]["content"]
    assert "stop" not in api.forwarded
    api.backend.reset_counters()
    cut = api.ask(text, stop=[" "], model="acme/switched:1")["choices"][0]["message"]["content"]
    assert api.forwarded["stop"] == [" "]
    assert full.startswith(cut) and " " in full and " " not in cut
    settled(api)


def test_what_an_operator_rejects_is_rejected(api: Api) -> None:
    answer = api.post(body(seed=7, model="acme/switched:1"))
    assert (answer.status_code, error(answer)["param"]) == (400, "seed")
    assert api.post(body(seed=None, model="acme/switched:1")).status_code == 200
    assert api.post(body(seed=7)).status_code == 200
    settled(api)


@pytest.mark.parametrize("stream", [True, False])
def test_control_fields_of_model_servers_are_dropped(api: Api, stream: bool) -> None:
    control: dict[str, Any] = {
        "priority": -1000,
        "timings_per_token": True,
        "cache_salt": "x",
        "kv_transfer_params": {"do_remote_decode": True},
    }
    api.post(body(top_k=5, stream=stream, **control))
    assert control.keys().isdisjoint(api.forwarded)
    assert api.forwarded["top_k"] == 5


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3-32b", {"include_usage": True}),
        ("acme/switched:1", {"include_usage": True, "continuous_usage_stats": True}),
    ],
)
def test_only_an_operator_decides_on_continuous_usage(
    api: Api, model: str, options: dict[str, bool]
) -> None:
    for value in (True, False, None):
        api.backend.reset_counters()
        asked = {"include_usage": True, "continuous_usage_stats": value}
        *content, last = api.stream(COUNTS, model=model, stream_options=asked)
        assert api.forwarded["stream_options"] == options
        assert all("usage" not in chunk for chunk in content)
        assert last["usage"]["completion_tokens"] == 5
    assert {tokens(event) for event in settled(api)} == {(30, 20, 5)}


def test_the_model_server_gets_its_own_name_of_the_model(api: Api) -> None:
    for fields in ({}, USAGE_ASKED):
        api.backend.reset_counters()
        answer = api.post(body(COUNTS, model="acme/switched:1", **fields))
        assert api.forwarded["model"] == "qwen3-32b"
        assert "qwen3-32b" not in answer.text
        assert answer.text.count('"model":"acme/switched:1"') >= 1
    settled(api)


def test_many_at_once_keep_the_money_exact(api: Api, tenant: Callable[..., Tenant]) -> None:
    crowd = [api.of(tenant(f"crowd-{number}")) for number in range(3)]
    with ExitStack() as stack:
        for each in crowd:
            for _ in range(8):
                stack.enter_context(each.streaming(f"{COUNTS} demo:gate_after=3"))
        api.backend.wait_for_requests(24, timeout=30)
    for each in crowd:
        events = settled(each)
        assert len(events) == 8
        assert {event.state for event in events} == {"cancelled"}
