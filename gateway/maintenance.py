"""Maintenance: switch it on and off, for all models or for one. The only writer of its table.

Running requests finish; every process reads the table anew within two seconds.
"""

from datetime import datetime

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from gateway.models import CatalogModel, Maintenance


class MaintenanceRefused(Exception):
    """The switch stays as it is; the text says why."""


def switch_on(*, until: datetime, model_id: str | None = None, message: str = "") -> Maintenance:
    """Refuse new requests with 503 until then, or until it is switched off.

    A maintenance that is on already gets the new end and message. Raises MaintenanceRefused.
    """
    now = timezone.now()
    if until <= now:
        raise MaintenanceRefused(f"{until:%Y-%m-%d %H:%M:%S %Z} is in the past.")
    try:
        Maintenance._meta.get_field("message").clean(message, None)
    except ValidationError as refusal:
        raise MaintenanceRefused(f"The message: {' '.join(refusal.messages)}") from None
    model = _find(model_id)
    with transaction.atomic():
        # One that ran out is over: the next is a new one, with its own start.
        Maintenance.objects.filter(model=model, until__lte=now).delete()
        maintenance, _ = Maintenance.objects.update_or_create(
            model=model, defaults={"until": until, "message": message}
        )
    return maintenance


def switch_off(*, model_id: str | None = None) -> bool:
    """Let requests run again, and return whether the maintenance had been on."""
    ended = Maintenance.objects.filter(model=_find(model_id))
    was_on = ended.filter(until__gt=timezone.now()).exists()
    ended.delete()
    return was_on


def _find(model_id: str | None) -> CatalogModel | None:
    if model_id is None:
        return None
    model = CatalogModel.objects.filter(model_id=model_id).first()
    if model is None:
        raise MaintenanceRefused(f"No model has the ID {model_id!r}.")
    return model
