"""Runs and findings in the admin: what was looked at, and what somebody has to answer.

A run is read only. A finding moves by actions, open to acknowledged to fixed, with a note.
"""

from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ActionForm
from django.db.models import QuerySet
from django.http import HttpRequest

from billing import findings
from billing.admin.columns import ReadOnlyAdmin
from billing.models import Finding, ReconciliationRun


class NoteForm(ActionForm):
    note = forms.CharField(required=False, max_length=2000, label="Note")


@admin.register(Finding)
class FindingAdmin(ReadOnlyAdmin):
    list_display = [
        *["invariant", "subject", "detail", "state", "owner"],
        *["first_seen_at", "last_seen_at"],
    ]
    list_filter = ["state", "invariant"]
    list_select_related = ["owner"]
    search_fields = ["subject"]
    ordering = ["-last_seen_at", "-pk"]
    actions = ["acknowledge", "fix"]
    action_form = NoteForm
    shown = [
        *["invariant", "subject", "detail", "state", "owner", "note"],
        *["first_seen_at", "last_seen_at"],
    ]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # For the actions of the list; a finding's own page has nothing to edit.
        return obj is None and request.user.has_perm("billing.change_finding")

    @admin.action(description="Acknowledge: I am at it", permissions=["change"])
    def acknowledge(self, request: HttpRequest, selected: QuerySet[Finding]) -> None:
        self._move(request, selected, findings.acknowledge, "Acknowledged")

    @admin.action(description="Fixed, as the note says", permissions=["change"])
    def fix(self, request: HttpRequest, selected: QuerySet[Finding]) -> None:
        self._move(request, selected, findings.fix, "Fixed")

    def _move(
        self,
        request: HttpRequest,
        selected: QuerySet[Finding],
        move: Callable[..., None],
        what: str,
    ) -> None:
        note = request.POST.get("note", "")
        for finding in selected.select_related("owner"):
            try:
                move(finding, by=request.user, note=note)
            except findings.FindingRefused as refusal:
                self.message_user(request, str(refusal), messages.ERROR)
                continue
            self.log_change(request, finding, f"{what}: {note}" if note else what)


@admin.register(ReconciliationRun)
class ReconciliationRunAdmin(ReadOnlyAdmin):
    list_display = ["invariant", "started_at", "finished_at", "since", "counted", "found"]
    list_filter = ["invariant"]
    ordering = ["-started_at", "-id"]
    show_full_result_count = False
    shown = ["invariant", "since", "started_at", "finished_at", "counted", "found"]
