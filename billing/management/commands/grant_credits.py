"""`manage.py grant_credits ORGANIZATION USD`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing import ledger, organizations
from billing.management.arguments import add_json, tell, usd
from billing.money import plain


class Command(BaseCommand):
    help = (
        "Add credits to an organization's balance, as one line of its ledger. Safe to repeat: an "
        "idempotency key grants once, and is refused for another amount or reason."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument("usd", metavar="USD", help="How much, as in 25 or 0.000001.")
        parser.add_argument("--reason", required=True, help="Why; it stays in the ledger.")
        parser.add_argument(
            "--idempotency-key",
            required=True,
            metavar="KEY",
            help="Names this grant, as in invoice-4711: the same key never grants twice.",
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        amount = usd(options["usd"])
        try:
            organization = organizations.find(options["organization"])
            entry = ledger.grant(
                organization=organization,
                amount=amount,
                actor="command line",
                reason=options["reason"],
                idempotency_key=options["idempotency_key"],
            )
        except (organizations.OrganizationNotFound, ledger.LedgerError) as refusal:
            raise CommandError(str(refusal)) from None
        balance = plain(organization.account.balance)
        tell(
            self.stdout,
            options["json"],
            {
                "organization": organization.slug,
                "ledger_entry": entry.pk,
                "amount": plain(entry.amount),
                "balance": balance,
            },
            f"{plain(entry.amount)} USD granted to {organization} (line {entry.pk}); "
            f"its balance is {balance} USD.",
        )
