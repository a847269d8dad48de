"""Every refusal and failure that a client of /v1 can see.

    ApiError
    ├── InvalidApiKey            401 invalid_api_key          authentication_error
    ├── KeyPaused                403 key_paused               permission_error
    ├── OrganizationSuspended    403 organization_suspended   permission_error
    ├── ModelNotAllowed          403 model_not_allowed        permission_error
    ├── InsufficientCredits      402 insufficient_credits     billing_error
    ├── SpendLimitReached        402 spend_limit_reached      billing_error
    ├── InvalidRequest           400 (no code)                invalid_request_error
    │   ├── EmptyArray           400 empty_array
    │   ├── UnsupportedParameter 400 unsupported_parameter
    │   └── BackendRefused       400 (no code)   the model server answered 400, 413 or 422
    ├── NotFound                 404 not_found                invalid_request_error
    │   ├── ModelNotFound        404 model_not_found
    │   └── GenerationNotFound   404 generation_not_found
    ├── MethodNotAllowed         405 method_not_allowed       invalid_request_error
    ├── UploadTimeout            408 (no code)                invalid_request_error
    ├── RequestTooLarge          413 request_too_large        invalid_request_error
    ├── UnsupportedEncoding      415 (no code)                invalid_request_error
    ├── TooManyInFlight          429 rate_limit_exceeded      rate_limit_error
    ├── RateLimitReached         429 rate_limit_exceeded      rate_limit_error
    ├── InternalError            500 internal_error           server_error
    ├── BackendFailed            502 plain text, no code
    └── Unavailable              503 no_backend_available     service_unavailable
        └── UnderMaintenance     503 maintenance

Where the table says "no code" the body carries `"code": null` (API page, "Errors"; rulings.md 5).
Keeps status, words and headers of each; never a host name, a stack or a key.
"""

from datetime import datetime
from decimal import Decimal
from email.utils import format_datetime
from typing import Any, ClassVar

import orjson

from billing.money import plain


class ApiError(Exception):
    """An answer other than 200, in the shape {"error": {"message", "type", "param", "code"}}."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    # The OpenAI SDKs repeat 408, 409, 429 and 5xx twice unless `x-should-retry` says otherwise.
    retry: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def as_object(self) -> dict[str, Any]:
        """Return the error object, as a body's or a stream's `error`."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }

    def body(self) -> bytes:
        return self.body_of_event()

    def body_of_event(self) -> bytes:
        """Return the data of the event that ends a stream with this error."""
        return orjson.dumps({"error": self.as_object()})

    def headers(self) -> list[tuple[str, str]]:
        headers = [("content-type", "application/json")]
        if not self.retry:
            headers.append(("x-should-retry", "false"))
        return headers


class InvalidApiKey(ApiError):
    status, type, code = 401, "authentication_error", "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("Incorrect API key provided. Send it as 'Authorization: Bearer <key>'.")

    def headers(self) -> list[tuple[str, str]]:
        return [*super().headers(), ("www-authenticate", "Bearer")]


class KeyPaused(ApiError):
    status, type, code = 403, "permission_error", "key_paused"

    def __init__(self) -> None:
        super().__init__("This API key is paused.")


class OrganizationSuspended(ApiError):
    status, type, code = 403, "permission_error", "organization_suspended"

    def __init__(self, reason: str) -> None:
        super().__init__(f"This organization is suspended. {reason}".strip())


class ModelNotAllowed(ApiError):
    status, type, code = 403, "permission_error", "model_not_allowed"

    def __init__(self, model: str) -> None:
        super().__init__(f"This API key may not use the model '{model}'.", param="model")


class InsufficientCredits(ApiError):
    status, type, code = 402, "billing_error", "insufficient_credits"

    def __init__(self, *, balance: Decimal, held: Decimal) -> None:
        super().__init__(
            f"Insufficient credits: the balance is {plain(balance)} USD, "
            f"of which {plain(held)} USD are held for requests in flight."
        )


class SpendLimitReached(ApiError):
    """The key's own limit; `period` is what it is a limit of: none, day, week or month."""

    status, type, code = 402, "billing_error", "spend_limit_reached"

    def __init__(
        self,
        *,
        limit: Decimal,
        period: str,
        spent: Decimal,
        held: Decimal,
        resets_at: datetime | None,
    ) -> None:
        each = f" a {period}" if resets_at else ""
        resets = (
            f"It resets at {resets_at:%Y-%m-%d %H:%M} UTC." if resets_at else "It never resets."
        )
        super().__init__(
            f"This API key may spend {plain(limit)} USD{each}: {plain(spent)} USD are spent and "
            f"{plain(held)} USD are held for its requests in flight. {resets}"
        )


class InvalidRequest(ApiError):
    status, type = 400, "invalid_request_error"


class EmptyArray(InvalidRequest):
    code = "empty_array"

    def __init__(self) -> None:
        # The page's words, to the letter.
        super().__init__(
            "Invalid 'messages': the array must contain at least one message.", param="messages"
        )


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class BackendRefused(InvalidRequest):
    """The model server's own judgement of the request, in our shape."""


class NotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class GenerationNotFound(NotFound):
    code = "generation_not_found"


class MethodNotAllowed(ApiError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed here; use {allowed}.")
        self.allowed = allowed

    def headers(self) -> list[tuple[str, str]]:
        return [*super().headers(), ("allow", self.allowed)]


class UploadTimeout(ApiError):
    status, type = 408, "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("The request body did not arrive in time.")


class RequestTooLarge(ApiError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedEncoding(ApiError):
    status, type = 415, "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("Send the body as plain JSON, without a Content-Encoding.")


class TooManyInFlight(ApiError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    retry = True


class RateLimitReached(ApiError):
    """A limit per minute, which an operator set; `param` says which."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    retry = True

    def __init__(
        self, message: str, *, param: str, retry_after: int, headers: list[tuple[str, str]]
    ) -> None:
        super().__init__(message, param=param)
        self._headers = [("retry-after", str(retry_after)), *headers]

    def headers(self) -> list[tuple[str, str]]:
        return [*super().headers(), *self._headers]


class InternalError(ApiError):
    status, type, code = 500, "server_error", "internal_error"

    def __init__(self) -> None:
        super().__init__("The gateway failed. The request was not billed.")


class BackendFailed(ApiError):
    """The model server was unreachable, failed, or sent what cannot be a completion.

    The body is plain text (API page, "Errors"); as an event in a stream that had begun it has
    the shape of all others, with the type `server_error`.
    """

    status = 502
    retry = True

    def body(self) -> bytes:
        return self.message.encode()

    def headers(self) -> list[tuple[str, str]]:
        return [("content-type", "text/plain; charset=utf-8")]


class Unavailable(ApiError):
    status, type, code = 503, "service_unavailable", "no_backend_available"
    retry = True


class UnderMaintenance(Unavailable):
    code = "maintenance"

    def __init__(self, message: str, until: datetime) -> None:
        super().__init__(message or "The service is under maintenance.")
        self.until = until

    def headers(self) -> list[tuple[str, str]]:
        # "Wait until the Retry-After date" (API page): an HTTP date, RFC 9110 section 10.2.3.
        return [*super().headers(), ("retry-after", format_datetime(self.until, usegmt=True))]
