"""Tables as CSV (RFC 4180) that a spreadsheet shows and never runs."""

import csv
from collections.abc import Iterable, Sequence
from decimal import Decimal
from io import StringIO

from billing.money import plain

# What makes a spreadsheet take a cell's text for a formula, or for the beginning of another cell.
_FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r", "\n")

Cell = str | int | Decimal | None


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return the table; amounts are plain decimals, and text that looks like a formula is quoted.

    The quote is the apostrophe that spreadsheets take for "this is text".
    """
    text = StringIO(newline="")
    writer = csv.writer(text)  # its dialect is RFC 4180: commas, CRLF, doubled quotes
    writer.writerow(header)
    writer.writerows([_cell(each) for each in row] for row in rows)
    return text.getvalue()


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, Decimal):
        return plain(value)
    # Spreadsheets pass over blanks before a formula.
    if isinstance(value, str) and (
        value.startswith(_FORMULA_BEGINS) or value.lstrip().startswith(_FORMULA_BEGINS)
    ):
        return f"'{value}"
    return str(value)
