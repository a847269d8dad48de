"""The usage API: what a key may read of its own organization, as JSON.

Read-only, and by key only: a session cookie means nothing here, so no page of another site can
make a browser read it. 402 and 429 never apply. Every error has OpenAI's shape, and every answer
an `x-request-id`.
"""

import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import orjson
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils import timezone
from rest_framework import exceptions
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from billing import limits
from billing.models import ApiKey, UsageEvent
from billing.money import plain
from billing.standing import standing
from billing.statements import Month, NoStatement, statement
from dashboard import access
from dashboard.authentication import ApiKeyAuthentication
from dashboard.statements import CSV_TYPE, csv_of, json_of
from gateway import errors

log = logging.getLogger(__name__)


class JsonAlways(BaseContentNegotiation):
    """Answer in JSON whatever `Accept` or `?format=` asks for: there is nothing else to get."""

    def select_parser(self, request: Request, parsers: Any) -> Any:
        return parsers[0]

    def select_renderer(self, request: Request, renderers: Any, format_suffix: Any = None) -> Any:
        return renderers[0], renderers[0].media_type


class ExactJsonRenderer(BaseRenderer):
    """JSON by orjson, whose Fragment writes a Decimal as the number it is, digit by digit."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        return orjson.dumps(data)


class KeyView(APIView):
    """Base of the views that a key may call."""

    http_method_names = ["get", "head"]
    authentication_classes = [ApiKeyAuthentication]
    content_negotiation_class = JsonAlways
    renderer_classes = [ExactJsonRenderer]

    @property
    def key(self) -> ApiKey:
        return cast(ApiKey, self.request.auth)

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)
        self.request_id = str(uuid.uuid4())

    def finalize_response(
        self, request: Request, response: Any, *args: Any, **kwargs: Any
    ) -> Response:
        response.headers["x-request-id"] = self.request_id
        response.headers["Cache-Control"] = "no-store"
        return super().finalize_response(request, response, *args, **kwargs)


class GenerationDetail(KeyView):
    """GET /v1/generations/{id}: the usage event behind `X-Neocloud-Generation-Id`."""

    def get(self, request: Request, generation_id: str) -> Response:
        try:
            event = access.find_event(self.key.organization, generation_id)
        except UsageEvent.DoesNotExist:
            raise errors.GenerationNotFound(
                "There is no generation with this ID in the organization of this API key."
            ) from None
        return Response(generation(event))


class Credits(KeyView):
    """GET /v1/credits: what the organization has, as exact decimal strings in USD."""

    def get(self, request: Request) -> Response:
        now = standing(self.key.organization_id)
        return Response(
            {
                "balance": plain(now.balance),
                "held": plain(now.held),
                "available": plain(now.available),
            }
        )


class StatementDetail(KeyView):
    """GET /v1/statements/{yyyy-mm}: a month's statement, as CSV by `?format=csv` or `Accept`."""

    def get(self, request: Request, month: str) -> HttpResponse:
        wanted = request.query_params.get("format") or _preferred(request)
        if wanted not in {"json", "csv"}:
            raise errors.InvalidRequest("The format is json or csv.", param="format")
        try:
            found = statement(self.key.organization, Month.parse(month))
        except NoStatement:
            raise errors.NotFound(
                "There is no statement of this month: name one as in 2026-11, from the "
                "organization's first month to the present one."
            ) from None
        if wanted == "csv":
            return HttpResponse(csv_of(found), content_type=CSV_TYPE)
        return Response(json_of(found))


def _preferred(request: Request) -> str:
    wanted = request._request.get_preferred_type(["application/json", "text/csv"])
    return "csv" if wanted == "text/csv" else "json"


class Key(KeyView):
    """GET /v1/key: the calling key, its limit and what it spent of it, its organization's limits.

    The spend is that of the key's period, from `spend_since` on; of all time without a period.
    """

    def get(self, request: Request) -> Response:
        key, organization = self.key, self.key.organization
        now = timezone.now()
        period = limits.span(key.spend_period, now)
        limit = key.spend_limit
        return Response(
            {
                "name": key.name,
                "prefix": key.prefix,
                "last4": key.last4,
                "created_at": _instant(key.created_at),
                "expires_at": _instant(key.expires_at),
                "allowed_models": key.allowed_models,
                "spend_limit": None if limit is None else plain(limit),
                "spend_period": key.spend_period,
                "spend": plain(limits.spends([key], now)[key.pk]),
                "spend_since": _instant(period.since),
                "spend_resets_at": _instant(period.resets_at),
                "organization": {
                    "name": organization.name,
                    "slug": organization.slug,
                    "max_in_flight": organization.max_in_flight,
                    "requests_per_minute": organization.requests_per_minute,
                    "tokens_per_minute": organization.tokens_per_minute,
                },
            }
        )


def generation(event: UsageEvent) -> dict[str, Any]:
    """Return the event as the API shows it; its prices and cost are exact."""
    return {
        "id": str(event.pk),
        "model": event.model,
        "total_cost": orjson.Fragment(plain(event.cost)),
        "tokens_prompt": event.prompt_tokens,
        "tokens_completion": event.completion_tokens,
        "cached_tokens": event.cached_tokens,
        "latency_ms": event.latency_ms,
        "status_code": event.status_code,
        "created_at": _instant(event.created_at),
        "reasoning_tokens": event.reasoning_tokens,
        "time_to_first_token_ms": event.time_to_first_token_ms,
        "finish_reason": event.finish_reason or None,
        "streamed": event.streamed,
        "state": event.state,
        "usage_source": event.usage_source,
        "prices": {
            "input": plain(event.input_price),
            "cached_input": plain(event.cached_input_price),
            "output": plain(event.output_price),
        },
        "api_key": {"name": event.api_key.name, "last4": event.api_key.last4},
        "error": event.error or None,
    }


def _instant(moment: datetime | None) -> str | None:
    """Return ISO 8601 in UTC, with a Z and always six decimals."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def exception_handler(exception: Exception, context: Mapping[str, Any]) -> HttpResponseBase:
    """Answer any exception of a view in OpenAI's shape; what nobody foresaw is logged, and 500."""
    if isinstance(exception, exceptions.MethodNotAllowed):
        allowed = ", ".join(context["view"].allowed_methods)
        exception = errors.MethodNotAllowed(context["request"].method, allowed)
    elif isinstance(exception, Http404 | exceptions.NotFound):
        exception = errors.NotFound("There is nothing at this address.")
    elif isinstance(exception, exceptions.NotAuthenticated | exceptions.AuthenticationFailed):
        exception = errors.InvalidApiKey()
    elif isinstance(exception, PermissionDenied):
        exception = exceptions.PermissionDenied()
    if isinstance(exception, exceptions.APIException):
        return _refusal(exception)
    if not isinstance(exception, errors.ApiError):
        log.error("request %s failed", context["view"].request_id, exc_info=exception)
        exception = errors.InternalError()
    return HttpResponse(
        exception.body(), status=exception.status, headers=dict(exception.headers())
    )


def _refusal(exception: exceptions.APIException) -> HttpResponse:
    """Return what the REST framework refuses by itself, under its own status."""
    kinds = {403: "permission_error", 429: "rate_limit_error", 500: "server_error"}
    error = {
        "message": str(exception.detail),
        "type": kinds.get(exception.status_code, "invalid_request_error"),
        "param": None,
        "code": None,
    }
    return HttpResponse(
        orjson.dumps({"error": error}),
        status=exception.status_code,
        content_type="application/json",
    )
