"""Section A: usage in streams."""

import json
from decimal import Decimal
from typing import Any

import pytest

from gateway import payload
from gateway.errors import InvalidRequest
from tests.gateway.test_meter import GOOD, chunk, counts, meter, used
from tests.gateway.test_payload import forwarded, parsed
from tests.test_completions import body
from tests.test_document import USAGE_ASKED, Api, chunks
from tests.test_settlement import one, tokens

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
ANY_JSON: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    1.0,
    "",
    "True",
    "yes",
    [],
    [1],
    {},
    {"a": 1},
]


def event(**fields: Any) -> bytes:
    """Return an event of a model server, with a blank where no serializer here would put one."""
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "qwen3-32b"}
    return b"data: " + json.dumps({**chunk, **fields}).encode() + b"\n\n"


def said(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, "finish_reason": reason}


def test_c01_no_trace_of_usage_for_who_did_not_ask(api: Api) -> None:
    content = event(choices=[said(0, "Hi")]) + event(choices=[said(0, "!", "stop")])
    usage = event(choices=[], usage=GOOD)
    api.backend.scripts["c01"] = [HEAD + content + usage + b"data: [DONE]\n\n"]
    answer = api.post(body("demo:script=c01", stream=True))
    assert answer.content == content + b"data: [DONE]\n\n"
    assert tokens(one(api)) == (30, 0, 5)


@pytest.mark.parametrize(
    "carrier",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": {}},
        {"id": "", "model": "", "choices": []},
        {"id": "other", "model": "other", "created": 9, "choices": []},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_first", [True, False])
def test_c07_the_usage_chunk_is_one_of_the_stream(carrier: dict[str, Any], is_first: bool) -> None:
    metered = meter()
    first = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    content = json.dumps({**first, "choices": [said(0, "Hi", "stop")]}).encode()
    usage = json.dumps({**carrier, "usage": GOOD}).encode()
    for data in (usage, content) if is_first and not carrier.get("id") else (content, usage):
        assert (metered.read(data) is None) is (data is usage)
    assert metered.read(json.dumps(carrier).encode()) is None
    assert counts(used(metered)) == (30, 0, 5)
    shown = json.loads(metered.usage_chunk(used(metered), Decimal(0)))
    shown.pop("usage")
    # llama.cpp's `created` is the time of each chunk, and is relayed as it is.
    assert shown == {**first, "created": carrier.get("created", 7), "choices": []}


@pytest.mark.parametrize("options", ANY_JSON, ids=repr)
@pytest.mark.parametrize("stream", [True, False, None])
def test_c10_stream_options_of_any_type(options: Any, stream: bool | None) -> None:
    if options is None or (isinstance(options, dict) and stream):
        request = parsed(stream=stream, stream_options=options)
        assert not request.include_usage
        sent = forwarded(request)
        assert ("stream_options" in sent) is bool(stream)
        assert sent.get("stream_options", {}).get("include_usage", True) is True
    else:
        with pytest.raises(InvalidRequest) as refusal:
            parsed(stream=stream, stream_options=options)
        assert refusal.value.param == "stream_options"


@pytest.mark.parametrize("value", ANY_JSON, ids=repr)
def test_c10_include_usage_of_any_type(value: Any) -> None:
    options = {"include_usage": value}
    if value is None or isinstance(value, bool):
        request = parsed(stream=True, stream_options=options)
        assert request.include_usage is (value is True)
        assert forwarded(request)["stream_options"] == {"include_usage": True}
    else:
        with pytest.raises(InvalidRequest) as refusal:
            parsed(stream=True, stream_options=options)
        assert refusal.value.param == "stream_options"


def test_c11_choices_end_one_by_one_and_are_paid_once(api: Api) -> None:
    content = b"".join(
        [
            event(choices=[said(0, "a"), said(2, "b")]),
            event(choices=[said(0, "c", "stop")]),
            event(choices=[said(1, "d", "length")]),
            event(choices=[said(2, "e")]),
            event(choices=[said(2, "", "stop")]),
        ]
    )
    usage = event(choices=[], usage=GOOD)
    api.backend.scripts["c11"] = [HEAD + content + usage + b"data: [DONE]\n\n"]
    answer = api.post(body("demo:script=c11", n=3, **USAGE_ASKED))
    assert answer.content.startswith(content)
    assert len(chunks(answer)) == 6
    assert tokens(one(api)) == (30, 0, 5)


def test_c11_a_finished_choice_does_not_end_the_others() -> None:
    metered = meter(choices=2)
    metered.read(chunk("a", index=0))
    metered.read(chunk("b", index=1, finish_reason="stop"))
    assert not metered.is_finished
    metered.read(chunk("c", index=0, finish_reason="length"))
    assert metered.is_finished


def test_c11_a_great_n_is_held_and_not_served_free() -> None:
    request = payload.parse(json.dumps(body(n=128, max_tokens=10)).encode(), depth_max=64)
    assert (request.choices, request.output_tokens_max) == (128, 10)
