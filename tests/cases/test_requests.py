"""Section F: requests."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.test import Client

from billing import keys
from dashboard.models import User
from gateway import payload
from gateway.errors import InvalidRequest
from tests.cases.test_usage import ANY_JSON
from tests.conftest import Tenant
from tests.gateway.test_meter import meter
from tests.gateway.test_payload import forwarded, parsed
from tests.gateway_process import SERVERS, gateway
from tests.test_completions import body
from tests.test_document import CLIENT, Api, error, seen_by
from tests.test_refusals import costs_nothing, head, send

TRUE, FALSE = [True, "true", 1], [False, "false", 0, None]


def _is_one_of(value: Any, values: list[Any]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)


@pytest.mark.parametrize("value", [*ANY_JSON, "true", "false", "TRUE", 1e0, 0.0, "1"], ids=repr)
def test_c56_stream_of_any_type(value: Any) -> None:
    if _is_one_of(value, [*TRUE, *FALSE]):
        request = parsed(stream=value)
        assert request.stream is forwarded(request)["stream"] is _is_one_of(value, TRUE)
    else:
        with pytest.raises(InvalidRequest) as refusal:
            parsed(stream=value)
        assert refusal.value.param == "stream"


def test_c59_a_schema_of_a_thousand_levels_is_refused(api: Api) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"type": "object", "properties": {"x": schema}}
    function = {"name": "f", "description": "Does f.", "parameters": schema}
    answer = api.post(body(tools=[{"type": "function", "function": function}]))
    assert (answer.status_code, error(answer)["code"]) == (400, None)
    costs_nothing(api)


@pytest.mark.parametrize("megabytes", [3, 19])
def test_c62_a_body_of_megabytes_is_taken(api: Api, megabytes: int) -> None:
    image = "data:image/png;base64," + "A" * (megabytes * 2**20)
    part = {"type": "image_url", "image_url": {"url": image}}
    answer = api.post(body(model="acme/switched:1", messages=[{"role": "user", "content": [part]}]))
    assert answer.status_code == 200
    assert api.forwarded["messages"][0]["content"] == [part]


@pytest.mark.parametrize("path", ["models", "credits", "key", "nothing"])
def test_c62_a_body_of_megabytes_elsewhere_gets_json(api: Api, path: str) -> None:
    answer = CLIENT.post(
        f"{api.gateway.base_url}/{path}", content=b" " * 3 * 2**20, headers=api.tenant.headers
    )
    assert answer.status_code in (404, 405)
    assert error(answer)["type"] == "invalid_request_error"


def test_c63_a_client_may_wait_for_100_continue(api: Api) -> None:
    content = json.dumps(body()).encode()
    with socket.create_connection(("127.0.0.1", api.gateway.port), timeout=60) as connection:
        connection.sendall(head(api, f"Content-Length: {len(content)}", "Expect: 100-continue"))
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 100 ")
        connection.sendall(content)
        while piece := connection.recv(65536):
            received += piece
    assert b"\r\n\r\nHTTP/1.1 200 OK\r\n" in received
    assert len(api.backend.chat_requests) == 1


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_c63_a_body_may_come_in_chunks(api: Api, size: int) -> None:
    content = json.dumps(body()).encode()
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    url = f"{api.gateway.base_url}/chat/completions"
    answer = CLIENT.post(url, content=iter(pieces), headers=api.tenant.headers)
    assert answer.status_code == 200
    assert "content-length" not in answer.request.headers
    assert api.forwarded == body()


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "GET", "FOO"])
def test_c64_only_a_post_runs_a_completion(api: Api, method: str) -> None:
    preflight = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    for headers in (preflight, {**preflight, **api.tenant.headers}):
        answer = send(api, headers, method=method)
        # uvicorn's parser knows no FOO.
        assert answer.status_code in ((400, 405) if method == "FOO" else (405,))
        assert not any(name.startswith("access-control") for name in answer.headers)
    costs_nothing(api)


@pytest.mark.parametrize("path", ["//v1/chat/completions", "///v1/chat/completions"])
def test_c65_slashes_before_v1_are_one(api: Api, path: str) -> None:
    answer = send(api, path=path)
    assert answer.status_code == 200
    assert api.tenant.event(answer).state == "succeeded"


@pytest.mark.parametrize("server", SERVERS)
def test_c69_no_key_is_in_a_log_the_database_or_a_page(
    server: str, catalog: None, acme: Tenant, broke: Tenant, model_server: Any
) -> None:
    unknown, ended = "sk-bk-" + "0" * 38, keys.issue(organization=acme.organization, name="old")
    keys.revoke(ended[0])
    secrets = [acme.secret, broke.secret, unknown, ended[1]]
    said: list[str] = []
    with gateway(server, DEBUG="True") as running:
        api = seen_by(acme, running, model_server)
        url = f"{running.base_url}/chat/completions"
        for secret in secrets:
            headers = {"Authorization": f"Bearer {secret}"}
            said.append(CLIENT.post(url, json=body(), headers=headers).text)
            said.append(CLIENT.post(url, content=b"{", headers=headers).text)
            said.append(CLIENT.get(f"{running.base_url}/key", headers=headers).text)
            said.append(CLIENT.get(f"{running.base_url}/nothing", headers=headers).text)
            if server == "uvicorn":  # daphne logs addresses: docs/cases.md
                said.append(CLIENT.get(f"{running.base_url}/models?api_key={secret}").text)
                said.append(CLIENT.post(f"{url}?key={secret}", json=body()).text)
        said.append(api.post(body("demo:status=500")).text)
        said.append(api.post(body("demo:reset")).text)
        said.append(api.post(body(model="unreachable")).text)
        said.extend(_pages(acme))
        log = "\n".join(running.log)
    for secret in secrets:
        for place, text in {"answers": "\n".join(said), "log": log}.items():
            assert secret not in text, place
        assert not any(secret in text for text in _texts_of_the_database())


def _pages(tenant: Tenant) -> Iterator[str]:
    """Edit the key in the admin, and return what its pages and the dashboard show after that."""
    name = tenant.organization.slug
    operator = User.objects.create_superuser(f"{name}@kiln.test", "correct horse battery")
    browser = Client(headers={"host": "localhost"})
    browser.force_login(operator)
    change = f"/admin/billing/apikey/{tenant.key.pk}/change/"
    browser.post(change, {"name": "renamed", "allowed_models": "[]", "spend_period": "none"})
    tenant.key.refresh_from_db()
    assert tenant.key.name == "renamed"
    for page in (
        change,
        f"/admin/billing/apikey/{tenant.key.pk}/history/",
        "/admin/billing/apikey/",
    ):
        answer = browser.get(page, follow=True)
        assert answer.status_code == 200
        yield answer.content.decode()


def _texts_of_the_database() -> Iterator[str]:
    for model in apps.get_models():
        for row in model._default_manager.values_list():
            yield repr(row)


@pytest.mark.parametrize("stream", [True, False, None])
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": [], "tool_choice": "none"},
    ],
    ids=str,
)
def test_c70_empty_tool_fields_are_forwarded(fields: dict[str, Any], stream: bool | None) -> None:
    request = parsed(stream=stream, **fields)
    payload.check(request, image_input=False)
    sent = forwarded(request)
    assert {name: sent[name] for name in fields} == fields


CALLS: list[list[Any]] = [
    [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
    [{"index": 0, "function": {"name": None, "arguments": '{"x":"\\ud8'}}],
    [{"index": 0, "function": {"arguments": "3c\\udf89"}}, {"index": 1, "id": "b"}],
    [{"function": {"arguments": "你"}}],
    [{"index": None, "id": None, "type": None, "function": {"arguments": "\U0001f389"}}],
    [{"index": 1, "function": {"arguments": None}}],
    [{"index": 1, "function": None}, None, "x"],
    [{"index": 7, "custom": {"input": "x"}}],
    [{"index": 0, "function": {"arguments": "x" * 100_000}}],
    [],
]


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: str(calls)[:40])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_c71_fragments_of_tool_calls_are_passed_on_as_they_are(
    calls: list[Any], ascii_only: bool
) -> None:
    choice = {"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None}
    data = json.dumps({"model": "m", "choices": [choice]}, ensure_ascii=ascii_only).encode()
    metered = meter()
    assert metered.read(data) is data
    texts = [
        call["function"].get("arguments")
        for call in calls
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    assert metered.deltas == len([text for text in texts if text])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]},
        {"tool_calls": [{"id": "a"}], "role": "assistant"},
        {"role": "assistant", "content": "", "name": None},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi."}], "refusal": None},
        {"role": "assistant", "content": [], "audio": None, "unheard_of": {"b": 1, "a": 2}},
        {"role": "assistant", "content": 7},
        {"role": "developer", "content": "Be brief.", "name": None},
    ],
    ids=str,
)
def test_c72_messages_are_forwarded_as_sent(message: dict[str, Any]) -> None:
    request = parsed(messages=[{"role": "user", "content": "Hi."}, message])
    payload.check(request, image_input=False)
    sent = json.dumps(forwarded(request)["messages"][1])
    assert sent == json.dumps(message)  # with the order of the keys
    assert request.prompt_tokens >= 1
