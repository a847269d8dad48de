"""Answers to what no view answered: JSON under /v1, a page elsewhere."""

from django.http import HttpRequest, HttpResponse
from django.views import defaults

from gateway.errors import ApiError, InternalError, InvalidRequest, NotFound
from gateway.views import refused


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    # Among others a wrong Host, which Django refuses before any view.
    if error := _of_api(request, InvalidRequest("The request cannot be read.")):
        return error
    return defaults.bad_request(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if error := _of_api(request, NotFound("There is nothing at this address.")):
        return error
    return defaults.page_not_found(request, exception)


def server_error(request: HttpRequest) -> HttpResponse:
    return _of_api(request, InternalError()) or defaults.server_error(request)


def _of_api(request: HttpRequest, error: ApiError) -> HttpResponse | None:
    return refused(error) if request.path.startswith("/v1") else None
