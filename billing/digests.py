"""The chain of digests that makes the ledger tamper-evident. The only writer of LedgerDigest.

Each UTC day with lines gets one link per organization, when the day is over: the SHA-256 of the
link before, the day, each line in the order of its ID, and the balance. Who edits, removes or
inserts a line behind the triggers' back breaks that day's link, and would have to forge every
later one; a link that was copied elsewhere in time then tells. Never repairs anything.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import orjson
from django.utils import timezone

from billing.models import CreditAccount, LedgerDigest, LedgerEntry, Organization
from billing.money import plain
from billing.reconcile.report import Report
from billing.statements import start_of

# A line bears the time at which its transaction began, so it may appear a moment after its day.
SEAL_AFTER = timedelta(minutes=10)

_COLUMNS = (
    *("id", "organization_id", "kind", "event_id", "reverses_id"),
    *("idempotency_key", "actor", "reason", "created_at"),
)


@dataclass(frozen=True, slots=True)
class Head:
    """Where a chain stands after a day: all lines up to then, and what they add up to."""

    digest: bytes = b""
    entries: int = 0
    balance: Decimal = Decimal(0)
    last_entry_id: int = 0


@dataclass(slots=True)
class Verification:
    """What was looked at of one organization, and its first broken link, if any."""

    links: int = 0
    lines: int = 0
    newest: bytes = b""
    broken_day: date | None = None
    detail: str = ""


def seal(day: date) -> int:
    """Add the missing links of every organization, up to `day`; return how many were added.

    Safe to repeat, and after nights on which nobody did. Raises ValueError for a day that is not
    over for `SEAL_AFTER`.
    """
    if timezone.now() < _end_of(day) + SEAL_AFTER:
        raise ValueError(f"{day} is not over: lines may still be written in it.")
    accounts = CreditAccount.objects.order_by("pk").values_list("pk", flat=True)
    return sum(_seal_organization(organization_id, day) for organization_id in accounts.iterator())


def _seal_organization(organization_id: int, last_day: date) -> int:
    links = LedgerDigest.objects.filter(organization=organization_id)
    newest = links.order_by("-day").first()
    head, since, added = _head(newest), _end_of(newest.day) if newest else None, 0
    while day := _next_day_with_lines(organization_id, since):
        if day > last_day:
            break
        head = _head_after(head, organization_id, day, since=since)
        link = LedgerDigest(
            organization_id=organization_id,
            day=day,
            last_entry_id=head.last_entry_id,
            entries=head.entries,
            balance=head.balance,
            digest=head.digest,
        )
        # Another process may be sealing too; it came to the same digest.
        LedgerDigest.objects.bulk_create([link], ignore_conflicts=True)
        since, added = _end_of(day), added + 1
    return added


def verify(organization: Organization, since: date | None = None) -> Verification:
    """Make the links of the organization again, from `since` on or all, up to the first broken one.

    Those before `since` are believed.
    """
    links = LedgerDigest.objects.filter(organization=organization).order_by("day")
    before = links.filter(day__lt=since).last() if since else None
    head, found = _head(before), Verification()
    start = _end_of(before.day) if before else None
    for link in (links.filter(day__gt=before.day) if before else links).iterator():
        made = _head_after(head, organization.pk, link.day, since=start)
        found.links += 1
        found.lines += made.entries - head.entries
        if made != _head(link):
            found.broken_day, found.detail = link.day, _difference(made, link)
            break
        head, start, found.newest = made, _end_of(link.day), made.digest
    return found


def verify_all(since: datetime | None) -> Report:
    """Verify the links of the days from `since` on, or all, of every organization."""
    report = Report("I13 the ledger is what was sealed", 0)
    first_day = since.astimezone(UTC).date() if since else None
    for organization in Organization.objects.order_by("pk").iterator():
        found = verify(organization, first_day)
        report.counted += found.links
        if found.broken_day:
            report.add(f"organization {organization} on {found.broken_day}", found.detail)
    return report


def _difference(made: Head, link: LedgerDigest) -> str:
    if made.entries != link.entries:
        return f"{made.entries} lines up to this day, sealed were {link.entries}"
    if made.balance != link.balance:
        return (
            f"the lines up to this day add up to {plain(made.balance)}, "
            f"sealed were {plain(link.balance)}"
        )
    return "a line of this day, or the link, is not what was sealed"


def _head(link: LedgerDigest | None) -> Head:
    if link is None:
        return Head()
    return Head(bytes(link.digest), link.entries, link.balance, link.last_entry_id)


def _head_after(before: Head, organization_id: int, day: date, *, since: datetime | None) -> Head:
    """Return the head after `day`: over all lines since the link before, in the order of IDs."""
    lines = LedgerEntry.objects.filter(organization=organization_id, created_at__lt=_end_of(day))
    if since is not None:
        lines = lines.filter(created_at__gte=since)
    sha, number, balance, last = hashlib.sha256(before.digest), 0, before.balance, 0
    sha.update(f"{organization_id} {day}\n".encode())
    for line in lines.order_by("id").values_list("amount", *_COLUMNS).iterator():
        amount, last = line[0], line[1]
        sha.update(_canonical(line))
        number, balance = number + 1, balance + amount
    sha.update(plain(balance).encode())
    return Head(sha.digest(), before.entries + number, balance, last)


def _canonical(line: tuple[Any, ...]) -> bytes:
    """Return the bytes of a line: one JSON array, which no two different lines share."""
    amount, *rest = line
    return orjson.dumps([plain(amount), *rest]) + b"\n"


def _next_day_with_lines(organization_id: int, since: datetime | None) -> date | None:
    lines = LedgerEntry.objects.filter(organization=organization_id)
    if since is not None:
        lines = lines.filter(created_at__gte=since)
    first = lines.order_by("created_at", "id").values_list("created_at", flat=True).first()
    return first.astimezone(UTC).date() if first else None


def _end_of(day: date) -> datetime:
    return start_of(day + timedelta(days=1))
