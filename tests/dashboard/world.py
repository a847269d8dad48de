"""Who and what the dashboard's tests look at, made by billing's own functions."""

import uuid
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.utils import timezone

from billing import keys, ledger, organizations, usage, workers
from billing.models import ApiKey, LedgerEntry, Membership, Organization, UsageEvent
from billing.pricing import Prices
from dashboard.models import User

QWEN = Prices(input=Decimal("0.08"), cached_input=Decimal("0.04"), output=Decimal("0.28"))
PASSWORD = "correct horse battery"
_WORKER = uuid.UUID(int=7)


def organization(name: str, *, credits: Decimal = Decimal(0)) -> Organization:
    made, _ = organizations.create(name=name, actor="tests", opening_credits=credits)
    return made


def person(email: str, *member_of: Organization, **fields: Any) -> User:
    """Make a user who has no password yet: hashing one is slow on purpose."""
    user = User.objects.create_user(email, **fields)
    for each in member_of:
        Membership.objects.create(user=user, organization=each)
    return user


def line(
    of: Organization, amount: Decimal, *, at: datetime | None = None, **fields: Any
) -> LedgerEntry:
    """Write a line of the ledger as of that moment, and move the balance with it."""
    entry = LedgerEntry(
        **{"organization": of, "kind": "adjustment", "actor": "tests", **fields}, amount=amount
    )
    if at is not None:
        entry.created_at = at
    with ledger.locked_accounts([of.pk]) as accounts:
        ledger._post([entry], accounts)
    return entry


def key(of: Organization, name: str = "default") -> tuple[ApiKey, str]:
    return keys.issue(organization=of, name=name)


def start(by: ApiKey, *, at: datetime | None = None, **fields: Any) -> usage.Admission:
    """Admit a request of this key; it is in flight from then on."""
    workers.beat(worker_id=_WORKER, host="tests", pid=1)
    admission = usage.Admission(
        **{
            "generation_id": uuid.uuid4(),
            "organization_id": by.organization_id,
            "key_id": by.pk,
            "worker_id": _WORKER,
            "model": "qwen3-32b",
            "backend": "secret-backend",
            "streamed": True,
            "prices": QWEN,
            "hold": Decimal("0.001"),
            "created_at": at or timezone.now(),
            **fields,
        }
    )
    with ledger.locked_accounts([by.organization_id]) as accounts:
        assert usage.admit([admission], accounts) == [None]
    return admission


def finish(admission: usage.Admission, **fields: Any) -> UsageEvent:
    """Settle the request: 9 tokens in and 12 out unless told otherwise."""
    settlement = usage.Settlement(
        **{
            "admission": admission,
            "backend": admission.backend,
            "state": UsageEvent.State.SUCCEEDED,
            "finished_at": admission.created_at + timedelta(milliseconds=840),
            "status_code": 200,
            "prompt_tokens": 9,
            "completion_tokens": 12,
            "usage_source": UsageEvent.UsageSource.REPORTED,
            "finish_reason": "stop",
            "latency_ms": 840,
            "time_to_first_token_ms": 120,
            **fields,
        }
    )
    with ledger.locked_accounts([admission.organization_id]) as accounts:
        usage.settle([settlement], accounts)
    return UsageEvent.objects.get(pk=admission.generation_id)


def request(by: ApiKey, *, at: datetime | None = None, **fields: Any) -> UsageEvent:
    """Run a request from start to end."""
    return finish(start(by, at=at), **fields)
