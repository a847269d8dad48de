"""Requests of billing's tests, run through billing's own functions."""

import uuid
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import connection
from django.db.models.functions import Now
from django.utils import timezone

from billing import ledger, usage
from billing.models import (
    ApiKey,
    CreditAccount,
    GatewayWorker,
    LedgerEntry,
    Organization,
    UsageEvent,
)
from billing.pricing import Prices

PRICES = Prices(input=Decimal("0.08"), cached_input=Decimal("0.04"), output=Decimal("0.28"))
# 100 prompt tokens of which 40 cached, and 10 completion tokens, at these prices.
TOKENS = {"prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 10}
COST = Decimal("0.0000092")


def admission(key: ApiKey, worker: GatewayWorker, **fields: Any) -> usage.Admission:
    return usage.Admission(
        **{
            "generation_id": uuid.uuid4(),
            "organization_id": key.organization_id,
            "key_id": key.pk,
            "worker_id": worker.pk,
            "model": "qwen3-32b",
            "backend": "rack-1",
            "streamed": False,
            "prices": PRICES,
            "hold": Decimal("0.001"),
            "created_at": timezone.now(),
            **fields,
        }
    )


def admit(*admissions: usage.Admission) -> list[usage.Answer]:
    with ledger.locked_accounts({each.organization_id for each in admissions}) as accounts:
        return usage.admit(admissions, accounts)


def settlement(of: usage.Admission, **fields: Any) -> usage.Settlement:
    return usage.Settlement(
        **{
            "admission": of,
            "backend": of.backend,
            "state": usage.State.SUCCEEDED,
            "finished_at": timezone.now(),
            "status_code": 200,
            "usage_source": usage.UsageSource.REPORTED,
            **TOKENS,
            **fields,
        }
    )


def settle(*settlements: usage.Settlement) -> list[Decimal]:
    organizations = {each.admission.organization_id for each in settlements}
    with ledger.locked_accounts(organizations) as accounts:
        return usage.settle(settlements, accounts)


def served(key: ApiKey, worker: GatewayWorker, **fields: Any) -> UsageEvent:
    """Run a request from admission to settlement."""
    opened = admission(key, worker)
    assert admit(opened) == [None]
    settle(settlement(opened, **fields))
    return UsageEvent.objects.get(pk=opened.generation_id)


def line(
    organization: Organization, amount: Decimal, *, at: datetime | None = None, **fields: Any
) -> LedgerEntry:
    """Write a line of the ledger as of that moment, and move the balance with it."""
    entry = LedgerEntry(
        **{"organization": organization, "kind": "adjustment", "actor": "tests", **fields},
        amount=amount,
    )
    if at is not None:
        entry.created_at = at
    with ledger.locked_accounts([organization.pk]) as accounts:
        ledger._post([entry], accounts)
    return entry


def charged(
    key: ApiKey, worker: GatewayWorker, cost: Decimal, *, at: datetime, model: str = "qwen3-32b"
) -> LedgerEntry:
    """Write a request of that moment, and its charge, whatever its tokens."""
    event = UsageEvent.objects.create(
        organization=key.organization,
        api_key=key,
        worker=worker,
        state=usage.State.SUCCEEDED,
        model=model,
        backend="rack-1",
        streamed=False,
        input_price=0,
        cached_input_price=0,
        output_price=0,
        hold=0,
        cost=cost,
        created_at=at,
        finished_at=at,
    )
    return line(key.organization, -cost, at=at, kind="charge", event=event)


def balance(organization: Organization) -> Decimal:
    amount: Decimal = CreditAccount.objects.get(pk=organization.pk).balance
    return amount


def silence(worker: GatewayWorker, seconds: float) -> None:
    """Let the worker have said nothing for so long."""
    GatewayWorker.objects.filter(pk=worker.pk).update(
        heartbeat_at=Now() - timedelta(seconds=seconds)
    )


def lift_triggers() -> None:
    """Let this test's transaction write the ledger as an intruder would; its rollback undoes it."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # none may be pending at ALTER TABLE
        for table in ("billing_ledgerentry", "billing_ledgerdigest"):
            if connection.vendor == "postgresql":
                cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
            else:
                cursor.execute(f"DROP TRIGGER {table}_no_UPDATE")
                cursor.execute(f"DROP TRIGGER {table}_no_DELETE")


def orphan(line: LedgerEntry) -> None:
    """Let the line's event be one that never was; the database wants it back before the end."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET CONSTRAINTS ALL DEFERRED")
    LedgerEntry.objects.filter(pk=line.pk).update(event=uuid.uuid4())
