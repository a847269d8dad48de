"""Generated books of any size: they are sound, and every kind of break in them is found.

    KILN_TEST_EVENTS=1000000 pytest tests/billing/test_reconcile_size.py -s

A few thousand events by default; docs/reliability.md has the figures of a million.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection
from django.db.models import F, Sum

from billing import reconcile
from billing.models import CreditAccount, KeySpend, LedgerEntry, Organization, UsageEvent
from gateway.management.commands.reconcile import CHECKS
from kiln_site.demo import generator
from tests.billing.world import lift_triggers, orphan

EVENTS = int(os.environ.get("KILN_TEST_EVENTS", "3000"))
PICODOLLAR = Decimal("0.000000000001")


def generate(number: int, **options: int) -> None:
    options = {"organizations": 12, "days": 3, **options}
    call_command("generate_events", number, force=True, stdout=StringIO(), **options)


@pytest.fixture
def books(db: None) -> Iterator[None]:
    generate(EVENTS)
    yield


def found() -> dict[str, set[str]]:
    """Return the subjects that a full reconciliation finds, by check."""
    subjects: dict[str, set[str]] = defaultdict(set)
    for name, check in CHECKS.items():
        began = time.monotonic()
        report = check.look(None)
        print(f"{name}: {report.counted} counted in {time.monotonic() - began:.2f} s")
        subjects[name] |= {broken.subject for broken in report.findings}
    return {name: of for name, of in subjects.items() if of}


def generated() -> Iterator[UsageEvent]:
    """Yield charged events, each of another organization."""
    for organization in Organization.objects.filter(slug__startswith="generated-"):
        yield UsageEvent.objects.filter(organization=organization, cost__gt=0)[0]


def charge_of(event: UsageEvent) -> LedgerEntry:
    return LedgerEntry.objects.get(event=event, kind="charge")


def intrude(event: UsageEvent) -> LedgerEntry:
    return LedgerEntry.objects.create(
        organization_id=event.organization_id,
        kind="charge",
        amount=-event.cost or -PICODOLLAR,
        event=event,
        actor="intruder",
    )


def test_generated_books_are_sound(books: None) -> None:
    assert found() == {}
    events = UsageEvent.objects.filter(organization__slug__startswith="generated-")
    assert events.count() == EVENTS
    assert {"succeeded", "cancelled"} < set(events.values_list("state", flat=True).distinct())
    lines = LedgerEntry.objects.filter(organization__slug__startswith="generated-")
    assert lines.filter(kind="charge").count() == events.filter(cost__gt=0).count()
    assert lines.filter(kind="grant").count() == 12
    spent = events.aggregate(total=Sum("cost"))["total"]
    keys = KeySpend.objects.filter(api_key__organization__slug__startswith="generated-")
    assert keys.aggregate(total=Sum("spend"))["total"] == spent
    assert {event.version for event in events.values_list("pk", flat=True)[:100]} == {7}


def test_every_kind_of_break_is_found(books: None) -> None:
    lift_triggers()
    with connection.cursor() as cursor:
        cursor.execute("DROP INDEX ledger_entry_one_charge_per_event")
    events = generated()
    expected: dict[str, set[str]] = defaultdict(set)
    expected["trial_balance"] = {"all accounts"}

    def off(*organizations: Organization) -> None:
        expected["balances"] |= {f"organization {each}" for each in organizations}

    event = next(events)  # a balance
    account = CreditAccount.objects.get(pk=event.organization_id)
    CreditAccount.objects.filter(pk=account.pk).update(balance=account.balance + PICODOLLAR)
    off(event.organization)

    event = next(events)  # a charge that is missing
    charge_of(event).delete()
    off(event.organization)
    expected["charges"].add(f"event {event.pk}")

    event = next(events)  # a charge of the wrong amount
    line = charge_of(event)
    LedgerEntry.objects.filter(pk=line.pk).update(amount=line.amount - PICODOLLAR)
    off(event.organization)
    expected["charges"].add(f"charge {line.pk}")

    event, other = next(events), next(events)  # a charge in the wrong organization
    line = charge_of(event)
    LedgerEntry.objects.filter(pk=line.pk).update(organization=other.organization)
    off(event.organization, other.organization)
    expected["charges"].add(f"charge {line.pk}")

    event = next(events)  # a second charge
    intrude(event)
    off(event.organization)
    expected["charges"].add(f"event {event.pk}")

    event = next(events)  # a charge for what cost nothing
    UsageEvent.objects.filter(pk=event.pk).update(
        cost=0, prompt_tokens=0, cached_tokens=0, completion_tokens=0
    )
    expected["charges"].add(f"charge {charge_of(event).pk}")

    lonely = line = charge_of(next(events))  # a charge without its event
    expected["charges"] |= {f"charge {line.pk}", f"event {line.event_id}"}
    orphan(line)

    event = next(events)  # a cost that its tokens do not make, charged as it is
    UsageEvent.objects.filter(pk=event.pk).update(completion_tokens=F("completion_tokens") + 1)
    expected["costs"].add(f"event {event.pk}")

    assert found() == expected
    LedgerEntry.objects.filter(pk=lonely.pk).update(event=lonely.event_id)  # the end needs it


def test_repeating_adds_as_many_again(db: None) -> None:
    generate(50, organizations=2)
    generate(70, organizations=3, seed=2)
    assert UsageEvent.objects.filter(organization__slug__startswith="generated-").count() == 120
    grants = LedgerEntry.objects.filter(organization__slug__startswith="generated-", kind="grant")
    assert grants.count() == 3
    assert reconcile.balances(None).findings == []


def test_requests_lie_within_their_days(db: None) -> None:
    before = datetime.now(UTC)
    generate(200, days=2)
    events = UsageEvent.objects.filter(organization__slug__startswith="generated-")
    ages = [(before - event.created_at).total_seconds() / 86400 for event in events]
    assert min(ages) > 0 and max(ages) < 2.1
    assert all(event.finished_at and event.finished_at < before for event in events)


def test_it_refuses_somebodys_own_books(db: None) -> None:
    Organization.objects.create(name="Acme", slug="acme-own")
    with pytest.raises(CommandError, match="Say --force"):
        call_command("generate_events", 10)
    with pytest.raises(CommandError, match="number must be at least 1"):
        call_command("generate_events", 0)
    with pytest.raises(generator.ForeignBooks):
        generator.refuse_foreign_books()
    assert not UsageEvent.objects.filter(organization__slug__startswith="generated-").exists()
