"""`manage.py create_organization NAME`."""

from decimal import Decimal
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing import organizations
from billing.management.arguments import add_json, tell, usd
from billing.money import plain


class Command(BaseCommand):
    help = (
        "Create an organization, the account that pays. Safe to repeat: if one of that name or "
        "slug exists, nothing of it changes and nothing is granted."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="Its name, as in 'Acme Inc.'; the slug is made from it.")
        parser.add_argument(
            "--credits", metavar="USD", help="Credits to grant at the start, as in 25 or 0.5."
        )
        parser.add_argument(
            "--max-in-flight",
            type=int,
            metavar="N",
            help="Requests in flight at once (default: KILN_MAX_IN_FLIGHT).",
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        credits = usd(options["credits"]) if options["credits"] is not None else Decimal(0)
        try:
            organization, created = organizations.create(
                name=options["name"],
                actor="command line",
                opening_credits=credits,
                max_in_flight=options["max_in_flight"],
            )
        except organizations.OrganizationRefused as refusal:
            raise CommandError(str(refusal)) from None
        balance = plain(organization.account.balance)
        tell(
            self.stdout,
            options["json"],
            {
                "organization": organization.slug,
                "name": organization.name,
                "created": created,
                "balance": balance,
                "max_in_flight": organization.max_in_flight,
            },
            f"Created {organization} with a balance of {balance} USD."
            if created
            else f"{organization} exists; nothing was changed. Its balance is {balance} USD.",
        )
