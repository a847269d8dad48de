"""Counts of refused requests: in memory until a flush, lost by none that fails, bounded."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError

from billing import keys, organizations, refusals
from billing.models import ApiKey, RefusalCount
from gateway import errors, refusal_counts
from gateway.refusal_counts import RefusalCounts

BROKE = errors.InsufficientCredits(balance=Decimal(0), held=Decimal(0))
NO_MODEL = errors.ModelNotFound("m")


@pytest.fixture
def key(db: None) -> ApiKey:
    acme, _ = organizations.create(name="Acme", actor="tests")
    return keys.issue(organization=acme, name="ci")[0]


def count(counts: RefusalCounts, key: ApiKey, *refused: errors.ApiError) -> None:
    for refusal in refused:
        counts.count(key.organization_id, key.pk, refusal)


def stored(key: ApiKey) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = {}
    for row in RefusalCount.objects.filter(api_key=key, organization=key.organization):
        assert row.minute.second == row.minute.microsecond == 0
        reason = (row.status_code, row.code)
        found[reason] = found.get(reason, 0) + row.number
    return found


def test_it_works(key: ApiKey, django_assert_num_queries: Any) -> None:
    counts = RefusalCounts()
    with django_assert_num_queries(0):
        count(counts, key, *[BROKE] * 1000, NO_MODEL, errors.InvalidRequest("m"))
    with django_assert_num_queries(1):
        counts.flush()
    once = {(402, "insufficient_credits"): 1000, (404, "model_not_found"): 1, (400, ""): 1}
    assert stored(key) == once
    count(counts, key, NO_MODEL)
    counts.flush()
    assert stored(key) == {**once, (404, "model_not_found"): 2}
    with django_assert_num_queries(0):
        counts.flush()


def test_two_processes_add_up(key: ApiKey) -> None:
    for counts in (RefusalCounts(), RefusalCounts()):
        count(counts, key, NO_MODEL, NO_MODEL)
        counts.flush()
    assert stored(key) == {(404, "model_not_found"): 4}


@pytest.mark.parametrize(
    "failure", [errors.Unavailable("m"), errors.BackendFailed("m"), errors.InternalError()]
)
def test_our_own_failures_are_no_refusals(key: ApiKey, failure: errors.ApiError) -> None:
    counts = RefusalCounts()
    count(counts, key, failure)
    counts.flush()
    assert stored(key) == {}


def test_a_flush_that_fails_is_made_up_for(key: ApiKey, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        count(counts, key, NO_MODEL)  # what comes meanwhile is kept as well
        raise OperationalError("away")

    counts = RefusalCounts()
    count(counts, key, NO_MODEL, BROKE)
    with monkeypatch.context() as patched:
        patched.setattr(refusals, "add", fail)
        counts.flush()
    counts.flush()
    assert stored(key) == {(404, "model_not_found"): 2, (402, "insufficient_credits"): 1}


def test_what_can_never_be_stored_is_logged_and_dropped(
    key: ApiKey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise IntegrityError("no such key")

    counts = RefusalCounts()
    count(counts, key, NO_MODEL, NO_MODEL)
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(refusals, "add", refuse)
        counts.flush()
    assert "2 refusals were not counted: no such key" in caplog.text
    counts.flush()
    assert stored(key) == {}


def test_memory_is_bounded(
    key: ApiKey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_counts, "_ROWS_MAX", 1)
    counts = RefusalCounts()
    with caplog.at_level(logging.ERROR):
        count(counts, key, NO_MODEL, BROKE, BROKE, NO_MODEL)
        counts.flush()
    assert stored(key) == {(404, "model_not_found"): 2}
    assert "2 refusals were not counted: too many are waiting" in caplog.text


def test_none_is_lost_between_threads(key: ApiKey, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 0

    def add(counted: Any) -> None:
        nonlocal total
        total += sum(counted.values())

    monkeypatch.setattr(refusals, "add", add)
    counts = RefusalCounts()

    def work(_: int) -> None:
        count(counts, key, *[NO_MODEL, BROKE] * 500)

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(work, number) for number in range(4)]
        while not all(each.done() for each in running):
            counts.flush()
    counts.flush()
    assert total == 4000


@pytest.fixture
def refused(key: ApiKey) -> Callable[..., refusals.Refused]:
    def make(status: int = 404, code: str = "model_not_found") -> refusals.Refused:
        minute = datetime.now(UTC).replace(second=0, microsecond=0)
        return refusals.Refused(key.organization_id, key.pk, minute, status, code)

    return make


def test_reasons_have_rows_of_their_own(
    key: ApiKey, refused: Callable[..., refusals.Refused]
) -> None:
    refusals.add({refused(): 2, refused(429, "rate_limit_exceeded"): 5})
    refusals.add({refused(): 1})
    assert stored(key) == {(404, "model_not_found"): 3, (429, "rate_limit_exceeded"): 5}
