"""Costs that the live service charged, and the API page's own example, to the last digit."""

import csv
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest

from billing.money import plain
from billing.pricing import Prices, cost

QWEN3_32B = Prices(input=Decimal("0.08"), cached_input=Decimal("0.04"), output=Decimal("0.28"))
GPT_OSS_120B = Prices(
    input=Decimal("0.015"), cached_input=Decimal("0.015"), output=Decimal("0.085")
)


class Tokens(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def observed() -> list[tuple[Tokens, str]]:
    file = Path(__file__).parent / "data" / "price-vectors.csv"
    with file.open(newline="") as lines:
        return [
            (
                Tokens(
                    int(row["tokens_prompt"]),
                    int(row["cached_tokens"]),
                    int(row["tokens_completion"]),
                ),
                row["total_cost"],
            )
            for row in csv.DictReader(lines)
        ]


def test_all_observed_events_are_here() -> None:
    assert len(observed()) == 38


@pytest.mark.parametrize(("tokens", "total_cost"), observed())
def test_it_reproduces_an_observed_cost(tokens: Tokens, total_cost: str) -> None:
    assert cost(tokens, QWEN3_32B) == Decimal(total_cost)
    assert plain(cost(tokens, QWEN3_32B)) == plain(Decimal(total_cost))


def test_it_reproduces_the_example_of_the_page() -> None:
    # "prompt_tokens": 9, "completion_tokens": 12, "cost": 0.000001155
    assert plain(cost(Tokens(9, 0, 12), GPT_OSS_120B)) == "0.000001155"
