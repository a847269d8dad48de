"""How figures read on a page: exact, with their unit, and a dash for what is not known.

Formats only. Amounts are `billing.money.plain`, so a page shows what the API and the ledger show.
"""

from decimal import Decimal

from django import template

from billing.money import plain

register = template.Library()

UNKNOWN = "–"


@register.filter
def usd(amount: Decimal | None) -> str:
    """Return the amount in US dollars, to its last digit."""
    if amount is None:
        return UNKNOWN
    return f"−${plain(-amount)}" if amount < 0 else f"${plain(amount)}"


@register.filter
def count(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"


@register.filter
def duration(milliseconds: int | None) -> str:
    """Return a duration with three significant figures at most."""
    if milliseconds is None:
        return UNKNOWN
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    if milliseconds < 59_950:
        return f"{milliseconds / 1000:.{2 if milliseconds < 9_995 else 1}f} s"
    minutes, seconds = divmod(round(milliseconds / 1000), 60)
    return f"{minutes} min {seconds:02} s"
