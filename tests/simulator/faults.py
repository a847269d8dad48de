"""What goes wrong, when, and what time it is: all of it follows from the seed."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# Faults by name, each with the most often it happens at a call that it may happen at.
_MOST = {
    "connection lost at statement": 0.03,
    "connection lost at commit": 0.2,
    "connection lost at the answer to a commit": 0.3,
    "error at statement": 0.03,
    "error at commit": 0.1,
    "killed at statement": 0.005,
    "killed at commit": 0.05,
    "killed at the answer to a commit": 0.05,
    "disk full at write": 0.2,
    "disk takes only a part": 0.3,
    "error at fsync": 0.1,
    "killed at write": 0.1,
    "killed at fsync": 0.1,
    "killed at ftruncate": 0.2,
    "another worker's turn": 0.3,
}


class Killed(BaseException):
    """The process is killed at this point: nothing after it runs."""


class Faults:
    """The faults of one seed. Some seeds have few kinds of fault, and often; others have many."""

    def __init__(self) -> None:
        self.begin(random.Random(0))

    def begin(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 1_800_000_000.0
        self.is_database_away = False
        self.is_disk_full = False
        self.happened: Counter[str] = Counter()
        self._is_on = False
        share = chance.choice([0.2, 0.5, 1.0])
        self._rates = {
            name: most * chance.random() for name, most in _MOST.items() if chance.random() < share
        }

    def clock(self) -> float:
        return self.now

    @contextmanager
    def may_happen(self, is_on: bool = True) -> Iterator[None]:
        """Let faults happen, or not: they do in a worker's turn, not while its world looks on."""
        before, self._is_on = self._is_on, is_on
        try:
            yield
        finally:
            self._is_on = before

    def happens(self, name: str) -> bool:
        rate = self._rates.get(name, 0.0)
        if not self._is_on or not rate or self.chance.random() >= rate:
            return False
        self.happened[name] += 1
        return True

    def maybe_kill(self, point: str) -> None:
        if self.happens(f"killed at {point}"):
            raise Killed(point)

    def end(self) -> None:
        """Let no call fail by itself from now on."""
        self._rates = {}


FAULTS = Faults()
