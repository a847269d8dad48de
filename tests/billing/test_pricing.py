"""Tokens times prices: exact, and what is held covers what can be asked."""

from decimal import Decimal
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from billing.fields import MoneyField
from billing.money import plain
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


@given(TOKENS, TOKENS, TOKENS, TOKENS, PRICES)
def test_two_requests_cost_what_one_of_all_their_tokens_costs(
    prompt: int, completion: int, more_prompt: int, more_completion: int, prices: Prices
) -> None:
    apart = cost(Tokens(prompt, 0, completion), prices) + cost(
        Tokens(more_prompt, more_prompt, more_completion), prices
    )
    together = Tokens(prompt + more_prompt, more_prompt, completion + more_completion)
    assert apart == cost(together, prices)


@given(TOKENS, TOKENS, TOKENS, PRICES)
def test_the_text_of_a_cost_is_the_cost(
    uncached: int, cached: int, completion: int, prices: Prices
) -> None:
    charged = cost(Tokens(uncached + cached, cached, completion), prices)
    assert Decimal(plain(charged)) == charged
    assert "E" not in plain(charged)


@given(TOKENS, TOKENS, st.integers(1, 8), PRICES)
def test_a_hold_is_the_cost_of_all_that_was_asked_for(
    prompt: int, output: int, choices: int, prices: Prices
) -> None:
    held = hold(prompt_tokens=prompt, output_tokens=output, choices=choices, prices=prices)
    assert held == cost(Tokens(prompt, 0, choices * output), prices)


def test_nothing_costs_nothing() -> None:
    free = Prices(input=Decimal(0), cached_input=Decimal(0), output=Decimal(0))
    assert cost(Tokens(9, 0, 12), free) == 0
