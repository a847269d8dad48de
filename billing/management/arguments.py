"""What the commands have in common: amounts of USD, one movement of money, the choice of output."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from django.core.management.base import CommandError, CommandParser, OutputWrapper

from billing import ledger, organizations
from billing.ledger import Because
from billing.models import LedgerEntry
from billing.money import MONEY_MAX, USD_PLACES, plain

# Not what Decimal() reads: 1e3, 1_000 and NaN are one slip away from another amount.
_PLAIN_AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)?")


def usd(text: str) -> Decimal:
    """Return the amount that `text` writes in plain decimals. Raises CommandError."""
    if not _PLAIN_AMOUNT.fullmatch(text):
        raise CommandError(
            f"{text!r} is not an amount of USD: write it in plain digits, as in 25 or 0.5."
        )
    amount = Decimal(text)
    if amount > MONEY_MAX:
        raise CommandError(f"{text} USD is more than one amount can be ({MONEY_MAX} USD).")
    if len(text.partition(".")[2]) > USD_PLACES:
        raise CommandError(f"{text} USD has more than {USD_PLACES} decimals.")
    return amount


def signed_usd(text: str) -> Decimal:
    """Return the amount that `text` writes, below zero after a minus sign. Raises CommandError."""
    return -usd(text[1:]) if text.startswith("-") else usd(text)


def usd_or_all(text: str) -> Decimal | None:
    """Return the amount that `text` writes, or None for `all`. Raises CommandError."""
    return None if text == "all" else usd(text)


def add_json(parser: CommandParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object instead of a sentence."
    )


def tell(stdout: OutputWrapper, as_json: bool, facts: Mapping[str, object], sentence: str) -> None:
    """Print the outcome: the facts as one JSON object for a script, the sentence for a person."""
    stdout.write(json.dumps(facts) if as_json else sentence)


def add_because(parser: CommandParser, *, example: str) -> None:
    """Add what every movement of money needs besides its amount."""
    parser.add_argument("--reason", required=True, help="Why; it stays in the ledger.")
    parser.add_argument(
        "--idempotency-key",
        required=True,
        metavar="KEY",
        help=f"Names this movement, as in {example}: the same key never moves money twice.",
    )
    add_json(parser)


def because(options: Mapping[str, Any]) -> Because:
    return {
        "actor": "command line",
        "reason": options["reason"],
        "idempotency_key": options["idempotency_key"],
    }


@contextmanager
def refusals_told() -> Iterator[None]:
    """Let a command end with the text of a refusal, and exit with 1."""
    try:
        yield
    except (organizations.OrganizationNotFound, ledger.LedgerError) as refusal:
        raise CommandError(str(refusal)) from None


def tell_movement(
    stdout: OutputWrapper, options: Mapping[str, Any], line: LedgerEntry, did: str
) -> None:
    """Print the line that was booked and the balance; `did` as in "granted to"."""
    organization = line.organization
    amount, balance = plain(line.amount), plain(organization.account.balance)
    tell(
        stdout,
        options["json"],
        {
            "organization": organization.slug,
            "ledger_entry": line.pk,
            "amount": amount,
            "balance": balance,
        },
        f"{amount} USD {did} {organization} (line {line.pk}); its balance is {balance} USD.",
    )
