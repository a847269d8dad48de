"""One generation: what was admitted, what the meter sees, and how it ended.

Makes the admission and the settlement of a request from what the straight line knows. Decides no
order and does no I/O.
"""

import logging
import os
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from time import monotonic, time_ns

from billing import pricing, usage
from billing.keys import Caller
from billing.limits import Minute
from billing.money import MONEY_MAX, plain
from gateway.catalog import Backend, Model
from gateway.meter import Expected, Meter, Usage
from gateway.payload import ChatRequest

log = logging.getLogger(__name__)

# More choices than any server makes; bounds what a reported usage can be.
_CHOICES_MAX = 1024

NOTHING = Usage(0, 0, 0, None, source="none")


def new_id() -> uuid.UUID:
    """Return a UUIDv7 (RFC 9562 section 5.7): milliseconds, then 74 random bits."""
    milliseconds = time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = milliseconds << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76  # version
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant
    return uuid.UUID(int=value)


@dataclass(slots=True)
class Generation:
    """A request on its way. `is_sent` from the moment a backend may work on it."""

    admission: usage.Admission
    meter: Meter
    backend: Backend
    began: float = field(default_factory=monotonic)
    is_admitted: bool = False
    minute: Minute | None = None  # what was left at admission, with a limit per minute
    is_sent: bool = False
    first_token_at: float | None = None

    @property
    def id(self) -> str:
        return str(self.admission.generation_id)

    def note_first_token(self) -> None:
        if self.first_token_at is None and self.meter.deltas:
            self.first_token_at = monotonic()

    def used(self, state: str) -> Usage:
        """What is to be paid for: nothing unless the backend worked and did not fail."""
        if state == usage.State.SUCCEEDED:
            return self.meter.usage(is_complete=True)
        if state == usage.State.CANCELLED and self.is_sent:
            return self.meter.usage(is_complete=False)
        return NOTHING

    def settlement(self, state: str, *, status: int, error: str = "") -> usage.Settlement:
        used = self.used(state)
        return usage.Settlement(
            admission=self.admission,
            backend=self.backend.name,
            state=state,
            finished_at=datetime.now(UTC),
            status_code=status,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            completion_tokens=used.completion_tokens,
            reasoning_tokens=used.reasoning_tokens,
            usage_source=used.source,
            error=error.replace("\0", "")[:300],
            anomaly=used.anomaly,
            finish_reason=self.meter.finish_reason,
            latency_ms=_milliseconds(self.began, monotonic()),
            time_to_first_token_ms=_milliseconds(self.began, self.first_token_at),
        )

    def log(self, settlement: usage.Settlement, cost: Decimal) -> None:
        """Write the one line of this request: IDs, counts and durations, none of its words."""
        log.info(
            "%s %s model=%s backend=%s status=%d tokens=%d+%d cost=%s ms=%s",
            self.id,
            settlement.state,
            self.admission.model,
            settlement.backend,
            settlement.status_code,
            settlement.prompt_tokens,
            settlement.completion_tokens,
            plain(cost),
            settlement.latency_ms,
        )


def begin(
    caller: Caller,
    model: Model,
    request: ChatRequest,
    backend: Backend,
    *,
    worker_id: uuid.UUID,
    hold_output_tokens_max: int,
) -> Generation:
    """Make a generation that asks to be admitted, with the hold of rulings.md 18."""
    choices = min(request.choices, _CHOICES_MAX)
    output_tokens = min(
        request.output_tokens_max or model.max_output_tokens, hold_output_tokens_max
    )
    hold = pricing.hold(
        prompt_tokens=request.prompt_tokens,
        output_tokens=output_tokens,
        choices=choices,
        prices=model.prices,
    )
    return Generation(
        admission=usage.Admission(
            generation_id=new_id(),
            organization_id=caller.organization_id,
            key_id=caller.key_id,
            worker_id=worker_id,
            model=model.id,
            backend=backend.name,
            streamed=request.stream,
            prices=model.prices,
            hold=min(hold, MONEY_MAX),
            created_at=datetime.now(UTC),
            held_tokens=request.prompt_tokens + output_tokens * choices,
        ),
        meter=Meter(
            Expected(
                model=model.id,
                prompt_tokens=request.prompt_tokens,
                output_tokens_max=output_tokens * choices,
                context_window=model.context_window,
                choices=choices,
            )
        ),
        backend=backend,
    )


def _milliseconds(start: float, end: float | None) -> int | None:
    return None if end is None else round((end - start) * 1000)
