"""The heartbeat: what it does after a pause, in its order, and with the database away."""

import uuid
from typing import Any

import pytest
from django.db import OperationalError

from gateway import heartbeat
from gateway.heartbeat import Heartbeat

TTL = 10.0


class Billing:
    """Stands for billing's functions and notes their calls; any of them can fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_away = False

    def note(self, name: str) -> Any:
        def call(*_: object, **__: object) -> Any:
            if self.is_away:
                raise OperationalError
            self.calls.append(name)
            return []

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands where the test sets it."""
    now = [1000.0]
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def billing(monkeypatch: pytest.MonkeyPatch) -> Billing:
    noted = Billing()
    monkeypatch.setattr("billing.workers.beat", noted.note("beat"))
    monkeypatch.setattr("billing.usage.in_flight_of", noted.note("look"))
    monkeypatch.setattr("billing.usage.close_abandoned", noted.note("give up"))
    monkeypatch.setattr(Heartbeat, "_tidy", lambda _: None)
    monkeypatch.setattr("gateway.heartbeat.close_old_connections", lambda: None)
    return noted


@pytest.fixture
def beating(clock: list[float], billing: Billing) -> Heartbeat:
    made = Heartbeat(
        uuid.uuid4(), seconds=2, ttl_seconds=TTL, is_open=lambda _: True, on_pause=lambda: None
    )
    made.turn()
    billing.calls.clear()
    return made


def test_a_turn_beats(beating: Heartbeat, billing: Billing, clock: list[float]) -> None:
    clock[0] += 2
    beating.turn()
    assert billing.calls == ["beat"]
    assert beating.is_fresh


def test_after_a_pause_slots_are_given_up_before_they_count_again(
    beating: Heartbeat, billing: Billing, clock: list[float]
) -> None:
    clock[0] += TTL + 1
    assert not beating.is_fresh
    beating.turn()
    beating.turn()
    assert billing.calls == ["look", "give up", "beat", "beat"]


def test_a_pause_is_not_forgotten_while_the_database_is_away(
    beating: Heartbeat, billing: Billing, clock: list[float]
) -> None:
    clock[0] += TTL + 1
    billing.is_away = True
    beating.turn()
    clock[0] += 2
    billing.is_away = False
    beating.turn()
    assert billing.calls == ["look", "give up", "beat"]


def test_slots_are_kept_where_only_the_database_was_away(
    beating: Heartbeat, billing: Billing, clock: list[float]
) -> None:
    billing.is_away = True
    for _ in range(10):
        clock[0] += 2
        beating.turn()
    assert not beating.is_fresh
    billing.is_away = False
    beating.turn()
    assert billing.calls == ["beat"]
    assert not beating.is_fresh  # until the others have beaten too
    clock[0] += 4
    assert beating.is_fresh
