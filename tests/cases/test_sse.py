"""Section E: parsing and relaying streams."""

import json

import pytest

from gateway.sse import FrameParser
from tests.test_completions import body
from tests.test_document import Api
from tests.test_settlement import COUNTS, events_of, one, tokens

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
NO_LINE_ENDS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("text", ["你好 🎉", "👩\u200d👩\u200d👧", "é", "\U0010ffff"])
def test_c41_multibyte_split(text: str) -> None:
    stream = f'data: {{"content":"{text}"}}\n\n'.encode()
    expected = [stream[6:-2]]
    for cut in range(len(stream) + 1):
        parser = FrameParser(1000)
        assert parser.feed(stream[:cut]) + parser.feed(stream[cut:]) == expected
    for size in (1, 2, 3):
        parser = FrameParser(1000)
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [frame for piece in pieces for frame in parser.feed(piece)] == expected


@pytest.mark.parametrize("character", NO_LINE_ENDS, ids=ascii)
def test_c42_only_lf_and_cr_end_a_line(character: str) -> None:
    data = f'{{"content":"a{character}b"}}'.encode()
    for size in (1, 1000):
        parser = FrameParser(1000)
        stream = b"data: " + data + b"\n\n"
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [frame for piece in pieces for frame in parser.feed(piece)] == [data]


@pytest.mark.parametrize("events", [1, 2, 4, 6])
def test_c48_an_event_leaves_when_it_has_arrived(api: Api, events: int) -> None:
    # The backend sends no more before the client has these.
    with api.streaming(f"{COUNTS} demo:gate_after={events}") as answer:
        pieces = answer.iter_raw()
        received = b""
        while received.count(b"\n\n") < events:
            received += next(pieces)
        assert len(events_of(received)) == events
        api.backend.open_gate()
        received += b"".join(pieces)
    assert events_of(received)[-1] == b"[DONE]"


@pytest.mark.parametrize(
    "end",
    [
        b"data: [DONE]\n\ndata: [DONE]\n\n",
        b'data: [DONE]\n\ndata: {"choices":[{"index":0,"delta":{"content":"late"}}]}\n\n',
        b"data: [DONE]\n\ngarbage\n\n",
        b"data: [DONE]\r\rdata: {",
        b"data: [DONE]",
    ],
    ids=ascii,
)
@pytest.mark.parametrize("is_glued", [True, False])
def test_c51_done_is_the_end_whatever_follows(on_uvicorn: Api, end: bytes, is_glued: bool) -> None:
    said = {"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}
    chunk = {"model": "qwen3-32b", "choices": [said]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    event, last = (b"data: %s\n\n" % json.dumps(each).encode() for each in (chunk, usage))
    pieces = [HEAD, event, last, end]
    on_uvicorn.backend.scripts["c51"] = [b"".join(pieces)] if is_glued else pieces
    answer = on_uvicorn.post(body("demo:script=c51", stream=True))
    assert answer.content == event + b"data: [DONE]\n\n"
    assert tokens(one(on_uvicorn)) == (3, 0, 1)
