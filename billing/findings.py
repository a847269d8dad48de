"""Runs and findings: what was looked at, and what breaks until somebody has dealt with it.

The only writer of ReconciliationRun and Finding. A finding is a question to a person: it is open
until an operator acknowledges it, and stays until an operator says that it is fixed and how. What
is found again after that is a new finding. Never touches what a finding is about.
"""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q
from django.utils import timezone

from billing import locks
from billing.models import Finding, ReconciliationRun
from billing.reconcile import Break, Check, Report

log = logging.getLogger(__name__)

RUNS_KEPT = timedelta(days=90)

_LOGGED_MAX = 20
_SUBJECT_MAX = 200
_State = Finding.State


class FindingRefused(Exception):
    """The finding cannot be changed so; the text says why."""


def run(check: Check, since: datetime | None) -> Report:
    """Look, and record the run and what it found."""
    started_at = timezone.now()
    report = check.look(since)
    seen_at = timezone.now()
    _record(check.name, report.findings, seen_at)
    ReconciliationRun.objects.create(
        invariant=check.name,
        since=since,
        started_at=started_at,
        finished_at=seen_at,
        counted=report.counted,
        found=len(report.findings),
    )
    return report


def run_alone(check: Check, *, is_full: bool = False) -> Report | None:
    """Run a check and log it, unless another process is at it: one result stands for both."""
    scope = "everything" if is_full else "recent"
    with locks.only_one(f"reconcile {scope} {check.name}") as is_ours:
        if not is_ours:
            return None
        report = run(check, None if is_full else check.since(timezone.now()))
    log.info("%s: %d counted, %d found", check.name, report.counted, len(report.findings))
    for note in report.notes[:_LOGGED_MAX]:
        log.info("%s: %s", check.name, note)
    for broken in report.findings[:_LOGGED_MAX]:
        log.error("%s: %s", check.name, broken)
    return report


def _record(invariant: str, breaks: Iterable[Break], seen_at: datetime) -> None:
    found = {broken.subject[:_SUBJECT_MAX]: broken.detail for broken in breaks}
    known = list(_unfixed().filter(invariant=invariant, subject__in=found))
    for finding in known:
        finding.detail, finding.last_seen_at = found.pop(finding.subject), seen_at
    Finding.objects.bulk_update(known, ["detail", "last_seen_at"], batch_size=500)
    # Another run may record the same at the same moment: the database keeps one.
    Finding.objects.bulk_create(
        [
            Finding(
                invariant=invariant,
                subject=subject,
                detail=detail,
                first_seen_at=seen_at,
                last_seen_at=seen_at,
            )
            for subject, detail in found.items()
        ],
        ignore_conflicts=True,
    )


def acknowledge(finding: Finding, *, by: Any, note: str = "") -> None:
    """Say that somebody is at it: `by` owns the finding from now on. Raises FindingRefused."""
    _change(finding, _State.ACKNOWLEDGED, note, owner=by)


def fix(finding: Finding, *, by: Any, note: str) -> None:
    """Say that it is mended; the note says how. Raises FindingRefused."""
    if not note.strip():
        raise FindingRefused("Say in the note how it was fixed.")
    _change(finding, _State.FIXED, note, owner=finding.owner or by)


def _change(finding: Finding, state: str, note: str, *, owner: Any) -> None:
    text = "\n".join(line for line in (finding.note, note.strip()) if line)
    changed = _unfixed().filter(pk=finding.pk).update(state=state, note=text, owner=owner)
    if not changed:
        raise FindingRefused(f"{finding} was fixed before; found again, it is a new finding.")


def forget_old_runs() -> int:
    """Delete runs that are older than anybody asks for; findings stay."""
    old = timezone.now() - RUNS_KEPT
    deleted, _ = ReconciliationRun.objects.filter(started_at__lt=old).delete()
    return deleted


def _unfixed() -> Any:
    return Finding.objects.filter(~Q(state=_State.FIXED))
