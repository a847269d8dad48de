"""Which organization a person or a key may see: tenancy is decided here and nowhere else.

A person sees the organizations of his or her memberships, and being an operator makes nobody a
member; a key sees its own organization. Everything else does not exist: whoever asks for it gets
the answer of a thing that never was, so nobody can learn what other organizations have.
"""

import uuid
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from django.contrib.auth.decorators import login_required
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.views.decorators.cache import cache_control

from billing.models import LedgerEntry, Membership, Organization, RefusalCount, UsageEvent
from dashboard.models import User

P = ParamSpec("P")


class PersonRequest(HttpRequest):
    """A request that `login_required` let through."""

    user: User


def organizations_of(user: User) -> QuerySet[Organization]:
    return Organization.objects.filter(memberships__user=user).order_by("name", "pk")


def is_owner(user: User, organization: Organization) -> bool:
    owners = Membership.objects.filter(organization=organization, role=Membership.Role.OWNER)
    return owners.filter(user=user).exists()


def events_of(organization: Organization) -> QuerySet[UsageEvent]:
    return UsageEvent.objects.filter(organization=organization)


def ledger_of(organization: Organization) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.filter(organization=organization)


def refusals_of(organization: Organization) -> QuerySet[RefusalCount]:
    return RefusalCount.objects.filter(organization=organization)


def find_event(organization: Organization, generation_id: str) -> UsageEvent:
    """Return the organization's event of this generation ID.

    Raises UsageEvent.DoesNotExist for an ID that is malformed, unknown or another organization's.
    """
    try:
        pk = uuid.UUID(generation_id)
    except ValueError:
        raise UsageEvent.DoesNotExist from None
    if str(pk) != generation_id.lower():  # UUID() also reads braces, URNs and missing hyphens
        raise UsageEvent.DoesNotExist
    return events_of(organization).select_related("api_key").get(pk=pk)


def member_page(
    view: Callable[Concatenate[PersonRequest, Organization, P], HttpResponse],
) -> Callable[..., HttpResponseBase]:
    """Give `view` the organization that the URL names, if the person who asks is its member.

    Who is not logged in is sent to the login page, and who is no member gets the same 404 as for
    an organization that does not exist. No cache keeps the page: it shows money, and the next
    person at this browser must not find it with the back button.
    """

    @cache_control(private=True, no_store=True)
    @login_required
    @wraps(view)
    def page(request: PersonRequest, slug: str, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        organization = get_object_or_404(organizations_of(request.user), slug=slug)
        return view(request, organization, *args, **kwargs)

    return page
