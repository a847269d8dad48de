"""Organizations in the admin: their limits, members and status, and the grant of credits."""

from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ActionForm
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path

from billing import ledger, organizations
from billing.admin.columns import ModelAdmin, ReadOnlyAdmin, usd
from billing.models import CreditAccount, LedgerEntry, Membership, Organization
from billing.money import MONEY_MAX, USD_PLACES, plain

if TYPE_CHECKING:
    _MembershipInlineBase = admin.TabularInline[Membership, Organization]
else:
    _MembershipInlineBase = admin.TabularInline


class ReasonForm(ActionForm):
    reason = forms.CharField(required=False, max_length=200, label="Reason (the customer sees it)")


class GrantForm(forms.Form):
    """What a grant needs. The idempotency key comes with the form: sent twice, it grants once."""

    amount = forms.DecimalField(
        label="Amount (USD)",
        min_value=Decimal(1).scaleb(-USD_PLACES),
        max_value=MONEY_MAX,
        max_digits=7 + USD_PLACES,
        decimal_places=USD_PLACES,
        widget=forms.TextInput(attrs={"inputmode": "decimal"}),
    )
    reason = forms.CharField(max_length=300, help_text="It stays in the ledger.")
    idempotency_key = forms.CharField(
        max_length=200, help_text="Names this grant: the same key never grants twice."
    )


class MembershipInline(_MembershipInlineBase):
    model = Membership
    autocomplete_fields = ["user"]
    extra = 0


@admin.register(Organization)
class OrganizationAdmin(ModelAdmin):
    list_display = ["slug", "name", "status", "balance", "max_in_flight"]
    list_filter = ["status"]
    list_select_related = ["account"]
    search_fields = ["slug", "name"]
    ordering = ["slug"]
    inlines = [MembershipInline]
    actions = ["suspend", "activate"]
    action_form = ReasonForm

    def get_fields(self, request: HttpRequest, obj: Organization | None = None) -> Any:
        fields = ["name", "slug", "max_in_flight", "overdraft_limit"]
        return [*fields, "balance", "status", "status_reason", "created_at"] if obj else fields

    def get_readonly_fields(
        self, request: HttpRequest, obj: Organization | None = None
    ) -> list[str]:
        # The slug is what scripts call it, so it never changes.
        return ["slug", "balance", "status", "status_reason", "created_at"] if obj else []

    def get_prepopulated_fields(
        self, request: HttpRequest, obj: Organization | None = None
    ) -> dict[str, Any]:
        return {} if obj else {"slug": ["name"]}

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="balance (USD)", ordering="account__balance")
    def balance(self, organization: Organization) -> str:
        return plain(organization.account.balance)

    def save_model(self, request: HttpRequest, obj: Organization, form: Any, change: bool) -> None:
        if change:
            # Only what was edited: the form may be older than a suspension.
            obj.save(update_fields=form.changed_data)
        else:
            organizations.register(obj)

    @admin.action(description="Suspend", permissions=["change"])
    def suspend(self, request: HttpRequest, selected: QuerySet[Organization]) -> None:
        reason = request.POST.get("reason", "")
        for organization in selected:
            try:
                organizations.suspend(organization, reason=reason)
            except organizations.OrganizationRefused as refusal:
                self.message_user(request, str(refusal), messages.ERROR)
                return
            self.log_change(request, organization, f"Suspended: {reason}")

    @admin.action(description="Activate", permissions=["change"])
    def activate(self, request: HttpRequest, selected: QuerySet[Organization]) -> None:
        for organization in selected:
            organizations.activate(organization)
            self.log_change(request, organization, "Activated")

    def get_urls(self) -> list[URLPattern]:
        grant = self.admin_site.admin_view(self.grant_view)
        return [
            path("<int:pk>/grant/", grant, name="billing_organization_grant"),
            *super().get_urls(),
        ]

    def grant_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Ask for amount, reason and idempotency key, and grant; the operator is the actor."""
        # A grant is a new line of the ledger, so that is the permission it needs.
        if not request.user.has_perm("billing.add_ledgerentry"):
            raise PermissionDenied
        organization = get_object_or_404(Organization.objects.select_related("account"), pk=pk)
        form = GrantForm(request.POST or None, initial={"idempotency_key": f"admin-{uuid4()}"})
        if request.method == "POST" and form.is_valid():
            entry = self._grant(request, organization, form)
            if entry is not None:
                text = f"{plain(entry.amount)} USD granted (ledger entry {entry.pk})"
                self.log_change(request, organization, f"{text}: {entry.reason}")
                self.message_user(request, f"{text} to {organization}.", messages.SUCCESS)
                return redirect("admin:billing_organization_changelist")
        context = {
            **self.admin_site.each_context(request),
            "title": f"Grant credits to {organization.name}",
            "opts": self.opts,
            "organization": organization,
            "balance": self.balance(organization),
            "form": form,
        }
        return TemplateResponse(request, "admin/billing/organization/grant.html", context)

    def _grant(
        self, request: HttpRequest, organization: Organization, form: GrantForm
    ) -> LedgerEntry | None:
        try:
            return ledger.grant(
                organization=organization,
                amount=form.cleaned_data["amount"],
                actor=request.user.get_username(),
                reason=form.cleaned_data["reason"],
                idempotency_key=form.cleaned_data["idempotency_key"],
            )
        except ledger.LedgerError as refusal:
            form.add_error(None, str(refusal))
            return None


@admin.register(CreditAccount)
class CreditAccountAdmin(ReadOnlyAdmin):
    list_display = ["organization", usd("balance")]
    list_select_related = ["organization"]
    search_fields = ["organization__slug"]
    ordering = ["organization__slug"]
    shown = ["organization", usd("balance")]
