"""The world of a chaos run: a cluster, a demo model server, some workers, some organizations."""

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from django.core.management import call_command
from django.db import DatabaseError, InterfaceError, connection, connections

from billing import keys, organizations
from billing.pricing import Prices
from gateway import catalog_file
from kiln_site.demo.seed import served_by
from tests.chaos import books
from tests.chaos.cluster import Cluster
from tests.chaos.customers import Told
from tests.chaos.ports import free_port
from tests.chaos.workers import Worker


@dataclass
class World:
    cluster: Cluster
    workers: list[Worker]
    secrets: list[str]
    spool: Path
    backend: "Backend"
    ttl_seconds: float
    seed: int
    told: Told = field(default_factory=Told)
    kills: int = 0
    crashes: int = 0
    most_in_flight: int = 0
    most_spooled: int = 0
    slots_free_after: float = 0.0
    replayed_after: float = 0.0
    drained_in: float = 0.0


class Backend:
    """The demo model server in a process of its own, so that it can be killed."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kiln_site.demo.model_server", "--port", str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        assert self._process.stdout.readline().startswith("LISTENING")

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout
            self._process.stdout.close()
            self._process = None


@contextmanager
def world(cluster: Cluster, folder: Path, options: argparse.Namespace) -> Iterator[World]:
    """Provision, start backend and workers, and end them again."""
    backend = Backend()
    backend.start()
    secrets = _provision(backend.port, options.organizations)
    workers = [Worker(folder / f"worker-{number}.log") for number in range(options.workers)]
    spool = folder / "var" / "spool"
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait_until_ready()
        yield World(cluster, workers, secrets, spool, backend, options.ttl, options.seed)
    finally:
        for worker in workers:
            worker.kill()
        backend.kill()
        connections.close_all()


def _provision(backend_port: int, number: int) -> list[str]:
    """Make the tables, a model and organizations; return their keys."""
    call_command("migrate", verbosity=0)
    model = catalog_file.ModelEntry(
        id="qwen3-32b",
        context_window=32768,
        prices=Prices(Decimal("0.08"), Decimal("0.04"), Decimal("0.28")),
    )
    catalog_file.load(served_by([model], f"http://127.0.0.1:{backend_port}/v1"))
    secrets = []
    for one in range(number):
        organization, _ = organizations.create(
            name=f"chaos-{one}", actor="chaos", opening_credits=Decimal(100)
        )
        secrets.append(keys.issue(organization=organization, name="chaos")[1])
    return secrets


@contextmanager
def disturbed(disturb: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `disturb` beside the block, until the block ends."""
    over = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            disturb(over)
        except BaseException as failure:  # noqa: BLE001 told below
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def watched(here: World) -> Iterator[None]:
    """Sample the books meanwhile: the most in flight, the most spooled."""

    def watch(over: threading.Event) -> None:
        while not over.wait(0.02):
            here.most_spooled = max(here.most_spooled, books.spooled(here.spool))
            try:
                here.most_in_flight = max(here.most_in_flight, books.most_in_flight())
            except (DatabaseError, InterfaceError):
                connection.close()
        connection.close()

    with disturbed(watch):
        yield


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until `condition` holds, and return how long that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds} s: {condition}")
        time.sleep(0.05)
    return time.monotonic() - began
