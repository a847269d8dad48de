"""The usage API: a key reads its own organization's generations, credits and itself."""

import json
import re
import uuid
from datetime import timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIRequest
from django.http import Http404, HttpRequest
from django.test import AsyncRequestFactory, Client, RequestFactory
from django.utils import timezone
from rest_framework import exceptions

from billing import keys, organizations
from billing.models import ApiKey, Organization, UsageEvent
from dashboard import api
from tests.dashboard import world

Key = tuple[ApiKey, str]
ADDRESSES = ["/v1/generations/x", "/v1/credits", "/v1/key", "/v1/statements/2026-11"]


def get(path: str, secret: str = "", **extra: Any) -> Any:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    return Client().get(path, headers={**headers, **extra})


def error(answer: Any, status: int) -> dict[str, Any]:
    """Check that the answer is an error in OpenAI's shape, and return its `error`."""
    assert answer.status_code == status
    assert answer["Content-Type"] == "application/json"
    assert uuid.UUID(answer["x-request-id"])
    body = json.loads(answer.content)
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    found: dict[str, Any] = body["error"]
    return found


# --- Generations ---------------------------------------------------------------------------------


def test_a_generation_has_these_fields_in_this_order(acme_key: Key) -> None:
    event = world.request(acme_key[0], prompt_tokens=100, cached_tokens=64, reasoning_tokens=3)
    answer = get(f"/v1/generations/{event.pk}", acme_key[1])
    assert answer.status_code == 200
    assert answer["Content-Type"] == "application/json"
    assert uuid.UUID(answer["x-request-id"])
    assert answer["Cache-Control"] == "no-store"
    created_at = answer.json()["created_at"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", created_at)
    assert list(answer.json().items()) == [
        ("id", str(event.pk)),
        ("model", "qwen3-32b"),
        ("total_cost", pytest.approx(0.0000088)),
        ("tokens_prompt", 100),
        ("tokens_completion", 12),
        ("cached_tokens", 64),
        ("latency_ms", 840),
        ("status_code", 200),
        ("created_at", created_at),
        ("reasoning_tokens", 3),
        ("time_to_first_token_ms", 120),
        ("finish_reason", "stop"),
        ("streamed", True),
        ("state", "succeeded"),
        ("usage_source", "reported"),
        ("prices", {"input": "0.08", "cached_input": "0.04", "output": "0.28"}),
        ("api_key", {"name": "default", "last4": acme_key[0].last4}),
        ("error", None),
    ]


@pytest.mark.parametrize(
    ("tokens", "text"), [(0, b"0"), (1, b"0.00000008"), (271_500_000, b"21.72")]
)
def test_its_cost_is_a_number_in_plain_decimals(acme_key: Key, tokens: int, text: bytes) -> None:
    event = world.request(acme_key[0], prompt_tokens=tokens, completion_tokens=0)
    answer = get(f"/v1/generations/{event.pk}", acme_key[1])
    assert b'"total_cost":' + text + b"," in answer.content


def test_a_generation_is_there_while_it_runs(acme_key: Key) -> None:
    running = world.start(acme_key[0])
    found = get(f"/v1/generations/{running.generation_id}", acme_key[1]).json()
    assert found["state"] == "in_flight"
    for name in ("status_code", "latency_ms", "finish_reason", "reasoning_tokens", "error"):
        assert found[name] is None


def test_a_failed_generation_tells_its_error(acme_key: Key) -> None:
    failed = UsageEvent.State.FAILED
    event = world.request(acme_key[0], state=failed, status_code=502, error="backend_closed")
    found = get(f"/v1/generations/{event.pk}", acme_key[1]).json()
    assert (found["error"], found["total_cost"]) == ("backend_closed", 0)


def test_another_organizations_an_unknown_and_a_malformed_id_are_one_404(
    acme_key: Key, globex_key: Key
) -> None:
    theirs = world.request(globex_key[0])
    answers = [
        error(get(f"/v1/generations/{each}", acme_key[1]), 404)
        for each in (theirs.pk, uuid.uuid4(), "x", theirs.pk.hex, "%00", "é", "9" * 400)
    ]
    assert answers[0]["code"] == "generation_not_found"
    assert answers[0]["type"] == "invalid_request_error"
    assert all(answer == answers[0] for answer in answers)


def test_any_key_of_the_organization_finds_it(acme_key: Key) -> None:
    event = world.request(acme_key[0])
    _, other = world.key(event.organization, "other")
    assert get(f"/v1/generations/{event.pk}", other).json()["api_key"]["name"] == "default"


# --- Credits and key -----------------------------------------------------------------------------


def test_credits_are_exact_strings(acme_key: Key) -> None:
    world.request(acme_key[0])
    world.start(acme_key[0], hold=Decimal("0.000000000001"))
    assert get("/v1/credits", acme_key[1]).json() == {
        "balance": "24.99999592",
        "held": "0.000000000001",
        "available": "24.999995919999",
    }


def test_an_empty_account_is_no_refusal(broke: Organization) -> None:
    _, secret = world.key(broke)
    nothing = {"balance": "0", "held": "0", "available": "0"}
    assert get("/v1/credits", secret).json() == nothing


def test_a_key_describes_itself(acme_key: Key, globex_key: Key) -> None:
    key, secret = acme_key
    world.request(key)
    world.request(key, at=timezone.now() - timedelta(days=40))
    world.request(world.key(key.organization, "other")[0])
    world.request(globex_key[0])
    found = get("/v1/key", secret).json()
    assert found == {
        "name": "default",
        "prefix": "sk-bk-",
        "last4": secret[-4:],
        "created_at": found["created_at"],
        "expires_at": None,
        "allowed_models": [],
        "spend_limit": None,
        "spend_period": "none",
        "spend": "0.00000816",
        "spend_since": None,
        "spend_resets_at": None,
        "organization": {
            "name": "Acme",
            "slug": "acme",
            "max_in_flight": 8,
            "requests_per_minute": None,
            "tokens_per_minute": None,
        },
    }


def test_a_key_tells_its_limit_and_the_spend_of_its_period(acme_key: Key) -> None:
    key, secret = acme_key
    ApiKey.objects.filter(pk=key.pk).update(spend_limit=Decimal("0.50"), spend_period="month")
    world.request(key)
    world.request(key, at=timezone.now() - timedelta(days=40))
    found = get("/v1/key", secret).json()
    assert (found["spend_limit"], found["spend_period"]) == ("0.5", "month")
    assert found["spend"] == "0.00000408"
    assert found["spend_since"] == f"{timezone.now():%Y-%m}-01T00:00:00.000000Z"
    assert re.fullmatch(r"\d{4}-\d\d-01T00:00:00\.000000Z", found["spend_resets_at"])
    assert found["spend_resets_at"] > found["spend_since"]


def test_a_key_that_spent_nothing(acme_key: Key) -> None:
    assert get("/v1/key", acme_key[1]).json()["spend"] == "0"


def test_a_look_up_costs_few_queries(acme_key: Key, django_assert_max_num_queries: Any) -> None:
    event = world.request(acme_key[0])
    for path in (f"/v1/generations/{event.pk}", "/v1/credits", "/v1/key"):
        get(path, acme_key[1])
        with django_assert_max_num_queries(3):
            assert get(path, acme_key[1]).status_code == 200


# --- Who may call --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ADDRESSES)
def test_a_session_is_no_key(client: Client, path: str, ada: Any) -> None:
    client.force_login(ada)
    assert error(client.get(path), 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ADDRESSES)
def test_a_bad_key_is_refused_before_all_else_and_never_echoed(path: str, db: None) -> None:
    secret = "sk-bk-" + "A" * 38
    for answer in (get(path), get(path, secret), get(path, Authorization="Basic YTpi")):
        assert error(answer, 401)["type"] == "authentication_error"
        assert secret not in answer.text
        assert answer["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["bearer {}", "BEARER   {}", "Bearer {}  "])
def test_the_schemes_case_and_blanks_do_not_matter(acme_key: Key, value: str) -> None:
    answer = get("/v1/credits", Authorization=value.format(acme_key[1]))
    assert answer.status_code == 200


def test_x_api_key_counts_only_without_authorization(acme_key: Key) -> None:
    good = {"x-api-key": acme_key[1]}
    assert get("/v1/credits", **good).status_code == 200
    assert get("/v1/credits", Authorization="Basic YTpi", **good).status_code == 401


def test_a_key_in_the_query_string_is_refused(acme_key: Key) -> None:
    error(get(f"/v1/credits?api_key={acme_key[1]}"), 401)
    error(get(f"/v1/credits?api_key={acme_key[1]}", acme_key[1]), 401)


def test_a_key_that_is_not_ascii_is_401(db: None) -> None:
    error(get("/v1/credits", "sk-bk-é"), 401)


def test_revoked_expired_paused_and_suspended(acme_key: Key) -> None:
    key, secret = acme_key
    keys.pause(key)
    assert error(get("/v1/credits", secret), 403)["code"] == "key_paused"
    keys.resume(key)
    organizations.suspend(key.organization, reason="Unpaid.")
    suspended = error(get("/v1/credits", secret), 403)
    assert suspended["code"] == "organization_suspended"
    assert "Unpaid." in suspended["message"]
    organizations.activate(key.organization)
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now())
    error(get("/v1/credits", secret), 401)
    ApiKey.objects.filter(pk=key.pk).update(expires_at=None)
    keys.revoke(key)
    error(get("/v1/credits", secret), 401)


def asgi(*headers: tuple[bytes, bytes]) -> HttpRequest:
    """Return a request as the ASGI handler makes it, with these raw headers."""
    scope = AsyncRequestFactory().get("/v1/credits").scope
    return ASGIRequest({**scope, "headers": list(headers)}, BytesIO())


def test_under_asgi_the_raw_headers_decide(acme_key: Key) -> None:
    good = b"Bearer " + acme_key[1].encode()
    answer = api.Credits.as_view()(asgi((b"authorization", good)))
    assert answer.status_code == 200
    for headers in (
        [(b"authorization", good), (b"authorization", b"Bearer sk-bk-other")],
        [(b"authorization", b"Bearer sk-bk-\xff\xfe")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"")],
    ):
        error(api.Credits.as_view()(asgi(*headers)), 401)


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete", "options"])
@pytest.mark.parametrize("path", ADDRESSES)
def test_other_methods_are_405(acme_key: Key, path: str, method: str) -> None:
    answer = Client().generic(
        method.upper(), path, b"{", headers={"Authorization": f"Bearer {acme_key[1]}"}
    )
    refusal = error(answer, 405)
    assert (refusal["type"], refusal["code"]) == ("invalid_request_error", "method_not_allowed")
    assert answer["Allow"] == "GET, HEAD"


def test_head_is_get_without_a_body(acme_key: Key) -> None:
    answer = Client().head("/v1/credits", headers={"Authorization": f"Bearer {acme_key[1]}"})
    assert (answer.status_code, answer.content) == (200, b"")


def test_it_answers_in_json_whatever_is_asked_for(acme_key: Key) -> None:
    for path in ("/v1/credits", "/v1/credits?format=html"):
        answer = get(path, acme_key[1], Accept="text/html")
        assert (answer.status_code, answer["Content-Type"]) == (200, "application/json")


def raised(exception: Exception) -> Any:
    """Return the answer to a request whose view raises this."""

    class Failing(api.Credits):
        def get(self, request: Any) -> Any:
            raise exception

    secret = world.key(world.organization("Failing"))[1]
    request = RequestFactory().get("/", headers={"Authorization": f"Bearer {secret}"})
    return Failing.as_view()(request)


@pytest.mark.parametrize(
    ("exception", "status", "kind"),
    [
        (Http404(), 404, "invalid_request_error"),
        (exceptions.NotFound(), 404, "invalid_request_error"),
        (exceptions.NotAuthenticated(), 401, "authentication_error"),
        (exceptions.AuthenticationFailed(), 401, "authentication_error"),
        (exceptions.PermissionDenied(), 403, "permission_error"),
        (exceptions.ParseError(), 400, "invalid_request_error"),
        (exceptions.UnsupportedMediaType("text/x"), 415, "invalid_request_error"),
        (exceptions.Throttled(), 429, "rate_limit_error"),
        (exceptions.APIException(), 500, "server_error"),
    ],
)
def test_what_the_rest_framework_raises_has_our_shape(
    db: None, exception: Exception, status: int, kind: str
) -> None:
    assert error(raised(exception), status)["type"] == kind


def test_what_nobody_foresaw_is_a_500_that_tells_nothing(
    db: None, caplog: pytest.LogCaptureFixture
) -> None:
    answer = raised(RuntimeError("secret"))
    assert error(answer, 500)["code"] == "internal_error"
    assert b"secret" not in answer.content
    assert answer["x-request-id"] in caplog.text
