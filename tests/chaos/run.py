"""One run: the scenarios in order, and the verdict."""

import argparse
import logging
import time
from collections import Counter
from pathlib import Path

from tests.chaos import books
from tests.chaos.cluster import Cluster
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.world import watched, world

LIMIT = 8
REPLAYED_WITHIN = 5.0


def run(cluster: Cluster, folder: Path, options: argparse.Namespace) -> int:
    """Run the scenarios that `options` ask for; return the exit code."""
    # The harness's own samples of the books fail while the database is down, as they should.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    with world(cluster, folder, options) as here:
        began = time.monotonic()
        with watched(here):
            for scenario, share in SCENARIOS.items():
                if options.only and scenario.__name__ != options.only:
                    continue
                at, before = time.monotonic(), Counter(here.told.outcomes)
                number = options.requests if options.only else round(options.requests * share)
                scenario(here, number)
                print(
                    f"{scenario.__name__:<24}{number:>6} requests{time.monotonic() - at:>7.1f} s   "
                    f"{_told(here.told.outcomes - before)}",
                    flush=True,
                )
            books.wait_until_replayed(here.spool, 30)
        verdict = books.judge(here.told, here.spool)
        seconds = time.monotonic() - began
    figures = {
        "requests": here.told.sent,
        "seconds": round(seconds, 1),
        "worker kills": here.kills,
        "database crashes": here.crashes,
        "costs told": len(here.told.costs),
        "events": verdict.events,
        "most spooled at once": here.most_spooled,
        "lost events": verdict.lost_events,
        "double debits": verdict.double_debits,
        "unpaid acknowledgements": verdict.unpaid_acknowledgements,
        "wrong balances": verdict.wrong_balances,
        "other findings": verdict.other_findings,
        "settlements left in a spool": verdict.spooled_left,
        "most in flight": here.most_in_flight,
        "seconds until slots were free": round(here.slots_free_after, 1),
        "seconds until replayed": round(here.replayed_after, 1),
        "seconds to drain at SIGTERM": round(here.drained_in, 1),
    }
    print()
    for name, figure in figures.items():
        print(f"  {name:<32}{figure:>10}")
    passed = (
        verdict.is_clean
        and here.most_in_flight <= LIMIT
        and here.slots_free_after <= options.ttl
        and here.replayed_after <= REPLAYED_WITHIN
    )
    print("\nPASS" if passed else "\nFAIL")
    return 0 if passed else 1


def _told(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcome} {number}" for outcome, number in outcomes.most_common())
