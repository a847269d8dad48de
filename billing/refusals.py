"""How often requests were refused, by key, reason and minute: the only writer of RefusalCount.

A refused request has no row of its own: whoever sends thousands of them a second must not fill
the disk. Nothing here is money.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from billing import counters
from billing.models import RefusalCount


@dataclass(frozen=True, slots=True)
class Refused:
    """What is counted together. `code` is empty where the answer has none."""

    organization_id: int
    key_id: int
    minute: datetime
    status_code: int
    code: str


def add(counts: Mapping[Refused, int]) -> None:
    """Add these numbers to the stored ones, in one statement."""
    rows = [
        RefusalCount(
            organization_id=refused.organization_id,
            api_key_id=refused.key_id,
            minute=refused.minute,
            status_code=refused.status_code,
            code=refused.code,
            number=number,
        )
        for refused, number in counts.items()
    ]
    of = ["organization", "minute", "api_key", "status_code", "code"]
    counters.add(rows, to=["number"], of=of)
