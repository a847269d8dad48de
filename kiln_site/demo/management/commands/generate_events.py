"""`manage.py generate_events N`."""

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from kiln_site.demo import generator


class Command(BaseCommand):
    help = (
        "Make N settled requests of generated organizations, with ledgers and balances that "
        "agree, to measure with or to look at. Repeating it adds as many again. Refuses a "
        "database that holds other organizations."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("number", type=int, metavar="N", help="How many requests.")
        parser.add_argument("--organizations", type=int, default=200, metavar="M")
        parser.add_argument(
            "--days", type=int, default=30, metavar="D", help="They fall into the last D days."
        )
        parser.add_argument("--seed", type=int, default=1, metavar="S")
        parser.add_argument(
            "--force", action="store_true", help="Also beside organizations of somebody's own."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        for name in ("number", "organizations", "days"):
            if options[name] < 1:
                raise CommandError(f"{name} must be at least 1")
        if not options["force"]:
            try:
                generator.refuse_foreign_books()
            except generator.ForeignBooks as refusal:
                raise CommandError(f"{refusal} Say --force to generate beside them.") from None
        began = time.monotonic()

        def progress(done: int) -> None:
            self.stderr.write(f"{done:,} of {options['number']:,} events")

        generator.generate(
            events=options["number"],
            organization_count=options["organizations"],
            days=options["days"],
            seed=options["seed"],
            progress=progress,
        )
        seconds = time.monotonic() - began
        self.stdout.write(
            f"{options['number']:,} events of {options['organizations']:,} organizations "
            f"in {seconds:.0f} s."
        )
