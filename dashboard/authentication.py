"""Who calls the usage API: the holder of an API key, and nobody else.

Apart from `api` because the REST framework imports its authentication classes, which settings
name, before a module of views has finished. Never reads a session or a cookie.
"""

from dataclasses import dataclass
from typing import ClassVar

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

from billing import keys
from billing.models import ApiKey
from gateway import bearer
from gateway.refusals import in_words_of_api


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who calls with a key: no person, so there is no name, session or permission to it."""

    organization_id: int
    is_authenticated: ClassVar[bool] = True


class ApiKeyAuthentication(BaseAuthentication):
    """Let in who sends a good API key. Raises the ApiError of one that is not."""

    def authenticate(self, request: Request) -> tuple[KeyHolder, ApiKey]:
        secret = bearer.secret_from(*_raw_headers_and_query(request._request))
        try:
            _, key = keys.authenticate(secret)
        except keys.KeyRefused as refusal:
            raise in_words_of_api(refusal) from None
        return KeyHolder(key.organization_id), key


def _raw_headers_and_query(request: HttpRequest) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers as they came over the wire, and the query string.

    Django's META joins two headers of a name into one with a comma, and a client that sends two
    keys must not be let in by whatever that makes.
    """
    if isinstance(request, ASGIRequest):
        return request.scope["headers"], request.scope["query_string"]
    headers = [
        (name.removeprefix("HTTP_").replace("_", "-").lower().encode(), value.encode("latin-1"))
        for name, value in request.META.items()
        if name in {"HTTP_AUTHORIZATION", "HTTP_X_API_KEY"}
    ]
    return headers, request.META.get("QUERY_STRING", "").encode("latin-1")
