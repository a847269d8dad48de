"""`manage.py grant_credits ORGANIZATION USD`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from billing import ledger, organizations
from billing.management.arguments import (
    add_because,
    because,
    refusals_told,
    tell_movement,
    usd,
)


class Command(BaseCommand):
    help = (
        "Add credits to an organization's balance, as one line of its ledger. Safe to repeat: an "
        "idempotency key grants once, and is refused for another amount or reason."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument("usd", metavar="USD", help="How much, as in 25 or 0.000001.")
        add_because(parser, example="welcome-2030")

    def handle(self, *args: Any, **options: Any) -> None:
        amount = usd(options["usd"])
        with refusals_told():
            line = ledger.grant(
                organization=organizations.find(options["organization"]),
                amount=amount,
                **because(options),
            )
        tell_movement(self.stdout, options, line, "granted to")
