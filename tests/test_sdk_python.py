"""The OpenAI Python SDK as a customer's client, on both ASGI servers."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

from billing import keys
from kiln_site.demo.model_server import DemoModelServer
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess

MODEL = "qwen3-32b"
# The machine may be busy; nothing here waits for a time to pass.
TIMEOUT_SECONDS = 60.0
WEATHER: ChatCompletionToolUnionParam = {
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


def said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def connect(served: GatewayProcess, secret: str, **options: Any) -> OpenAI:
    options = {"max_retries": 0, "timeout": TIMEOUT_SECONDS, **options}
    return OpenAI(base_url=served.base_url, api_key=secret, **options)


@pytest.fixture
def client(served: GatewayProcess, acme: Tenant) -> Iterator[OpenAI]:
    with connect(served, acme.secret) as client:
        yield client


def cost_of(usage: CompletionUsage | None) -> Decimal:
    """The cost as the SDK shows it: a float, whose shortest text is the exact amount."""
    assert usage and usage.model_extra
    return Decimal(repr(usage.model_extra["cost"]))


def check_paid(acme: Tenant, generation_id: str, usage: CompletionUsage | None) -> None:
    """The client's usage, the event and the ledger say the same to the last digit."""
    assert usage
    event = acme.event(generation_id)
    assert (event.state, event.usage_source) == ("succeeded", "reported")
    assert event.prompt_tokens == usage.prompt_tokens
    assert event.completion_tokens == usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert event.cost == cost_of(usage) > 0
    assert acme.charges()[-1] == -event.cost


def check_not_paid(acme: Tenant) -> None:
    assert [event.state for event in acme.events()] == ["failed"] * len(acme.events())
    assert acme.charges() == []


# --- answers --------------------------------------------------------------------------------------


def test_it_works(client: OpenAI, acme: Tenant) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=said("Hello!"), max_tokens=800)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer._request_id
    check_paid(acme, answer._request_id, answer.usage)


def test_an_answer_cut_off_by_max_tokens_says_length(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=said("Hello!"), max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 2


def test_the_raw_answer_has_the_cost_in_plain_decimals(client: OpenAI, acme: Tenant) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=said("Hello!"), max_tokens=3
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    identifier = raw.headers["X-Neocloud-Generation-Id"]
    assert raw.request_id == raw.headers["x-request-id"] == identifier
    event = acme.event(identifier)
    assert f'"cost":{event.cost.normalize():f}' in raw.text
    check_paid(acme, identifier, raw.parse().usage)


def test_a_stream_gives_text_and_no_usage(client: OpenAI, acme: Tenant) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=said("Hello!"), stream=True
    ) as stream:
        identifier = stream.response.headers["X-Neocloud-Generation-Id"]
        chunks = list(stream)
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk.model == MODEL for chunk in chunks)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    event = acme.event(identifier)
    assert event.state == "succeeded"
    assert acme.charges() == [-event.cost]


def test_a_stream_says_the_same_as_a_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=said("Tell me of tides."))
    with client.chat.completions.create(
        model=MODEL, messages=said("Tell me of tides."), stream=True
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


def test_a_stream_with_usage_ends_with_one_chunk_of_it(client: OpenAI, acme: Tenant) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=said("Hello!"),
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        identifier = stream.response.headers["X-Neocloud-Generation-Id"]
        *content, last = stream
    assert all(chunk.choices and chunk.usage is None for chunk in content)
    assert last.choices == []
    check_paid(acme, identifier, last.usage)


def test_the_stream_helper_puts_an_answer_together(client: OpenAI, acme: Tenant) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=said("Hello!"), stream_options={"include_usage": True}
    ) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    check_paid(acme, str(acme.events()[0].pk), answer.usage)


def test_reasoning_and_cached_tokens_reach_the_client(client: OpenAI, acme: Tenant) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=said("Think! demo:reasoning=3 demo:prompt_tokens=310 demo:cached=256")
    )
    usage = answer.usage
    assert usage and usage.prompt_tokens_details and usage.completion_tokens_details
    assert usage.prompt_tokens_details.cached_tokens == 256
    assert usage.completion_tokens_details.reasoning_tokens == 3
    expected = (54 * Decimal("0.08") + 256 * Decimal("0.04")) / 1_000_000
    expected += usage.completion_tokens * Decimal("0.28") / 1_000_000
    assert cost_of(usage) == expected
    assert answer._request_id
    check_paid(acme, answer._request_id, usage)


def test_a_client_that_leaves_a_stream_pays_for_what_it_read(
    client: OpenAI, acme: Tenant, model_server: DemoModelServer
) -> None:
    text = f"demo:hang_after=4 {secrets.token_hex(8)}"
    with client.chat.completions.create(model=MODEL, messages=said(text), stream=True) as stream:
        identifier = stream.response.headers["X-Neocloud-Generation-Id"]
        read = [next(stream) for _ in range(4)]  # the role, then three of text
    model_server.wait_for_close(request_with(model_server, text)[0], TIMEOUT_SECONDS)
    # A customer with the next request in the same process: its answer comes after the settlement.
    client.chat.completions.create(model=MODEL, messages=said("Hello!"))
    event = acme.event(identifier)
    assert sum(bool(chunk.choices[0].delta.content) for chunk in read) == 3
    assert (event.state, event.completion_tokens) == ("cancelled", 3)
    assert -event.cost in acme.charges()


def test_the_async_client_runs_several_at_once(served: GatewayProcess, acme: Tenant) -> None:
    async def several() -> list[tuple[str | None, CompletionUsage | None]]:
        async with AsyncOpenAI(
            base_url=served.base_url,
            api_key=acme.secret,
            max_retries=0,
            timeout=TIMEOUT_SECONDS,
        ) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(4))))

    async def one(client: AsyncOpenAI, number: int) -> tuple[str | None, CompletionUsage | None]:
        if number % 2:
            answer = await client.chat.completions.create(
                model=MODEL, messages=said(f"Hello {number}!")
            )
            return answer._request_id, answer.usage
        async with await client.chat.completions.create(
            model=MODEL,
            messages=said(f"Hello {number}!"),
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = [chunk async for chunk in stream]
            return stream.response.headers["X-Neocloud-Generation-Id"], chunks[-1].usage

    answers = asyncio.run(several())
    for identifier, usage in answers:
        assert identifier and usage
        assert acme.event(identifier).cost == cost_of(usage)
    assert sum(acme.charges()) == -sum(cost_of(usage) for _, usage in answers)


# --- tools ----------------------------------------------------------------------------------------


def test_tools_make_a_round_trip(client: OpenAI, acme: Tenant) -> None:
    messages = said("What is the weather in Rome?")
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="auto"
    )
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert first._request_id
    check_paid(acme, first._request_id, first.usage)

    messages.append(choice.message.model_dump(exclude_none=True))  # type: ignore[arg-type]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"celsius": 21}'})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert second.choices[0].finish_reason == "stop"
    assert '{"celsius": 21}' in (second.choices[0].message.content or "")
    assert second._request_id
    check_paid(acme, second._request_id, second.usage)


def test_streamed_tool_calls_are_joined_by_index(client: OpenAI) -> None:
    """The arguments come in fragments of two calls, mixed."""
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    reason = None
    with client.chat.completions.create(
        model=MODEL,
        messages=said("What is the weather in Oslo? demo:tool_calls=2"),
        tools=[WEATHER],
        stream=True,
    ) as stream:
        for chunk in stream:
            reason = chunk.choices[0].finish_reason or reason
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments.setdefault(call.index, "")
                arguments[call.index] += call.function.arguments or ""
    assert reason == "tool_calls"
    assert names == {0: "get_weather", 1: "get_weather"}
    assert [json.loads(arguments[index]) for index in (0, 1)] == [{"city": "Oslo"}] * 2


# --- models ---------------------------------------------------------------------------------------


def test_models_are_listed(client: OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {"qwen3-32b", "gpt-oss-120b"} <= set(listed)
    extra = listed["qwen3-32b"].model_extra or {}
    assert extra["context_window"] == 32768
    assert extra["prices"] == {"input": "0.08", "cached_input": "0.04", "output": "0.28"}


@pytest.mark.parametrize("model_id", ["qwen3-32b", "acme/switched:1"])
def test_a_model_is_retrieved(client: OpenAI, model_id: str) -> None:
    model = client.models.retrieve(model_id)
    assert (model.id, model.object) == (model_id, "model")


# --- errors ---------------------------------------------------------------------------------------


def refused(client: OpenAI, **fields: Any) -> openai.APIStatusError:
    """Send a request that is refused and return the SDK's exception."""
    fields = {"model": MODEL, "messages": said("Hello!"), **fields}
    with pytest.raises(openai.APIStatusError) as refusal:
        client.chat.completions.create(**fields)
    return refusal.value


@pytest.mark.parametrize("secret", ["sk-bk-unknown", "", "unknown"])
def test_a_wrong_key_is_an_authentication_error(served: GatewayProcess, secret: str) -> None:
    with connect(served, secret or "x") as client:
        error = refused(client)
        assert type(error) is openai.AuthenticationError
        assert (error.status_code, error.code) == (401, "invalid_api_key")
        assert error.type == "authentication_error"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_a_revoked_key_is_an_authentication_error(served: GatewayProcess, acme: Tenant) -> None:
    keys.revoke(acme.key)
    with connect(served, acme.secret) as client:
        error = refused(client)
    assert type(error) is openai.AuthenticationError
    assert acme.secret not in str(error)


def test_a_paused_key_is_a_permission_error(served: GatewayProcess, acme: Tenant) -> None:
    keys.pause(acme.key)
    with connect(served, acme.secret) as client:
        error = refused(client)
    assert type(error) is openai.PermissionDeniedError
    assert (error.status_code, error.code, error.type) == (403, "key_paused", "permission_error")


def test_a_model_that_the_key_may_not_use_is_a_permission_error(
    served: GatewayProcess, acme: Tenant
) -> None:
    _, secret = keys.issue(
        organization=acme.organization, name="narrow", allowed_models=["gpt-oss-120b"]
    )
    with connect(served, secret) as client:
        error = refused(client)
        client.chat.completions.create(model="gpt-oss-120b", messages=said("Hello!"))
    assert type(error) is openai.PermissionDeniedError
    assert (error.code, error.param) == ("model_not_allowed", "model")


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    error = refused(client, model="nope")
    assert type(error) is openai.NotFoundError
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")
    assert "qwen3-32b" in error.message
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("nope")
    assert refusal.value.code == "model_not_found"


def test_an_endpoint_that_is_not_there_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.embeddings.create(model=MODEL, input="Hello!")
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.response.headers["content-type"] == "application/json"


def test_a_method_that_is_not_there_is_refused_in_json(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        client.post("/models", cast_to=object, body={})
    assert refusal.value.status_code == 405
    assert refusal.value.type == "invalid_request_error"


def test_an_empty_conversation_is_a_bad_request(client: OpenAI, acme: Tenant) -> None:
    error = refused(client, messages=[])
    assert type(error) is openai.BadRequestError
    assert (error.status_code, error.code) == (400, "empty_array")
    assert error.body == {
        "message": "Invalid 'messages': the array must contain at least one message.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "empty_array",
    }
    assert error.request_id
    assert acme.events() == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_backends_refusal_is_a_bad_request_without_code(
    client: OpenAI, acme: Tenant, stream: bool
) -> None:
    error = refused(client, temperature=9, stream=stream)
    assert type(error) is openai.BadRequestError
    assert (error.status_code, error.code, error.param) == (400, None, "temperature")
    assert "temperature must be in [0, 2]" in error.message
    check_not_paid(acme)


def test_an_error_as_first_event_of_a_stream_still_has_its_status(
    client: OpenAI, acme: Tenant
) -> None:
    error = refused(client, messages=said("demo:error_first=400"), stream=True)
    assert type(error) is openai.BadRequestError
    assert error.code is None
    check_not_paid(acme)


def test_a_request_beyond_the_limit_of_requests_in_flight_is_a_rate_limit_error(
    served: GatewayProcess, tenant: Callable[..., Tenant]
) -> None:
    acme = tenant(max_in_flight=1)
    with connect(served, acme.secret) as client:
        with client.chat.completions.create(
            model=MODEL, messages=said("demo:hang_after=1"), stream=True
        ) as stream:
            next(stream)
            error = refused(client)
        # The place is free again as soon as the stream's client has left.
        patient = client.with_options(max_retries=8)
        assert patient.chat.completions.create(model=MODEL, messages=said("Hello!")).choices
    assert type(error) is openai.RateLimitError
    assert (error.status_code, error.code) == (429, "rate_limit_exceeded")
    assert error.type == "rate_limit_error"
    names = error.response.headers.keys()
    assert not any(name.startswith(("x-ratelimit", "retry-after")) for name in names)
    assert [event.state for event in acme.events()] == ["cancelled", "succeeded"]


def test_an_organization_without_credits_gets_402(served: GatewayProcess, broke: Tenant) -> None:
    with connect(served, broke.secret) as client:
        error = refused(client)
        assert client.models.list().data  # reading is free
    assert type(error) is openai.APIStatusError
    assert (error.status_code, error.code) == (402, "insufficient_credits")
    assert error.type == "billing_error"
    assert broke.events() == []


def test_a_body_beyond_the_limit_gets_413(uvicorn_served: GatewayProcess, acme: Tenant) -> None:
    with connect(uvicorn_served, acme.secret) as client:
        error = refused(client, messages=said("x" * (21 * 2**20)))
    assert type(error) is openai.APIStatusError
    assert (error.status_code, error.code) == (413, "request_too_large")
    assert acme.events() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["demo:status=500", "demo:plain_status=401", "demo:reset"])
def test_a_backend_that_fails_is_an_internal_server_error(
    client: OpenAI, acme: Tenant, text: str, stream: bool
) -> None:
    error = refused(client, messages=said(text), stream=stream)
    assert type(error) is openai.InternalServerError
    assert (error.status_code, error.code) == (502, None)
    assert error.response.headers["content-type"].startswith("text/plain")
    assert error.response.text
    assert error.request_id == error.response.headers["X-Neocloud-Generation-Id"]
    check_not_paid(acme)


def test_a_model_without_a_backend_is_an_internal_server_error(
    client: OpenAI, acme: Tenant
) -> None:
    error = refused(client, model="without-backend")
    assert type(error) is openai.InternalServerError
    assert (error.status_code, error.code) == (503, "no_backend_available")
    assert error.type == "service_unavailable"
    check_not_paid(acme)


@pytest.mark.parametrize("fault", ["error_after=3", "error_string=3", "eof_after=3", "end_after=3"])
def test_a_backend_that_breaks_off_raises_after_the_text_that_came(
    client: OpenAI, acme: Tenant, fault: str
) -> None:
    text = ""
    with client.chat.completions.create(
        model=MODEL, messages=said(f"demo:{fault}"), stream=True
    ) as stream:
        identifier = stream.response.headers["X-Neocloud-Generation-Id"]
        with pytest.raises(openai.APIError) as failure:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert text
    assert type(failure.value) is openai.APIError
    assert failure.value.type == "server_error"
    assert failure.value.code is None
    event = acme.event(identifier)
    assert (event.state, event.status_code, event.cost) == ("failed", 200, 0)
    check_not_paid(acme)


# --- repeated requests ----------------------------------------------------------------------------


def counting(served: GatewayProcess, secret: str, sent: list[Any]) -> OpenAI:
    """A client that repeats as the SDK does, and notes what it sends."""
    transport = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    return connect(served, secret, max_retries=2, http_client=transport)


def request_with(model_server: DemoModelServer, text: str) -> list[Any]:
    """The requests with this text that reached the model server."""
    return [one for one in model_server.chat_requests if text.encode() in one.body]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"model": "nope"},
        {"temperature": 9},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_succeed_is_sent_once(
    served: GatewayProcess, acme: Tenant, fields: dict[str, Any]
) -> None:
    sent: list[Any] = []
    with counting(served, acme.secret, sent) as client:
        error = refused(client, **fields)
    assert error.response.headers["x-should-retry"] == "false"
    assert len(sent) == 1


def test_an_empty_balance_is_not_asked_again(served: GatewayProcess, broke: Tenant) -> None:
    sent: list[Any] = []
    with counting(served, broke.secret, sent) as client:
        error = refused(client)
    assert error.response.headers["x-should-retry"] == "false"
    assert len(sent) == 1


def test_a_backends_refusal_reaches_it_once(client: OpenAI, model_server: DemoModelServer) -> None:
    text = f"demo:status=400 {secrets.token_hex(8)}"
    refused(client.with_options(max_retries=2), messages=said(text))
    assert len(request_with(model_server, text)) == 1


def test_a_backends_failure_is_repeated_and_never_billed(
    served: GatewayProcess, acme: Tenant, model_server: DemoModelServer
) -> None:
    text = f"demo:status=500 {secrets.token_hex(8)}"
    sent: list[Any] = []
    with counting(served, acme.secret, sent) as client:
        error = refused(client.with_options(max_retries=1), messages=said(text))
    assert "x-should-retry" not in error.response.headers
    assert len(sent) == len(request_with(model_server, text)) == 2
    assert len(acme.events()) == 2
    check_not_paid(acme)
