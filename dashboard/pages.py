"""The pages: what a person sees of an organization, as HTML.

A view translates, asks once, and renders. Tenancy is `access`'s, order is `paging`'s, money is
billing's. Nothing here counts events or reads more of them than it shows.
"""

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from django.contrib.auth import login
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import RedirectURLMixin
from django.db.models import Max, Sum
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe
from django.views.generic import View

from billing import notices
from billing.models import Organization, UsageEvent
from billing.standing import standing
from dashboard import access, login_links, paging
from dashboard.access import PersonRequest, member_page
from gateway.models import CatalogModel

PAGE_SIZE = 50
REFUSALS_MAX = 20
EXPIRING_KEYS_MAX = 5

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
    page = paging.asked_for(request, access.events_of(organization), size=PAGE_SIZE)
    untouched = not page.rows and not page.moved
    return render(
        request,
        "dashboard/requests.html",
        {
            **frame(request, organization, section="requests"),
            "standing": standing(organization.pk),
            "expiring_keys": notices.expiring_keys(organization)[:EXPIRING_KEYS_MAX],
            "page": page,
            "missing": wanted,
            "refusals": () if page.moved else _refusals(organization),
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
            **frame(request, organization, section="requests"),
            "event": event,
            "lines": _lines(event),
            "ledger": access.ledger_of(organization).filter(event=event).order_by("pk"),
        },
    )


def frame(request: PersonRequest, organization: Organization, *, section: str) -> dict[str, Any]:
    """Return what the frame around every page of an organization shows."""
    return {
        "organization": organization,
        "organizations": access.organizations_of(request.user),
        "section": section,
    }


def _refusals(organization: Organization) -> list[Any]:
    """Return what was refused in the last 24 hours, by key and reason, the most frequent first."""
    since = timezone.now() - timedelta(hours=24)
    found = access.refusals_of(organization).filter(minute__gte=since).order_by()
    by_reason = found.values("api_key__name", "api_key__last4", "status_code", "code")
    counted = by_reason.annotate(times=Sum("number"), latest=Max("minute"))
    ordered = counted.order_by("-times", "-latest", "api_key__name", "status_code", "code")
    return list(ordered[:REFUSALS_MAX])


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
