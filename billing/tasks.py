"""Celery's tasks of billing: one domain call each, safe to repeat."""

import logging
from datetime import timedelta

from celery import shared_task
from django.utils import timezone

from billing import digests, findings, notices, usage
from billing.checks import CHECKS

log = logging.getLogger(__name__)


@shared_task
def reap_lost(**_: object) -> None:
    """Close the events of workers that died."""
    lost = usage.close_lost().generation_ids
    if lost:
        log.warning("closed %d events of dead workers as lost", len(lost))


@shared_task
def check(name: str, *, is_full: bool = False) -> None:
    """Run one of `billing.checks` over its last hours, or over everything."""
    findings.run_alone(CHECKS[name], is_full=is_full)


@shared_task
def forget_old_runs(**_: object) -> None:
    findings.forget_old_runs()


@shared_task
def seal_ledgers(**_: object) -> None:
    """Verify what was sealed last, then seal the days that are over."""
    findings.run_alone(CHECKS["digests"], is_full=False)
    digests.seal((timezone.now() - timedelta(days=1)).date())


@shared_task
def send_notices(**_: object) -> None:
    """Tell owners of low balances and of keys that expire."""
    notices.look()
    notices.send()
