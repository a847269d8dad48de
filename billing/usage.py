"""Usage events: admit, settle, close what was lost. The only writer of UsageEvent.

An event in flight is the slot, the hold and the audit record in one row. It is committed before
the request is forwarded, and leaves `in_flight` once:

    in_flight -> succeeded | cancelled | failed | lost        lost -> succeeded | cancelled

`admit` and `settle` take batches, under the locks of `ledger.locked_accounts`; one is a batch of
one. Never decides what a request is worth by itself: tokens come from the gateway's meter, prices
from the event.
"""

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from billing import keys, ledger, limits, pricing
from billing.models import CreditAccount, UsageEvent
from billing.pricing import Prices
from billing.standing import NotAdmitted, read_keys, standings
from billing.workers import is_dead_for

# Why a request may not run; or what is left of its minute, None without a limit per minute.
Answer = NotAdmitted | keys.KeyRefused | limits.Minute | None

State = UsageEvent.State
UsageSource = UsageEvent.UsageSource

# A worker may be silent for this long and still settle what it ran (a pause, a database away).
LOST_AFTER = timedelta(seconds=120)

_SETTLED_FIELDS = [
    "backend",
    "state",
    "finished_at",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "usage_source",
    "cost",
    "status_code",
    "error",
    "anomaly",
    "finish_reason",
    "latency_ms",
    "time_to_first_token_ms",
]


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that asks to run. `hold` is in USD; prices are those it will be billed at."""

    generation_id: uuid.UUID
    organization_id: int
    key_id: int
    worker_id: uuid.UUID
    model: str
    backend: str
    streamed: bool
    prices: Prices
    hold: Decimal
    created_at: datetime
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a request ended. Carries all of the event, so a row that was lost is made again."""

    admission: Admission
    backend: str  # the one that answered; another than the admission's after a retry
    state: str
    finished_at: datetime
    status_code: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    usage_source: str = UsageSource.NONE
    error: str = ""
    anomaly: str = ""
    finish_reason: str = ""
    latency_ms: int | None = None
    time_to_first_token_ms: int | None = None

    @property
    def cost(self) -> Decimal:
        """The cost in USD; customers never pay for a request that failed (section 7)."""
        if self.state not in {State.SUCCEEDED, State.CANCELLED}:
            return Decimal(0)
        return pricing.cost(self, self.admission.prices)


@dataclass(frozen=True, slots=True)
class Lost:
    """What `close_lost` closed."""

    generation_ids: list[uuid.UUID] = field(default_factory=list)


def admit(admissions: Sequence[Admission], accounts: dict[int, CreditAccount]) -> list[Answer]:
    """Open an event for each request that may run; return per request the answer.

    Key and organization are read again here, under the lock: what was revoked, paused, suspended
    or limited a moment ago is refused now, whatever a cache said.
    """
    callers, now = read_keys(admission.key_id for admission in admissions)
    by_organization = standings(
        accounts, {key.organization for key in callers.values()}, callers.values(), now
    )
    answers: list[Answer] = []
    opened: list[UsageEvent] = []
    for admission in admissions:
        key, organization = (
            callers.get(admission.key_id),
            by_organization.get(admission.organization_id),
        )
        try:
            if key is None or organization is None:
                raise keys.KeyInvalid
            keys.refuse_unusable(key)
            keys.refuse_unlisted(key, admission.model)
            organization.refuse_one_more(key.pk)
        except (NotAdmitted, keys.KeyRefused) as refusal:
            answers.append(refusal)
            continue
        opened.append(_event(admission))
        answers.append(
            organization.add(key.pk, hold=admission.hold, held_tokens=admission.held_tokens)
        )
    UsageEvent.objects.bulk_create(opened)
    limits.count_admitted({pk: one.minute for pk, one in by_organization.items() if one.minute})
    return answers


def settle(settlements: Sequence[Settlement], accounts: dict[int, CreditAccount]) -> list[Decimal]:
    """Close the event of each settlement, charge its cost, and return what it cost, in USD.

    Safe to repeat: a settlement whose event was closed before changes nothing, and is answered
    with what that event cost.
    """
    ids = [settlement.admission.generation_id for settlement in settlements]
    found: dict[uuid.UUID, tuple[str, Decimal]] = {}
    limited: dict[uuid.UUID, datetime] = {}  # whose tokens count, and the database's time
    rows = UsageEvent.objects.filter(pk__in=ids).values_list(
        "pk", "state", "cost", "organization__tokens_per_minute", Now()
    )
    for pk, state, cost, tokens_per_minute, now in rows:
        found[pk] = (state, cost)
        if tokens_per_minute is not None:
            limited[pk] = now
    closed: list[UsageEvent] = []
    for settlement in settlements:
        generation_id = settlement.admission.generation_id
        if _may_close(found.get(generation_id, (None, None))[0], settlement.state):
            event = _event(settlement.admission)
            for name in _SETTLED_FIELDS:
                setattr(event, name, getattr(settlement, name))
            closed.append(event)
            found[generation_id] = (event.state, event.cost)
    UsageEvent.objects.bulk_create(
        closed, update_conflicts=True, unique_fields=["id"], update_fields=_SETTLED_FIELDS
    )
    ledger.charge(closed, accounts)
    limits.count_spend(closed)
    limits.count_settled((event, limited[event.pk]) for event in closed if event.pk in limited)
    return [found[generation_id][1] for generation_id in ids]


def close_lost(*, after: timedelta = LOST_AFTER) -> Lost:
    """Close as lost what workers left behind that have been silent for `after`: cost 0."""
    return _lose(UsageEvent.objects.filter(is_dead_for(after), state=State.IN_FLIGHT))


def is_in_flight(generation_id: uuid.UUID) -> bool:
    return UsageEvent.objects.filter(pk=generation_id, state=State.IN_FLIGHT).exists()


def in_flight_of(worker_id: uuid.UUID) -> list[uuid.UUID]:
    return list(
        UsageEvent.objects.filter(worker=worker_id, state=State.IN_FLIGHT).values_list(
            "pk", flat=True
        )
    )


def close_abandoned(generation_ids: Collection[uuid.UUID]) -> Lost:
    """Close as lost those of these events that are still in flight: nobody will settle them."""
    return _lose(UsageEvent.objects.filter(pk__in=generation_ids, state=State.IN_FLIGHT))


def _lose(events: QuerySet[UsageEvent]) -> Lost:
    found = list(events.values_list("pk", "organization_id"))
    if not found:
        return Lost()
    with ledger.locked_accounts(organization for _, organization in found):
        # The state is asked again under the lock: a settlement may have come first.
        still = UsageEvent.objects.filter(pk__in=[pk for pk, _ in found], state=State.IN_FLIGHT)
        lost = list(still.values_list("pk", flat=True))
        still.update(state=State.LOST, finished_at=timezone.now(), error="worker_lost")
    return Lost(lost)


def _may_close(state: str | None, to: str) -> bool:
    if state == State.LOST:
        return to in {State.SUCCEEDED, State.CANCELLED}
    return state in {State.IN_FLIGHT, None}


def _event(admission: Admission) -> UsageEvent:
    return UsageEvent(
        id=admission.generation_id,
        organization_id=admission.organization_id,
        api_key_id=admission.key_id,
        worker_id=admission.worker_id,
        model=admission.model,
        backend=admission.backend,
        streamed=admission.streamed,
        input_price=admission.prices.input,
        cached_input_price=admission.prices.cached_input,
        output_price=admission.prices.output,
        hold=admission.hold,
        held_tokens=admission.held_tokens,
        created_at=admission.created_at,
    )
