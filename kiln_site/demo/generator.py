"""Books of any size, made fast: settled events, their charges, and balances that agree.

For measuring and for looking at full pages. Writes plain rows in bulk, PostgreSQL through COPY,
because the doors of `billing` are made for one request at a time; so every row here must be one
that those doors could have written. Never touches an organization that it did not make.
"""

import math
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import accumulate
from typing import Any

from django.db import connection
from django.utils import timezone

from billing import counters, keys, ledger, organizations, workers
from billing.models import ApiKey, CreditAccount, KeySpend, LedgerEntry, Organization, UsageEvent
from billing.money import USD_PLACES
from billing.pricing import PICODOLLARS_PER_USD
from kiln_site.demo.seed import PAGE_MODELS

SLUG_PREFIX = "generated-"
OPENING_CREDITS = Decimal(5000)

_CHUNK = 50_000
_DAY = 86_400
_KEYS = 2  # of each organization
_HELD = 1024  # completion tokens of each request
_BACKENDS = ("rack-1", "rack-2")

# What a row of these tables holds, in the order in which `_event` and `_line` return it; columns
# that are not named keep NULL. Values are as both databases store them.
_EVENT = (
    *("id", "organization_id", "api_key_id", "worker_id", "state", "model", "backend", "streamed"),
    *("input_price", "cached_input_price", "output_price", "hold", "held_tokens"),
    *("created_at", "finished_at", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("usage_source", "cost", "status_code", "error", "anomaly", "finish_reason"),
    *("latency_ms", "time_to_first_token_ms"),
)
_LINE = ("organization_id", "kind", "amount", "event_id", "actor", "reason", "created_at")

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Payer:
    organization_id: int
    key_ids: tuple[int, ...]


class ForeignBooks(Exception):
    """The database holds organizations that were not generated."""


def refuse_foreign_books() -> None:
    """Raise ForeignBooks where somebody's own organizations are."""
    others = Organization.objects.exclude(slug__startswith=SLUG_PREFIX)
    if others.exists():
        raise ForeignBooks(f"{others.count()} organizations here were not generated.")


def generate(
    *,
    events: int,
    organization_count: int,
    days: int,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Add `events` settled events over the last `days`; `progress` hears how many are there.

    The same seed makes the same requests. Repeating it adds as many again.
    """
    chance = random.Random(seed)  # noqa: S311 plausible, not secret
    end = timezone.now().replace(microsecond=0) - timedelta(minutes=10)
    start = end - timedelta(days=days)
    payers = [_payer(number, start) for number in range(1, organization_count + 1)]
    worker_id = uuid.UUID(int=chance.getrandbits(128), version=4)
    workers.beat(worker_id=worker_id, host="generator", pid=0)
    workers.stop(worker_id)
    moments = _moments(start, days, events, chance)
    for done in range(0, events, _CHUNK):
        number = min(_CHUNK, events - done)
        _write_chunk(chance, payers, worker_id, [next(moments) for _ in range(number)])
        progress(done + number)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            # The planner should not wait for autovacuum to learn what has come.
            cursor.execute("ANALYZE billing_usageevent, billing_ledgerentry, billing_creditaccount")


def _payer(number: int, start: datetime) -> _Payer:
    organization, is_new = organizations.create(
        name=f"Generated {number:04}", actor="generator", max_in_flight=64
    )
    if is_new:
        # Before its first request, so that no page shows a balance below zero.
        with ledger.locked_accounts([organization.pk]):
            LedgerEntry.objects.create(
                organization=organization,
                kind=LedgerEntry.Kind.GRANT,
                amount=OPENING_CREDITS,
                actor="generator",
                reason="Opening credits",
                idempotency_key="opening-credits",
                created_at=start,
            )
            _move_balances({organization.pk: int(OPENING_CREDITS) * PICODOLLARS_PER_USD})
        Organization.objects.filter(pk=organization.pk).update(created_at=start)
        for name in range(1, _KEYS + 1):
            keys.issue(organization=organization, name=f"key-{name}")
    key_ids = ApiKey.objects.filter(organization=organization).order_by("pk")
    return _Payer(organization.pk, tuple(key_ids.values_list("pk", flat=True)))


def _moments(start: datetime, days: int, number: int, chance: random.Random) -> Iterator[datetime]:
    """Yield moments in order, denser by day than by night."""
    span = days * _DAY
    for position in range(number):
        even = span * (position + chance.random()) / number
        wave = 0.11 * _DAY * math.sin(2 * math.pi * even / _DAY)
        yield start + timedelta(seconds=even - wave)


def _write_chunk(
    chance: random.Random,
    payers: Sequence[_Payer],
    worker_id: uuid.UUID,
    moments: Sequence[datetime],
) -> None:
    # A few organizations send most of the requests, as everywhere.
    weights = list(accumulate(1 / rank for rank in range(1, len(payers) + 1)))
    chosen = chance.choices(payers, cum_weights=weights, k=len(moments))
    events, lines = [], []
    moved: Counter[int] = Counter()
    spent: Counter[tuple[int, date]] = Counter()
    for payer, moment in zip(chosen, moments, strict=True):
        key_id = chance.choice(payer.key_ids)
        event, cost, finished_at = _event(chance, payer, key_id, worker_id.hex, moment)
        events.append(event)
        if cost:
            lines.append(_line(payer.organization_id, event[0], cost, finished_at))
            moved[payer.organization_id] -= cost
            spent[key_id, moment.date()] += cost
    spends = [
        KeySpend(api_key_id=key_id, day=day, spend=Decimal(cost).scaleb(-USD_PLACES))
        for (key_id, day), cost in spent.items()
    ]
    with ledger.locked_accounts(moved):
        _insert(UsageEvent._meta.db_table, _EVENT, events)
        _insert(LedgerEntry._meta.db_table, _LINE, lines)
        _move_balances(moved)
        counters.add(spends, to=["spend"], of=["api_key", "day"])


# Picodollars a token: input, cached input, output.
_PRICES = {
    model.id: (
        int(model.prices.input.scaleb(6)),
        int(model.prices.cached_input.scaleb(6)),
        int(model.prices.output.scaleb(6)),
    )
    for model in PAGE_MODELS
}
_MODELS = list(_PRICES)
_STATES = (["succeeded", "cancelled", "failed"], [965, 30, 5])
_OUTCOMES = {
    "succeeded": ("reported", 200, "", "stop"),
    "cancelled": ("continuous", 200, "", ""),
    "failed": ("none", 502, "The model backend could not be reached. Try again later.", ""),
}


def _event(
    chance: random.Random, payer: _Payer, key_id: int, worker: str, moment: datetime
) -> tuple[Row, int, str]:
    """Return a row of an event, its cost in picodollars, and when it was finished."""
    state = chance.choices(*_STATES)[0]
    source, status, error, reason = _OUTCOMES[state]
    model = chance.choice(_MODELS)
    input_price, cached_price, output_price = _PRICES[model]
    prompt = cached = completion = 0
    latency, first_token = chance.randint(2, 40), None
    streamed = chance.random() < 0.7
    if state != "failed":
        prompt = min(int(chance.lognormvariate(6.3, 0.9)), 24_000) + 1
        cached = prompt // 16 * 16 // 2 if chance.random() < 0.4 else 0
        completion = min(int(chance.lognormvariate(4.6, 0.9)), 8_000) + 1
        first_token = chance.randint(60, 400)
        latency = first_token + completion * chance.randint(9, 16)
    cost = (prompt - cached) * input_price + cached * cached_price + completion * output_price
    finished_at = _stored(moment + timedelta(milliseconds=latency))
    row = (
        *(_id(chance, moment), payer.organization_id, key_id, worker),
        *(state, model, chance.choice(_BACKENDS), int(streamed)),
        *(input_price, cached_price, output_price),
        *(prompt * input_price + _HELD * output_price, prompt + _HELD, _stored(moment)),
        *(finished_at, prompt, cached, completion, source, cost),
        *(status, error, "", reason, latency, first_token if streamed else None),
    )
    return row, cost, finished_at


def _line(organization_id: int, event_id: str, cost: int, created_at: str) -> Row:
    return (organization_id, "charge", -cost, event_id, "gateway", "", created_at)


def _id(chance: random.Random, moment: datetime) -> str:
    """Return a UUIDv7 of this moment, as the gateway's are."""
    milliseconds = int(moment.timestamp() * 1000)
    value = milliseconds << 80 | 0x7 << 76 | chance.getrandbits(12) << 64
    return f"{value | 0x2 << 62 | chance.getrandbits(62):032x}"


def _stored(moment: datetime) -> str:
    """Return the text that both databases take for a moment; connections speak UTC."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ")


def _insert(table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    names = ", ".join(columns)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            with cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        else:
            values = ", ".join(["%s"] * len(columns))
            cursor.executemany(
                f"INSERT INTO {table} ({names}) VALUES ({values})",  # noqa: S608 names of ours
                rows,
            )


def _move_balances(moved: Mapping[int, int]) -> None:
    """Move balances by whole picodollars, under the locks of `ledger.locked_accounts`."""
    table = CreditAccount._meta.db_table
    with connection.cursor() as cursor:
        cursor.executemany(
            f"UPDATE {table} SET balance = balance + %s WHERE organization_id = %s",  # noqa: S608
            [(amount, organization) for organization, amount in moved.items()],
        )
