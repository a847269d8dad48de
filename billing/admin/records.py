"""The records in the admin: usage events, ledger entries, digests, notices, workers.

Read, never written: a refund is a new line of the ledger. Events and entries are millions of rows,
so no page counts them, sorts them by what has no index, or skips through them: a list is the newest
rows of what was asked for, and asking is by generation ID, by organization, or by time where an
index knows it.
"""

from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path
from django.utils import timezone

from billing import ledger
from billing.admin import movements
from billing.admin.columns import ReadOnlyAdmin, usd
from billing.models import (
    GatewayWorker,
    LedgerDigest,
    LedgerEntry,
    Notice,
    Organization,
    UsageEvent,
)
from billing.money import plain

if TYPE_CHECKING:
    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

NEWEST_MAX = 1000


class NewestPaginator(_Paginator):
    """Pages through the newest rows only, and counts no further than them."""

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list)
        return len(rows.values_list("pk")[:NEWEST_MAX])


class SinceFilter(admin.SimpleListFilter):
    """Rows since an hour, a day, a week or a month ago, by a column that an index knows."""

    column: str
    ages = {"hour": 1, "day": 24, "week": 24 * 7, "month": 24 * 30}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, f"Past {name}") for name in self.ages]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        hours = self.ages.get(self.value() or "")
        if hours is None:
            return queryset
        since = timezone.now() - timedelta(hours=hours)
        return queryset.filter(**{f"{self.column}__gte": since})


class FinishedFilter(SinceFilter):
    title = parameter_name = "finished"
    column = "finished_at"


class CreatedFilter(SinceFilter):
    title = parameter_name = "created"
    column = "created_at"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        # The index of `created_at` is one per organization.
        return super().lookups(request, model_admin) if request.GET.get("q") else []


class StateFilter(admin.SimpleListFilter):
    title = parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(str(value), str(label)) for value, label in UsageEvent.State.choices]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(state=self.value()) if self.value() else queryset


class NewestAdmin(ReadOnlyAdmin):
    """Lists the newest rows, of all or of what the search box names."""

    paginator = NewestPaginator
    show_full_result_count = False
    sortable_by = ()
    search_fields = ["pk"]  # shows the box; `get_search_results` decides
    search_help_text = "A generation ID, or an organization's slug."
    event_column: str

    def get_ordering(self, request: HttpRequest) -> Any:
        # Both are the order of an index: of an organization's rows, and of all.
        return ["-created_at", "-pk"] if request.GET.get("q") else ["-pk"]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(**{self.event_column: UUID(term)}), False
        except ValueError:
            # The ID, not a join: with it the database reads the organization's index in order.
            organization = Organization.objects.filter(slug=term).first()
            return queryset.filter(organization=organization), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        subtitle = f"the newest {NEWEST_MAX:,} of what is asked for"
        return super().changelist_view(request, {"subtitle": subtitle, **(extra_context or {})})


@admin.register(UsageEvent)
class UsageEventAdmin(NewestAdmin):
    event_column = "pk"
    list_display = [
        "id",
        "created_at",
        "organization",
        "model",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        usd("cost"),
        "latency_ms",
        "state",
        "status_code",
    ]
    list_select_related = ["organization"]
    list_filter = [StateFilter, FinishedFilter]
    shown = [
        *["id", "state", "organization", "api_key", "model", "backend", "worker", "streamed"],
        *["created_at", "finished_at", "latency_ms", "time_to_first_token_ms"],
        *["prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"],
        *["usage_source", "anomaly", "finish_reason", "status_code", "error"],
        *map(usd, ["cost", "hold", "input_price", "cached_input_price", "output_price"]),
    ]

    def get_urls(self) -> list[URLPattern]:
        refund = self.admin_site.admin_view(self.refund_view)
        return [
            path("<uuid:pk>/refund/", refund, name="billing_usageevent_refund"),
            *super().get_urls(),
        ]

    def refund_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        event = get_object_or_404(UsageEvent, pk=pk)
        try:
            charge = ledger.find_charge(str(pk))
        except ledger.LedgerError:
            raise Http404 from None
        left = plain(ledger.left_of(charge))
        facts = f"{charge.organization} was charged {plain(event.cost)} USD; {left} USD are left."
        return movements.movement_page(
            self, request, movements.REFUND, event, facts=facts, charge=charge
        )


@admin.register(LedgerEntry)
class LedgerEntryAdmin(NewestAdmin):
    event_column = "event"
    list_display = ["id", "created_at", "organization", "kind", usd("amount"), "actor", "reason"]
    list_select_related = ["organization"]
    list_filter = [CreatedFilter]
    shown = [
        "id",
        "created_at",
        "organization",
        "kind",
        usd("amount"),
        "event",
        "reverses",
        "actor",
        "reason",
        "idempotency_key",
    ]


@admin.register(LedgerDigest)
class LedgerDigestAdmin(ReadOnlyAdmin):
    paginator = NewestPaginator
    show_full_result_count = False
    list_display = ["organization", "day", "entries", usd("balance"), "fingerprint"]
    list_select_related = ["organization"]
    search_fields = ["organization__slug"]
    ordering = ["-pk"]
    shown = ["organization", "day", "last_entry", "entries", usd("balance"), "fingerprint"]

    @admin.display(description="digest")
    def fingerprint(self, link: LedgerDigest) -> str:
        return bytes(link.digest).hex()


@admin.register(Notice)
class NoticeAdmin(ReadOnlyAdmin):
    paginator = NewestPaginator
    show_full_result_count = False
    list_display = ["organization", "kind", "crossed_at", "mailed_at", "delivered_at", "attempts"]
    list_select_related = ["organization"]
    list_filter = ["kind"]
    search_fields = ["organization__slug"]
    ordering = ["-pk"]
    shown = [
        *["organization", "kind", "subject", "crossed_at", "cleared_at"],
        *["mailed_at", "delivered_at", "attempts", "attempted_at"],
    ]


@admin.register(GatewayWorker)
class GatewayWorkerAdmin(ReadOnlyAdmin):
    list_display = ["id", "host", "pid", "started_at", "heartbeat_at", "stopped_at"]
    ordering = ["-heartbeat_at", "id"]
    shown = ["id", "host", "pid", "started_at", "heartbeat_at", "stopped_at"]
