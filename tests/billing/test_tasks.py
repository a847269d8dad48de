"""Celery's beat: what it names exists, and every check is on it."""

from typing import Any

import pytest
from django.conf import settings

from billing import tasks
from billing.checks import CHECKS
from billing.models import ReconciliationRun
from kiln_site.celery import app

SCHEDULE: dict[str, Any] = settings.CELERY_BEAT_SCHEDULE


def test_every_scheduled_task_exists() -> None:
    app.loader.import_default_modules()
    assert {entry["task"] for entry in SCHEDULE.values()} <= set(app.tasks)


def test_every_check_is_scheduled() -> None:
    named = {
        entry["args"][0] for entry in SCHEDULE.values() if entry["task"] == "billing.tasks.check"
    }
    assert named == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_runs_and_leaves_its_run(db: None, name: str) -> None:
    tasks.check(name)
    tasks.check(name, is_full=True)
    spans = ReconciliationRun.objects.filter(invariant=name).order_by("pk")
    assert [run.since is None for run in spans] == [False, True]
