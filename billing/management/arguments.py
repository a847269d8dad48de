"""What the commands have in common: an amount of USD, and the choice of output."""

import json
import re
from collections.abc import Mapping
from decimal import Decimal

from django.core.management.base import CommandError, CommandParser, OutputWrapper

from billing.money import MONEY_MAX, USD_PLACES

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


def add_json(parser: CommandParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object instead of a sentence."
    )


def tell(stdout: OutputWrapper, as_json: bool, facts: Mapping[str, object], sentence: str) -> None:
    """Print the outcome: the facts as one JSON object for a script, the sentence for a person."""
    stdout.write(json.dumps(facts) if as_json else sentence)
