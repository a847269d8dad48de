"""`manage.py reverse_payment ORGANIZATION REFERENCE USD|all`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from billing import ledger, organizations
from billing.management.arguments import (
    add_because,
    because,
    refusals_told,
    tell_movement,
    usd_or_all,
)


class Command(BaseCommand):
    help = (
        "Take back the credits of a purchase whose payment was taken back, in whole or in part; "
        "all reversals of a purchase are together never more than it. The balance may end below "
        "zero."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument("reference", help="The idempotency key of the purchase.")
        parser.add_argument("usd", metavar="USD|all", help="How much; all: what is left of it.")
        add_because(parser, example="dispute-17")

    def handle(self, *args: Any, **options: Any) -> None:
        amount = usd_or_all(options["usd"])
        with refusals_told():
            organization = organizations.find(options["organization"])
            line = ledger.reverse_payment(
                purchase=ledger.find_purchase(organization, options["reference"]),
                amount=amount,
                **because(options),
            )
        tell_movement(self.stdout, options, line, "of a payment taken back from")
