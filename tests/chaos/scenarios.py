"""The faults, one function each. A scenario sends requests and disturbs the world meanwhile."""

import asyncio
import random
import shutil
import threading
import uuid
from collections.abc import Callable

from tests.chaos import books
from tests.chaos.customers import Customers
from tests.chaos.world import World, disturbed, wait_for

Disturb = Callable[[threading.Event], None]

# Longer than a settlement waits before it is spooled.
_DOWN_SECONDS = 3.0


def _send(here: World, number: int, **options: int) -> None:
    urls = [worker.url for worker in here.workers]
    here.seed += 1
    asyncio.run(Customers(urls, here.secrets, here.told, here.seed).send(number, **options))


def _killing(here: World, every: float = 1.0) -> Disturb:
    chance = random.Random(here.seed)

    def disturb(over: threading.Event) -> None:
        over.wait(0.5)
        while True:
            worker = chance.choice(here.workers)
            worker.kill()
            here.kills += 1
            worker.start()
            if over.wait(every):
                break
        for worker in here.workers:
            worker.wait_until_ready()

    return disturb


def _crashing(here: World, every: float) -> Disturb:
    def disturb(over: threading.Event) -> None:
        over.wait(0.5)
        while True:
            here.cluster.stop("immediate")
            here.crashes += 1
            threading.Event().wait(_DOWN_SECONDS)
            here.cluster.start()
            here.replayed_after = max(
                here.replayed_after, books.wait_until_replayed(here.spool, 30)
            )
            if over.wait(every):
                break

    return disturb


def kill_workers(here: World, number: int) -> None:
    """A worker is killed with -9 every second."""
    with disturbed(_killing(here)):
        _send(here, number)


def crash_database(here: World, number: int) -> None:
    """PostgreSQL is stopped `immediate` every few seconds, for three."""
    with disturbed(_crashing(here, 3.0)):
        _send(here, number)


def kill_and_crash(here: World, number: int) -> None:
    """Both at once."""
    with disturbed(_killing(here)), disturbed(_crashing(here, 4.0)):
        _send(here, number)


def kill_all_at_the_limit(here: World, number: int) -> None:
    """All workers die while every slot is taken: the slots must be free within the TTL."""

    def disturb(over: threading.Event) -> None:
        wait_for(lambda: books.most_in_flight() >= 8, 20)
        for worker in here.workers:
            worker.kill()
            here.kills += 1
        free_after = wait_for(lambda: books.most_in_flight() == 0, 60)
        here.slots_free_after = max(here.slots_free_after, free_after)
        for worker in here.workers:
            worker.start()
        for worker in here.workers:
            worker.wait_until_ready()

    with disturbed(disturb):
        _send(here, number)


def terminate_under_load(here: World, number: int) -> None:
    """Workers get SIGTERM one after another: what runs ends, nothing is cut or lost."""

    def disturb(over: threading.Event) -> None:
        for worker in here.workers:
            if over.wait(0.5):
                return
            here.drained_in = max(here.drained_in, worker.terminate())
            worker.start()
            worker.wait_until_ready()

    with disturbed(disturb):
        _send(here, number)


def pause_a_worker(here: World, number: int) -> None:
    """A worker is stopped for three TTLs: others take its slots meanwhile."""

    def disturb(over: threading.Event) -> None:
        over.wait(0.5)
        here.workers[0].pause()
        threading.Event().wait(3 * here.ttl_seconds)
        here.workers[0].resume()
        here.workers[0].wait_until_ready()

    with disturbed(disturb):
        _send(here, number)


def kill_the_backend(here: World, number: int) -> None:
    """The model server is killed in the middle of its answers: those cost nothing."""

    def disturb(over: threading.Event) -> None:
        over.wait(0.5)
        while True:
            here.backend.kill()
            here.backend.start()
            if over.wait(1.0):
                break

    with disturbed(disturb):
        _send(here, number)


def fill_the_spool_disk(here: World, number: int) -> None:
    """The database goes away and no file can grow: nothing is named that the books lack."""
    for worker in here.workers:
        worker.kill()
        worker.file_size_max = 0
        worker.start()
    for worker in here.workers:
        worker.wait_until_ready()
    with disturbed(_crashing(here, 2.0)):
        _send(here, number)
    for worker in here.workers:
        worker.kill()
        worker.file_size_max = None
        worker.start()
    for worker in here.workers:
        worker.wait_until_ready()


def replay_twice(here: World, number: int) -> None:
    """Each spool file that appears is copied as if a dead process had left it: replayed twice."""

    def disturb(over: threading.Event) -> None:
        seen: set[str] = set()
        while not over.wait(0.01):
            for file in here.spool.glob("*.jsonl"):
                if file.name not in seen and file.exists() and file.stat().st_size:
                    copy = here.spool / f"{uuid.uuid4()}.jsonl"
                    shutil.copy(file, copy)
                    seen |= {file.name, copy.name}

    with disturbed(disturb), disturbed(_crashing(here, 2.5)):
        _send(here, number)


# Shares of all requests; together 1.
SCENARIOS: dict[Callable[[World, int], None], float] = {
    kill_workers: 0.25,
    crash_database: 0.15,
    kill_and_crash: 0.15,
    kill_all_at_the_limit: 0.05,
    terminate_under_load: 0.10,
    pause_a_worker: 0.05,
    kill_the_backend: 0.10,
    fill_the_spool_disk: 0.05,
    replay_twice: 0.10,
}
