"""The gateway's small endpoints: models, health, and JSON for every wrong path under /v1.

Answered from memory but for `readyz`. The completions endpoint is a consumer, not a view.
"""

import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from billing.money import plain
from gateway import bearer, process
from gateway.catalog import Model
from gateway.errors import ApiError, MethodNotAllowed, NotFound, Unavailable

View = Callable[..., Coroutine[Any, Any, HttpResponse]]


def answer(status: int, body: bytes, headers: list[tuple[str, str]]) -> HttpResponse:
    """Return a response of /v1: every one carries an `x-request-id`."""
    response = HttpResponse(body, status=status)
    for name, value in headers:
        response[name] = value
    response["x-request-id"] = str(uuid.uuid4())
    return response


def refused(error: ApiError) -> HttpResponse:
    return answer(error.status, error.body(), error.headers())


def _json(value: Any) -> HttpResponse:
    return answer(200, orjson.dumps(value), [("content-type", "application/json")])


def _get(view: View) -> View:
    """Let GET and HEAD through, after authentication; say ApiErrors in the documented shape."""

    async def wrapped(request: HttpRequest, **captured: str) -> HttpResponse:
        try:
            if request.method not in ("GET", "HEAD"):
                raise MethodNotAllowed(request.method or "", "GET")
            scope: Any = request.scope  # type: ignore[attr-defined]
            secret = bearer.secret_from(scope["headers"], scope["query_string"])
            running = await process.running()
            await running.callers.authenticate(secret)
            return await view(running, **captured)
        except ApiError as error:
            return refused(error)

    # Keys are no cookies: a POST must hear 405, not Django's 403 page about a CSRF token.
    return csrf_exempt(wrapped)


@_get
async def models(running: process.Process) -> HttpResponse:
    served = sorted(running.catalog.models.values(), key=lambda model: model.id)
    return _json({"object": "list", "data": [_described(model) for model in served]})


@_get
async def model(running: process.Process, model_id: str) -> HttpResponse:
    return _json(_described(running.catalog.find(model_id)))


@csrf_exempt
async def not_found(request: HttpRequest, *_: str) -> HttpResponse:
    """Answer any other path under /v1: JSON, never a redirect or a page."""
    return refused(NotFound(f"There is no {request.method} {request.path[:200]}."))


async def healthz(request: HttpRequest) -> HttpResponse:
    """Say that the process answers; asks nothing else."""
    return _json({"status": "ok"})


async def readyz(request: HttpRequest) -> HttpResponse:
    """Say whether this process admits requests: it does not drain, and its database answers.

    Backends are told of and do not count (rulings.md 24).
    """
    try:
        running = await process.running()
        await running.commits.read(_ask_database)
        if running.is_draining:
            raise Unavailable("The gateway is restarting.")
    except ApiError as error:
        return answer(
            503,
            orjson.dumps({"status": "unavailable", "reason": error.message}),
            [("content-type", "application/json")],
        )
    catalog = running.catalog
    return _json(
        {
            "status": "ok",
            "database": "ok",
            "models": {model.id: len(model.backends) for model in catalog.models.values()},
        }
    )


def _ask_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def _described(model: Model) -> dict[str, Any]:
    """Return a model as OpenAI's object, with what Kiln adds (beyond-the-page.md section 1)."""
    return {
        "id": model.id,
        "object": "model",
        "created": int(model.created_at.timestamp()),
        "owned_by": "kiln",
        "status": "serving",
        "context_window": model.context_window,
        "max_output_tokens": model.max_output_tokens,
        "prices": {
            "input": plain(model.prices.input),
            "cached_input": plain(model.prices.cached_input),
            "output": plain(model.prices.output),
        },
        "capabilities": {
            "image_input": model.image_input,
            "parallel_tool_calls": model.parallel_tool_calls,
        },
        "parameters": {
            name: {"status": cell.status, "action": cell.action}
            for name, cell in model.cells.items()
        },
    }
