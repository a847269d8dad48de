"""The OpenAI Node SDK as a customer's client, on both ASGI servers.

Needs `node` and `npm`; tests/node/client.mjs makes the calls. JavaScript writes and reads numbers
as doubles, so what it says of a cost is compared with the ledger as a decimal.
"""

import fcntl
import json
import secrets
import subprocess
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from billing import keys
from kiln_site.demo.model_server import DemoModelServer
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess
from tests.requirements import absent, require

NODE = Path(__file__).parent / "node"
MODEL = "qwen3-32b"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say what the weather of a city is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
INSTALL_SECONDS = 300
CALL_SECONDS = 120

Call = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def sdk() -> None:
    """Install the SDK once into tests/node/node_modules, however many test runs begin at once."""
    require("node", "npm")
    manifest = NODE / "package.json"
    with manifest.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _installed() == json.load(file)["dependencies"]["openai"]:
            return
        try:
            subprocess.run(
                ["npm", "ci", "--silent", "--no-audit", "--no-fund"],
                cwd=NODE,
                timeout=INSTALL_SECONDS,
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            absent("the packages of tests/node, which `npm ci` could not install")


def _installed() -> str:
    try:
        manifest = (NODE / "node_modules" / "openai" / "package.json").read_text()
    except FileNotFoundError:
        return ""
    return str(json.loads(manifest)["version"])


def run(served: GatewayProcess, secret: str, call: str, body: Any = None, **more: Any) -> Any:
    """Make one call as this key's customer and return the client's report."""
    command = {"baseURL": served.base_url, "apiKey": secret, "call": call, "body": body, **more}
    done = subprocess.run(
        ["node", "client.mjs"],
        cwd=NODE,
        input=json.dumps(command),
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout, parse_float=Decimal)


@pytest.fixture
def customer(sdk: None, served: GatewayProcess, acme: Tenant) -> Call:
    """customer("create", body): a call of acme's."""

    def call(name: str, body: Any = None, **more: Any) -> dict[str, Any]:
        report: dict[str, Any] = run(served, acme.secret, name, body, **more)
        return report

    return call


def body(text: str = "Hello!", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def check_paid(acme: Tenant, generation_id: str, usage: dict[str, Any]) -> None:
    event = acme.event(generation_id)
    assert (event.state, event.usage_source) == ("succeeded", "reported")
    assert event.prompt_tokens == usage["prompt_tokens"]
    assert event.completion_tokens == usage["completion_tokens"]
    assert event.cost == usage["cost"] > 0
    assert acme.charges() == [-event.cost]


def check_not_paid(acme: Tenant) -> None:
    assert [event.state for event in acme.events()] == ["failed"] * len(acme.events())
    assert acme.charges() == []


# --- answers --------------------------------------------------------------------------------------


def test_it_works(customer: Call, acme: Tenant) -> None:
    report = customer("create", body(max_tokens=800))
    answer = report["answer"]
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert report["requestId"] == report["generationId"]
    check_paid(acme, report["generationId"], answer["usage"])


def test_the_raw_answer_has_the_cost_in_plain_decimals(customer: Call, acme: Tenant) -> None:
    report = customer("raw", body(max_tokens=3))
    event = acme.event(report["generationId"])
    assert report["contentType"] == "application/json"
    assert f'"cost":{event.cost.normalize():f}' in report["text"]


def test_a_stream_gives_text_and_no_usage(customer: Call, acme: Tenant) -> None:
    report = customer("stream", body())
    chunks = report["chunks"]
    assert text_of(chunks)
    assert not any("usage" in chunk for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    event = acme.event(report["generationId"])
    assert event.state == "succeeded"
    assert acme.charges() == [-event.cost]


def test_a_stream_with_usage_ends_with_one_chunk_of_it(customer: Call, acme: Tenant) -> None:
    report = customer("stream", body(stream_options={"include_usage": True}))
    *content, last = report["chunks"]
    assert text_of(content)
    assert not any("usage" in chunk for chunk in content)
    assert last["choices"] == []
    check_paid(acme, report["generationId"], last["usage"])


def test_the_stream_helper_puts_an_answer_together(customer: Call, acme: Tenant) -> None:
    report = customer("streamHelper", body(stream_options={"include_usage": True}))
    assert report["answer"]["choices"][0]["message"]["content"]
    assert report["answer"]["choices"][0]["finish_reason"] == "stop"
    check_paid(acme, str(acme.events()[0].pk), report["answer"]["usage"])


def test_a_client_that_leaves_a_stream_pays_for_what_it_read(
    customer: Call, acme: Tenant, model_server: DemoModelServer
) -> None:
    text = f"demo:hang_after=4 {secrets.token_hex(8)}"
    report = customer("leave", body(text), count=4)
    [request] = [one for one in model_server.chat_requests if text.encode() in one.body]
    model_server.wait_for_close(request, CALL_SECONDS)
    # The next request's answer comes after the settlement of this one.
    customer("create", body())
    event = acme.event(report["generationId"])
    assert (event.state, event.completion_tokens) == ("cancelled", 3)
    assert -event.cost in acme.charges()


# --- tools ----------------------------------------------------------------------------------------


def test_tools_make_a_round_trip(customer: Call, acme: Tenant) -> None:
    asked = body("What is the weather in Rome?", tools=[WEATHER], tool_choice="auto")
    first = customer("create", asked)["answer"]["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] is None
    [call] = first["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"celsius": 21}'}
    messages = [*asked["messages"], first["message"], result]
    second = customer("create", {**asked, "messages": messages})["answer"]["choices"][0]
    assert second["finish_reason"] == "stop"
    assert '{"celsius": 21}' in second["message"]["content"]
    assert acme.charges() == [-event.cost for event in acme.events()]


def test_the_tool_runner_answers_streamed_calls(customer: Call, acme: Tenant) -> None:
    report = customer("runTools", body("What is the weather in Oslo?", tools=[WEATHER]))
    assert report["asked"] == [{"city": "Oslo"}]
    assert '{"celsius":21}' in report["text"]
    roles = [message["role"] for message in report["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert [event.state for event in acme.events()] == ["succeeded"] * 2
    assert acme.charges() == [-event.cost for event in acme.events()]


# --- models ---------------------------------------------------------------------------------------


def test_models_are_listed_and_retrieved(customer: Call) -> None:
    assert {"qwen3-32b", "gpt-oss-120b"} <= {model["id"] for model in customer("models")["models"]}
    for model_id in ("qwen3-32b", "acme/switched:1"):
        model = customer("model", model_id)["model"]
        assert (model["id"], model["object"]) == (model_id, "model")


# --- errors ---------------------------------------------------------------------------------------


def check_error(report: dict[str, Any], name: str, status: int, code: str | None) -> None:
    error = report["error"]
    assert (error["class"], error["status"], error["code"]) == (name, status, code)
    assert error["requestId"]


def test_a_wrong_key_is_an_authentication_error(sdk: None, served: GatewayProcess) -> None:
    for call, sent in (("create", body()), ("models", None)):
        report = run(served, "sk-bk-unknown", call, sent)
        check_error(report, "AuthenticationError", 401, "invalid_api_key")


def test_a_paused_key_is_a_permission_error(customer: Call, acme: Tenant) -> None:
    keys.pause(acme.key)
    check_error(customer("create", body()), "PermissionDeniedError", 403, "key_paused")


def test_what_is_not_there_is_not_found(customer: Call) -> None:
    report = customer("create", body(model="nope"))
    check_error(report, "NotFoundError", 404, "model_not_found")
    assert report["error"]["param"] == "model"
    check_error(customer("model", "nope"), "NotFoundError", 404, "model_not_found")
    assert customer("embed", {"model": MODEL, "input": "x"})["error"]["class"] == "NotFoundError"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "empty_array", "messages"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"temperature": 9}, None, "temperature"),
        ({"temperature": 9, "stream": True}, None, "temperature"),
    ],
)
def test_a_bad_request_is_sent_once(
    customer: Call, acme: Tenant, fields: dict[str, Any], code: str | None, param: str
) -> None:
    report = customer("create", {**body(), **fields}, maxRetries=2)
    check_error(report, "BadRequestError", 400, code)
    assert report["error"]["type"] == "invalid_request_error"
    assert report["error"]["param"] == param
    assert report["error"]["headers"]["x-should-retry"] == "false"
    assert report["sent"] == 1
    check_not_paid(acme)


def test_an_organization_without_credits_gets_402_once(
    sdk: None, served: GatewayProcess, broke: Tenant
) -> None:
    report = run(served, broke.secret, "create", body(), maxRetries=2)
    check_error(report, "APIError", 402, "insufficient_credits")
    assert report["sent"] == 1
    assert broke.events() == []


def test_a_request_beyond_the_limit_of_requests_in_flight_is_a_rate_limit_error(
    sdk: None, served: GatewayProcess, tenant: Callable[..., Tenant], model_server: DemoModelServer
) -> None:
    acme = tenant(max_in_flight=1)
    text = f"demo:hang_after=1 {secrets.token_hex(8)}"
    command = {"baseURL": served.base_url, "apiKey": acme.secret, "call": "stream"}
    with subprocess.Popen(["node", "client.mjs"], cwd=NODE, stdin=subprocess.PIPE) as holder:
        assert holder.stdin
        holder.stdin.write(json.dumps({**command, "body": body(text)}).encode())
        holder.stdin.close()
        request = _arrived(model_server, text)
        report = run(served, acme.secret, "create", body())
        holder.kill()
    check_error(report, "RateLimitError", 429, "rate_limit_exceeded")
    assert "retry-after" not in report["error"]["headers"]
    model_server.wait_for_close(request, CALL_SECONDS)
    # The place is free as soon as the first client has left.
    assert run(served, acme.secret, "create", body(), maxRetries=8)["answer"]["choices"]


def _arrived(model_server: DemoModelServer, text: str) -> Any:
    """Wait until the model server has a request with this text."""
    count = len(model_server.chat_requests)
    while True:
        for request in model_server.chat_requests:
            if text.encode() in request.body:
                return request
        model_server.wait_for_requests(count + 1, CALL_SECONDS)
        count += 1


def test_a_backend_that_fails_is_an_internal_server_error_and_asked_again(
    customer: Call, acme: Tenant
) -> None:
    report = customer("create", body("demo:status=500"), maxRetries=1)
    check_error(report, "InternalServerError", 502, None)
    assert report["error"]["headers"]["content-type"].startswith("text/plain")
    assert report["sent"] == 2
    assert len(acme.events()) == 2
    check_not_paid(acme)


def test_a_model_without_a_backend_is_an_internal_server_error(customer: Call) -> None:
    report = customer("create", body(model="without-backend"))
    check_error(report, "InternalServerError", 503, "no_backend_available")


@pytest.mark.parametrize("fault", ["error_after=3", "eof_after=3"])
def test_a_backend_that_breaks_off_raises_after_the_text_that_came(
    customer: Call, acme: Tenant, fault: str
) -> None:
    report = customer("stream", body(f"demo:{fault}"))
    assert text_of(report["chunks"])
    error = report["error"]
    assert (error["class"], error["status"], error["code"]) == ("APIError", None, None)
    assert error["type"] == "server_error"
    event = acme.event(report["generationId"])
    assert (event.state, event.status_code, event.cost) == ("failed", 200, 0)
    check_not_paid(acme)
