"""`manage.py refund_charge GENERATION_ID USD|all`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from billing import ledger
from billing.management.arguments import (
    add_because,
    because,
    refusals_told,
    tell_movement,
    usd_or_all,
)


class Command(BaseCommand):
    help = (
        "Give back what a request was charged, in whole or in part; all refunds of a request are "
        "together never more than its charge. The request keeps its cost."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("generation_id", help="The request's X-Neocloud-Generation-Id.")
        parser.add_argument("usd", metavar="USD|all", help="How much; all: what is left of it.")
        add_because(parser, example="ticket-99")

    def handle(self, *args: Any, **options: Any) -> None:
        amount = usd_or_all(options["usd"])
        with refusals_told():
            line = ledger.refund(
                charge=ledger.find_charge(options["generation_id"]),
                amount=amount,
                **because(options),
            )
        tell_movement(self.stdout, options, line, "refunded to")
