"""`manage.py reconcile`."""

import json
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from billing import reconcile, usage
from billing.management.arguments import add_json

_WINDOW = timedelta(hours=1)


class Command(BaseCommand):
    help = (
        "Close the requests of gateway processes that died, then prove the money: every balance "
        "is the sum of its ledger, every cost was charged once, every cost is its tokens times "
        "its prices. Changes no money. Exits 1 if anything is found wrong."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--full", action="store_true", help="Look at everything, not at the last hour only."
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        since = None if options["full"] else timezone.now() - _WINDOW
        lost = usage.close_lost().generation_ids
        self._progress(options, f"{len(lost)} requests of dead processes closed as lost")
        reports = []
        for invariant in reconcile.INVARIANTS:
            report = invariant(since)
            reports.append(report)
            self._progress(
                options,
                f"{report.invariant}: {report.counted} counted, {len(report.findings)} found",
                *report.findings,
            )
        found = sum(len(report.findings) for report in reports)
        if options["json"]:
            facts = {
                "since": since.isoformat() if since else None,
                "closed_as_lost": [str(generation_id) for generation_id in lost],
                "invariants": [
                    {
                        "invariant": report.invariant,
                        "counted": report.counted,
                        "findings": report.findings,
                    }
                    for report in reports
                ],
                "found": found,
            }
            self.stdout.write(json.dumps(facts))
        if found:
            raise CommandError(f"{found} found; nothing was repaired.")

    def _progress(self, options: dict[str, Any], line: str, *findings: str) -> None:
        if options["json"]:
            return
        self.stdout.write(line)
        for finding in findings:
            self.stdout.write(f"  {finding}")
        self.stdout.flush()
