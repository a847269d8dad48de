"""Celery's tasks of billing: one domain call each, safe to repeat."""

import logging
from datetime import timedelta

from celery import shared_task
from django.utils import timezone

from billing import reconcile, usage

log = logging.getLogger(__name__)

# Longer than the beat's period, so that a beat that was missed leaves no gap.
_WINDOW = timedelta(hours=1)


@shared_task
def reap_lost(**_: object) -> None:
    """Close the events of workers that died."""
    lost = usage.close_lost().generation_ids
    if lost:
        log.warning("closed %d events of dead workers as lost", len(lost))


@shared_task
def reconcile_balances(**_: object) -> None:
    _tell(reconcile.balances(timezone.now() - _WINDOW))


@shared_task
def reconcile_costs(**_: object) -> None:
    since = timezone.now() - _WINDOW
    _tell(reconcile.charges(since))
    _tell(reconcile.costs(since))


def _tell(report: reconcile.Report) -> None:
    log.info("%s: %d counted, %d found", report.invariant, report.counted, len(report.findings))
    for finding in report.findings:
        log.error("%s: %s", report.invariant, finding)
