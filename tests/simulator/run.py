"""One seed after another, and the verdict on each."""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from django.core.management import call_command
from django.db import connection

from billing import keys, organizations
from billing.models import LedgerEntry, UsageEvent
from gateway import spool
from tests.chaos import books
from tests.simulator.disk import DISK
from tests.simulator.faults import FAULTS
from tests.simulator.world import World

setattr(spool, "os", DISK)  # noqa: B010  no name that it exports


def run(
    folder: Path, seeds: Iterable[int], *, is_verbose: bool = False, exit_first: bool = False
) -> int:
    """Run these seeds and print what came of them; return the exit code."""
    database, template = Path(connection.settings_dict["NAME"]), folder / "template.sqlite3"
    _provision()
    connection.close()
    database.rename(template)
    totals: Counter[str] = Counter()
    failed: list[int] = []
    for seed in seeds:
        if failed and exit_first:
            break
        shutil.copyfile(template, database)
        world, broken = _run_one(seed, folder / "spool")
        connection.close()
        totals.update(_figures(world))
        totals.update(broken)
        if any(broken.values()):
            failed.append(seed)
            print(f"seed {seed}: {dict(+Counter(broken))}", flush=True)
        if is_verbose:
            _print(dict(sorted({**FAULTS.happened, **world.told.outcomes}.items())))
    _print(totals)
    if failed:
        print(f"\nFAIL. Again with: python -m tests.simulator --seed {failed[0]}")
    return 1 if failed else 0


def _figures(world: World) -> Counter[str]:
    return Counter(
        {
            "seeds": 1,
            "requests": world.told.sent,
            "admitted": len(world.told.ids),
            "costs told": len(world.told.costs),
            "worker kills": world.kills,
            "faults at a call": sum(FAULTS.happened.values()),
        }
    )


def _print(figures: Mapping[str, int]) -> None:
    for name, number in figures.items():
        print(f"  {name:<44}{number:>9}")


def _provision() -> None:
    call_command("migrate", verbosity=0)
    for name in "ab":
        organization, _ = organizations.create(name=f"simulated-{name}", actor="simulator")
        keys.issue(organization=organization, name="default")


def _run_one(seed: int, folder: Path) -> tuple[World, dict[str, int]]:
    folder.mkdir()
    world = World(seed, folder)
    try:
        world.run()
        return world, _judge(world, folder)
    finally:
        for worker in world.workers:
            worker.bury()
        shutil.rmtree(folder)


def _judge(world: World, folder: Path) -> dict[str, int]:
    """Count what is wrong, by name; all zeros are a pass."""
    verdict = books.judge(world.told, folder)
    charged = {
        event: -amount
        for event, amount in LedgerEntry.objects.filter(kind="charge").values_list(
            "event_id", "amount"
        )
    }
    settlements = world.told.settlements
    return {
        "lost events": verdict.lost_events,
        "double debits": verdict.double_debits,
        "unpaid acknowledgements": verdict.unpaid_acknowledgements,
        "wrong balances": verdict.wrong_balances,
        "other findings": verdict.other_findings,
        "settlements left in a spool": verdict.spooled_left,
        "charges that nobody asked for": sum(
            pk not in settlements or settlements[pk].cost != cost for pk, cost in charged.items()
        ),
        "events of living workers left open": world.left_open,
        "events of dead workers left open": UsageEvent.objects.filter(state="in_flight").count(),
        "requests without an end": world.unanswered,
        "in flight beyond the limit": max(world.most_in_flight - world.limit, 0),
    }
