"""Every refusal, from outside: its exact words, that it costs nothing, and what comes before what.

Through a real gateway, on both ASGI servers where the server has a part in it.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID

import httpx
import pytest
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing import keys, organizations
from billing.models import ApiKey, Organization
from billing.money import plain
from gateway import maintenance
from kiln_site.demo.model_server import DemoModelServer
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess, gateway
from tests.test_completions import body
from tests.test_document import (
    CLIENT,
    NAMED,
    WEATHER,
    Api,
    chunks,
    error,
    maintenance_of_all,
    seen_by,
    wait_until,
)

MIB = 2**20
NO_HEADERS: dict[str, str] = {}


@pytest.fixture
def api(served: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """Acme's view of the gateway on either server."""
    return seen_by(acme, served, model_server)


@pytest.fixture
def on_uvicorn(uvicorn_served: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """Acme's view of a gateway on uvicorn, for what is the same on both or exempts daphne."""
    return seen_by(acme, uvicorn_served, model_server)


def send(
    api: Api, headers: Any = None, *, method: str = "POST", path: str = "/v1/chat/completions"
) -> httpx.Response:
    """Send a good request with these headers only, by this method, to this path."""
    content = json.dumps(body()).encode() if method not in ("GET", "HEAD", "OPTIONS") else None
    headers = api.tenant.headers if headers is None else headers
    return CLIENT.request(method, f"{api.gateway.url}{path}", content=content, headers=headers)


def refused(
    api: Api,
    answer: httpx.Response,
    status: int,
    code: str | None,
    kind: str = "invalid_request_error",
    *,
    param: str | None = None,
    is_final: bool = True,
    beside: int = 0,
) -> str:
    """Check a refusal before admission, beside so many other requests, and return its text."""
    assert answer.status_code == status, answer.text
    refusal = error(answer)
    assert (refusal["code"], refusal["type"], refusal["param"]) == (code, kind, param)
    assert UUID(answer.headers["x-request-id"])
    assert answer.headers.get("x-should-retry") == ("false" if is_final else None)
    absent = {"x-neocloud-generation-id", "location", "set-cookie", "retry-after"}
    assert [name for name in answer.headers if name in absent or "ratelimit" in name] == []
    assert api.tenant.secret not in answer.text
    costs_nothing(api, beside)
    return str(refusal["message"])


def costs_nothing(api: Api, beside: int = 0) -> None:
    """Check that nothing was forwarded, held, billed or recorded, beside so many others."""
    events = api.tenant.events()
    now = api.tenant.standing
    assert len(events) == len(api.backend.chat_requests) == now.in_flight == beside
    assert now.held == sum(event.hold for event in events)
    assert api.tenant.charges() == []


def raw(api: Api, *pieces: bytes) -> bytes:
    """Send these bytes on a connection of their own and return all that comes back."""
    with socket.create_connection(("127.0.0.1", api.gateway.port), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = b""
        # A server that answers before it has read everything resets the connection behind it.
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                received += piece
    return received


def head(api: Api, *lines: str) -> bytes:
    return "\r\n".join(
        [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            f"Authorization: Bearer {api.tenant.secret}",
            *lines,
            "\r\n",
        ]
    ).encode()


# --- 401 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer {secret}x",
        "Bearer {flipped}",
        "Bearer {unknown}",
        "Bearer {secret} {secret}",
        "Basic {secret}",
        "Token {secret}",
        "{secret}",
        "Bearer sk-bk-é",
        "Bearer {secret}\xff",
        "Bearer " + "x" * 4000,
    ],
)
def test_401_without_a_good_key(api: Api, header: str | None) -> None:
    secret = api.tenant.secret
    flipped = secret[:-1] + ("a" if secret[-1] != "a" else "b")  # its checksum is wrong
    with transaction.atomic():
        _, unknown = keys.issue(organization=api.tenant.organization, name="never")
        transaction.set_rollback(True)
    headers = {}
    if header is not None:
        text = header.format(secret=secret, flipped=flipped, unknown=unknown)
        headers = {"authorization": text.encode("latin-1")}
    answer = send(api, headers)
    message = refused(api, answer, 401, "invalid_api_key", "authentication_error")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "sk-bk-" not in message
    assert send(api, headers, method="GET", path="/v1/models").status_code == 401


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_401_for_a_key_that_ended(api: Api, how: str) -> None:
    if how == "revoked":
        keys.revoke(api.tenant.key)
    else:
        ApiKey.objects.filter(pk=api.tenant.key.pk).update(expires_at=timezone.now())
    refused(api, send(api), 401, "invalid_api_key", "authentication_error")


@pytest.mark.parametrize(
    "header", ["bearer {}", "BEARER {}", "Bearer   {}", "Bearer {}  ", "  Bearer {}"]
)
def test_the_scheme_and_blanks_do_not_matter(api: Api, header: str) -> None:
    content = json.dumps(body()).encode()
    good = head(api, f"Content-Length: {len(content)}")
    header = header.format(api.tenant.secret)
    request = good.replace(f"Bearer {api.tenant.secret}".encode(), header.encode())
    assert raw(api, request, content).startswith(b"HTTP/1.1 200 ")


def test_x_api_key_counts_without_an_authorization_header(api: Api, globex: Tenant) -> None:
    answer = send(api, {"x-api-key": api.tenant.secret})
    assert answer.status_code == 200
    assert api.tenant.event(answer).state == "succeeded"
    both = {"x-api-key": globex.secret, **api.tenant.headers}
    assert api.tenant.event(send(api, both)).state == "succeeded"
    assert (
        send(api, {"x-api-key": api.tenant.secret, "Authorization": "Basic x"}).status_code == 401
    )


def test_401_for_two_different_keys(api: Api, globex: Tenant) -> None:
    for name, template in (("Authorization", "Bearer {}"), ("x-api-key", "{}")):
        both = [(name, template.format(each.secret)) for each in (api.tenant, globex)]
        for headers in (both, both[::-1]):
            refused(api, send(api, headers), 401, "invalid_api_key", "authentication_error")
    costs_nothing(api.of(globex))
    same = [("Authorization", f"Bearer {api.tenant.secret}")] * 2
    assert send(api, same).status_code == 200


@pytest.mark.parametrize("name", ["api_key", "api-key", "key", "token", "access_token", "API_KEY"])
def test_401_for_a_key_in_the_address(api: Api, name: str) -> None:
    path = f"/v1/chat/completions?{name}={api.tenant.secret}"
    for headers in (NO_HEADERS, api.tenant.headers):
        answer = send(api, headers, path=path)
        refused(api, answer, 401, "invalid_api_key", "authentication_error")


# --- 403 ------------------------------------------------------------------------------------------


def test_403_for_a_paused_key(api: Api) -> None:
    keys.pause(api.tenant.key)
    refused(api, send(api), 403, "key_paused", "permission_error")


def test_403_for_a_suspended_organization(api: Api) -> None:
    organizations.suspend(api.tenant.organization, reason="An invoice is open.")
    message = refused(api, send(api), 403, "organization_suspended", "permission_error")
    assert "An invoice is open." in message


def test_403_for_a_model_that_the_key_may_not_use(api: Api) -> None:
    _, secret = keys.issue(
        organization=api.tenant.organization, name="one", allowed_models=["gpt-oss-120b"]
    )
    limited = api.of(replace(api.tenant, secret=secret))
    answer = limited.post(body())
    refused(limited, answer, 403, "model_not_allowed", "permission_error", param="model")
    assert limited.post(body(model="gpt-oss-120b")).status_code == 200


# --- 402 ------------------------------------------------------------------------------------------


def test_402_without_credits(api: Api, broke: Tenant) -> None:
    poor = api.of(broke)
    message = refused(poor, poor.post(body()), 402, "insufficient_credits", "billing_error")
    assert "the balance is 0 USD" in message
    assert poor.get("models").status_code == poor.get("credits").status_code == 200


def test_402_counts_what_is_held(api: Api, tenant: Callable[..., Tenant]) -> None:
    poor = api.of(tenant("poor", credits="0.00001"))
    with poor.in_flight(1):
        [event] = poor.tenant.events()
        answer = poor.post(body())
        message = refused(poor, answer, 402, "insufficient_credits", "billing_error", beside=1)
        assert "the balance is 0.00001 USD" in message
        assert f"{plain(event.hold)} USD are held" in message
        credits = poor.get("credits").json()
        assert Decimal(credits["held"]) == event.hold
        assert Decimal(credits["available"]) == Decimal("0.00001") - event.hold < 0
    assert poor.post(body()).status_code == 200


def test_the_last_picodollar_can_be_spent(api: Api, tenant: Callable[..., Tenant]) -> None:
    poor = api.of(tenant("poor", credits="0.000000000001"))
    assert poor.post(body()).status_code == 200
    assert poor.tenant.balance < 0
    assert poor.post(body()).status_code == 402


def test_an_overdraft_limit_counts_as_credits(api: Api, broke: Tenant) -> None:
    Organization.objects.filter(pk=broke.organization.pk).update(overdraft_limit=Decimal("0.01"))
    assert api.of(broke).post(body()).status_code == 200
    assert -Decimal("0.01") < broke.balance < 0


# --- The body -------------------------------------------------------------------------------------


def text(content: str) -> bytes:
    return content.encode()


GOOD = '"model":"qwen3-32b","messages":[{"role":"user","content":"Hello!"}]'


def elements(count: int) -> bytes:
    """Return a good body in which `[`, `{` and `,` occur so many times."""
    rest = f'{{{GOOD},"x":['
    commas = count - sum(map(rest.count, "[{,"))
    return text(f"{rest}{'0,' * commas}0]}}")


NO_JSON = {
    "nothing": b"",
    "blanks": b"  \n",
    "half": b'{"model":',
    "an array": b"[]",
    "a string": b'"model"',
    "null": b"null",
    "two objects": b"{}{}",
    "a comma too many": text(f"{{{GOOD},}}"),
    "a comment": text(f"{{{GOOD}/* */}}"),
    "single quotes": b"{'model': 'qwen3-32b'}",
    "NaN": text(f'{{{GOOD},"temperature":NaN}}'),
    "Infinity": text(f'{{{GOOD},"temperature":Infinity}}'),
    "-Infinity": text(f'{{{GOOD},"temperature":-Infinity}}'),
    "beyond a double": text(f'{{{GOOD},"top_p":1e400}}'),
    "invalid UTF-8": text(f"{{{GOOD}}}").replace(b"Hello", b"Hell\xff"),
    "an overlong form": text(f"{{{GOOD}}}").replace(b"Hello", b"Hell\xc0\xaf"),
    "a surrogate in UTF-8": text(f"{{{GOOD}}}").replace(b"Hello", b"Hell\xed\xa0\x80"),
    "UTF-16": f"{{{GOOD}}}".encode("utf-16"),
    "a control character": text(f"{{{GOOD}}}").replace(b"Hello", b"Hell\n"),
    "equal keys": text(f'{{{GOOD},"model":"gpt-oss-120b"}}'),
    "equal keys deep inside": text(f"{{{GOOD}}}").replace(b'"role"', b'"role":"system","role"'),
    "equal keys, one escaped": text(f'{{{GOOD},"mode\\u006c":"gpt-oss-120b"}}'),
    "65 levels": text(f'{{{GOOD},"x":{"[" * 64}{"]" * 64}}}'),
    "65 levels of objects": text('{%s,"x":%s1%s}' % (GOOD, '{"a":' * 64, "}" * 64)),  # noqa: UP031
    "100,000 levels": text(f'{{{GOOD},"x":{"[" * 100_000}}}'),
    "200,001 elements": elements(200_001),
    "200,001 arrays": text(f'{{{GOOD},"x":[{",".join(["[]"] * 100_000)}]}}'),
}


@pytest.mark.parametrize("content", NO_JSON.values(), ids=NO_JSON)
def test_400_for_what_is_no_json_object(on_uvicorn: Api, content: bytes) -> None:
    refused(on_uvicorn, on_uvicorn.post(content), 400, None)


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "a model that is a number": ({"model": 1}, "model"),
    "a model that is null": ({"model": None}, "model"),
    "stream: yes": ({"stream": "yes"}, "stream"),
    "stream: TRUE": ({"stream": "TRUE"}, "stream"),
    "stream: 2": ({"stream": 2}, "stream"),
    "stream: -1": ({"stream": -1}, "stream"),
    "stream: ''": ({"stream": ""}, "stream"),
    "stream: []": ({"stream": []}, "stream"),
    "stream: {}": ({"stream": {}}, "stream"),
    "options that are a string": ({"stream": True, "stream_options": "yes"}, "stream_options"),
    "options that are an array": ({"stream": True, "stream_options": []}, "stream_options"),
    "options that are false": ({"stream": True, "stream_options": False}, "stream_options"),
    "include_usage: 'True'": (
        {"stream": True, "stream_options": {"include_usage": "True"}},
        "stream_options",
    ),
    "include_usage: 1": (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options",
    ),
    "messages that are a string": ({"messages": "Hello!"}, "messages"),
    "messages that are an object": ({"messages": {}}, "messages"),
    "messages that are false": ({"messages": False}, "messages"),
    "messages that are 0": ({"messages": 0}, "messages"),
    "messages that are empty text": ({"messages": ""}, "messages"),
    "tools that are an object": ({"tools": {}}, "tools"),
    "tools that are a string": ({"tools": "get_weather"}, "tools"),
    "a tool that is a string": ({"tools": ["get_weather"]}, "tools[0]"),
    "a function without a description": (
        {"tools": [WEATHER, {"type": "function", "function": {"name": "f"}}]},
        "tools[1].function.description",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), FIELDS.values(), ids=FIELDS)
def test_400_for_a_wrong_type_names_the_field(
    on_uvicorn: Api, fields: dict[str, Any], param: str
) -> None:
    refused(on_uvicorn, on_uvicorn.post({**body(), **fields}), 400, None, param=param)


MESSAGES: list[Any] = [
    "Hello!",
    None,
    [],
    {},
    {"content": "Hello!"},
    {"role": None, "content": "Hello!"},
    {"role": "wizard", "content": "Hello!"},
    {"role": "User", "content": "Hello!"},
    {"role": ["user"], "content": "Hello!"},
    {"role": "system"},
    {"role": "developer", "content": None},
    {"role": "user", "content": None},
    {"role": "user", "content": 1},
    {"role": "user", "content": {"type": "text", "text": "Hello!"}},
    {"role": "user", "content": ["Hello!"]},
    {"role": "tool", "content": "{}"},
    {"role": "tool", "tool_call_id": 1, "content": "{}"},
    {"role": "tool", "tool_call_id": "call_1"},
]


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_400_for_a_message_that_no_server_may_see(on_uvicorn: Api, message: object) -> None:
    messages = [{"role": "user", "content": "Hello!"}, message]
    answer = on_uvicorn.post(body(messages=messages))
    refused(on_uvicorn, answer, 400, None, param="messages[1]")


@pytest.mark.parametrize(
    "url",
    [
        None,
        1,
        "",
        "http://example.com/cat.png",
        "ftp://example.com/cat.png",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "//example.com/cat.png",
        "cat.png",
        "https://",
        "https://localhost/",
        "https://localhost./",
        "https://printer/",
        "https://db.internal/",
        "https://127.0.0.1/",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0177.0.0.1/",
        "https://0.0.0.0/",
        "https://10.0.0.7:8000/",
        "https://172.16.0.1/",
        "https://192.168.1.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://100.64.0.1/",
        "https://[::1]/",
        "https://[fd00::1]/",
        "https://[fe80::1]/",
        "https://[::ffff:10.0.0.7]/",
        "https://example.com@10.0.0.7/",
        "https://example.com\\@10.0.0.7/",
        "https://example.com:port/",
        " https://example.com/",
    ],
)
def test_400_for_an_image_from_a_private_address(on_uvicorn: Api, url: object) -> None:
    image = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]
    answer = on_uvicorn.post(body(model="acme/switched:1", messages=messages))
    refused(on_uvicorn, answer, 400, None, param="messages[0]")


def test_400_for_an_image_on_a_model_without_image_input(on_uvicorn: Api) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    answer = on_uvicorn.post(body(messages=[{"role": "user", "content": [image]}]))
    refused(on_uvicorn, answer, 400, None, param="messages[0]")


@pytest.mark.parametrize("fields", [{}, {"messages": None}, {"messages": []}])
@pytest.mark.parametrize("stream", [True, False])
def test_400_empty_array(api: Api, fields: dict[str, Any], stream: bool) -> None:
    answer = api.post({"model": "qwen3-32b", "stream": stream, **fields})
    message = refused(api, answer, 400, "empty_array", param="messages")
    assert message == "Invalid 'messages': the array must contain at least one message."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "gpt-oss-120b", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"model": "acme/switched:1", "seed": 7}, "seed"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_400_unsupported_parameter(
    api: Api, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = api.post({**body(), "stream": stream, **fields})
    refused(api, answer, 400, "unsupported_parameter", param=param)


@pytest.mark.parametrize(
    "model",
    [
        "Qwen3-32B",
        "qwen3",
        " qwen3-32b",
        "qwen3-32b ",
        "qwen3-32b/",
        "qwen3-32b:free",
        "switched:1",
        "../qwen3-32b",
        "qwen3-32b\0",
        "",
        "x" * 100_000,
        "重" * 300,
    ],
    ids=lambda model: repr(model[:20]),
)
def test_404_for_an_id_that_is_not_in_the_catalog(api: Api, model: str) -> None:
    message = refused(api, api.post(body(model=model)), 404, "model_not_found", param="model")
    assert len(message) < 1000
    for served in ("qwen3-32b", "gpt-oss-120b", "acme/switched:1"):
        assert served in message


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "GZIP", "gzip, identity"])
def test_415_for_a_content_encoding(api: Api, encoding: str) -> None:
    answer = send(api, {**api.tenant.headers, "Content-Encoding": encoding})
    refused(api, answer, 415, None)


# --- 413 ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_gateway(catalog: None) -> Iterator[GatewayProcess]:
    """On uvicorn: daphne takes in all of a body before the gateway hears of it."""
    with gateway("uvicorn", KILN_BODY_MAX_MIB="1", KILN_UPLOAD_SECONDS="1") as running:
        yield running


@pytest.fixture
def small(small_gateway: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """Acme's view of a gateway that takes bodies of 1 MiB within 1 second."""
    return seen_by(acme, small_gateway, model_server)


def padded(size: int) -> bytes:
    return text(f"{{{GOOD}}}").ljust(size)


def test_a_body_of_exactly_the_limit_is_taken(small: Api) -> None:
    assert small.post(padded(MIB)).status_code == 200
    assert small.forwarded == json.loads(f"{{{GOOD}}}")


def test_413_for_one_byte_more(small: Api) -> None:
    message = refused(small, small.post(padded(MIB + 1)), 413, "request_too_large")
    assert "1 MiB" in message


def test_413_before_the_body_is_sent(small: Api) -> None:
    received = raw(small, head(small, "Content-Length: 999999999999"))
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in received
    costs_nothing(small)


def test_413_while_a_chunked_body_is_read(small: Api) -> None:
    chunk = b"80000\r\n" + b" " * 0x80000 + b"\r\n"
    # Three halves of a MiB, and no end: the answer comes before it.
    received = raw(small, head(small, "Transfer-Encoding: chunked"), chunk, chunk, chunk)
    assert received.startswith(b"HTTP/1.1 413 ")
    costs_nothing(small)


def test_a_chunked_body_within_the_limit_is_taken(small: Api) -> None:
    content = padded(MIB)
    pieces = [content[at : at + 100_000] for at in range(0, MIB, 100_000)]
    url = f"{small.gateway.base_url}/chat/completions"
    answer = CLIENT.post(url, content=iter(pieces), headers=small.tenant.headers)
    assert answer.status_code == 200
    assert "content-length" not in answer.request.headers


def test_413_on_the_limit_of_every_gateway(api: Api) -> None:
    message = refused(api, api.post(padded(20 * MIB + 1)), 413, "request_too_large")
    assert "20 MiB" in message


def test_an_upload_that_stalls_is_given_up(small: Api) -> None:
    received = raw(small, head(small, "Content-Length: 1000"), b"{")
    assert received.startswith(b"HTTP/1.1 408 ")
    costs_nothing(small)


# --- What is accepted is forwarded as it was sent -------------------------------------------------

ODD = {
    "the largest integers": '"seed":18446744073709551615,"x":-9223372036854775808',
    "a string of digits": '"user":"123456789012345678901234567890"',
    "64 levels": f'"x":{"[" * 63}{"]" * 63}',
    "colons and quotes": '"user":"a:b\\":\\u003a{[,","x:y":{"::":":"}',
    "numbers": '"x":[0,-0.0,1.0,0.1,1e-7,1E22,123456789.123456789,5e-324,1.7976931348623157e308]',
    "escapes": '"x":"\\u0000\\u001f\\u007f\\ud83c\\udf89\\/\\b\\f"',
    "separators": '"x":"\u2028\u2029\u0085\ufeff"',
    "an empty key": '"":{"":""}',
    "keys that differ in case": '"User":1,"user":"2"',
    "equal keys in different objects": '"x":[{"a":1},{"a":1,"b":{"a":1}}]',
    "blanks": '\r\n\t"x" :\t[ ] ',
}
REFUSED_OR_EXACT = {
    "65 bits": '"seed":18446744073709551616',
    "minus 65 bits": '"seed":-9223372036854775809',
    "200 digits": f'"x":{"9" * 200}',
    "5000 digits": f'"x":{"9" * 5000}',
    "a number that a double rounds": '"x":0.12345678901234567890123',
    "a lone surrogate": '"x":"\\ud800"',
    "surrogates in the wrong order": '"x":"\\udf89\\ud83c"',
    "a lone surrogate as a key": '"\\udfff":1',
    "a hidden equal key": '"x":"\\u003a","seed":1,"seed":2',
}


def same(one: object, other: object) -> bool:
    """Tell whether two JSON values are written alike, down to 1 and 1.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_what_is_accepted_is_forwarded_exactly(on_uvicorn: Api, fields: str) -> None:
    sent = f"{{{GOOD},{fields}}}"
    answer = on_uvicorn.post(text(sent))
    assert answer.status_code == 200, answer.text
    assert same(on_uvicorn.forwarded, json.loads(sent))


def test_200_000_elements_are_accepted(on_uvicorn: Api) -> None:
    assert on_uvicorn.post(elements(200_000)).status_code == 200
    assert same(on_uvicorn.forwarded, json.loads(elements(200_000)))


@pytest.mark.parametrize("fields", REFUSED_OR_EXACT.values(), ids=REFUSED_OR_EXACT)
def test_what_cannot_be_forwarded_exactly_is_refused(on_uvicorn: Api, fields: str) -> None:
    sent = f"{{{GOOD},{fields}}}"
    answer = on_uvicorn.post(text(sent))
    if on_uvicorn.backend.chat_requests:
        assert same(on_uvicorn.forwarded, json.loads(sent))
    else:
        refused(on_uvicorn, answer, 400, None)


def test_a_byte_order_mark_is_refused_or_not_forwarded(on_uvicorn: Api) -> None:
    answer = on_uvicorn.post(text(f"\ufeff{{{GOOD}}}"))
    if on_uvicorn.backend.chat_requests:
        assert same(on_uvicorn.forwarded, json.loads(f"{{{GOOD}}}"))
        assert answer.status_code == 200
    else:
        refused(on_uvicorn, answer, 400, None)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    fields=st.dictionaries(
        st.sampled_from(
            [
                "model",
                "messages",
                "stream",
                "stream_options",
                "tools",
                "tool_choice",
                "n",
                "stop",
                "x",
            ]
        ),
        _ANYTHING,
    )
)
def test_nothing_is_a_500(on_uvicorn: Api, fields: dict[str, Any]) -> None:
    on_uvicorn.backend.reset_counters()
    sent = {**body(), **fields}
    answer = on_uvicorn.post(sent)
    assert answer.status_code in (200, 400, 404), answer.text
    for request in on_uvicorn.backend.chat_requests:
        unchanged = {"messages", "tools", "tool_choice", "n", "x"} & sent.keys()
        assert all(same(request.json[name], sent[name]) for name in unchanged)
    assert on_uvicorn.tenant.standing.in_flight == 0


# --- 429 ------------------------------------------------------------------------------------------


@pytest.fixture
def two_gateways(api: Api, uvicorn_served: GatewayProcess) -> list[Api]:
    """Two processes; acme uses another key on the second."""
    _, secret = keys.issue(organization=api.tenant.organization, name="second")
    return [api, replace(api, gateway=uvicorn_served, tenant=replace(api.tenant, secret=secret))]


def too_many(api: Api, answer: httpx.Response) -> None:
    message = refused(
        api, answer, 429, "rate_limit_exceeded", "rate_limit_error", is_final=False, beside=8
    )
    assert "8 requests in flight" in message


def test_429_for_the_ninth_of_all_keys_and_processes(two_gateways: list[Api]) -> None:
    first, second = two_gateways
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(first.streaming())
            stack.enter_context(second.streaming())
        for each in two_gateways:
            too_many(each, each.post(body()))
            too_many(each, each.post(body(stream=True)))
        assert first.get("models").status_code == first.get("credits").status_code == 200
    wait_until(lambda: first.tenant.standing.in_flight == 0)


def test_a_slot_is_free_as_soon_as_a_stream_ends(two_gateways: list[Api]) -> None:
    first, second = two_gateways
    with first.in_flight(7):
        with second.streaming():
            assert first.post(body()).status_code == 429
        wait_until(lambda: first.tenant.standing.in_flight == 7)
        assert first.post(body()).status_code == 200
        with second.streaming() as eighth:
            assert eighth.status_code == 200
            assert first.post(body()).status_code == 429
    with first.in_flight(8) as streams:
        assert {stream.status_code for stream in streams} == {200}


def test_eight_of_forty_at_once_are_admitted(two_gateways: list[Api]) -> None:
    backend = two_gateways[0].backend
    with ThreadPoolExecutor(40) as threads:
        asked = [
            threads.submit(two_gateways[number % 2].post, body("demo:gate", stream=number % 3 == 0))
            for number in range(40)
        ]
        # Nobody who was admitted is answered before the gate opens.
        answered = as_completed(asked, timeout=60)
        refusals = [next(answered).result().status_code for _ in range(32)]
        backend.wait_for_requests(8, timeout=60)
        assert backend.in_flight == 8
        backend.open_gate()
        admitted = [one.result() for one in answered]
    assert refusals == [429] * 32
    assert [answer.status_code for answer in admitted] == [200] * 8
    assert backend.most_in_flight == 8
    assert len(two_gateways[0].tenant.events()) == 8


def test_the_limit_is_the_organizations_own(
    api: Api, globex: Tenant, tenant: Callable[..., Tenant]
) -> None:
    two = api.of(tenant("two", max_in_flight=2))
    with two.in_flight(2):
        assert two.post(body()).status_code == 429
        assert api.of(globex).post(body()).status_code == 200
        Organization.objects.filter(pk=two.tenant.organization.pk).update(max_in_flight=3)
        wait_until(lambda: two.post(body()).status_code == 200)


# --- 503 ------------------------------------------------------------------------------------------


def in_maintenance(answer: httpx.Response, until: datetime) -> str:
    assert answer.status_code == 503
    refusal = error(answer)
    assert (refusal["code"], refusal["type"]) == ("maintenance", "service_unavailable")
    # An HTTP date (RFC 9110 section 5.6.7), which SDKs and proxies read alike.
    date = answer.headers["retry-after"]
    assert re.fullmatch(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT", date)
    assert parsedate_to_datetime(date) == until
    assert UUID(answer.headers["x-request-id"])
    assert "x-neocloud-generation-id" not in answer.headers
    return str(refusal["message"])


def test_503_in_maintenance_of_all(
    api: Api, on_uvicorn: Api, small: Api, tenant: Callable[..., Tenant]
) -> None:
    waiting = api.of(tenant("waiting"))
    with (
        waiting.streaming("demo:gate_after=2 demo:tokens=5") as running,
        maintenance_of_all(api, on_uvicorn, small) as until,
    ):
        seen = len(api.tenant.events())
        in_maintenance(api.post(body()), until)
        in_maintenance(api.post(body(stream=True)), until)
        # It comes after the key and before the body.
        in_maintenance(api.post(b"not even JSON"), until)
        assert send(api, NO_HEADERS).status_code == 401
        assert len(api.tenant.events()) == seen
        assert api.get("models").status_code == api.get("credits").status_code == 200
        # What runs finishes.
        api.backend.open_gate()
        assert running.read().endswith(b"data: [DONE]\n\n")
    assert [event.state for event in waiting.tenant.events()] == ["succeeded"]


@contextmanager
def maintenance_of_resting(*apis: Api) -> Iterator[datetime]:
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=5)

    def all_answer(status: int) -> bool:
        return all(api.post(body(model="resting")).status_code == status for api in apis)

    maintenance.switch_on(until=until, model_id="resting", message="It is being moved.")
    try:
        wait_until(lambda: all_answer(503))
        yield until
    finally:
        maintenance.switch_off(model_id="resting")
        wait_until(lambda: all_answer(200))


def test_503_in_maintenance_of_one_model(api: Api, on_uvicorn: Api) -> None:
    with maintenance_of_resting(api, on_uvicorn) as until:
        message = in_maintenance(api.post(body(model="resting")), until)
        assert message == "It is being moved."
        assert api.post(body()).status_code == 200
        # It comes after the body and the catalog.
        assert api.post({"model": "resting", "messages": []}).status_code == 400
        assert api.post(body(model="no such model")).status_code == 404


def test_503_without_a_backend(api: Api) -> None:
    for stream in (True, False):
        answer = api.post(body(model="without-backend", stream=stream))
        refused(
            api, answer, 503, "no_backend_available", "service_unavailable", is_final=False
        )  # fmt: skip


# --- Orders ---------------------------------------------------------------------------------------


def test_401_and_403_come_before_402_and_429(api: Api, broke: Tenant) -> None:
    organizations.suspend(broke.organization, reason="")
    assert api.of(broke).post(body()).status_code == 403
    keys.revoke(broke.key)
    wait_until(lambda: api.of(broke).post(body()).status_code == 401)
    with api.in_flight(8):
        keys.pause(api.tenant.key)
        wait_until(lambda: api.post(body()).status_code == 403)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        padded(20 * MIB + 1),
        body(model="no such model"),
        body(messages=[]),
        body(model="without-backend"),
    ],
    ids=["no JSON", "too large", "no such model", "no message", "no backend"],
)
def test_402_comes_before_the_body(api: Api, broke: Tenant, content: object) -> None:
    poor = api.of(broke)
    refused(poor, poor.post(content), 402, "insufficient_credits", "billing_error")


def test_401_402_and_429_come_before_the_body_is_sent(on_uvicorn: Api, broke: Tenant) -> None:
    unsent = "Content-Length: 1000"
    nobody = replace(broke, secret="sk-bk-nobody")
    for tenant, status in ((nobody, b"401"), (broke, b"402")):
        received = raw(on_uvicorn, head(on_uvicorn.of(tenant), unsent))
        assert received.startswith(b"HTTP/1.1 %s " % status)
    with on_uvicorn.in_flight(8):
        assert raw(on_uvicorn, head(on_uvicorn, unsent)).startswith(b"HTTP/1.1 429 ")


def test_the_body_comes_before_the_catalog(on_uvicorn: Api) -> None:
    unknown = {"model": "no such model"}
    api = on_uvicorn
    refused(api, api.post(padded(20 * MIB + 1)), 413, "request_too_large")
    refused(api, api.post(body(**unknown) | {"stream": "yes"}), 400, None, param="stream")
    refused(api, api.post({**unknown, "messages": []}), 400, "empty_array", param="messages")
    refused(api, api.post(body(**unknown)), 404, "model_not_found", param="model")


# --- Methods, paths, hosts ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"])
def test_405_for_another_method(api: Api, method: str) -> None:
    answer = send(api, method=method)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.headers["content-type"] == "application/json"
    assert UUID(answer.headers["x-request-id"])
    if method != "HEAD":
        refused(api, answer, 405, "method_not_allowed")
    costs_nothing(api)


@pytest.mark.parametrize("path", ["models", "models/qwen3-32b", "credits", "key", "generations/x"])
def test_405_for_a_post_to_what_is_read(api: Api, path: str) -> None:
    answer = send(api, path=f"/v1/{path}")
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]
    assert error(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/v1/nothing/",
        "/v1/chat",
        "/v1/chat/completions/",
        "/v1/chat/completions//",
        "/v1/chat//completions",
        "/v1//chat/completions",
        "/v1/v1/chat/completions",
        "/v1/completions",
        "/v1/models/",
        "/v1/models/no-such-model",
        "/v1/models/qwen3-32b/",
        "/v1/credits/",
        "/v1/generations/",
        "/v1/generations/no-such-id",
        "/v1/key/",
        "//v1/nothing",
        "/v1/%00",
        "/v1/%ff",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_404_is_json_and_never_a_redirect(api: Api, path: str, method: str) -> None:
    answer = send(api, method=method, path=path)
    assert answer.status_code in ((404,) if method == "GET" else (404, 405))
    assert error(answer)["type"] == "invalid_request_error"
    assert UUID(answer.headers["x-request-id"])
    assert "location" not in answer.headers
    costs_nothing(api)


def test_a_wrong_host_gets_json(on_uvicorn: Api) -> None:
    # In a gateway of its own, which must not log it as a failure: any client can send it.
    with gateway() as running:
        api = replace(on_uvicorn, gateway=running)
        for host in ("evil.example", "evil.example:99999", "[::1", "a_b", "127.0.0.1/"):
            headers = {**api.tenant.headers, "Host": host}
            for path in ("models", "credits", "key", "nothing"):
                answer = send(api, headers, method="GET", path=f"/v1/{path}")
                assert answer.status_code in (200, 400, 404)
                assert answer.headers["content-type"] == "application/json"
                assert answer.json()
            assert send(api, headers).status_code in (200, 400)


def test_an_http_1_0_client_gets_an_answer_without_chunks(api: Api) -> None:
    content = json.dumps(body(stream=True)).encode()
    request = head(api, f"Content-Length: {len(content)}").replace(b"HTTP/1.1", b"HTTP/1.0")
    answer_head, _, answer = raw(api, request, content).partition(b"\r\n\r\n")
    assert b" 200 OK" in answer_head
    assert b"chunked" not in answer_head.lower()
    assert answer.endswith(b"data: [DONE]\n\n")


def test_two_requests_on_one_connection_are_both_understood(api: Api) -> None:
    content = json.dumps(body("demo:tokens=3")).encode()
    length = f"Content-Length: {len(content)}"
    first = head(api, length).replace(b"Connection: close", b"Connection: keep-alive")
    received = raw(api, first + content + head(api, length) + content)
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert received.count(b'"cost":') == 2


# --- What bites within two seconds ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda tenant: keys.revoke(tenant.key), 401),
        (
            lambda tenant: ApiKey.objects.filter(pk=tenant.key.pk).update(
                expires_at=timezone.now()
            ),
            401,
        ),
        (lambda tenant: keys.pause(tenant.key), 403),
        (lambda tenant: organizations.suspend(tenant.organization, reason=""), 403),
    ],
    ids=["revoked", "expired", "paused", "suspended"],
)
def test_it_bites_in_every_process(
    two_gateways: list[Api], change: Callable[[Tenant], None], status: int
) -> None:
    first = two_gateways[0]
    both = [first, replace(first, gateway=two_gateways[1].gateway)]
    for each in both:
        assert each.post(body()).status_code == each.get("models").status_code == 200
    change(first.tenant)
    for each in both:
        wait_until(lambda each=each: each.post(body()).status_code == status)  # type: ignore[misc]
        wait_until(lambda each=each: each.get("models").status_code == status)  # type: ignore[misc]


def test_what_was_paused_or_suspended_works_again(api: Api) -> None:
    keys.pause(api.tenant.key)
    assert api.post(body()).status_code == 403
    keys.resume(api.tenant.key)
    wait_until(lambda: api.post(body()).status_code == 200)
    organizations.suspend(api.tenant.organization, reason="")
    wait_until(lambda: api.post(body()).status_code == 403)
    organizations.activate(api.tenant.organization)
    wait_until(lambda: api.post(body()).status_code == 200)


# --- The model server refuses, or fails -----------------------------------------------------------


def failed(api: Api, answer: httpx.Response, status: int) -> None:
    """Check that an admitted request cost nothing, is recorded, and named by its answer."""
    assert answer.status_code == status, answer.text
    event = api.tenant.event(answer)
    assert answer.headers["x-request-id"] == str(event.pk)
    assert (event.state, event.status_code, event.cost) == ("failed", status, 0)
    assert (event.prompt_tokens, event.completion_tokens) == (0, 0)
    assert event.usage_source == "none"
    assert event.error
    assert api.tenant.charges() == []
    assert api.tenant.standing.in_flight == 0


REASON = "The demo model server was asked to fail."


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("demo:status=400", REASON),
        ("demo:status=413", REASON),
        ("demo:status=422", REASON),
        ("demo:status=400 demo:shape=string", REASON),
        ("demo:status=400 demo:shape=old", REASON),
        ("demo:status=400 demo:shape=detail", REASON),
        ("demo:status=422 demo:shape=details", REASON),
        ("demo:status=400 demo:shape=empty", "The model server rejected the request."),
        ("demo:plain_status=400", "Internal Server Error"),
    ],
)
def test_400_of_the_model_server_stays_readable(
    api: Api, words: str, reason: str, stream: bool
) -> None:
    answer = api.post(body(words, stream=stream))
    failed(api, answer, 400)
    refusal = error(answer)
    assert (refusal["type"], refusal["code"]) == ("invalid_request_error", None)
    assert refusal["message"] == reason
    assert answer.headers["x-should-retry"] == "false"


def test_400_of_the_model_server_names_the_field(api: Api) -> None:
    answer = api.post(body(temperature="hot"))
    failed(api, answer, 400)
    assert error(answer)["param"] == "temperature"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        *(f"demo:status={status}" for status in (401, 403, 404, 405, 408, 409, 418, 451)),
        *(f"demo:status={status}" for status in (201, 202, 500, 501, 502, 504, 599)),
        "demo:plain_status=500",
        "demo:redirect",
        "demo:reset",
        "demo:eof",
        "demo:not_http",
        "demo:html",
        "demo:half_json",
        "demo:odd_json",
        "demo:empty_body",
        "demo:gzip",
        "demo:error_first",
        "demo:error_first=503",
    ],
)
def test_502_is_plain_text_and_tells_nothing(api: Api, words: str, stream: bool) -> None:
    if words == "demo:half_json" and stream:
        words = "demo:eof_after=0"  # the same of a stream
    answer = api.post(body(words, stream=stream))
    if words == "demo:error_first=503" and not stream:
        # A status 503 in an answer of one piece: the model server is busy.
        failed(api, answer, 503)
        return
    failed(api, answer, 502)
    assert answer.headers["content-type"].partition(";")[0] == "text/plain"
    assert re.fullmatch(r"[A-Z][A-Za-z ,.]+\.", answer.text)  # no host, no number, no page
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize("stream", [True, False])
def test_502_for_a_backend_that_nobody_listens_on(api: Api, stream: bool) -> None:
    answer = api.post(body(model="unreachable", stream=stream))
    failed(api, answer, 502)
    assert answer.headers["content-type"].partition(";")[0] == "text/plain"
    assert "127.0.0.1" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [429, 503])
def test_503_for_a_busy_backend(api: Api, status: int, stream: bool) -> None:
    answer = api.post(body(f"demo:status={status}", stream=stream))
    failed(api, answer, 503)
    refusal = error(answer)
    assert refusal["code"] == "no_backend_available"
    assert refusal["type"] == "service_unavailable"
    assert "x-should-retry" not in answer.headers
    assert "retry-after" not in answer.headers


def test_slots_are_free_after_every_kind_of_failure(api: Api) -> None:
    ways: list[object] = [
        b"{",
        body(messages=[]),
        body(model="no such model"),
        body(model="unreachable"),
        body(model="without-backend"),
        body("demo:status=500"),
        body("demo:status=400"),
        body("demo:eof_after=3", stream=True),
        body("demo:error_after=3", stream=True),
    ]
    for _ in range(3):  # three times each is more than the eight slots
        for content in ways:
            assert api.post(content).status_code != 429
    assert api.tenant.standing.in_flight == 0
    assert chunks(api.post(body(stream=True)))
