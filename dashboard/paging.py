"""Pages of rows by cursor: each row once, however many arrive meanwhile.

Keeps the order, newest first by (created_at, id), and the text of a cursor. Never counts and never
skips by number: both read everything that came before, and shift when a row is added.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar
from uuid import UUID

from django.core.exceptions import BadRequest
from django.db.models import Q, QuerySet
from django.http import HttpRequest

from billing.models import LedgerEntry, UsageEvent

Row = TypeVar("Row", UsageEvent, LedgerEntry)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# A UUID's digits or a whole number's: how many there are tells which.
_TEXT = re.compile(r"([0-9]{1,17})-([0-9a-f]{32}|[0-9]{1,18})")


class BadCursor(ValueError):
    """The text is no cursor of these rows."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place of one row in the order; as text it fits a URL unescaped."""

    created_at: datetime
    id: UUID | int

    @classmethod
    def of(cls, row: UsageEvent | LedgerEntry) -> "Cursor":
        return cls(row.created_at, row.pk)

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read what `str` wrote. Raises BadCursor."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise BadCursor(text)
        created_at = _EPOCH + int(found[1]) * _MICROSECOND
        return cls(created_at, UUID(found[2]) if len(found[2]) == 32 else int(found[2]))

    def __str__(self) -> str:
        name = self.id.hex if isinstance(self.id, UUID) else self.id
        return f"{(self.created_at - _EPOCH) // _MICROSECOND}-{name}"


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Rows, newest first, and where the neighbours begin; None where there is no neighbour."""

    rows: list[Row]
    newer: Cursor | None
    older: Cursor | None
    moved: bool = True  # whether the address named a place, so that there may be newer rows


def asked_for(request: HttpRequest, rows: QuerySet[Row], *, size: int) -> Page[Row]:
    """Return the page that the query string names. Raises BadRequest for what is no cursor."""
    before, after = request.GET.get("before"), request.GET.get("after")
    try:
        if before:
            return older_than(rows, Cursor.parse(before), size=size)
        if after:
            return newer_than(rows, Cursor.parse(after), size=size)
    except BadCursor:
        raise BadRequest("The page address is damaged.") from None
    return newest(rows, size=size)


def newest(rows: QuerySet[Row], *, size: int) -> Page[Row]:
    """Return the page that nothing precedes: what is newer does not exist yet."""
    found = list(rows.order_by("-created_at", "-id")[: size + 1])
    return Page(found[:size], newer=None, older=_end(found, size), moved=False)


# SQLite compares times as text, and one that the database made has three decimals there where a
# parameter has six or none. A microsecond to either side compares right on both databases.


def older_than(rows: QuerySet[Row], cursor: Cursor, *, size: int) -> Page[Row]:
    _refuse_stranger(rows, cursor)
    # The second condition alone bounds the index scan; the first settles ties of the clock.
    after = Q(created_at__lte=cursor.created_at - _MICROSECOND) | Q(pk__lt=cursor.id)
    bounded = rows.filter(after, created_at__lt=cursor.created_at + _MICROSECOND)
    found = list(bounded.order_by("-created_at", "-id")[: size + 1])
    newer = Cursor.of(found[0]) if found else None
    return Page(found[:size], newer=newer, older=_end(found, size))


def newer_than(rows: QuerySet[Row], cursor: Cursor, *, size: int) -> Page[Row]:
    _refuse_stranger(rows, cursor)
    before = Q(created_at__gte=cursor.created_at + _MICROSECOND) | Q(pk__gt=cursor.id)
    bounded = rows.filter(before, created_at__gt=cursor.created_at - _MICROSECOND)
    found = list(bounded.order_by("created_at", "id")[: size + 1])
    older = Cursor.of(found[0]) if found else None
    return Page(found[:size][::-1], newer=_end(found, size), older=older)


def _refuse_stranger(rows: QuerySet[Row], cursor: Cursor) -> None:
    if isinstance(cursor.id, UUID) != (rows.model is UsageEvent):
        raise BadCursor(str(cursor))


def _end(found: list[Row], size: int) -> Cursor | None:
    """Return the cursor of the page's last row if the row beyond the page shows there is more."""
    return Cursor.of(found[size - 1]) if len(found) > size else None
