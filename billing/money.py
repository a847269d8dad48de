"""USD as whole picodollars (1e-12 USD): the bounds of an amount, and the text a customer reads.

Never rounds and never uses a float: a double prints 0.000001155 as 1.155e-06.
"""

from decimal import Decimal

USD_PLACES = 12
PRICE_PLACES = 6

# A signed 64-bit column ends at 9.22e18; the constraints of the tables stop at this round figure.
MONEY_MAX = Decimal(9_000_000)


def plain(amount: Decimal) -> str:
    """Return `amount` in plain decimals: no exponent, no trailing zeros, `0` for zero.

    This text stands in `usage.cost`, the usage API, pages and files alike, so that one amount
    reads the same everywhere to the last digit.
    """
    text = f"{amount:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in {"-0", ""} else text
