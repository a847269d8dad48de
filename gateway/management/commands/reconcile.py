"""`manage.py reconcile`: here, because the gateway sees its own checks and those of billing."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from billing import checks, findings, usage
from billing.management.arguments import add_json
from billing.reconcile import Check, Report
from gateway import second_source

CHECKS = {**checks.CHECKS, second_source.CHECK.name: second_source.CHECK}


def _lost() -> list[str]:
    return [str(generation_id) for generation_id in usage.close_lost().generation_ids]


# What tidies, at no cost to anybody, before the checks look: each returns the requests it closed.
ACTIONS: dict[str, Callable[[], list[str]]] = {"lost": _lost}


@dataclass(frozen=True)
class _Looked:
    """One check of this run."""

    check: Check
    since: datetime | None
    report: Report
    seconds: float


class Command(BaseCommand):
    help = (
        "Close the requests of gateway processes that died, then prove the money: every balance "
        "is the sum of its ledger, every cost was charged once, every cost is its tokens times "
        "its prices, and more. Changes no money. Records the run and keeps what it finds as "
        "findings in the admin. Exits 1 if anything is found wrong."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--full", action="store_true", help="Look at everything, not at the last hours only."
        )
        parser.add_argument(
            "--only",
            action="append",
            metavar="NAME",
            choices=[*ACTIONS, *CHECKS],
            help=f"Only this, as often as needed: {', '.join([*ACTIONS, *CHECKS])}.",
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = options["only"] or [*ACTIONS, *CHECKS]
        closed = {name: act() for name, act in ACTIONS.items() if name in chosen}
        now = timezone.now()
        looked = []
        for name, check in CHECKS.items():
            if name in chosen:
                self.stderr.write(f"{name} ...")
                is_full = options["full"] and (options["only"] or not check.is_slow)
                looked.append(_look(check, None if is_full else check.since(now)))
        if options["json"]:
            self.stdout.write(json.dumps(_facts(closed, looked)))
        else:
            self._print(closed, looked)
        found = sum(len(each.report.findings) for each in looked)
        if found:
            raise CommandError(f"{found} found; nothing was repaired.")

    def _print(self, closed: dict[str, list[str]], looked: list[_Looked]) -> None:
        for name, generation_ids in closed.items():
            self.stdout.write(f"{len(generation_ids)} requests closed as {name}")
        if looked:
            self.stdout.write(f"{'':<14} {'counted':>12} {'found':>6} {'seconds':>8}")
        for each in looked:
            report = each.report
            self.stdout.write(
                f"{each.check.name:<14} {report.counted:>12,} {len(report.findings):>6} "
                f"{each.seconds:>8.2f}  {report.invariant}"
            )
        for each in looked:
            for line in (*each.report.notes, *each.report.findings):
                self.stdout.write(f"  {each.check.name}: {line}")


def _look(check: Check, since: datetime | None) -> _Looked:
    began = time.monotonic()
    report = findings.run(check, since)
    return _Looked(check, since, report, time.monotonic() - began)


def _facts(closed: dict[str, list[str]], looked: list[_Looked]) -> dict[str, Any]:
    return {
        **{f"closed_as_{name}": generation_ids for name, generation_ids in closed.items()},
        "invariants": [
            {
                "name": each.check.name,
                "invariant": each.report.invariant,
                "since": each.since.isoformat() if each.since else None,
                "counted": each.report.counted,
                "findings": [str(finding) for finding in each.report.findings],
                "notes": each.report.notes,
            }
            for each in looked
        ],
        "found": sum(len(each.report.findings) for each in looked),
    }
