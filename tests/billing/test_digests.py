"""The digest chain: silent on an honest ledger, and it names the day of each kind of forgery."""

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from billing import digests, tasks
from billing.models import Finding, LedgerDigest, LedgerEntry, Organization
from tests.billing.world import lift_triggers, line

FIRST, SECOND, THIRD = (date(2026, 3, day) for day in (1, 2, 5))
SINCE = datetime(2026, 3, 2, tzinfo=UTC)


def noon(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, 12, tzinfo=UTC)


@pytest.fixture
def sealed(acme: Organization) -> Organization:
    """Acme, with three lines on each of three days, all sealed."""
    for day in (FIRST, SECOND, THIRD):
        for number in range(3):
            line(acme, Decimal(number + 1), at=noon(day), reason=f"{day} {number}")
    assert digests.seal(THIRD) == 3
    return acme


def links(organization: Organization) -> list[LedgerDigest]:
    return list(LedgerDigest.objects.filter(organization=organization).order_by("day"))


def test_it_works(sealed: Organization) -> None:
    assert [(link.day, link.entries, link.balance) for link in links(sealed)] == [
        (FIRST, 3, 6),
        (SECOND, 6, 12),
        (THIRD, 9, 18),
    ]
    assert len({bytes(link.digest) for link in links(sealed)}) == 3
    found = digests.verify(sealed)
    assert (found.links, found.lines, found.broken_day) == (3, 9, None)
    assert found.newest == bytes(links(sealed)[-1].digest)


def test_sealing_again_adds_nothing(sealed: Organization) -> None:
    assert digests.seal(THIRD) == digests.seal(FIRST) == 0
    assert digests.verify(sealed).broken_day is None


def test_nights_that_were_missed_are_made_up_for(acme: Organization, globex: Organization) -> None:
    for organization in (acme, globex):
        for day in (FIRST, SECOND, THIRD):
            line(organization, Decimal(1), at=noon(day))
    assert digests.seal(FIRST) == 2
    assert digests.seal(THIRD) == 4
    alike = [[(link.day, link.entries) for link in links(each)] for each in (acme, globex)]
    assert alike[0] == alike[1]
    # The same lines of two organizations are not the same.
    assert links(acme)[0].digest != links(globex)[0].digest


def test_a_day_that_is_not_over_is_not_sealed(acme: Organization) -> None:
    now = timezone.now()
    for day in (now.date(), (now + timedelta(days=1)).date()):
        with pytest.raises(ValueError, match="is not over"):
            digests.seal(day)
    assert links(acme) == []


FORGERIES = {
    "an amount": ("UPDATE billing_ledgerentry SET amount = amount + 1 WHERE id = %s", SECOND),
    "a reason": ("UPDATE billing_ledgerentry SET reason = 'forged' WHERE id = %s", SECOND),
    "an actor": ("UPDATE billing_ledgerentry SET actor = 'nobody' WHERE id = %s", SECOND),
    "a kind": ("UPDATE billing_ledgerentry SET kind = 'grant' WHERE id = %s", SECOND),
    "a key": ("UPDATE billing_ledgerentry SET idempotency_key = '' WHERE id = %s", SECOND),
    "a removal": ("DELETE FROM billing_ledgerentry WHERE id = %s", SECOND),
    "a day": (
        "UPDATE billing_ledgerentry SET created_at = '2026-03-01 12:00:00+00:00' WHERE id = %s",
        FIRST,
    ),
    "an insertion": (
        "INSERT INTO billing_ledgerentry (organization_id, kind, amount, actor, reason, created_at)"
        " SELECT organization_id, kind, amount, actor, reason, created_at"
        " FROM billing_ledgerentry WHERE id = %s",
        SECOND,
    ),
    "an insertion on a day between": (
        "INSERT INTO billing_ledgerentry (organization_id, kind, amount, actor, reason, created_at)"
        " SELECT organization_id, kind, amount, actor, reason, '2026-03-03 12:00:00+00:00'"
        " FROM billing_ledgerentry WHERE id = %s",
        THIRD,
    ),
}


@pytest.mark.parametrize(("sql", "day"), FORGERIES.values(), ids=list(FORGERIES))
def test_a_forged_ledger_is_found_and_the_day_named(
    sealed: Organization, sql: str, day: date
) -> None:
    victim = LedgerEntry.objects.get(organization=sealed, reason=f"{SECOND} 1")
    lift_triggers()
    with connection.cursor() as cursor:
        cursor.execute(sql, [victim.pk])
    found = digests.verify(sealed)
    assert found.broken_day == day
    assert found.detail
    [told] = digests.verify_all(None).findings
    assert told.subject == f"organization acme on {day}"


def test_two_amounts_that_were_exchanged_are_found(sealed: Organization) -> None:
    lift_triggers()
    lines = LedgerEntry.objects.filter(organization=sealed, created_at=noon(FIRST))
    first, second, _ = lines.order_by("id")
    lines.filter(pk=first.pk).update(amount=second.amount)
    lines.filter(pk=second.pk).update(amount=first.amount)
    found = digests.verify(sealed)
    assert (found.broken_day, found.links) == (FIRST, 1)
    assert "is not what was sealed" in found.detail


@pytest.mark.parametrize(
    "change",
    [
        lambda chain: chain.filter(day=SECOND).update(balance=0),
        lambda chain: chain.filter(day=SECOND).update(entries=0),
        lambda chain: chain.filter(day=SECOND).update(digest=bytes(32)),
        lambda chain: chain.filter(day=SECOND).delete(),
    ],
    ids=["balance", "entries", "digest", "removed"],
)
def test_a_forged_link_is_found(sealed: Organization, change: Callable[[object], object]) -> None:
    lift_triggers()
    change(LedgerDigest.objects.filter(organization=sealed))
    removed = not LedgerDigest.objects.filter(organization=sealed, day=SECOND).exists()
    assert digests.verify(sealed).broken_day == (THIRD if removed else SECOND)


def test_a_look_at_the_last_days_believes_what_came_before(sealed: Organization) -> None:
    lift_triggers()
    LedgerEntry.objects.filter(reason=f"{FIRST} 0").update(reason="forged")
    recent = digests.verify_all(SINCE)
    assert (recent.counted, recent.findings) == (2, [])
    assert len(digests.verify_all(None).findings) == 1
    LedgerEntry.objects.filter(reason=f"{SECOND} 0").update(reason="forged")
    [told] = digests.verify_all(SINCE).findings
    assert told.subject == f"organization acme on {SECOND}"


@pytest.mark.parametrize(
    "change",
    [lambda: LedgerDigest.objects.update(balance=0), lambda: LedgerDigest.objects.all().delete()],
    ids=["update", "delete"],
)
def test_a_link_cannot_be_changed_or_deleted(
    sealed: Organization, change: Callable[[], object]
) -> None:
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        change()
    assert digests.verify(sealed).broken_day is None


# --- The task and the command --------------------------------------------------------------------


def test_the_task_seals_yesterday_and_records_what_it_found(sealed: Organization) -> None:
    yesterday = timezone.now() - timedelta(days=1)
    forged = line(sealed, Decimal(1), at=yesterday)
    tasks.seal_ledgers()
    assert [link.day for link in links(sealed)] == [FIRST, SECOND, THIRD, yesterday.date()]
    assert not Finding.objects.exists()
    lift_triggers()
    LedgerEntry.objects.filter(pk=forged.pk).update(reason="forged")
    tasks.seal_ledgers()
    assert Finding.objects.get().subject == f"organization acme on {yesterday.date()}"


def verify_ledger(*arguments: str) -> str:
    out = StringIO()
    call_command("verify_ledger", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_counts_and_prints_the_newest_digest(
    sealed: Organization, globex: Organization
) -> None:
    newest = bytes(links(sealed)[-1].digest).hex()
    assert verify_ledger("acme") == (
        f"3 links over 9 lines verified, 0 chains broken. Newest: {newest}\n"
    )
    assert json.loads(verify_ledger("--json")) == {
        "links": 3,
        "lines": 9,
        "broken": [],
        "newest": {"acme": newest},
    }
    assert verify_ledger("globex") == "0 links over 0 lines verified, 0 chains broken.\n"
    with pytest.raises(CommandError, match="No organization has the name or slug 'nobody'"):
        verify_ledger("nobody")


def test_the_command_fails_and_names_the_first_broken_link(sealed: Organization) -> None:
    lift_triggers()
    LedgerEntry.objects.filter(reason__startswith=f"{SECOND}").update(reason="forged")
    out = StringIO()
    with pytest.raises(CommandError, match=f"acme on {SECOND}: a line of this day"):
        call_command("verify_ledger", "--json", stdout=out)
    [broken] = json.loads(out.getvalue())["broken"]
    assert (broken["organization"], broken["day"]) == ("acme", str(SECOND))
