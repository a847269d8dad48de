"""The operators' admin of the catalog: models, price versions, backends, maintenance.

A price version is added, never changed: events and invoices were made with it. A backend's key
goes in and never comes out.
"""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminSplitDateTime
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone

from billing.admin.columns import ReadOnlyAdmin
from gateway import catalog_file, maintenance
from gateway.models import Backend, BackendReading, CatalogModel, Maintenance, ModelPrice

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
    _Inline = admin.TabularInline[Any, CatalogModel]
    _ModelForm = forms.ModelForm[Any]
else:
    _ModelAdmin = admin.ModelAdmin
    _Inline = admin.TabularInline
    _ModelForm = forms.ModelForm


class CatalogModelForm(_ModelForm):
    def clean_parameters(self) -> dict[str, str]:
        parameters = self.cleaned_data["parameters"] or {}
        if not isinstance(parameters, dict):
            raise forms.ValidationError('An object, as in {"stop": "forward"}.')
        try:
            return catalog_file.check_parameters(parameters)
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None


class PriceForm(_ModelForm):
    effective_from = forms.SplitDateTimeField(
        required=False, widget=AdminSplitDateTime, help_text="Empty means now."
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance._state.adding:
            # The column's default is an expression of the database, which no widget can show.
            self.initial["effective_from"] = None

    def clean_effective_from(self) -> datetime:
        now = timezone.now()
        begin: datetime = self.cleaned_data["effective_from"] or now
        if begin < now:
            raise forms.ValidationError("A price cannot begin in the past.")
        return begin


class BackendForm(_ModelForm):
    """Takes a key and never shows it: an empty field keeps what is stored."""

    api_key = forms.CharField(
        label="API key",
        required=False,
        max_length=500,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Never shown; empty keeps it, naming a variable removes it.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial["api_key"] = ""

    def clean(self) -> dict[str, Any] | None:
        typed, variable = self.cleaned_data.get("api_key"), self.cleaned_data.get("api_key_env")
        if typed and variable:
            self.add_error("api_key_env", "Give the key or the variable, not both.")
        elif not typed:
            self.cleaned_data["api_key"] = "" if variable else self.instance.api_key
        return super().clean()


class PriceInline(_Inline):
    model = ModelPrice
    form = PriceForm
    fields = ["input", "cached_input", "output", "effective_from", "created_by"]
    readonly_fields = ["created_by"]
    ordering = ["-effective_from", "-pk"]
    extra = 0
    verbose_name = "price version"

    def get_min_num(
        self, request: HttpRequest, obj: CatalogModel | None = None, **kwargs: Any
    ) -> int:
        return 0 if obj else 1  # a model without a price cannot be served

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class BackendInline(_Inline):
    model = Backend
    form = BackendForm
    extra = 0


@admin.register(CatalogModel)
class CatalogModelAdmin(_ModelAdmin):
    form = CatalogModelForm
    list_display = ["model_id", "status", "context_window", "image_input", "parallel_tool_calls"]
    list_filter = ["status"]
    search_fields = ["model_id"]
    ordering = ["model_id"]
    inlines = [PriceInline, BackendInline]
    fields = [
        "model_id",
        "status",
        "context_window",
        "max_output_tokens",
        "image_input",
        "parallel_tool_calls",
        "parameters",
    ]

    def get_readonly_fields(
        self, request: HttpRequest, obj: CatalogModel | None = None
    ) -> list[str]:
        # Clients and usage events know it by this ID.
        return ["model_id"] if obj else []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # "retired" is how a model goes

    def save_formset(self, request: HttpRequest, form: Any, formset: Any, change: bool) -> None:
        if formset.model is ModelPrice:
            for price_form in formset.forms:
                price_form.instance.created_by = request.user
        formset.save()


@admin.register(Backend)
class BackendAdmin(_ModelAdmin):
    form = BackendForm
    list_display = ["name", "model", "url", "served_model_name", "weight", "enabled"]
    list_filter = ["enabled", "model"]
    list_select_related = ["model"]
    search_fields = ["name", "url"]
    ordering = ["model__model_id", "name"]
    actions = ["enable", "disable"]

    @admin.action(description="Enable", permissions=["change"])
    def enable(self, request: HttpRequest, selected: QuerySet[Backend]) -> None:
        self._set_enabled(request, selected, True)

    @admin.action(description="Disable: no new requests", permissions=["change"])
    def disable(self, request: HttpRequest, selected: QuerySet[Backend]) -> None:
        self._set_enabled(request, selected, False)

    def _set_enabled(
        self, request: HttpRequest, selected: QuerySet[Backend], enabled: bool
    ) -> None:
        for backend in selected:
            Backend.objects.filter(pk=backend.pk).update(enabled=enabled)
            self.log_change(request, backend, "Enabled" if enabled else "Disabled")


@admin.register(BackendReading)
class BackendReadingAdmin(ReadOnlyAdmin):
    list_display = [
        *["metrics_url", "served_model_name", "read_at"],
        *["server_started", "prompt_tokens", "completion_tokens"],
    ]
    shown = [
        *["metrics_url", "served_model_name", "read_at"],
        *["server_started", "prompt_tokens", "completion_tokens"],
    ]
    ordering = ["metrics_url", "served_model_name"]


class MaintenanceForm(_ModelForm):
    def clean_until(self) -> datetime:
        until: datetime = self.cleaned_data["until"]
        if until <= timezone.now():
            raise forms.ValidationError("The end is in the past.")
        return until


@admin.register(Maintenance)
class MaintenanceAdmin(_ModelAdmin):
    form = MaintenanceForm
    list_display = ["__str__", "until", "message", "started_at"]
    list_select_related = ["model"]
    ordering = ["-until", "pk"]
    fields = ["model", "until", "message"]

    def get_readonly_fields(
        self, request: HttpRequest, obj: Maintenance | None = None
    ) -> list[str]:
        return ["model"] if obj else []

    def save_model(self, request: HttpRequest, obj: Maintenance, form: Any, change: bool) -> None:
        stored = maintenance.switch_on(
            until=obj.until, model_id=_model_id(obj), message=obj.message
        )
        obj.pk = stored.pk

    def delete_model(self, request: HttpRequest, obj: Maintenance) -> None:
        maintenance.switch_off(model_id=_model_id(obj))

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Maintenance]) -> None:
        for row in queryset.select_related("model"):
            self.delete_model(request, row)


def _model_id(row: Maintenance) -> str | None:
    return row.model.model_id if row.model else None
