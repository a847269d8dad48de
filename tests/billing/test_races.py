"""Two processes at one account: the second sees what the first did, and the limit is one for all.

The first is in the middle of its transaction when the second comes. On PostgreSQL the second waits
for the lock of the account; SQLite lets it begin only after the first.
"""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections

from billing import ledger, usage, workers
from billing.models import GatewayWorker
from billing.standing import TooManyInFlight
from tests import environment
from tests.billing.world import COST, admission, admit, settle, settlement
from tests.conftest import Tenant

Process = Callable[[], GatewayWorker]


@pytest.fixture
def only(tenant: Callable[..., Tenant]) -> Iterator[Tenant]:
    """May have one request in flight. What runs at the end is closed: it is committed."""
    made = tenant("only", max_in_flight=1)
    yield made
    usage.close_abandoned([event.pk for event in made.events()])


@pytest.fixture
def process(tenant: Callable[..., Tenant]) -> Process:
    """Start a gateway process, as far as billing knows."""

    def start() -> GatewayWorker:
        worker_id = uuid.uuid4()
        workers.beat(worker_id=worker_id, host="tests", pid=1)
        return GatewayWorker(pk=worker_id)

    return start


@pytest.fixture
def meanwhile(tenant: Callable[..., Tenant]) -> Iterator[Callable[..., "Future[Any]"]]:
    """Let another process do something; on return it has done it, or waits for a lock."""

    def closing(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            connections.close_all()

    def begin(function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        doing = pool.submit(closing, function, *arguments)
        if environment.KIND == "postgresql":
            _wait_until_waiting(doing)
        return doing

    with ThreadPoolExecutor(1) as pool:
        yield begin


def _wait_until_waiting(doing: "Future[Any]") -> None:
    import psycopg

    with psycopg.connect(environment.POSTGRES_URL, autocommit=True) as server:
        while not doing.done():
            waiting = server.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
                " AND wait_event_type = 'Lock'",
                [environment.NAME],
            )
            if waiting.fetchone() != (0,):
                return


def test_who_comes_meanwhile_sees_what_was_admitted(
    only: Tenant, process: Process, meanwhile: Callable[..., "Future[Any]"]
) -> None:
    first, second = admission(only.key, process()), admission(only.key, process())
    with ledger.locked_accounts([only.organization.pk]) as accounts:
        assert usage.admit([first], accounts) == [None]
        answers = meanwhile(admit, second)
    [refusal] = answers.result()
    assert isinstance(refusal, TooManyInFlight)


def test_who_comes_meanwhile_sees_what_was_charged(
    only: Tenant, process: Process, meanwhile: Callable[..., "Future[Any]"]
) -> None:
    before, worker = only.balance, process()
    first, second = (settlement(admission(only.key, worker)) for _ in range(2))
    with ledger.locked_accounts([only.organization.pk]) as accounts:
        usage.settle([first], accounts)
        costs = meanwhile(settle, second)
    assert costs.result() == [COST]
    assert only.balance == before - 2 * COST


def test_the_limit_is_one_over_all_processes(only: Tenant, process: Process) -> None:
    assert admit(admission(only.key, process())) == [None]
    [refusal] = admit(admission(only.key, process()))
    assert isinstance(refusal, TooManyInFlight)
