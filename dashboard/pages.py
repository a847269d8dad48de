"""The pages: what a person sees of an organization, as HTML.

A view translates, asks once, and renders. Tenancy is `access`'s, order is `paging`'s, money is
billing's. Nothing here counts events or reads more of them than it shows.
"""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django.contrib.auth import login
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import RedirectURLMixin
from django.core.exceptions import BadRequest
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe
from django.views.generic import View

from billing.models import Organization, UsageEvent
from billing.standing import standing
from dashboard import access, login_links, paging
from dashboard.access import PersonRequest, member_page
from gateway.models import CatalogModel

PAGE_SIZE = 50

_MILLION = 6  # prices are in USD per million tokens: ten to this power


@method_decorator(cache_control(private=True, no_store=True), name="dispatch")
class LoginLink(RedirectURLMixin, View):
    """Log in whoever holds a good one-time link, and lead on to the path in `next`."""

    next_page = "home"
    http_method_names = ["get"]  # HEAD, as link checkers send it, must not spend the link

    def get(self, request: HttpRequest, user_id: int, token: str) -> HttpResponse:
        user = login_links.spend(user_id, token)
        if user is None:
            return render(request, "registration/login_link_ended.html", status=410)
        login(request, user)
        return redirect(self.get_success_url())


@require_safe
@cache_control(private=True, no_store=True)
@login_required
def home(request: PersonRequest) -> HttpResponse:
    """Lead to the person's organization; let choose who has several, and tell who has none."""
    organizations = list(access.organizations_of(request.user))
    if len(organizations) == 1:
        return redirect("requests", organizations[0].slug)
    if not organizations and request.user.is_staff:
        return redirect("admin:index")
    return render(request, "dashboard/organizations.html", {"organizations": organizations})


@require_safe
@member_page
def requests(request: PersonRequest, organization: Organization) -> HttpResponse:
    """List the organization's requests, newest first, below what it has to spend."""
    wanted = request.GET.get("id", "").strip()
    if wanted:
        try:
            event = access.find_event(organization, wanted)
        except UsageEvent.DoesNotExist:
            pass  # the page says so, above the list
        else:
            return redirect("request-detail", organization.slug, event.pk)
    page = _page(request, organization)
    untouched = not page.events and not _cursors(request)
    return render(
        request,
        "dashboard/requests.html",
        {
            **_frame(request, organization),
            "standing": standing(organization.pk),
            "page": page,
            "moved": bool(_cursors(request)),
            "missing": wanted,
            "first_steps": _first_steps(request, organization) if untouched else None,
        },
    )


@require_safe
@member_page
def request_detail(
    request: PersonRequest, organization: Organization, generation_id: str
) -> HttpResponse:
    """Show one request whole: its tokens times its prices, and what the ledger says."""
    try:
        event = access.find_event(organization, generation_id)
    except UsageEvent.DoesNotExist:
        raise Http404 from None
    return render(
        request,
        "dashboard/request_detail.html",
        {
            **_frame(request, organization),
            "event": event,
            "lines": _lines(event),
            "ledger": access.ledger_of(organization).filter(event=event).order_by("pk"),
        },
    )


def _frame(request: PersonRequest, organization: Organization) -> dict[str, Any]:
    """Return what the frame around every page of an organization shows."""
    return {
        "organization": organization,
        "organizations": access.organizations_of(request.user),
        "section": "requests",
    }


def _cursors(request: HttpRequest) -> dict[str, str]:
    return {name: request.GET[name] for name in ("before", "after") if request.GET.get(name)}


def _page(request: HttpRequest, organization: Organization) -> paging.Page:
    """Return the page that the query string names. Raises BadRequest for what is no cursor."""
    events, cursors = access.events_of(organization), _cursors(request)
    try:
        if "before" in cursors:
            cursor = paging.Cursor.parse(cursors["before"])
            return paging.older_than(events, cursor, size=PAGE_SIZE)
        if "after" in cursors:
            cursor = paging.Cursor.parse(cursors["after"])
            return paging.newer_than(events, cursor, size=PAGE_SIZE)
    except paging.BadCursor:
        raise BadRequest("The page address is damaged.") from None
    return paging.newest(events, size=PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class _FirstSteps:
    """What stands in for the list while an organization has made no request."""

    has_key: bool
    url: str
    model: str


def _first_steps(request: HttpRequest, organization: Organization) -> _FirstSteps:
    serving = CatalogModel.objects.filter(status=CatalogModel.Status.SERVING)
    return _FirstSteps(
        has_key=organization.keys.filter(revoked_at__isnull=True).exists(),
        url=request.build_absolute_uri("/v1/chat/completions"),
        model=serving.order_by("model_id").values_list("model_id", flat=True).first() or "MODEL",
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """One product of the arithmetic: tokens, USD per million, USD."""

    what: str
    tokens: int
    price: Decimal
    amount: Decimal


def _lines(event: UsageEvent) -> list[_Line]:
    """Return the products whose sum is what the event's tokens are worth at its prices."""
    return [
        # At most ten digits times thirteen: within the 28 that a Decimal product keeps.
        _Line(what, tokens, price, tokens * price.scaleb(-_MILLION))
        for what, tokens, price in (
            ("Input", event.prompt_tokens - event.cached_tokens, event.input_price),
            ("Cached input", event.cached_tokens, event.cached_input_price),
            ("Output", event.completion_tokens, event.output_price),
        )
    ]
