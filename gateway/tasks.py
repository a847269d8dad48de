"""Celery's tasks of the gateway: one domain call each, safe to repeat."""

from celery import shared_task

from billing import findings
from gateway import second_source


@shared_task
def compare_second_source(**_: object) -> None:
    findings.run_alone(second_source.CHECK)
