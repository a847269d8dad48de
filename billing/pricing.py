"""Tokens times prices: what one request costs, and what is held for it before it runs.

Keeps the arithmetic, in whole picodollars. Holds no tables, reads no clock, rounds nothing.
"""

from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

PICODOLLARS_PER_USD = 10**12


class Tokens(Protocol):
    """What pricing needs to know of an answer; `cached_tokens` are part of `prompt_tokens`."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Prices:
    """A price version, in USD per million tokens with at most six decimals each.

    `cached_input` is the price of prompt tokens served from the prefix cache; a model without
    one charges them at `input` (beyond-the-page.md section 7, rulings.md 10).
    """

    input: Decimal
    cached_input: Decimal
    output: Decimal


def _picodollars_per_token(price: Decimal) -> int:
    # 1 USD per million tokens is a millionth of a USD, a million picodollars, per token.
    return int(price.scaleb(6))


def _usd(picodollars: int) -> Decimal:
    return Decimal(picodollars).scaleb(-12)


def cost(tokens: Tokens, prices: Prices) -> Decimal:
    """Return the cost in USD: (prompt - cached)*input + cached*cached_input + completion*output.

    Reasoning tokens are part of the completion tokens (API page, usage.completion_tokens).
    """
    uncached = tokens.prompt_tokens - tokens.cached_tokens
    return _usd(
        uncached * _picodollars_per_token(prices.input)
        + tokens.cached_tokens * _picodollars_per_token(prices.cached_input)
        + tokens.completion_tokens * _picodollars_per_token(prices.output)
    )


def hold(*, prompt_tokens: int, output_tokens: int, choices: int, prices: Prices) -> Decimal:
    """Return the USD that are held while the request runs (rulings.md 18).

    The prompt is counted uncached: what the backend's cache will serve is not known before.
    """
    return _usd(
        prompt_tokens * _picodollars_per_token(prices.input)
        + choices * output_tokens * _picodollars_per_token(prices.output)
    )
