"""`manage.py record_purchase ORGANIZATION USD`."""

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
        "Add credits that an organization has paid for, as one line of its ledger. The idempotency "
        "key is the payment's own reference, by which reverse_payment finds it again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument("usd", metavar="USD", help="How much, as in 25 or 99.9.")
        add_because(parser, example="invoice-4711")

    def handle(self, *args: Any, **options: Any) -> None:
        amount = usd(options["usd"])
        with refusals_told():
            line = ledger.purchase(
                organization=organizations.find(options["organization"]),
                amount=amount,
                **because(options),
            )
        tell_movement(self.stdout, options, line, "purchased by")
