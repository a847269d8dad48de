"""Refused requests of known keys, counted in memory and added to the database once a second.

A refusal costs no write: neither a customer's loop nor an attacker with a revoked key makes the
database work harder. The price is that a process that is killed loses its last second of counts.
Counts only refusals that are the request's own (4xx, before admission): an admitted request has
its event, and an outage is nobody's refusal.
"""

import logging
import threading
from collections import Counter
from datetime import UTC, datetime

from django.db import DatabaseError, IntegrityError, InterfaceError

from billing import refusals
from billing.refusals import Refused
from gateway.errors import ApiError

log = logging.getLogger(__name__)

# Keys times reasons times minutes; only with the database away for long does it come near.
_ROWS_MAX = 5000


class RefusalCounts:
    """What one process refused since the last flush."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Refused] = Counter()
        self._dropped = 0

    def count(self, organization_id: int, key_id: int, refusal: ApiError) -> None:
        if refusal.status >= 500:
            return
        minute = datetime.now(UTC).replace(second=0, microsecond=0)
        refused = Refused(organization_id, key_id, minute, refusal.status, refusal.code or "")
        with self._lock:
            self._add(refused, 1)

    def flush(self) -> None:
        """Add what was counted to the database; keep it for the next time if that fails."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            dropped, self._dropped = self._dropped, 0
        if dropped:
            log.error("%d refusals were not counted: too many are waiting", dropped)
        try:
            refusals.add(counts)
        except IntegrityError as error:
            # A key was deleted meanwhile: it would fail again, and hold up all others.
            log.error("%d refusals were not counted: %s", counts.total(), error)
        except (DatabaseError, InterfaceError) as error:
            log.warning("refusals are counted later: %s", error)
            with self._lock:
                for refused, number in counts.items():
                    self._add(refused, number)

    def _add(self, refused: Refused, number: int) -> None:
        if refused in self._counts or len(self._counts) < _ROWS_MAX:
            self._counts[refused] += number
        else:
            self._dropped += number
