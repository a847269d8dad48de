"""Pages of usage events by cursor: each event once, however many arrive meanwhile.

Keeps the order, newest first by (created_at, id), and the text of a cursor. Never counts and never
skips by number: both read everything that came before, and shift when a row is added.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from django.db.models import Q, QuerySet

from billing.models import UsageEvent

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TEXT = re.compile(r"([0-9]{1,17})-([0-9a-f]{32})")


class BadCursor(ValueError):
    """The text is no cursor."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place of one event in the order; as text it fits a URL unescaped."""

    created_at: datetime
    id: UUID

    @classmethod
    def of(cls, event: UsageEvent) -> "Cursor":
        return cls(event.created_at, event.pk)

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read what `str` wrote. Raises BadCursor."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise BadCursor(text)
        return cls(_EPOCH + int(found[1]) * _MICROSECOND, UUID(found[2]))

    def __str__(self) -> str:
        return f"{(self.created_at - _EPOCH) // _MICROSECOND}-{self.id.hex}"


@dataclass(frozen=True, slots=True)
class Page:
    """Events, newest first, and where the neighbours begin; None where there is no neighbour."""

    events: list[UsageEvent]
    newer: Cursor | None
    older: Cursor | None


def newest(events: QuerySet[UsageEvent], *, size: int) -> Page:
    """Return the page that nothing precedes: what is newer does not exist yet."""
    found = list(events.order_by("-created_at", "-id")[: size + 1])
    return Page(found[:size], newer=None, older=_end(found, size))


def older_than(events: QuerySet[UsageEvent], cursor: Cursor, *, size: int) -> Page:
    # The first condition alone bounds the index scan; the second settles ties of the clock.
    after = Q(created_at__lt=cursor.created_at) | Q(pk__lt=cursor.id)
    found = list(
        events.filter(after, created_at__lte=cursor.created_at).order_by("-created_at", "-id")[
            : size + 1
        ]
    )
    newer = Cursor.of(found[0]) if found else None
    return Page(found[:size], newer=newer, older=_end(found, size))


def newer_than(events: QuerySet[UsageEvent], cursor: Cursor, *, size: int) -> Page:
    before = Q(created_at__gt=cursor.created_at) | Q(pk__gt=cursor.id)
    found = list(
        events.filter(before, created_at__gte=cursor.created_at).order_by("created_at", "id")[
            : size + 1
        ]
    )
    older = Cursor.of(found[0]) if found else None
    return Page(found[:size][::-1], newer=_end(found, size), older=older)


def _end(found: list[UsageEvent], size: int) -> Cursor | None:
    """Return the cursor of the page's last event if the row beyond the page shows there is more."""
    return Cursor.of(found[size - 1]) if len(found) > size else None
