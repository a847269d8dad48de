"""Every refusal: its status, its body, its headers."""

import json
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from gateway import errors

UNTIL = datetime(2030, 1, 31, 18, 0, tzinfo=UTC)
# One of each, with the status, type and code that the drawing in the module promises.
ALL: list[tuple[errors.ApiError, int, str, str | None]] = [
    (errors.InvalidApiKey(), 401, "authentication_error", "invalid_api_key"),
    (errors.KeyPaused(), 403, "permission_error", "key_paused"),
    (
        errors.OrganizationSuspended("Unpaid."),
        403,
        "permission_error",
        "organization_suspended",
    ),
    (errors.ModelNotAllowed("m"), 403, "permission_error", "model_not_allowed"),
    (
        errors.InsufficientCredits(balance=Decimal("0.10"), held=Decimal("1E-12")),
        402,
        "billing_error",
        "insufficient_credits",
    ),
    (
        errors.SpendLimitReached(
            limit=Decimal(5), period="day", spent=Decimal(5), held=Decimal("0.10"), resets_at=UNTIL
        ),
        402,
        "billing_error",
        "spend_limit_reached",
    ),
    (errors.InvalidRequest("m", param="n"), 400, "invalid_request_error", None),
    (errors.EmptyArray(), 400, "invalid_request_error", "empty_array"),
    (
        errors.UnsupportedParameter("m", param="stop"),
        400,
        "invalid_request_error",
        "unsupported_parameter",
    ),
    (errors.BackendRefused("m"), 400, "invalid_request_error", None),
    (errors.NotFound("m"), 404, "invalid_request_error", "not_found"),
    (errors.ModelNotFound("m"), 404, "invalid_request_error", "model_not_found"),
    (errors.GenerationNotFound("m"), 404, "invalid_request_error", "generation_not_found"),
    (errors.MethodNotAllowed("PUT", "POST"), 405, "invalid_request_error", "method_not_allowed"),
    (errors.UploadTimeout(), 408, "invalid_request_error", None),
    (errors.RequestTooLarge("m"), 413, "invalid_request_error", "request_too_large"),
    (errors.UnsupportedEncoding(), 415, "invalid_request_error", None),
    (errors.TooManyInFlight("m"), 429, "rate_limit_error", "rate_limit_exceeded"),
    (
        errors.RateLimitReached("m", param="requests_per_minute", retry_after=7, headers=[]),
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    ),
    (errors.InternalError(), 500, "server_error", "internal_error"),
    (errors.BackendFailed("m"), 502, "server_error", None),
    (errors.Unavailable("m"), 503, "service_unavailable", "no_backend_available"),
    (errors.UnderMaintenance("m", UNTIL), 503, "service_unavailable", "maintenance"),
]
JSON = [each for each in ALL if not isinstance(each[0], errors.BackendFailed)]


def headers(error: errors.ApiError) -> dict[str, str]:
    assert len(dict(error.headers())) == len(error.headers())
    return dict(error.headers())


def test_one_of_each_is_here() -> None:
    def below(cls: type[errors.ApiError]) -> set[type[errors.ApiError]]:
        return {cls}.union(*map(below, cls.__subclasses__()))

    ours = {cls for cls in below(errors.ApiError) if cls.__module__ == errors.__name__}
    assert {type(error) for error, *_ in ALL} == ours - {errors.ApiError}


@pytest.mark.parametrize(("error", "status", "kind", "code"), ALL, ids=lambda each: str(each))
def test_the_drawing_tells_the_truth(
    error: errors.ApiError, status: int, kind: str, code: str | None
) -> None:
    assert (error.status, error.type, error.code) == (status, kind, code)
    drawn = re.search(rf"─ {type(error).__name__} +(\d+) ((?!plain)\w+)?", errors.__doc__ or "")
    assert drawn is not None
    assert int(drawn[1]) == status
    assert drawn[2] == code


@pytest.mark.parametrize(("error", "status", "kind", "code"), JSON, ids=lambda each: str(each))
def test_the_body_is_an_error_object(
    error: errors.ApiError, status: int, kind: str, code: str | None
) -> None:
    assert headers(error)["content-type"] == "application/json"
    body: dict[str, Any] = json.loads(error.body())
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
    assert body["error"] == error.as_object()


def test_the_body_of_an_empty_array_is_the_pages() -> None:
    assert json.loads(errors.EmptyArray().body()) == {
        "error": {
            "message": "Invalid 'messages': the array must contain at least one message.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "empty_array",
        }
    }


def test_a_502_is_plain_text_and_an_object_in_a_stream() -> None:
    error = errors.BackendFailed("The model backend failed.")
    assert error.body() == b"The model backend failed."
    assert headers(error) == {"content-type": "text/plain; charset=utf-8"}
    assert error.as_object()["code"] is None
    assert error.as_object()["type"] == "server_error"


def test_maintenance_tells_its_end_as_an_http_date() -> None:
    error = errors.UnderMaintenance("", UNTIL)
    assert headers(error)["retry-after"] == "Thu, 31 Jan 2030 18:00:00 GMT"
    assert error.message == "The service is under maintenance."


@pytest.mark.parametrize(("error", "status", "kind", "code"), ALL, ids=lambda each: str(each))
def test_only_what_may_succeed_is_retried(
    error: errors.ApiError, status: int, kind: str, code: str | None
) -> None:
    asked_not_to = headers(error).get("x-should-retry") == "false"
    assert asked_not_to == (status not in {429, 502, 503})


def test_a_429_carries_no_hint_of_when() -> None:
    names = set(headers(errors.TooManyInFlight("m")))
    assert "retry-after" not in names
    assert not any("ratelimit" in name for name in names)


def test_a_429_of_a_limit_per_minute_says_when() -> None:
    of_requests = [("x-ratelimit-limit-requests", "60")]
    error = errors.RateLimitReached("m", param="p", retry_after=7, headers=of_requests)
    assert headers(error)["retry-after"] == "7"
    assert headers(error)["x-ratelimit-limit-requests"] == "60"


@pytest.mark.parametrize(
    ("period", "resets_at", "words"),
    [
        ("day", UNTIL, "5 USD a day: 4.9 USD are spent and 0.1 USD are held"),
        ("month", UNTIL, "It resets at 2030-01-31 18:00 UTC."),
        ("none", None, "It never resets."),
    ],
)
def test_a_402_of_a_spend_limit_says_when_it_resets(
    period: str, resets_at: datetime | None, words: str
) -> None:
    spent, held = Decimal("4.90"), Decimal("0.1")
    error = errors.SpendLimitReached(
        limit=Decimal(5), period=period, spent=spent, held=held, resets_at=resets_at
    )
    assert words in error.message


def test_a_402_says_what_there_is_in_plain_decimals() -> None:
    error = errors.InsufficientCredits(balance=Decimal("0.10"), held=Decimal("1E-12"))
    assert "0.1 USD" in error.message
    assert "0.000000000001 USD" in error.message


def test_a_405_names_the_method_that_is_allowed() -> None:
    assert headers(errors.MethodNotAllowed("PUT", "POST"))["allow"] == "POST"
    assert headers(errors.InvalidApiKey())["www-authenticate"] == "Bearer"


def test_the_reason_of_a_suspension_is_shown() -> None:
    assert errors.OrganizationSuspended("Unpaid.").message.endswith("Unpaid.")
    assert errors.OrganizationSuspended("").message == "This organization is suspended."
