"""A real model server, llama.cpp's own, behind a gateway on both ASGI servers.

The tiny model is a byte bigram: it says nonsense, but it counts, streams and stops as any model
does. SmolLM2-135M is small and says something.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import call_command
from django.db import connection
from openai import OpenAI

from billing.models import UsageEvent
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess
from tests.real_server import real_server, wait_until

TINY, SMOLLM2 = "real/tiny", "real/smollm2"
# Wide, so that an answer is long enough for its client to leave in the middle of it.
CONTEXT = 32768
TIMEOUT_SECONDS = 120.0
CREDITS = Decimal(5)
INPUT, CACHED, OUTPUT = Decimal("0.11"), Decimal("0.07"), Decimal("0.430001")
ENTRY = """
[[models]]
id = "{model}"
context_window = {context}
input_usd_per_million = "0.11"
cached_input_usd_per_million = "0.07"
output_usd_per_million = "0.430001"
[[models.backends]]
url = "{url}"
served_model_name = "{alias}"
name = "llama.cpp"
"""


@pytest.fixture(scope="session")
def tiny_url(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The tiny model, in the catalog as real/tiny."""
    with real_server("tiny", alias="tiny", context=CONTEXT, parallel=2) as url:
        file = tmp_path_factory.mktemp("real") / "catalog.toml"
        load_catalog(file, django_db_blocker, model=TINY, context=CONTEXT, url=url, alias="tiny")
        yield url


@pytest.fixture(scope="session")
def smollm2_url(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """SmolLM2-135M-Instruct, in the catalog as real/smollm2."""
    with real_server("smollm2", alias="smollm2-135m", context=2048, parallel=2) as url:
        file = tmp_path_factory.mktemp("real") / "catalog.toml"
        entry = {"model": SMOLLM2, "context": 2048, "url": url, "alias": "smollm2-135m"}
        load_catalog(file, django_db_blocker, **entry)
        yield url


def load_catalog(file: Path, django_db_blocker: Any, **entry: Any) -> None:
    file.write_text(ENTRY.format(**entry))
    with django_db_blocker.unblock():
        call_command("load_catalog", str(file), stdout=StringIO())
        connection.close()


@pytest.fixture
def tiny(tiny_url: str, served: GatewayProcess, acme: Tenant) -> GatewayProcess:
    """A gateway that serves the tiny model."""
    wait_for_model(served, acme, TINY)
    return served


@pytest.fixture
def smollm2(smollm2_url: str, served: GatewayProcess, acme: Tenant) -> GatewayProcess:
    """A gateway that serves SmolLM2."""
    wait_for_model(served, acme, SMOLLM2)
    return served


def wait_for_model(served: GatewayProcess, acme: Tenant, model: str) -> None:
    """A gateway reads the catalog anew each second."""
    for _ in wait_until(f"{model} is listed"):
        answer = httpx.get(f"{served.base_url}/models", headers=acme.headers)
        if model in [listed["id"] for listed in answer.json()["data"]]:
            return


def body(text: str = "Hello!", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": TINY, "messages": messages, "temperature": 0, "max_tokens": 40, **fields}


def ask(served: GatewayProcess, acme: Tenant, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"{served.base_url}/chat/completions",
        json=fields,
        headers=acme.headers,
        timeout=TIMEOUT_SECONDS,
    )


def ask_directly(url: str, fields: dict[str, Any]) -> Any:
    """Ask the model server itself, as the gateway does."""
    answer = httpx.post(
        f"{url}/chat/completions", json={**fields, "model": "tiny"}, timeout=TIMEOUT_SECONDS
    )
    assert answer.status_code == 200, answer.text
    return load(answer.text)


def load(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def chunks_of(text: str) -> list[Any]:
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert "data: [DONE]" not in events
    return [load(event.removeprefix("data: ")) for event in events]


def cost_of(usage: dict[str, Any]) -> Decimal:
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    uncached: int = usage["prompt_tokens"] - cached
    completion: int = usage["completion_tokens"]
    return (uncached * INPUT + cached * CACHED + completion * OUTPUT) / 1_000_000


def check_paid(acme: Tenant, event: UsageEvent, answer: dict[str, Any]) -> None:
    """The server's own timings, the usage, the event and the ledger agree to the last digit."""
    usage, timings = answer["usage"], answer["timings"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] == timings["cache_n"] + timings["prompt_n"]
    assert usage["completion_tokens"] == timings["predicted_n"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert cached == timings["cache_n"]
    assert (event.state, event.usage_source, event.anomaly) == ("succeeded", "reported", "")
    assert (event.prompt_tokens, event.cached_tokens) == (usage["prompt_tokens"], cached)
    assert event.completion_tokens == usage["completion_tokens"]
    assert event.cost == usage["cost"] == cost_of(usage) > 0
    assert acme.charges() == [-event.cost]
    assert acme.balance == CREDITS - event.cost


def closed_event(acme: Tenant, generation_id: str) -> UsageEvent:
    for _ in wait_until("the event is closed"):
        event = acme.event(generation_id)
        if event.state != "in_flight":
            return event
    raise AssertionError


def test_it_works(tiny: GatewayProcess, tiny_url: str, acme: Tenant) -> None:
    answer = ask(tiny, acme, body())
    assert answer.status_code == 200
    got, own = load(answer.text), ask_directly(tiny_url, body())
    assert got["model"] == TINY
    assert got["choices"] == own["choices"]
    assert got["choices"][0]["message"]["content"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got["usage"][count] == own["usage"][count]
    check_paid(acme, acme.event(answer), got)


def test_a_stream_says_and_costs_the_same_as_a_whole_answer(
    tiny: GatewayProcess, tiny_url: str, acme: Tenant
) -> None:
    fields = {**body(), "stream": True, "stream_options": {"include_usage": True}}
    answer = ask(tiny, acme, fields)
    assert answer.status_code == 200
    *content, last = chunks_of(answer.text)
    own = ask_directly(tiny_url, body())
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in content)
    assert text == own["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in content]
    assert reasons == [None] * (len(content) - 1) + [own["choices"][0]["finish_reason"]]
    assert not any("usage" in chunk for chunk in content)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]
    check_paid(acme, acme.event(answer), last)


def test_a_stream_without_usage_costs_the_same(tiny: GatewayProcess, acme: Tenant) -> None:
    answer = ask(tiny, acme, {**body(), "stream": True})
    assert not any("usage" in chunk for chunk in chunks_of(answer.text))
    event = acme.event(answer)
    assert (event.state, event.usage_source) == ("succeeded", "reported")
    assert acme.charges() == [-event.cost] != [0]


def test_a_cut_off_answer_says_length(tiny: GatewayProcess, acme: Tenant) -> None:
    answer = load(ask(tiny, acme, body(max_tokens=3)).text)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_cached_tokens_are_cheaper(tiny: GatewayProcess, acme: Tenant) -> None:
    fields = body("The same long prompt twice. " * 20)
    first, second = (load(ask(tiny, acme, fields).text)["usage"] for _ in range(2))
    assert second["prompt_tokens"] == first["prompt_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] > 0
    assert [first["cost"], second["cost"]] == [cost_of(first), cost_of(second)]
    assert acme.charges() == [-first["cost"], -second["cost"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_a_bad_request(
    tiny: GatewayProcess, acme: Tenant, stream: bool
) -> None:
    answer = ask(tiny, acme, body("x" * (CONTEXT + 1), stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "context size" in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
    assert acme.event(answer).state == "failed"
    assert acme.charges() == []
    assert acme.balance == CREDITS


def test_a_client_that_leaves_in_the_middle_pays_for_what_was_made(
    tiny: GatewayProcess, acme: Tenant
) -> None:
    fields = body(max_tokens=CONTEXT - 1000, ignore_eos=True, stream=True)
    with httpx.stream(
        "POST",
        f"{tiny.base_url}/chat/completions",
        json=fields,
        headers=acme.headers,
        timeout=TIMEOUT_SECONDS,
    ) as answer:
        generation_id = answer.headers["X-Neocloud-Generation-Id"]
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(20):
            next(lines)
    event = closed_event(acme, generation_id)
    # One chunk has the role, the others a token each.
    assert (event.state, event.usage_source) == ("cancelled", "counted")
    assert 19 <= event.completion_tokens < CONTEXT - 1000
    assert event.prompt_tokens == 2  # "Hello!": a quarter of its bytes, rounded up
    assert event.cost == (2 * INPUT + event.completion_tokens * OUTPUT) / 1_000_000
    assert acme.charges() == [-event.cost]
    assert acme.balance == CREDITS - event.cost


def test_a_real_model_knows_the_capital_of_france(smollm2: GatewayProcess, acme: Tenant) -> None:
    with OpenAI(
        base_url=smollm2.base_url,
        api_key=acme.secret,
        max_retries=0,
        timeout=TIMEOUT_SECONDS,
    ) as client:
        whole = client.chat.completions.create(
            model=SMOLLM2,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=60,
        )
        with client.chat.completions.create(
            model=SMOLLM2,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            *content, last = stream
    assert "Paris" in (whole.choices[0].message.content or "")
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in content)
    for event, usage in zip(acme.events(), (whole.usage, last.usage), strict=True):
        assert usage and usage.model_extra
        assert event.state == "succeeded"
        assert event.cost == Decimal(repr(usage.model_extra["cost"]))
        assert event.cost == cost_of(usage.model_dump())
    assert acme.charges() == [-event.cost for event in acme.events()]
    assert acme.balance == CREDITS - sum(event.cost for event in acme.events())
