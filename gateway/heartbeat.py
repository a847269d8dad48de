"""The heartbeat of this process, and what every worker tidies in its beat.

Has a thread and a database connection of its own: nothing that the process is busy with may make
it look dead. So slots heal without Celery: each worker closes what dead ones left behind, and
those of its own events that it does not know any more.
"""

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from time import monotonic

from django.db import DatabaseError, InterfaceError, close_old_connections

from billing import usage, workers

log = logging.getLogger(__name__)


# How much longer than a beat another worker may need to find the database again.
_RECONNECT_SECONDS = 2.0


class Heartbeat(threading.Thread):
    """Beat every `seconds`; `is_fresh` tells whether this worker's slots count for others."""

    def __init__(
        self,
        worker_id: uuid.UUID,
        *,
        seconds: float,
        ttl_seconds: float,
        is_open: Callable[[uuid.UUID], bool],
        on_pause: Callable[[], None],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._worker_id = worker_id
        self._seconds = seconds
        self._ttl_seconds = ttl_seconds
        self._is_open = is_open
        self._on_pause = on_pause
        self._is_over = threading.Event()
        self._last_beat = -1e9
        self._admit_from = 0.0
        self._awake = monotonic()
        self._was_paused = False  # and has not given up its slots yet

    def beat(self) -> None:
        """Beat once. Raises DatabaseError."""
        started = monotonic()
        workers.beat(worker_id=self._worker_id, host=socket.gethostname(), pid=os.getpid())
        if self._last_beat > 0 and started - self._last_beat > self._ttl_seconds:
            # Our slots counted as free meanwhile, and so did those of others if the database was
            # away: all of us beat before one of us admits.
            self._admit_from = started + self._seconds + _RECONNECT_SECONDS
        self._last_beat = started

    @property
    def is_fresh(self) -> bool:
        """False when others may take this worker for dead: it must not admit then."""
        now = monotonic()
        return now - self._last_beat <= self._ttl_seconds and now >= self._admit_from

    def run(self) -> None:
        self._awake = monotonic()
        while not self._is_over.wait(self._seconds):
            self.turn()

    def turn(self) -> None:
        """Beat and tidy, as far as the database can be reached."""
        now = monotonic()
        # Not the time of the last beat: with the database away nobody else admits either.
        if now - self._awake > self._ttl_seconds:
            self._was_paused = True
        self._awake = now
        try:
            if self._was_paused:
                self._give_up_slots()
                self._was_paused = False  # no beat before that, however often it has to be tried
            self.beat()
            self._tidy()
        except (DatabaseError, InterfaceError) as error:
            log.error("heartbeat failed: %s", error)
        finally:
            close_old_connections()

    def stop(self) -> None:
        """Say that this worker ends, as far as the database can be told."""
        self._is_over.set()
        self.join()
        try:
            workers.stop(self._worker_id)
        except (DatabaseError, InterfaceError) as error:
            log.error("the worker's end could not be recorded: %s", error)
        finally:
            close_old_connections()

    def _give_up_slots(self) -> None:
        """Lose what this process was running: others may have taken its slots during a pause.

        Before the beat, which would make them count again. What had ended all the same is still
        billed: its settlement finds the event lost, and corrects it.
        """
        log.error("the process was paused for longer than its heartbeat may be silent")
        self._on_pause()
        usage.close_abandoned(usage.in_flight_of(self._worker_id))

    def _tidy(self) -> None:
        lost = usage.close_lost().generation_ids
        # Asked for the rows first and the registry second: a row that was settled in between is
        # unknown to the registry, but no longer in flight when it is closed.
        unknown = [pk for pk in usage.in_flight_of(self._worker_id) if not self._is_open(pk)]
        if unknown:
            lost = [*lost, *usage.close_abandoned(unknown).generation_ids]
        for generation_id in lost:
            log.warning("generation %s was lost; it is not billed", generation_id)
