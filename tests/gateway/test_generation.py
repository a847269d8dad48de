"""A generation: its ID, what is held for it, and how each end is settled."""

import json
import uuid
from dataclasses import replace
from decimal import Decimal
from time import time_ns
from types import SimpleNamespace
from typing import Any

import pytest

from billing.money import MONEY_MAX
from billing.pricing import Prices
from gateway import generation, payload
from gateway.generation import Generation, new_id

PRICES = Prices(input=Decimal("0.08"), cached_input=Decimal("0.04"), output=Decimal("0.28"))
CALLER: Any = SimpleNamespace(organization_id=1, key_id=2)
BACKEND: Any = SimpleNamespace(name="first")
MODEL: Any = SimpleNamespace(id="m", context_window=32768, max_output_tokens=32768, prices=PRICES)
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 20},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def begun(model: Any = MODEL, text: str = "Hello!", **fields: object) -> Generation:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return generation.begin(
        CALLER,
        model,
        payload.parse(json.dumps(body).encode(), depth_max=64),
        BACKEND,
        worker_id=uuid.UUID(int=7),
        hold_output_tokens_max=16384,
    )


def said(current: Generation, *contents: str, **fields: object) -> Generation:
    current.is_sent = True
    for content in contents:
        choices = [{"index": 0, "delta": {"content": content}}]
        current.meter.read(json.dumps({"choices": choices, **fields}).encode())
        current.note_first_token()
    return current


def test_it_works() -> None:
    current = said(begun(stream=True), "a", "b", usage=USAGE)
    settlement = current.settlement("succeeded", status=200)
    assert settlement.admission is current.admission
    assert settlement.prompt_tokens == 30
    assert settlement.cached_tokens == 20
    assert settlement.completion_tokens == 5
    assert settlement.reasoning_tokens == 2
    assert settlement.usage_source == "reported"
    assert settlement.cost == Decimal("0.000003")


# --- The ID ---------------------------------------------------------------------------------------


def test_an_id_is_a_uuid_of_version_7() -> None:
    before = time_ns() // 10**6
    made = [new_id() for _ in range(1000)]
    after = time_ns() // 10**6
    for each in made:
        assert (each.version, each.variant) == (7, uuid.RFC_4122)
        assert before <= each.int >> 80 <= after  # its first 48 bits are the milliseconds
    assert len(set(made)) == 1000
    assert sorted(made, key=lambda each: each.int >> 80) == made


def test_all_bits_but_time_version_and_variant_are_random() -> None:
    made = [new_id().int for _ in range(1000)]
    ones = zeros = 0
    for each in made:
        ones |= each
        zeros |= ~each
    random = (1 << 80) - 1 & ~(0xF << 76) & ~(0x3 << 62)
    assert ones & zeros & random == random


def test_the_text_is_the_canonical_one() -> None:
    current = begun()
    assert current.id == str(uuid.UUID(current.id)) == str(current.admission.generation_id)


# --- The hold -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "output_tokens"),
    [
        ({}, 16384),
        ({"max_tokens": 100}, 100),
        ({"max_tokens": 100, "n": 3}, 300),
        ({"max_tokens": 10**9}, 16384),
        ({"max_completion_tokens": 50}, 50),
    ],
)
def test_the_hold_is_the_prompt_and_all_choices(fields: dict[str, Any], output_tokens: int) -> None:
    current = begun(text="x" * 400, **fields)
    assert current.admission.hold == (100 * PRICES.input + output_tokens * PRICES.output) / 10**6


def test_without_a_limit_the_models_own_counts() -> None:
    model = SimpleNamespace(**{**vars(MODEL), "max_output_tokens": 10})
    assert begun(model, text="").admission.hold == 10 * PRICES.output / 10**6


def test_an_attack_by_n_cannot_break_the_column_of_the_hold() -> None:
    dear = Prices(Decimal(10**9), Decimal(10**9), Decimal(10**9))
    model = SimpleNamespace(**{**vars(MODEL), "prices": dear})
    assert begun(model, n=10**9).admission.hold == MONEY_MAX


def test_the_admission_carries_what_is_copied_to_the_event() -> None:
    admission = begun(stream=True).admission
    assert (admission.organization_id, admission.key_id) == (1, 2)
    assert admission.worker_id == uuid.UUID(int=7)
    assert (admission.model, admission.backend, admission.streamed) == ("m", "first", True)
    assert admission.prices == PRICES
    assert admission.created_at.utcoffset() is not None


# --- The settlement -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "is_sent", "cost"),
    [
        ("succeeded", True, "0.000003"),
        ("cancelled", True, "0.000003"),
        ("cancelled", False, "0"),
        ("failed", True, "0"),
        ("failed", False, "0"),
    ],
)
def test_who_pays(state: str, is_sent: bool, cost: str) -> None:
    current = said(begun(stream=True), "a", usage=USAGE)
    current.is_sent = is_sent
    settlement = current.settlement(state, status=200)
    assert settlement.cost == Decimal(cost)
    if not Decimal(cost):
        assert settlement.usage_source == "none"
        assert settlement.prompt_tokens == settlement.completion_tokens == 0


def test_a_client_that_left_before_the_first_token_pays_the_prompt() -> None:
    current = begun(text="x" * 400)
    current.is_sent = True
    settlement = current.settlement("cancelled", status=499)
    assert (settlement.prompt_tokens, settlement.completion_tokens) == (100, 0)
    assert settlement.cost == 100 * PRICES.input / 10**6


def test_the_backend_is_the_one_that_answered() -> None:
    current = said(begun(), "a")
    another: Any = SimpleNamespace(name="second")
    current.backend = another
    settlement = current.settlement("succeeded", status=200)
    assert (settlement.backend, settlement.admission.backend) == ("second", "first")


def test_texts_fit_their_columns() -> None:
    # PostgreSQL stores no U+0000, and these texts come from backends.
    current = begun()
    choice = {"index": 0, "delta": {}, "finish_reason": "x\0" * 50}
    current.meter.read(json.dumps({"choices": [choice]}).encode())
    settlement = current.settlement("failed", status=502, error="a\0" * 500)
    assert settlement.error == "a" * 300
    assert settlement.finish_reason == "x" * 32


def test_times_are_whole_milliseconds() -> None:
    current = begun(stream=True)
    assert current.settlement("failed", status=502).time_to_first_token_ms is None
    said(current, "")
    assert current.first_token_at is None  # an empty delta is no token
    said(current, "a")
    current.began, current.first_token_at = current.began - 2, current.began - 0.5
    settlement = current.settlement("succeeded", status=200)
    assert settlement.time_to_first_token_ms == 1500
    assert settlement.latency_ms is not None
    assert settlement.latency_ms >= 2000


def test_the_first_token_is_noted_once() -> None:
    current = said(begun(stream=True), "a")
    first = current.first_token_at
    said(current, "b")
    assert current.first_token_at == first is not None


def test_a_cost_is_of_the_prices_at_admission() -> None:
    current = said(begun(stream=True), "a", usage=USAGE)
    settlement = current.settlement("succeeded", status=200)
    free = replace(settlement.admission, prices=Prices(Decimal(0), Decimal(0), Decimal(0)))
    assert replace(settlement, admission=free).cost == 0
    assert settlement.cost > 0
