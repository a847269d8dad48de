"""`manage.py adjust_credits ORGANIZATION USD`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from billing import ledger, organizations
from billing.management.arguments import (
    add_because,
    because,
    refusals_told,
    signed_usd,
    tell_movement,
)


class Command(BaseCommand):
    help = (
        "Correct an organization's balance by a signed amount, as one line of its ledger. For what "
        "is no purchase, grant or refund; a negative amount takes credits away."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument("usd", metavar="USD", help="How much, as in 2.5 or -2.5.")
        add_because(parser, example="finding-12")

    def handle(self, *args: Any, **options: Any) -> None:
        amount = signed_usd(options["usd"])
        with refusals_told():
            line = ledger.adjust(
                organization=organizations.find(options["organization"]),
                amount=amount,
                **because(options),
            )
        tell_movement(self.stdout, options, line, "of adjustment booked for")
