"""Settings of an organization: when and where its owners are told. Members read, owners write."""

from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from billing import notices
from billing.models import Organization
from billing.money import MONEY_MAX, USD_PLACES, plain
from dashboard import access
from dashboard.access import PersonRequest, member_page
from dashboard.pages import frame


class NoticesForm(forms.Form):
    low_balance = forms.DecimalField(
        required=False,
        min_value=0,
        max_value=MONEY_MAX,
        max_digits=7 + USD_PLACES,
        decimal_places=USD_PLACES,
    )
    webhook_url = forms.CharField(required=False, max_length=500)
    new_secret = forms.BooleanField(required=False)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page
def page(request: PersonRequest, organization: Organization) -> HttpResponse:
    is_owner = access.is_owner(request.user, organization)
    if request.method != "POST":
        return _render(request, organization, NoticesForm(initial=_now(organization)), is_owner)
    if not is_owner:
        raise PermissionDenied
    form = NoticesForm(request.POST)
    if not form.is_valid():
        return _render(request, organization, form, is_owner)
    try:
        secret = notices.direct(organization, **form.cleaned_data)
    except notices.NoticesRefused as refusal:
        form.add_error(refusal.field, str(refusal))
        return _render(request, organization, form, is_owner)
    if secret is None:
        return redirect("settings", organization.slug)
    # Shown in the answer itself: a secret that waited for the next page would lie in the session.
    form = NoticesForm(initial=_now(organization))
    return _render(request, organization, form, is_owner, secret=secret)


def _now(organization: Organization) -> dict[str, Any]:
    threshold = organization.low_balance
    return {
        "low_balance": "" if threshold is None else plain(threshold),
        "webhook_url": organization.webhook_url,
    }


def _render(
    request: PersonRequest,
    organization: Organization,
    form: NoticesForm,
    is_owner: bool,
    secret: str | None = None,
) -> HttpResponse:
    context = {
        **frame(request, organization, section="settings"),
        "form": form,
        "is_owner": is_owner,
        "secret": secret,
    }
    return render(request, "dashboard/settings.html", context)
