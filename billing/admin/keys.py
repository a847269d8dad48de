"""API keys in the admin: issued on the add page or by rotation, which show the key once; never
shown again. And what was refused of them."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ActionForm
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone

from billing import keys
from billing.admin.columns import ModelAdmin, ReadOnlyAdmin
from billing.admin.records import NewestPaginator
from billing.models import ApiKey, RefusalCount

if TYPE_CHECKING:
    _Form = forms.ModelForm[ApiKey]
else:
    _Form = forms.ModelForm


_EDITED = ["name", "expires_at", "allowed_models", "spend_limit", "spend_period"]


class OverlapForm(ActionForm):
    overlap_hours = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=keys.OVERLAP_HOURS_MAX,
        initial=keys.OVERLAP_HOURS,
        label="Hours that a rotated key still works",
    )


class ApiKeyForm(_Form):
    class Meta:
        model = ApiKey
        fields = ["organization", *_EDITED]

    def clean_allowed_models(self) -> list[str]:
        models = self.cleaned_data["allowed_models"] or []
        if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
            raise forms.ValidationError('A list of model IDs, as in ["qwen3-32b"].')
        return models

    def clean(self) -> dict[str, Any] | None:
        # The constraint also looks at `revoked_at`, which is no field here, so Django leaves it
        # to the database, whose refusal would be a 500.
        name = self.cleaned_data.get("name")
        organization = self.cleaned_data.get("organization") or self.instance.organization
        live = ApiKey.objects.filter(organization=organization, name=name, revoked_at=None)
        if self.instance.revoked_at is None and live.exclude(pk=self.instance.pk).exists():
            self.add_error("name", f"{organization} has a live key of that name.")
        return super().clean()


@admin.register(ApiKey)
class ApiKeyAdmin(ModelAdmin):
    form = ApiKeyForm
    list_display = ["name", "organization", "shown", "state", "created_at", "last_used_at"]
    list_select_related = ["organization"]
    search_fields = ["name", "=last4", "=organization__slug"]
    ordering = ["-pk"]
    autocomplete_fields = ["organization"]
    actions = ["revoke", "pause", "resume", "rotate"]
    action_form = OverlapForm

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        fields = ["organization", *_EDITED]
        return [*fields, *self.get_readonly_fields(request, obj)[1:]] if obj else fields

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> list[str]:
        if obj is None:
            return []
        return [
            "organization",
            "shown",
            "state",
            "created_at",
            "created_by",
            "last_used_at",
            "paused_at",
            "revoked_at",
        ]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="key")
    def shown(self, key: ApiKey) -> str:
        return f"{key.prefix}…{key.last4}"

    @admin.display
    def state(self, key: ApiKey) -> str:
        if key.revoked_at:
            return "revoked"
        if key.expires_at and key.expires_at <= timezone.now():
            return "expired"
        return "paused" if key.paused_at else "live"

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        if change:
            # Only what was edited: the form may be older than a revocation.
            obj.save(update_fields=form.changed_data)
            return
        key, secret = keys.issue(
            organization=obj.organization,
            name=obj.name,
            created_by=request.user,
            expires_at=obj.expires_at,
            allowed_models=obj.allowed_models,
            spend_limit=obj.spend_limit,
            spend_period=obj.spend_period,
        )
        vars(obj).update(vars(key))
        # Not a field: it lives until `response_add` shows it, and cannot reach a table.
        vars(obj)["secret"] = secret

    def response_add(
        self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None
    ) -> HttpResponse:
        return self._show_once(request, obj, vars(obj).pop("secret"))

    def _show_once(self, request: HttpRequest, key: ApiKey, secret: str) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": "API key issued",
            "opts": self.opts,
            "key": key,
            "secret": secret,
        }
        return TemplateResponse(request, "admin/billing/apikey/issued.html", context)

    @admin.action(description="Revoke for good", permissions=["change"])
    def revoke(self, request: HttpRequest, selected: QuerySet[ApiKey]) -> None:
        for key in selected:
            keys.revoke(key)
            self.log_change(request, key, "Revoked")

    @admin.action(description="Pause", permissions=["change"])
    def pause(self, request: HttpRequest, selected: QuerySet[ApiKey]) -> None:
        for key in selected:
            keys.pause(key)
            self.log_change(request, key, "Paused")

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request: HttpRequest, selected: QuerySet[ApiKey]) -> None:
        for key in selected:
            keys.resume(key)
            self.log_change(request, key, "Resumed")

    @admin.action(description="Rotate: issue its successor", permissions=["change"])
    def rotate(self, request: HttpRequest, selected: QuerySet[ApiKey]) -> HttpResponse | None:
        form = OverlapForm(request.POST)
        form.full_clean()  # the admin did, and calls no action when it is not valid
        hours = form.cleaned_data.get("overlap_hours")
        key = selected.first()
        if key is None or len(selected) > 1 or hours is None:
            self.message_user(request, "Select one key, and say how many hours.", messages.ERROR)
            return None
        try:
            new, secret = keys.rotate(key, timedelta(hours=hours), created_by=request.user)
        except (keys.KeyEnded, keys.KeyNameTaken) as refusal:
            self.message_user(request, str(refusal), messages.ERROR)
            return None
        self.log_change(request, key, f"Rotated: works for {hours} more hours")
        self.log_addition(request, new, f"Issued by the rotation of {key}")
        return self._show_once(request, new, secret)


@admin.register(RefusalCount)
class RefusalCountAdmin(ReadOnlyAdmin):
    """Lists the newest: by number of row, and of one organization by minute, as its index has."""

    list_display = ["minute", "organization", "api_key", "status_code", "code", "number"]
    list_select_related = ["organization", "api_key"]
    paginator = NewestPaginator
    show_full_result_count = False
    sortable_by = ()
    search_fields = ["=organization__slug"]
    search_help_text = "An organization's slug."
    shown = ["minute", "organization", "api_key", "status_code", "code", "number"]

    def get_ordering(self, request: HttpRequest) -> Any:
        return ["-minute", "-pk"] if request.GET.get("q") else ["-pk"]
