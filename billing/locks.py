"""Advisory locks: one of several processes does a job, the others leave it.

For work that is safe to do twice and a waste to; what must not happen twice is held by constraints.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection


@contextmanager
def only_one(name: str) -> Iterator[bool]:
    """Yield whether this process may do the job of that name: False while another does it.

    PostgreSQL lets go of the lock when its holder dies. SQLite has one host and little to do: there
    everybody may.
    """
    if connection.vendor != "postgresql":
        yield True
        return
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [number])
        [is_ours] = cursor.fetchone()
    try:
        yield is_ours
    finally:
        if is_ours:
            # Given back by hand: the connection goes back to a pool, it does not end.
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [number])
