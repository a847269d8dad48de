"""Gateway workers and their heartbeats: the only writer of GatewayWorker.

A slot or a hold counts while its worker's heartbeat is fresh by the database's clock, so a worker
that was killed frees its slots by saying nothing. Never asks another host for the time.
"""

import uuid
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from billing.models import GatewayWorker


def beat(*, worker_id: uuid.UUID, host: str, pid: int) -> None:
    """Say that this worker lives; the first time, or after its row was lost, register it."""
    if not GatewayWorker.objects.filter(pk=worker_id).update(heartbeat_at=Now(), stopped_at=None):
        GatewayWorker.objects.bulk_create(
            [GatewayWorker(pk=worker_id, host=host, pid=pid)], ignore_conflicts=True
        )


def stop(worker_id: uuid.UUID) -> None:
    GatewayWorker.objects.filter(pk=worker_id).update(stopped_at=Now())


def is_live() -> Q:
    """Return the condition on a usage event that its worker's heartbeat is fresh."""
    ttl = timedelta(seconds=settings.KILN_HEARTBEAT_TTL_SECONDS)
    return Q(worker__heartbeat_at__gt=Now() - ttl)


def is_dead_for(age: timedelta) -> Q:
    """Return the condition on a usage event that its worker has been silent for `age`."""
    return Q(worker__heartbeat_at__lt=Now() - age)
