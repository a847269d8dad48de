"""What billing should do, in plain Python: the state machine runs it beside the real functions."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from uuid import UUID

from billing import keys, standing
from billing.pricing import cost
from billing.usage import Admission, Settlement

NOTHING = Decimal(0)


@dataclass
class Account:
    overdraft_limit: Decimal
    max_in_flight: int
    balance: Decimal = NOTHING
    is_suspended: bool = False
    counts_minutes: bool = False
    requests: int = 0
    tokens: int = 0
    # What balance, overdraft limit and holds together never fall below: the hold of the request
    # that was admitted last, and what was taken since that no hold had covered (I10).
    floor: Decimal = NOTHING
    movements: dict[str, tuple[object, ...]] = field(default_factory=dict)  # by idempotency key

    def move(self, amount: Decimal) -> None:
        self.balance += amount
        self.floor += min(amount, NOTHING)


@dataclass
class Key:
    organization: int
    spend_limit: Decimal | None
    is_paused: bool = False
    is_revoked: bool = False
    spend: Decimal = NOTHING


@dataclass
class Event:
    admission: Admission
    state: str = "in_flight"
    cost: Decimal = NOTHING


class Model:
    def __init__(self, accounts: dict[int, Account], api_keys: dict[int, Key]) -> None:
        self.accounts = accounts
        self.keys = api_keys
        self.live: set[UUID] = set()  # workers that others count
        self.dead: set[UUID] = set()  # those that have been silent for so long that all is lost
        self.events: dict[UUID, Event] = {}
        self.told: dict[UUID, Decimal] = {}  # costs that were named
        self.undone: dict[int, Decimal] = defaultdict(Decimal)  # of lines, by ID

    def running(self, organization: int) -> list[Admission]:
        """Return what counts: in flight, of workers that live."""
        return [
            event.admission
            for event in self.events.values()
            if event.state == "in_flight"
            and event.admission.organization_id == organization
            and event.admission.worker_id in self.live
        ]

    def admit(self, admission: Admission) -> type[Exception] | None:
        """Return why not; None where the request is in flight now."""
        refusal = self._refusal(admission)
        if refusal is None:
            self.events[admission.generation_id] = Event(admission)
            account = self.accounts[admission.organization_id]
            account.floor = -admission.hold
            account.requests += account.counts_minutes
        return refusal

    def _refusal(self, admission: Admission) -> type[Exception] | None:
        account, key = self.accounts[admission.organization_id], self.keys[admission.key_id]
        running = self.running(admission.organization_id)
        held = sum((each.hold for each in running), NOTHING)
        of_key = sum((each.hold for each in running if each.key_id == admission.key_id), NOTHING)
        if key.is_revoked:
            return keys.KeyInvalid
        if key.is_paused:
            return keys.KeyPaused
        if account.is_suspended:
            return keys.OrganizationSuspended
        if account.balance + account.overdraft_limit - held <= 0:
            return standing.InsufficientCredits
        if key.spend_limit is not None and key.spend + of_key >= key.spend_limit:
            return standing.SpendLimitReached
        if len(running) >= account.max_in_flight:
            return standing.TooManyInFlight
        return None

    def settle(self, settlement: Settlement) -> Decimal:
        """Return what the request costs, this time as every time."""
        admission = settlement.admission
        known = self.events.get(admission.generation_id)
        event = known or Event(admission)
        may_close = {"in_flight": True, "lost": settlement.state != "failed"}
        if may_close.get(event.state, False):
            self.events[admission.generation_id] = event
            self._close(event, settlement, is_known=known is not None)
        return event.cost

    def _close(self, event: Event, settlement: Settlement, *, is_known: bool) -> None:
        admission = event.admission
        is_held = (
            is_known and event.state == "in_flight" and admission.worker_id in self.live
        )  # else the hold had been let go of before
        event.state = settlement.state
        if settlement.state != "failed":
            event.cost = cost(settlement, admission.prices)
        account = self.accounts[admission.organization_id]
        account.balance -= event.cost
        account.floor -= max(event.cost - (admission.hold if is_held else NOTHING), NOTHING)
        self.keys[admission.key_id].spend += event.cost
        if account.counts_minutes and is_known:
            account.tokens += settlement.prompt_tokens + settlement.completion_tokens

    def lose(self, generation_ids: Iterable[UUID]) -> set[UUID]:
        """Close as lost what of this is in flight, and return it."""
        found = {pk: self.events[pk] for pk in generation_ids if pk in self.events}
        lost = {pk: event for pk, event in found.items() if event.state == "in_flight"}
        for event in lost.values():
            event.state = "lost"
        return set(lost)

    def of_worker(self, *worker_ids: UUID) -> list[UUID]:
        return [pk for pk, event in self.events.items() if event.admission.worker_id in worker_ids]
