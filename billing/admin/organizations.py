"""Organizations in the admin: their limits, members and status, and the movements of credits."""

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ActionForm
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path

from billing import organizations
from billing.admin import movements
from billing.admin.columns import ModelAdmin, ReadOnlyAdmin, usd
from billing.models import CreditAccount, Membership, Organization
from billing.money import plain

if TYPE_CHECKING:
    _MembershipInlineBase = admin.TabularInline[Membership, Organization]
else:
    _MembershipInlineBase = admin.TabularInline


class ReasonForm(ActionForm):
    reason = forms.CharField(required=False, max_length=200, label="Reason (the customer sees it)")


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
        fields += ["requests_per_minute", "tokens_per_minute"]
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
        view = self.admin_site.admin_view(self.movement_view)
        own = [
            path(f"<int:pk>/{name}/", view, {"name": name}, name=f"billing_organization_{name}")
            for name in movements.OF_ORGANIZATION
        ]
        return [*own, *super().get_urls()]

    def movement_view(self, request: HttpRequest, pk: int, name: str) -> HttpResponse:
        organization = get_object_or_404(Organization.objects.select_related("account"), pk=pk)
        return movements.movement_page(
            self,
            request,
            movements.OF_ORGANIZATION[name],
            organization,
            facts=f"Balance now: {self.balance(organization)} USD.",
            organization=organization,
        )


@admin.register(CreditAccount)
class CreditAccountAdmin(ReadOnlyAdmin):
    list_display = ["organization", usd("balance")]
    list_select_related = ["organization"]
    search_fields = ["organization__slug"]
    ordering = ["organization__slug"]
    shown = ["organization", usd("balance")]
