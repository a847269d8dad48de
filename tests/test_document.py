"""The API page, claim by claim, in its order: what a customer who read it may rely on.

Each docstring is the claim, word for word; `tests/data/chat-completions.txt` is the page. All of
it through a real gateway, on both ASGI servers. Claims about one model's own answers are asserted
on the demo model server, which gives such answers when it is asked to.
"""

import atexit
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from billing import organizations
from gateway import maintenance
from kiln_site.demo.model_server import DemoModelServer
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess
from tests.test_completions import body

PAGE = (Path(__file__).parent / "data" / "chat-completions.txt").read_text()
EXAMPLE_USAGE = '"prompt_tokens":9,"completion_tokens":12,"total_tokens":21,"cost":0.000001155'
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USAGE_ASKED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
# One for all: each client reads the system's certificates anew, which takes longer than a test.
CLIENT = httpx.Client(timeout=60)
atexit.register(CLIENT.close)


@dataclass(frozen=True)
class Api:
    """A gateway as one of its customers sees it, and the model server behind it."""

    gateway: GatewayProcess
    tenant: Tenant
    backend: DemoModelServer

    def of(self, tenant: Tenant) -> "Api":
        return replace(self, tenant=tenant)

    def get(self, path: str) -> httpx.Response:
        return CLIENT.get(f"{self.gateway.base_url}/{path}", headers=self.tenant.headers)

    def post(self, content: object) -> httpx.Response:
        """Send a body, as JSON unless it is bytes."""
        return CLIENT.post(
            f"{self.gateway.base_url}/chat/completions",
            content=content if isinstance(content, bytes) else json.dumps(content).encode(),
            headers=self.tenant.headers,
        )

    def ask(self, text: str = "Hello!", **fields: object) -> Any:
        """Ask, and return the JSON of the 200, its numbers exact."""
        answer = self.post(body(text, **fields))
        assert answer.status_code == 200, answer.text
        return json.loads(answer.content, parse_float=Decimal)

    def stream(self, text: str = "Hello!", **fields: object) -> list[Any]:
        return chunks(self.post(body(text, **{"stream": True, **fields})))

    @property
    def forwarded(self) -> Any:
        """The body of the one request that the model server got."""
        [request] = self.backend.chat_requests
        return request.json

    @contextmanager
    def streaming(
        self, text: str = "demo:hang_after=2", **fields: object
    ) -> Iterator[httpx.Response]:
        """Hold an answer open from its head on; at the end the client leaves."""
        with CLIENT.stream(
            "POST",
            f"{self.gateway.base_url}/chat/completions",
            json=body(text, stream=True, **fields),
            headers=self.tenant.headers,
        ) as answer:
            yield answer

    @contextmanager
    def in_flight(self, number: int) -> Iterator[list[httpx.Response]]:
        """Hold so many answers open; after it they are settled."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.streaming()) for _ in range(number)]
        wait_until(lambda: self.tenant.standing.in_flight == 0)


def seen_by(tenant: Tenant, gateway: GatewayProcess, backend: DemoModelServer) -> Api:
    """Return a tenant's view; the backend has ended and forgotten what earlier tests asked."""
    backend.wait_until_idle(30)
    backend.reset_counters()
    return Api(gateway, tenant, backend)


@pytest.fixture
def api(served: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """Acme's view of the gateway on either server."""
    return seen_by(acme, served, model_server)


def chunks(answer: httpx.Response) -> list[Any]:
    """Return the chunks of a whole stream, which must end with its one [DONE]."""
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
    return [json.loads(event[6:], parse_float=Decimal) for event in events]


def error(answer: httpx.Response) -> Any:
    """Return the error object, which must be all of the body."""
    assert answer.headers["content-type"] == "application/json"
    [[name, error]] = answer.json().items()
    assert name == "error"
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def wait_until(is_true: Callable[[], bool], seconds: float = 30) -> None:
    """Poll what another process decides and nothing here can be woken by."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@contextmanager
def maintenance_of_all(*apis: Api) -> Iterator[datetime]:
    """Switch maintenance on; these gateways have heard of it, and at the end that it is off."""
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)

    def all_answer(status: int) -> bool:
        return all(api.post(body()).status_code == status for api in apis)

    maintenance.switch_on(until=until)
    try:
        wait_until(lambda: all_answer(503))
        yield until
    finally:
        maintenance.switch_off()
        wait_until(lambda: all_answer(200))


# --- The page itself ------------------------------------------------------------------------------

# Headings, and pointers to other pages that say nothing of this endpoint.
NO_CLAIMS = set(
    """
Chat completions
URL
Request
Authentication
Request body
Support status
Common parameters
Only on this endpoint
Full definition
Response body
Field Type Description
Stream chunk
Errors
Status · error.code Cause What to do
Every status code is listed on the Errors page.
Limits
Headers and retry guidance for 429 are on the Rate limits page.
""".strip().splitlines()
)


def _words(text: str) -> str:
    return " ".join(text.split())


def _quotes() -> list[str]:
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    return [
        _words(paragraph)
        for test in tests
        if test.__doc__
        for paragraph in test.__doc__.split("\n\n")
    ]


def test_every_test_quotes_the_page() -> None:
    page = _words(PAGE)
    assert [quote for quote in _quotes() if quote not in page] == []
    silent = {
        name for name, value in globals().items() if name[:5] == "test_" and not value.__doc__
    }
    assert silent == {
        "test_every_test_quotes_the_page",
        "test_every_sentence_of_the_page_is_quoted",
    }


def test_every_sentence_of_the_page_is_quoted() -> None:
    examples = PAGE[PAGE.index("bash") : PAGE.index("The token counts and cost")]
    sentences = {
        sentence
        for line in PAGE.replace(examples, "").splitlines()
        for sentence in re.split(r"(?<=[.]) (?=[A-Z])", _words(line))
        if sentence
    }
    quotes = _quotes()
    assert {one for one in sentences if not any(one in quote for quote in quotes)} <= NO_CLAIMS
    assert sentences >= NO_CLAIMS


# --- Request and response -------------------------------------------------------------------------


def test_it_answers_in_the_openai_format(api: Api) -> None:
    """Generates a model response for a conversation. The request and response follow the OpenAI
    Chat Completions format."""
    answer = api.ask("What do routers do?")
    assert answer["choices"][0]["message"]["content"]
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}


def test_the_parameters_are_marked_as_on_the_page(api: Api) -> None:
    """Each parameter below is marked with what the gateway does with it today."""
    marked = re.findall(
        r"^([a-z_]+?)(?:= .*})?(?:string|array|integer|number|boolean|object| \| )+(?:required)?"
        r"(supported|passed through|ignored|not supported)$",
        PAGE,
        re.M,
    )
    cells = api.get("models/qwen3-32b").json()["parameters"]
    assert len(marked) == 18
    assert {name: cells[name]["status"] for name, _ in marked} == {
        name: status.replace(" ", "_") for name, status in marked
    }


@pytest.mark.parametrize("path", ["", "/"])
def test_it_is_where_the_page_says(api: Api, path: str) -> None:
    """POST/chat/completions

    https://api.bricksum.com/v1/chat/completions"""
    # With the slash: a base URL that ends in one makes //v1 of it.
    url = f"{api.gateway.url}{path}/v1/chat/completions"
    answer = CLIENT.post(url, json=body(), headers=api.tenant.headers)
    assert (answer.status_code, answer.history) == (200, [])


def test_the_curl_example_runs_as_printed(api: Api) -> None:
    """curl https://api.bricksum.com/v1/chat/completions \\
      -H "Authorization: Bearer $KILN_API_KEY" \\
      -H "Content-Type: application/json" \\
    """
    [command] = re.findall(r"^curl .*?}'$", PAGE, re.M | re.S)
    headers = dict(re.findall(r'-H "(.*?): (.*?)"', command))
    headers["Authorization"] = headers["Authorization"].replace("$KILN_API_KEY", api.tenant.secret)
    [data] = re.findall(r"-d '(.*?)'", command, re.S)
    answer = CLIENT.post(f"{api.gateway.base_url}/chat/completions", content=data, headers=headers)
    assert answer.status_code == 200
    assert api.tenant.event(answer).state == "succeeded"


def test_the_python_example_runs_as_printed(api: Api) -> None:
    """client = OpenAI(
        base_url="https://api.bricksum.com/v1",
        api_key=os.environ["KILN_API_KEY"],
    )"""
    [program] = re.findall(r"^import os\n.*?^print\(resp\.usage\)$", PAGE, re.M | re.S)
    program = program.replace("https://api.bricksum.com/v1", api.gateway.base_url)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KILN_API_KEY": api.tenant.secret},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    [event] = api.tenant.events()
    assert f"completion_tokens={event.completion_tokens}" in ran.stdout
    assert "cost=" in ran.stdout


def test_a_response_looks_like_the_example(api: Api) -> None:
    """{
      "id": "chatcmpl-...",
      "object": "chat.completion",
      "created": 1710000000,
      "model": "qwen3-32b",
      "choices": [

    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21,
        "cost": 0.000001155
      }

    The token counts and cost in these examples are illustrative figures measured on gpt-oss-120b,
    not qwen3-32b's."""
    text = "demo:prompt_tokens=9 demo:cached=0 demo:tokens=12 demo:usage=null_details"
    answer = api.post(body(text, model="gpt-oss-120b"))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert f'"usage":{{{EXAMPLE_USAGE}}}' in answer.text
    [example] = re.findall(r"^200 OK\n\n(\{.*?^\})$", PAGE, re.M | re.S)
    shape, seen = json.loads(example), answer.json()
    assert seen.keys() == shape.keys()
    assert seen["choices"][0].keys() == shape["choices"][0].keys()
    assert seen["choices"][0]["message"].keys() == shape["choices"][0]["message"].keys()
    # On qwen3-32b the same tokens cost what that model's prices say.
    cost = api.ask(text)["usage"]["cost"]
    assert cost == (9 * Decimal("0.08") + 12 * Decimal("0.28")) / 1_000_000


def test_a_stream_looks_like_the_example(api: Api) -> None:
    """200 OK · text/event-stream

    "choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}

    "usage":{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21,"cost":0.000001155}}

    data: [DONE]"""
    text = "demo:prompt_tokens=9 demo:cached=0 demo:tokens=12 demo:usage=null_details"
    answer = api.post(body(text, model="gpt-oss-120b", **USAGE_ASKED))
    assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
    *_, finish, usage = chunks(answer)
    assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert usage["choices"] == []
    assert answer.text.endswith(f'"usage":{{{EXAMPLE_USAGE}}}}}\n\ndata: [DONE]\n\n')
    for example in re.findall(r"^data: (\{.*\})$", PAGE, re.M):
        assert finish.keys() <= json.loads(example).keys() <= usage.keys()


def test_a_bad_request_looks_like_the_example(api: Api) -> None:
    """400 Bad Request

    {
      "error": {
        "message": "Invalid 'messages': the array must contain at least one message.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "empty_array"
      }
    }"""
    answer = api.post({"model": "qwen3-32b", "messages": []})
    [example] = re.findall(r"^400 Bad Request\n\n(\{.*?^\})$", PAGE, re.M | re.S)
    assert answer.status_code == 400
    assert answer.json() == json.loads(example)


# --- Authentication -------------------------------------------------------------------------------


def test_authentication_is_the_same_everywhere(api: Api) -> None:
    """Authentication is the same on every endpoint the gateway fronts, and is documented on the
    API Reference page."""
    url = f"{api.gateway.base_url}/chat/completions"
    refused = CLIENT.post(url, json=body(), headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401
    for path in ("models", "models/qwen3-32b", "credits", "key", "generations/1"):
        url = f"{api.gateway.base_url}/{path}"
        answer = CLIENT.get(url, headers={"Authorization": "Bearer wrong"})
        assert (answer.status_code, answer.json()) == (401, refused.json())
        assert CLIENT.get(url, headers=api.tenant.headers).status_code in (200, 404)


# --- Support status -------------------------------------------------------------------------------


def test_supported_means_handled(api: Api) -> None:
    """supported: The gateway handles it, or a published measurement shows it works."""
    answer = api.ask("demo:tokens=9", max_tokens=4)
    assert answer["usage"]["completion_tokens"] == 4


def test_passed_through_means_forwarded(api: Api) -> None:
    """passed through: Forwarded to the model server; not verified by Kiln."""
    api.ask(temperature=0.25)
    assert api.forwarded["temperature"] == 0.25


def test_ignored_means_that_all_else_is_normal(api: Api) -> None:
    """ignored: Accepted with 200, but not applied. The rest of the response is normal."""
    with_it, without = api.ask(stop=["a"]), api.ask()
    for answer in (with_it, without):
        answer.pop("id"), answer.pop("created")
    assert with_it == without


def test_not_supported_means_an_error(api: Api) -> None:
    """not supported: Rejected with an error, or not working on the models named in the
    description."""
    answer = api.post(body(tools=[WEATHER], tool_choice="required"))
    assert answer.status_code == 400
    assert error(answer)["code"] == "unsupported_parameter"


# --- Common parameters ----------------------------------------------------------------------------


def test_model_is_required(api: Api) -> None:
    """These are documented once on the API Reference page. Listed here with what this endpoint
    does differently.

    modelstringrequiredsupported
    Same as the shared definition."""
    for fields in ({}, {"model": None}, {"model": 1}, {"model": ["qwen3-32b"]}):
        answer = api.post({"messages": body()["messages"], **fields})
        assert (answer.status_code, error(answer)["param"]) == (400, "model")


@pytest.mark.parametrize("fields", [{}, {"messages": []}, {"messages": None}])
def test_messages_must_not_be_empty(api: Api, fields: dict[str, Any]) -> None:
    """messagesarrayrequiredsupported
    An empty or missing array is rejected with 400 (empty_array)."""
    answer = api.post({"model": "qwen3-32b", **fields})
    assert (answer.status_code, error(answer)["code"]) == (400, "empty_array")
    assert api.backend.chat_requests == []


@pytest.mark.parametrize("message", ["Hello!", None, {}, {"content": "Hello!"}, ["user", "Hello!"]])
def test_a_message_is_a_role_and_a_content(api: Api, message: object) -> None:
    """A message is a role and a content, in the shapes below."""
    answer = api.post(body(messages=[message]))
    assert (answer.status_code, error(answer)["param"]) == (400, "messages[0]")
    assert api.backend.chat_requests == []


def test_a_system_message_sets_the_whole_conversation(api: Api) -> None:
    """system message
    - rolestringrequiredsupported
      Set to "system".
      Allowed values
      system
    - contentstringrequiredsupported
      Instructions that apply to the whole conversation."""
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What do routers do?"},
    ]
    api.ask(messages=messages)
    assert api.forwarded["messages"] == messages
    answer = api.post(body(messages=[{"role": "system"}, *messages[1:]]))
    assert (answer.status_code, error(answer)["param"]) == (400, "messages[0]")


def test_a_user_message_is_text(api: Api) -> None:
    """user message
    - rolestringrequiredsupported
      Set to "user".
      Allowed values
      user
    - contentstring | arrayrequiredsupported
      Text, or an array of content parts."""
    api.ask("Hello, 世界! \u2028")
    assert api.forwarded["messages"] == [{"role": "user", "content": "Hello, 世界! \u2028"}]
    for content in (None, 1, {"text": "Hello!"}):
        answer = api.post(body(messages=[{"role": "user", "content": content}]))
        assert (answer.status_code, error(answer)["param"]) == (400, "messages[0]")


def test_a_parts_array_is_forwarded_unchanged(api: Api) -> None:
    """The gateway forwards a parts array unchanged."""
    parts = [
        {"type": "text", "text": "Hello!", "cache_control": {"type": "ephemeral"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"text": ""},
    ]
    api.ask(messages=[{"role": "user", "content": parts}])
    assert api.forwarded["messages"] == [{"role": "user", "content": parts}]


def test_image_parts_work_where_the_input_includes_images(api: Api) -> None:
    """Image parts (image_url) work only on models whose input includes images; see the Models
    page."""
    for url in ("https://example.com/cat.png", "data:image/png;base64,iVBORw0KGgo="):
        api.backend.reset_counters()
        image = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]
        answer = api.post(body(messages=messages))
        assert (answer.status_code, error(answer)["param"]) == (400, "messages[0]")
        api.ask(model="acme/switched:1", messages=messages)
        assert api.forwarded["messages"] == messages
    listed = api.get("models").json()["data"]
    images = {model["id"]: model["capabilities"]["image_input"] for model in listed}
    assert (images["qwen3-32b"], images["acme/switched:1"]) == (False, True)


@pytest.mark.parametrize("tool_result", ['{"celsius": 7}', ""])
def test_a_tool_call_is_sent_back_and_answered(api: Api, tool_result: str) -> None:
    """assistant message
    - rolestringrequiredsupported
      Set to "assistant".
      Allowed values
      assistant
    - contentstring | nullsupported
      An earlier model reply. It can be null when the reply was a tool call.
    - tool_callsarraysupported
      The tool_calls array the model returned. Send it back unchanged before the matching tool
      message.

    tool message
    - rolestringrequiredsupported
      Set to "tool".
      Allowed values
      tool
    - tool_call_idstringrequiredsupported
      The id of the tool call this result answers.
    - contentstringrequiredsupported
      The result of running the tool, usually a JSON string."""
    question = {"role": "user", "content": "How is the weather in Oslo?"}
    reply = api.ask(messages=[question], tools=[WEATHER])["choices"][0]["message"]
    assert reply["content"] is None
    [call] = reply["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": tool_result}
    api.backend.reset_counters()
    answer = api.ask(messages=[question, reply, result], tools=[WEATHER])
    assert api.forwarded["messages"] == [question, reply, result]
    assert answer["choices"][0]["finish_reason"] == "stop"
    for missing in ("tool_call_id", "content"):
        part = {name: value for name, value in result.items() if name != missing}
        refused = api.post(body(messages=[question, reply, part]))
        assert (refused.status_code, error(refused)["param"]) == (400, "messages[2]")


@pytest.mark.parametrize("value", [1, 800, 10**9, None])
def test_max_tokens_is_sent_as_given(api: Api, value: int | None) -> None:
    """max_tokensintegersupported
    Sent to the model server as given."""
    api.ask(max_tokens=value)
    assert api.forwarded["max_tokens"] == value


def test_max_tokens_of_zero_is_judged_by_the_model_server(api: Api) -> None:
    """Sent to the model server as given."""
    answer = api.post(body(max_tokens=0))
    assert api.forwarded["max_tokens"] == 0
    assert (answer.status_code, error(answer)["param"]) == (400, "max_tokens")


def test_content_can_be_empty_at_the_cap(api: Api) -> None:
    """If generation stops at this cap (finish_reason: "length"), a non-streaming response can
    return empty content."""
    answer = api.ask("demo:reasoning=9 demo:tokens=5", max_tokens=6)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("value", [True, "true", 1])
def test_stream_is_rewritten_to_a_boolean(api: Api, value: object) -> None:
    """streambooleansupported
    The gateway also reads the string "true" and the number 1 as true, and rewrites the field to
    a boolean before forwarding."""
    assert len(api.stream(stream=value)) > 2
    assert api.forwarded["stream"] is True


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": "false"}, {"stream": 0}])
def test_stream_is_false_by_default(api: Api, fields: dict[str, Any]) -> None:
    """Default
    false"""
    assert api.ask(**fields)["object"] == "chat.completion"
    assert api.forwarded.get("stream", False) is False


def test_tools_are_sent_as_function_definitions(api: Api) -> None:
    """toolsarraysupported
    Sent as OpenAI function definitions.

    function tool
    - typestringrequiredsupported
      Set to "function".
      Allowed values
      function

    - function.descriptionstringrequiredsupported
      What the function does."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    api.ask(tools=[strict])
    assert api.forwarded["tools"] == [strict]


def test_the_model_calls_a_function_by_its_name(api: Api) -> None:
    """- function.namestringrequiredsupported
    The name the model uses in tool_calls."""
    reply = api.ask("How is the weather in Oslo?", tools=[WEATHER])["choices"][0]
    assert [call["function"]["name"] for call in reply["message"]["tool_calls"]] == ["get_weather"]
    nameless = {"type": "function", "function": {"description": "Get the weather."}}
    answer = api.post(body(tools=[nameless]))
    assert (answer.status_code, error(answer)["param"]) == (400, "tools[0]")


@pytest.mark.parametrize("description", [None, "", " ", 1])
def test_a_function_needs_a_description(api: Api, description: object) -> None:
    """A function without a description is rejected with 400."""
    function = {"name": "get_weather", "description": description}
    answer = api.post(body(tools=[WEATHER, {"type": "function", "function": function}]))
    assert answer.status_code == 400
    assert error(answer)["param"] == "tools[1].function.description"
    assert api.backend.chat_requests == []


def test_parameters_are_a_json_schema(api: Api) -> None:
    """- function.parametersobjectsupported
    JSON Schema of the function arguments."""
    reply = api.ask("How is the weather in Oslo?", tools=[WEATHER])["choices"][0]
    [call] = reply["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def test_tool_choice_auto_is_sent_as_it_is(api: Api) -> None:
    """tool_choice= "auto"stringsupported
    Sent as the string "auto"."""
    reply = api.ask(tools=[WEATHER], tool_choice="auto")["choices"][0]
    assert api.forwarded["tool_choice"] == "auto"
    assert reply["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("forced", ["required", NAMED])
def test_forced_tool_choice_gets_a_clear_error(api: Api, forced: object) -> None:
    """tool_choice= "required" | {"type": "function", ...}string | objectnot supported
    Forced tool choice, sent as "required" or as a named function.

    Neither is a 4xx, so do not retry it — send tool_choice "auto" only."""
    # The page describes what the model server did, and calls it a failure without a clear error.
    # "Not supported" is "Rejected with an error", so the gateway gives the clear one.
    answer = api.post(body(tools=[WEATHER], tool_choice=forced))
    assert answer.status_code == 400
    assert answer.headers["x-should-retry"] == "false"
    refusal = error(answer)
    assert (refusal["code"], refusal["param"]) == ("unsupported_parameter", "tool_choice")
    assert api.backend.chat_requests == []


def test_forced_tool_choice_fails_as_measured_where_it_is_forwarded(api: Api) -> None:
    """On qwen3-32b (measured 2026-09-26), forced tool choice fails without a clear error:
    tool_choice "required" returns HTTP 500 with a plain-text "Internal Server Error" body, and
    naming a function returns 200 with empty arguments (finish_reason "stop")."""
    model: dict[str, Any] = {"model": "acme/switched:1", "tools": [WEATHER]}
    # What a model server answers with 500 is a 502 of the gateway ("Errors").
    failed = api.post(body("demo:plain_status=500", tool_choice="required", **model))
    assert api.forwarded["tool_choice"] == "required"
    assert failed.status_code == 502
    assert failed.headers["content-type"].partition(";")[0] == "text/plain"
    api.backend.reset_counters()
    answer = api.ask("demo:empty_arguments", tool_choice=NAMED, **model)
    assert api.forwarded["tool_choice"] == NAMED
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


# --- Only on this endpoint ------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_need_a_stream(api: Api, fields: dict[str, Any]) -> None:
    """stream_optionsobjectsupported
    Options for a streaming response. Send it only together with stream: true."""
    answer = api.post(body(stream_options={"include_usage": True}, **fields))
    assert (answer.status_code, error(answer)["param"]) == (400, "stream_options")
    assert api.backend.chat_requests == []


def test_include_usage_adds_one_chunk(api: Api) -> None:
    """usage options
    - include_usagebooleansupported
      When true, the stream ends with one extra chunk whose choices is empty and whose usage object
      holds the token counts and cost."""
    *content, last = api.stream("demo:tokens=7", **USAGE_ASKED)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in content)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 7
    assert last["usage"]["cost"] == api.tenant.events()[0].cost
    assert {last[name] for name in ("id", "model")} == {
        content[0][name] for name in ("id", "model")
    }


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_the_flag_is_set_on_every_stream(api: Api, options: dict[str, bool] | None) -> None:
    """The gateway sets this flag on every streaming request to meter tokens, and removes the usage
    chunk when you did not ask for it.
      Default
      false"""
    seen = api.stream("demo:tokens=7", stream_options=options)
    assert api.forwarded["stream_options"] == {"include_usage": True}
    is_asked = bool(options and options.get("include_usage"))
    assert [chunk for chunk in seen if "usage" in chunk or not chunk["choices"]] == (
        [seen[-1]] if is_asked else []
    )
    [event] = api.tenant.events()
    assert (event.completion_tokens, event.usage_source) == (7, "reported")


def test_parallel_tool_calls_are_accepted(api: Api) -> None:
    """parallel_tool_callsbooleannot supported
    Applied only on models whose Parallel tool calls cell on the Models page is yes; qwen3-32b is
    not one of them. Measured on gpt-oss-120b: the request is accepted with 200, and the model
    calls at most one tool per reply."""
    # The demo model, too, calls one tool unless it is asked for several.
    answer = api.ask(model="gpt-oss-120b", tools=[WEATHER], parallel_tool_calls=True)
    assert api.forwarded["parallel_tool_calls"] is True
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    model = api.get("models/qwen3-32b").json()
    assert model["capabilities"]["parallel_tool_calls"] is False


def test_one_reply_can_carry_several_tool_calls(api: Api) -> None:
    """On qwen3-32b the parallel_tool_calls setting is not applied, which is not the same as replies
    holding one call: even with parallel_tool_calls: false, one reply can carry several tool calls.
    Answer every entry in tool_calls with its own tool message."""
    question = {"role": "user", "content": "Weather in Oslo and Bergen? demo:tool_calls=3"}
    fields: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False}
    reply = api.ask(messages=[question], **fields)["choices"][0]["message"]
    assert api.forwarded["parallel_tool_calls"] is False
    assert len({call["id"] for call in reply["tool_calls"]}) == 3
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "{}"}
        for call in reply["tool_calls"]
    ]
    api.backend.reset_counters()
    api.ask(messages=[question, reply, *results], **fields)
    assert api.forwarded["messages"] == [question, reply, *results]


@pytest.mark.parametrize("model", ["gpt-oss-120b", "qwen3-32b"])
@pytest.mark.parametrize("effort", ["low", "medium", "high", "unheard-of"])
def test_reasoning_effort_is_forwarded_as_sent(api: Api, model: str, effort: str) -> None:
    """reasoning_effortstringsupported
    Forwarded to the model as sent. gpt-oss-120b accepts low, medium and high; whether another
    model honours it is not published.

    Allowed values
    low, medium, high"""
    api.ask(model=model, reasoning_effort=effort)
    assert api.forwarded["reasoning_effort"] == effort


def test_reasoning_tokens_are_output_tokens(api: Api) -> None:
    """Higher values spend more reasoning tokens, which adds latency and output tokens."""
    little = api.ask("demo:tokens=5 demo:reasoning=2", reasoning_effort="low")["usage"]
    much = api.ask("demo:tokens=5 demo:reasoning=20", reasoning_effort="high")["usage"]
    assert (little["completion_tokens"], much["completion_tokens"]) == (7, 25)
    assert much["cost"] > little["cost"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, 0.7, 2]),
        ("top_p", [0.05, 1]),
        ("n", [1, 2]),
        ("seed", [0, -5, 2**53 + 1]),
        ("presence_penalty", [-2, 0.5, 2]),
        ("frequency_penalty", [-2, 0.5, 2]),
    ],
)
def test_sampling_parameters_are_forwarded(api: Api, name: str, values: list[Any]) -> None:
    """temperaturenumberpassed through
    Forwarded to the model server; not verified by Kiln.
    Range
    0–2
    top_pnumberpassed through
    Forwarded to the model server; not verified by Kiln.
    Range
    0–1
    nintegerpassed through
    Forwarded to the model server; not verified by Kiln.
    seedintegerpassed through
    Forwarded to the model server; not verified by Kiln.
    presence_penaltynumberpassed through
    Forwarded to the model server; not verified by Kiln.
    Range
    -2–2
    frequency_penaltynumberpassed through
    Forwarded to the model server; not verified by Kiln.
    Range
    -2–2"""
    for value in values:
        api.ask(**{name: value})
    assert [request.json[name] for request in api.backend.chat_requests] == values
    # "Not verified": what is out of range is judged by the model server, not here.
    answer = api.post(body(**{name: "hot"}))
    assert (answer.status_code, error(answer)["param"]) == (400, name)
    assert api.backend.chat_requests[-1].json[name] == "hot"


@pytest.mark.parametrize("stop", [" ", ["e", "a"]])
def test_stop_is_not_applied(api: Api, stop: object) -> None:
    """stopstring | arrayignored
    Accepted, but not applied. Generation continues past the stop string."""
    text = api.ask("What do routers do?", stop=stop)["choices"][0]["message"]["content"]
    assert all(word in text.rstrip("e a") for word in stop)  # type: ignore[attr-defined]
    assert "stop" not in api.forwarded


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    ],
)
def test_response_format_is_accepted(api: Api, value: object) -> None:
    """response_formatobjectnot supported
    json_object and json_schema do not work yet. The request is accepted with 200, but content
    comes back empty. To get JSON, tell the model in the prompt to reply with JSON only, then parse
    and validate the result in your client."""
    # Empty is what the model makes of it; the gateway neither fills nor refuses it.
    answer = api.ask("demo:tokens=0", response_format=value)
    assert api.forwarded["response_format"] == value
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 0


def test_ignore_eos_is_rejected_on_gpt_oss(api: Api) -> None:
    """ignore_eosbooleannot supported
    On gpt-oss models, true is rejected with 400 (unsupported_parameter) before the request reaches
    the model."""
    answer = api.post(body(model="gpt-oss-120b", ignore_eos=True))
    assert answer.status_code == 400
    refusal = error(answer)
    assert (refusal["code"], refusal["param"]) == ("unsupported_parameter", "ignore_eos")
    assert api.backend.chat_requests == []
    api.ask(model="gpt-oss-120b", ignore_eos=False)
    assert api.forwarded["ignore_eos"] is False


@pytest.mark.parametrize("value", [True, False])
def test_ignore_eos_is_forwarded_on_other_models(api: Api, value: bool) -> None:
    """On other models it is forwarded to the model server."""
    api.ask(ignore_eos=value)
    assert api.forwarded["ignore_eos"] is value


def test_unlisted_parameters_are_forwarded(api: Api) -> None:
    """OpenAI chat parameters that are not listed here are forwarded to the model server in the
    same way. Kiln has not verified them."""
    unlisted: dict[str, Any] = {
        "logit_bias": {"50256": -100},
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 50,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "user": "u-1",
        "verbosity": "low",
        "web_search_options": {},
    }
    api.ask(**unlisted)
    assert api.forwarded == body(**unlisted)


# --- Response body --------------------------------------------------------------------------------


def test_the_response_names_itself(api: Api) -> None:
    """id	string	ID of the chat completion.
    object	string	"chat.completion".
    created	integer	Creation time in Unix seconds.

    choices[].index	integer	Position of the choice.
    choices[].message.role	string	"assistant"."""
    before = int(time.time())
    answer = api.ask(n=2)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert before <= answer["created"] <= int(time.time())
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["message"]["role"] for choice in answer["choices"]} == {"assistant"}


def test_model_is_the_id_that_was_asked_for(api: Api) -> None:
    """model	string	The model ID that produced the response."""
    whole = api.ask(model="acme/switched:1")
    streamed = api.stream(model="acme/switched:1", **USAGE_ASKED)
    assert {answer["model"] for answer in (whole, *streamed)} == {"acme/switched:1"}
    # The server knows the model by another name.
    assert {request.json["model"] for request in api.backend.chat_requests} == {"qwen3-32b"}


def test_content_is_the_generated_text(api: Api) -> None:
    r"""choices[].message.content	string \| null	The generated text. It can be empty when
    finish_reason is "length", and null when the reply is a tool call."""
    said, cut, called = (
        api.ask("demo:emoji What do routers do?")["choices"][0],
        api.ask("demo:reasoning=3", max_tokens=3)["choices"][0],
        api.ask(tools=[WEATHER])["choices"][0],
    )
    assert said["message"]["content"].endswith("你好 🎉 👩\u200d👩\u200d👧 — und 日本")
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "")
    assert (called["finish_reason"], called["message"]["content"]) == ("tool_calls", None)


def test_tool_calls_have_their_parts(api: Api) -> None:
    """choices[].message.tool_calls	array	Tool calls the model wants you to run: id, type and
    function.name with function.arguments as a JSON string."""
    message = api.ask("Weather in Oslo?", tools=[WEATHER])["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert isinstance(call["id"], str)
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize(
    ("reason", "fields"),
    [("stop", {}), ("length", {"max_tokens": 1}), ("tool_calls", {"tools": [WEATHER]})],
)
def test_the_finish_reason_is_one_of_three(api: Api, reason: str, fields: dict[str, Any]) -> None:
    """choices[].finish_reason	string	"stop", "length" (cut off by max_tokens) or "tool_calls"."""
    assert api.ask(**fields)["choices"][0]["finish_reason"] == reason
    assert api.stream(**fields)[-1]["choices"][0]["finish_reason"] == reason
    assert [event.finish_reason for event in api.tenant.events()] == [reason, reason]


def test_usage_counts_tokens(api: Api) -> None:
    """usage.prompt_tokens	integer	Input tokens.
    usage.completion_tokens	integer	Output tokens, including reasoning tokens.
    usage.total_tokens	integer	Input plus output tokens."""
    text = "demo:prompt_tokens=30 demo:cached=0 demo:tokens=5 demo:reasoning=7"
    for usage in (
        api.ask(text)["usage"],
        api.stream(text, **USAGE_ASKED)[-1]["usage"],
    ):
        assert usage["prompt_tokens"] == 30
        assert usage["completion_tokens"] == 12
        assert usage["total_tokens"] == 42
        assert usage["cost"] == (30 * Decimal("0.08") + 12 * Decimal("0.28")) / 1_000_000


def test_cached_tokens_are_present_when_reported(api: Api) -> None:
    """usage.prompt_tokens_details.cached_tokens	integer	Input tokens served from the prefix
    cache. Present only when the model server reports it."""
    text = "demo:prompt_tokens=30 demo:cached=20 demo:tokens=5"
    usage = api.ask(text)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 20}
    cost = 10 * Decimal("0.08") + 20 * Decimal("0.04") + 5 * Decimal("0.28")
    assert usage["cost"] == cost / 1_000_000
    silent = api.ask(f"{text} demo:usage=null_details")["usage"]
    assert silent.keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "cost"}


@pytest.mark.parametrize("fields", [{}, USAGE_ASKED])
def test_cost_is_what_was_deducted(api: Api, fields: dict[str, Any]) -> None:
    """usage.cost	number	Amount in USD deducted from credits for this request. The gateway adds
    it."""
    before = api.tenant.balance
    answer = api.post(body("demo:tokens=7", **fields))
    [cost] = re.findall(r'"cost":([0-9.]+)}', answer.text)
    assert before - api.tenant.balance == Decimal(cost) > 0


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_header_names_the_usage_event(api: Api, fields: dict[str, Any]) -> None:
    """X-Neocloud-Generation-Id	header	Response header with the ID of the usage event for this
    request. Store it with your logs."""
    answer = api.post(body(**fields))
    generation_id = answer.headers["X-Neocloud-Generation-Id"]
    [event] = api.tenant.events()
    assert str(event.id) == generation_id
    url = f"{api.gateway.base_url}/generations/{generation_id}"
    assert CLIENT.get(url, headers=api.tenant.headers).json()["id"] == generation_id


# --- Stream chunk ---------------------------------------------------------------------------------


def test_each_data_line_is_one_chunk(api: Api) -> None:
    """With stream: true, each data: line carries one chunk with the fields below. Keepalive
    comments, data: [DONE] and disconnects are described on the Streaming page.

    object	string	"chat.completion.chunk"."""
    # Whatever pieces the bytes of the backend came in: `chunks` reads one line per event.
    for words in ("", "demo:split=3", "demo:glue=5", "demo:crlf", "demo:u2028"):
        seen = api.stream(f"Hello! {words}", **USAGE_ASKED)
        assert {chunk["object"] for chunk in seen} == {"chat.completion.chunk"}


def test_a_delta_carries_the_new_text(api: Api) -> None:
    """choices[].delta.content	string	The new text of this chunk."""
    whole = api.ask("What do routers do?")["choices"][0]["message"]["content"]
    deltas = [
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in api.stream("What do routers do?")
    ]
    assert "".join(deltas) == whole
    assert len(deltas) > 10


def test_tool_call_fragments_add_up(api: Api) -> None:
    """choices[].delta.tool_calls	array	Tool call fragments. Concatenate function.arguments
    across chunks by index."""
    text = "Weather in Oslo? demo:tool_calls=3"
    whole = api.ask(text, tools=[WEATHER])["choices"][0]["message"]["tool_calls"]
    names, arguments = ["", "", ""], ["", "", ""]
    for chunk in api.stream(text, tools=[WEATHER]):
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            names[call["index"]] += call["function"].get("name", "")
            arguments[call["index"]] += call["function"].get("arguments", "")
    assert names == [call["function"]["name"] for call in whole]
    assert arguments == [call["function"]["arguments"] for call in whole]


def test_the_last_content_chunk_carries_the_reason(api: Api) -> None:
    r"""choices[].finish_reason	string \| null	null until the last content chunk, which carries
    the reason."""
    for words in ("", "demo:finish_with_text"):
        *before, last = api.stream(f"Hello! {words}")
        assert {chunk["choices"][0]["finish_reason"] for chunk in before} == {None}
        assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("usage", ["last_content", "every_chunk", "null_between", "twice"])
def test_usage_is_in_the_final_chunk_only(api: Api, usage: str) -> None:
    """usage	object	Only in the final chunk, and only when stream_options.include_usage is true.
    That chunk has an empty choices array."""
    text = f"Hello! demo:usage={usage}"
    *before, final = api.stream(text, **USAGE_ASKED)
    assert (final["choices"], "usage" in final) == ([], True)
    assert all("usage" not in chunk for chunk in before)
    assert all("usage" not in chunk and chunk["choices"] for chunk in api.stream(text))


def test_the_cost_is_added_to_the_usage_chunk(api: Api) -> None:
    """usage.cost	number	Amount in USD deducted from credits for this request. The gateway
    adds it to the usage chunk."""
    before = api.tenant.balance
    usage = api.stream("demo:tokens=11", **USAGE_ASKED)[-1]["usage"]
    assert usage["cost"] == before - api.tenant.balance > 0


# --- Errors ---------------------------------------------------------------------------------------


def test_an_empty_code_is_null(api: Api) -> None:
    """Branch on the HTTP status and error.code, not on the message text. An empty error.code cell
    means the body carries no code."""
    assert error(api.post(b"{"))["code"] is None
    assert error(api.post(body(temperature=9)))["code"] is None


@pytest.mark.parametrize("fields", [{"messages": []}, {"messages": None}])
def test_400_empty_array(api: Api, fields: dict[str, Any]) -> None:
    """400empty_array	messages is empty or missing.	Send at least one message."""
    answer = api.post(body(**fields))
    assert (answer.status_code, error(answer)["code"]) == (400, "empty_array")
    api.ask()


def test_400_unsupported_parameter(api: Api) -> None:
    """400unsupported_parameter	ignore_eos: true on a gpt-oss model.	Remove ignore_eos."""
    answer = api.post(body(model="gpt-oss-120b", ignore_eos=True))
    assert (answer.status_code, error(answer)["code"]) == (400, "unsupported_parameter")
    api.ask(model="gpt-oss-120b")


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "qwen3-32b", "messages": [',
        body(temperature=9),
        body(tools=[{"type": "function", "function": {"name": "get_weather"}}]),
        body("word " * 40_000),
    ],
    ids=["malformed JSON", "invalid parameters", "no description", "context window"],
)
def test_400_of_the_model_server(api: Api, content: object) -> None:
    """400	The model server rejected the request: malformed JSON, invalid parameters, a function
    without a description, or more than the model's context window (the Models page lists it per
    model).	Fix the payload. Do not retry as sent."""
    answer = api.post(content)
    assert answer.status_code == 400
    assert (error(answer)["type"], error(answer)["code"]) == ("invalid_request_error", None)
    assert answer.headers["x-should-retry"] == "false"
    model = api.get("models/qwen3-32b").json()
    assert model["context_window"] == 32768


def test_404_model_not_found(api: Api) -> None:
    """404model_not_found	The model ID is not in the catalog.	Check the ID against GET /models."""
    listed = api.get("models").json()["data"]
    listed = [model["id"] for model in listed]
    answer = api.post(body(model="Qwen3-32B"))
    assert (answer.status_code, error(answer)["code"]) == (404, "model_not_found")
    assert "Qwen3-32B" not in listed
    assert "qwen3-32b" in listed


def test_429_rate_limit_exceeded(api: Api) -> None:
    """429rate_limit_exceeded	The organization already has 8 requests in flight. No rate-limit
    headers are sent.	Back off exponentially and retry."""
    with api.in_flight(8):
        answer = api.post(body())
        assert (answer.status_code, error(answer)["code"]) == (429, "rate_limit_exceeded")
        assert [name for name in answer.headers if "ratelimit" in name or "retry" in name] == []
    api.ask()


@pytest.mark.parametrize(
    "fields", [{"text": "demo:status=500"}, {"text": "Hello!", "model": "unreachable"}]
)
def test_502_is_plain_text(api: Api, fields: dict[str, Any]) -> None:
    """502	The model backend returned an error or was unreachable. The body is plain text.	Retry
    with exponential backoff."""
    answer = api.post(body(**fields))
    assert answer.status_code == 502
    assert answer.headers["content-type"].partition(";")[0] == "text/plain"
    assert re.fullmatch(r"[A-Z][\w ,.]+\.", answer.text)


def test_503_in_maintenance_and_without_a_backend(api: Api, uvicorn_served: GatewayProcess) -> None:
    """503	The service is in maintenance mode, or no model backend is available.	During
    maintenance, wait until the Retry-After date. Otherwise retry with exponential backoff."""
    with maintenance_of_all(api, replace(api, gateway=uvicorn_served)) as until:
        answer = api.post(body())
        assert answer.status_code == 503
        assert parsedate_to_datetime(answer.headers["retry-after"]) == until
    answer = api.post(body(model="without-backend"))
    assert answer.status_code == 503
    assert "retry-after" not in answer.headers


def test_401_402_403_and_429_come_before_the_endpoint(
    api: Api, broke: Tenant, globex: Tenant
) -> None:
    """401, 402, 403 and 429 come from the gateway before the request reaches this endpoint. They
    are listed once on the API Reference page."""
    nonsense = b"{"  # which the endpoint would answer with 400
    url = f"{api.gateway.base_url}/chat/completions"
    assert CLIENT.post(url, content=nonsense).status_code == 401
    assert api.of(broke).post(nonsense).status_code == 402
    organizations.suspend(globex.organization, reason="")
    assert api.of(globex).post(nonsense).status_code == 403
    with api.in_flight(8):
        assert api.post(nonsense).status_code == 429
    assert api.post(nonsense).status_code == 400


# --- Limits ---------------------------------------------------------------------------------------


def test_the_limits_apply_here(api: Api, tenant: Callable[..., Tenant]) -> None:
    """Context length, request body size, timeouts and the per-organization rate limits apply here
    as well; they are listed once on the API Reference page."""
    assert api.post(body("word " * 40_000)).status_code == 400
    assert api.post(body("x" * 21 * 2**20)).status_code == 413
    small = tenant("small", max_in_flight=1)
    with api.of(small).in_flight(1):
        assert api.of(small).post(body()).status_code == 429
