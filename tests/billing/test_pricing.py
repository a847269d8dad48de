"""Tokens times prices: exact, and what is held covers what can be asked."""

from decimal import Decimal
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from billing.fields import MoneyField
from billing.pricing import Prices, cost, hold

TOKENS = st.integers(0, 10**6)
PRICE = st.decimals(0, 1000, places=6)
PRICES = st.builds(Prices, input=PRICE, cached_input=PRICE, output=PRICE)


class Tokens(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def test_it_works() -> None:
    prices = Prices(input=Decimal("0.08"), cached_input=Decimal("0.04"), output=Decimal("0.28"))
    assert cost(Tokens(321, 302, 29), prices) == Decimal("0.00002172")


@given(TOKENS, TOKENS, TOKENS, PRICES)
def test_a_cost_is_a_whole_number_of_picodollars(
    uncached: int, cached: int, completion: int, prices: Prices
) -> None:
    charged = cost(Tokens(uncached + cached, cached, completion), prices)
    assert charged * 10**6 == (
        uncached * prices.input + cached * prices.cached_input + completion * prices.output
    )
    assert MoneyField().get_prep_value(charged) == charged * 10**12


@given(TOKENS, TOKENS, st.integers(1, 8), PRICES)
def test_a_hold_is_the_cost_of_all_that_was_asked_for(
    prompt: int, output: int, choices: int, prices: Prices
) -> None:
    held = hold(prompt_tokens=prompt, output_tokens=output, choices=choices, prices=prices)
    assert held == cost(Tokens(prompt, 0, choices * output), prices)


def test_nothing_costs_nothing() -> None:
    free = Prices(input=Decimal(0), cached_input=Decimal(0), output=Decimal(0))
    assert cost(Tokens(9, 0, 12), free) == 0
