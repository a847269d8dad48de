"""Recorded answers of three real model servers, replayed through a real socket and a gateway.

tests/data/wire has 37 answers of each server byte for byte (`*.http`, head and body) and the
request that each answered (`*.req.json`). The recorded request goes through the gateway wherever
our own checks let it pass, else a plain one; the answer is the recorded one either way.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from kiln_site.demo.model_server import DemoModelServer
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess

WIRE = Path(__file__).parent / "data" / "wire"
PLAIN = {"model": "qwen3-32b", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}

# What the gateway refuses before a model server sees it: status and code (beyond-the-page.md 3).
REFUSED: dict[str, tuple[int, str | None]] = {
    "bad_json": (400, None),
    "bad_utf8": (400, None),
    "empty_body": (400, None),
    "empty_messages": (400, "empty_array"),
    "missing_messages": (400, "empty_array"),
    "no_role": (400, None),
    "stream_options_without_stream": (400, None),
}
# What it refuses on qwen3-32b, but not on a model whose operator switched those cells (rulings.md
# 30), or which takes images.
REFUSED_BY_DEFAULT: dict[str, str | None] = {
    "image_part": None,
    "tool_bad_schema": "unsupported_parameter",
    "tool_named": "unsupported_parameter",
    "tool_named_stream": "unsupported_parameter",
    "tool_required": "unsupported_parameter",
    "tool_required_stream": "unsupported_parameter",
    "tool_required_without_tools": "unsupported_parameter",
}
SWITCHED = "acme/switched:1"
# USD per million tokens: input, cached input, output (tests/data/catalog.toml).
PRICES = {
    "qwen3-32b": (Decimal("0.08"), Decimal("0.04"), Decimal("0.28")),
    SWITCHED: (Decimal("1"), Decimal("0.5"), Decimal("2.000001")),
}
CREDITS = Decimal(5)


@dataclass(frozen=True)
class Capture:
    """One recorded answer."""

    name: str  # server/case
    raw: bytes
    status: int
    is_stream: bool
    text: str

    @property
    def case(self) -> str:
        return self.name.partition("/")[2]

    @property
    def events(self) -> list[str]:
        """The data of the events of a stream."""
        lines = self.text.splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [load(event) for event in self.events if event != "[DONE]"]


def load(text: str) -> Any:
    """Parse JSON without losing a digit."""
    return json.loads(text, parse_float=Decimal)


def read(path: Path) -> Capture:
    raw = path.read_bytes()
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    if "transfer-encoding: chunked" in lines:
        body = b"".join(dechunked(body))
    return Capture(
        name=f"{path.parent.name}/{path.stem}",
        raw=raw,
        status=int(lines[0].split(" ")[1]),
        is_stream=any(line.startswith("content-type: text/event-stream") for line in lines),
        text=body.decode(),
    )


def dechunked(body: bytes) -> Iterator[bytes]:
    while True:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


CAPTURES = {capture.name: capture for capture in map(read, sorted(WIRE.glob("*/*.http")))}


def of(*, status: tuple[int, ...], stream: bool | None = None) -> list[Any]:
    """The captures with one of these statuses, as parameters of a test."""
    return [
        pytest.param(capture, id=capture.name)
        for capture in CAPTURES.values()
        if capture.status in status and stream in (None, capture.is_stream)
    ]


def recorded_request(capture: Capture) -> bytes | None:
    """The request that was answered; of the two overflows only the answers were kept."""
    path = WIRE / f"{capture.name}.req.json"
    return path.read_bytes() if path.exists() else None


def request_for(capture: Capture) -> dict[str, Any]:
    """A request that passes our checks and asks the demo model server for this recording."""
    recorded = recorded_request(capture)
    if recorded is None or capture.case in REFUSED:
        fields: dict[str, Any] = {**PLAIN, "stream": capture.case == "overflow_stream"}
    else:
        fields = json.loads(recorded)
    fields["model"] = SWITCHED if capture.case in REFUSED_BY_DEFAULT else "qwen3-32b"
    word = f" demo:script={capture.name}"
    *earlier, last = fields["messages"]
    content = last["content"]
    if isinstance(content, str):
        said: Any = content + word
    else:
        said = [{**content[0], "text": content[0]["text"] + word}, *content[1:]]
    return {**fields, "messages": [*earlier, {**last, "content": said}]}


@dataclass(frozen=True)
class Expected:
    """What a recorded answer costs."""

    usage: dict[str, Any]  # as the client reads it, without the cost
    source: str
    cost: Decimal


def expected(capture: Capture, fields: dict[str, Any]) -> Expected:
    """Work out usage and cost from the recording alone.

    The last complete usage wins, never a sum; nulls are absent. Without one the non-empty deltas
    are counted, and the prompt is a quarter of the bytes of its texts, rounded up.
    """
    answers = capture.chunks if capture.is_stream else [load(capture.text)]
    reported = [answer["usage"] for answer in answers if answer.get("usage")]
    if reported:
        usage = {name: value for name, value in reported[-1].items() if value is not None}
    else:
        deltas = [choice["delta"] for answer in answers for choice in answer["choices"]]
        prompt = -(-len("".join(m["content"] for m in fields["messages"]).encode()) // 4)
        counted = sum(1 for delta in deltas if delta.get("content"))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": counted,
            "total_tokens": prompt + counted,
        }
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    input_price, cached_price, output_price = PRICES[fields["model"]]
    cost = (
        (usage["prompt_tokens"] - cached) * input_price
        + cached * cached_price
        + usage["completion_tokens"] * output_price
    ) / 1_000_000
    return Expected(usage, "reported" if reported else "counted", cost)


def ask(
    served: GatewayProcess,
    acme: Tenant,
    model_server: DemoModelServer,
    capture: Capture,
    fields: dict[str, Any],
    *,
    bytes_a_write: int | None = None,
) -> httpx.Response:
    """Ask for a recording and return what the client got."""
    size = bytes_a_write or len(capture.raw)
    model_server.scripts[capture.name] = [
        capture.raw[at : at + size] for at in range(0, len(capture.raw), size)
    ]
    answer = httpx.post(
        f"{served.base_url}/chat/completions", json=fields, headers=acme.headers, timeout=60
    )
    # Whatever the model server sent, these two are ours.
    assert answer.headers["x-request-id"] == answer.headers["X-Neocloud-Generation-Id"]
    assert "vary" not in answer.headers and "access-control-allow-origin" not in answer.headers
    return answer


def check_answer(
    answer: httpx.Response, acme: Tenant, capture: Capture, fields: dict[str, Any]
) -> None:
    """A 200: relayed unchanged but for model, usage and cost, and billed to the last digit."""
    due = expected(capture, fields)
    assert answer.status_code == 200
    if capture.is_stream:
        check_stream(answer, capture, fields, due)
    else:
        assert answer.headers["content-type"] == "application/json"
        assert load(answer.text) == {
            **load(capture.text),
            "model": fields["model"],
            "usage": {**due.usage, "cost": due.cost},
        }
        assert f'"cost":{plain(due.cost)}' in answer.text
    event = acme.event(answer)
    assert (event.state, event.status_code, event.usage_source) == ("succeeded", 200, due.source)
    assert event.prompt_tokens == due.usage["prompt_tokens"]
    assert event.completion_tokens == due.usage["completion_tokens"]
    assert event.streamed == capture.is_stream
    assert event.anomaly == ""
    assert event.cost == due.cost
    assert acme.charges() == [-due.cost]
    assert acme.balance == CREDITS - due.cost


def check_stream(
    answer: httpx.Response, capture: Capture, fields: dict[str, Any], due: Expected
) -> None:
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    events = events_of(answer.text)
    assert events.pop() == "[DONE]"
    assert "[DONE]" not in events
    chunks = [load(event) for event in events]
    if (fields.get("stream_options") or {}).get("include_usage"):
        last = chunks.pop()
        own: dict[str, Any] = next(
            (chunk for chunk in reversed(capture.chunks) if not chunk["choices"]), {}
        )
        assert last == {
            **last,
            **own,
            "object": "chat.completion.chunk",
            "id": capture.chunks[0]["id"],
            "model": fields["model"],
            "choices": [],
            "usage": {**due.usage, "cost": due.cost},
        }
        assert f'"cost":{plain(due.cost)}' in events[-1]
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks == [
        {name: value for name, value in chunk.items() if name != "usage"}
        | {"model": fields["model"]}
        for chunk in capture.chunks
        if chunk["choices"]
    ]


def events_of(text: str) -> list[str]:
    """The data of the events, each of which must be one `data:` line and nothing else."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and len(event.splitlines()) == 1 for event in events)
    return [event.removeprefix("data: ") for event in events]


def plain(amount: Decimal) -> str:
    return f"{amount:f}".rstrip("0").rstrip(".")


def check_not_billed(answer: httpx.Response, acme: Tenant) -> None:
    event = acme.event(answer)
    assert (event.state, event.status_code) == ("failed", answer.status_code)
    assert event.cost == 0
    assert acme.charges() == []
    assert acme.balance == CREDITS


def message_of(text: str) -> tuple[str, str | None]:
    """The recorded refusal's own words, and its `param`."""
    body = load(text)
    if "detail" in body:
        detail = body["detail"]
        return detail if isinstance(detail, str) else detail[0]["msg"], None
    return body["error"]["message"], body["error"].get("param")


def test_it_has_all_recordings() -> None:
    assert len(CAPTURES) == 111
    assert len(of(status=(200, 400, 404, 413, 422, 500))) == 111


@pytest.mark.parametrize("capture", of(status=(200,)))
def test_an_answer_is_relayed_unchanged_and_billed_exactly(
    served: GatewayProcess, acme: Tenant, model_server: DemoModelServer, capture: Capture
) -> None:
    fields = request_for(capture)
    answer = ask(served, acme, model_server, capture, fields)
    check_answer(answer, acme, capture, fields)


@pytest.mark.parametrize("capture", of(status=(200,), stream=True))
def test_a_stream_shows_its_usage_only_to_a_client_that_asked(
    served: GatewayProcess, acme: Tenant, model_server: DemoModelServer, capture: Capture
) -> None:
    """Each stream once more, asked the other way than when it was recorded."""
    fields = request_for(capture)
    asked = (fields.get("stream_options") or {}).get("include_usage", False)
    fields["stream_options"] = {"include_usage": not asked}
    answer = ask(served, acme, model_server, capture, fields)
    check_answer(answer, acme, capture, fields)
    assert model_server.chat_requests[-1].json["stream_options"]["include_usage"] is True


@pytest.mark.parametrize("capture", of(status=(400, 413, 422)))
def test_a_refusal_keeps_its_message_in_our_shape(
    served: GatewayProcess, acme: Tenant, model_server: DemoModelServer, capture: Capture
) -> None:
    answer = ask(served, acme, model_server, capture, request_for(capture))
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json().pop("error")
    assert sorted(error) == ["code", "message", "param", "type"]
    message, param = message_of(capture.text)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == (param and param.removeprefix("body."))
    assert error["code"] is None
    check_not_billed(answer, acme)


@pytest.mark.parametrize("capture", of(status=(404, 500)))
def test_a_failure_is_a_502_in_plain_text_and_not_billed(
    served: GatewayProcess, acme: Tenant, model_server: DemoModelServer, capture: Capture
) -> None:
    answer = ask(served, acme, model_server, capture, request_for(capture))
    assert answer.status_code == 502
    assert answer.headers["content-type"].startswith("text/plain")
    assert "x-should-retry" not in answer.headers
    assert answer.text and "127.0.0.1" not in answer.text and capture.text not in answer.text
    check_not_billed(answer, acme)


@pytest.mark.parametrize(
    "name",
    [
        "llama/stream_usage",
        "llama/n2_stream",
        "llama/overflow_stream",
        "llama/nonstream_stop",
        "vllm/stream_continuous_usage",
        "vllm/tool_required_stream",
        "transformers/stream_usage",
        "transformers/overflow_stream",
    ],
)
def test_an_answer_that_comes_byte_by_byte_is_the_same(
    served: GatewayProcess, acme: Tenant, model_server: DemoModelServer, name: str
) -> None:
    capture = CAPTURES[name]
    fields = request_for(capture)
    answer = ask(served, acme, model_server, capture, fields, bytes_a_write=1)
    if capture.status == 200:
        check_answer(answer, acme, capture, fields)
    else:
        assert answer.status_code == 400
        assert message_of(capture.text)[0] in answer.json()["error"]["message"]
        check_not_billed(answer, acme)


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_BY_DEFAULT, "unknown_model"])
def test_what_real_servers_judge_in_three_ways_is_refused_before_it_reaches_one(
    served: GatewayProcess, acme: Tenant, model_server: DemoModelServer, case: str
) -> None:
    """The recorded request itself, byte for byte: llama.cpp's, whose model ID is ours."""
    before = len(model_server.chat_requests)
    body = recorded_request(CAPTURES[f"llama/{case}"])
    answer = httpx.post(
        f"{served.base_url}/chat/completions", content=body, headers=acme.headers, timeout=60
    )
    status, code = REFUSED.get(case) or (400, REFUSED_BY_DEFAULT.get(case))
    if case == "unknown_model":
        status, code = 404, "model_not_found"
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert answer.headers["x-should-retry"] == "false"
    assert "X-Neocloud-Generation-Id" not in answer.headers
    assert acme.events() == []
    assert len(model_server.chat_requests) == before
