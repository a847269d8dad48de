"""Section B: price arithmetic."""

import json
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from django.db.models import Sum
from django.test import Client

from billing.models import CreditAccount, UsageEvent
from billing.money import plain
from billing.pricing import Prices, cost
from gateway import catalog
from gateway.errors import ModelNotFound
from gateway.models import CatalogModel, ModelPrice
from tests.dashboard import world
from tests.gateway.test_meter import counts, meter, used

PAGE = Prices(input=Decimal("0.035"), cached_input=Decimal("0.035"), output=Decimal("0.070"))


class Tokens(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def read(usage: dict[str, Any], *, stream: bool) -> Tokens:
    """Return what the meter makes of this usage, in a stream or in a whole answer."""
    metered = meter(context_window=100_000)
    if stream:
        metered.read(json.dumps({"choices": [], "usage": usage}).encode())
    else:
        choice = {"index": 0, "message": {"content": "Hi."}, "finish_reason": "stop"}
        metered.read_body(json.dumps({"choices": [choice], "usage": usage}).encode())
    return Tokens(*counts(used(metered)))


@pytest.mark.parametrize("stream", [True, False])
def test_c12_cached_tokens_are_part_of_the_prompt(stream: bool) -> None:
    usage = {
        "prompt_tokens": 2006,
        "completion_tokens": 300,
        "prompt_tokens_details": {"cached_tokens": 1920},
    }
    prices = Prices(input=Decimal("0.08"), cached_input=Decimal("0.04"), output=Decimal("0.28"))
    expected = (86 * prices.input + 1920 * prices.cached_input + 300 * prices.output) / 10**6
    assert cost(read(usage, stream=stream), prices) == expected
    at_one_price = Prices(prices.input, prices.input, prices.output)
    expected = (2006 * prices.input + 300 * prices.output) / 10**6
    assert cost(read(usage, stream=stream), at_one_price) == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("total", [187, 218, 0, None])
def test_c14_reasoning_tokens_are_part_of_the_completion(stream: bool, total: int | None) -> None:
    usage = {
        "prompt_tokens": 51,
        "completion_tokens": 136,
        "total_tokens": total,
        "completion_tokens_details": {"reasoning_tokens": 31},
    }
    assert read(usage, stream=stream) == (51, 0, 136)


def test_c15_a_million_tiny_costs_are_not_rounded() -> None:
    each = cost(Tokens(9, 0, 12), PAGE)
    assert plain(each) == "0.000001155"
    assert sum([each] * 1_000_000, Decimal(0)) == Decimal("1.155")
    assert cost(Tokens(1, 0, 0), PAGE) == Decimal("0.000000035")


_IDS = re.compile(r"[0-9a-f]{4,}(-[0-9a-f]{4,})+|[0-9a-f]{12}")


def test_c16_all_tell_one_amount(client: Client, db: None) -> None:
    acme = world.organization("Acme", credits=Decimal("0.3"))
    client.force_login(world.person("ada@acme.test", acme))
    key, secret = world.key(acme)
    tenth = Prices(input=Decimal(1), cached_input=Decimal(1), output=Decimal(1))
    for _ in range(10):
        world.finish(world.start(key, prices=tenth), prompt_tokens=1, completion_tokens=0)
    for _ in range(2):
        world.finish(world.start(key, prices=tenth), prompt_tokens=100_000, completion_tokens=0)
    last = world.finish(world.start(key, prices=tenth), prompt_tokens=99_990, completion_tokens=0)
    assert CreditAccount.objects.get(pk=acme.pk).balance == 0
    assert UsageEvent.objects.aggregate(sum=Sum("cost")) == {"sum": Decimal("0.3")}
    headers = {"Authorization": f"Bearer {secret}"}
    assert client.get("/v1/credits", headers=headers).json()["balance"] == "0"
    told = client.get(f"/v1/generations/{last.pk}", headers=headers).text
    assert '"total_cost":0.09999,' in told
    month = f"{datetime.now(UTC):%Y-%m}"
    statement = client.get(f"/v1/statements/{month}", headers=headers).json()
    assert statement["totals"]["charge"] == "-0.3"
    assert statement["closing_balance"] == "0"
    texts = [
        client.get(f"/o/acme/{page}").content.decode()
        for page in (f"statements/{month}.csv", "requests/", "credits/")
    ]
    assert "-0.3" in texts[0]
    assert "$0.000001<" in texts[1]
    for text in texts:
        figures = _IDS.sub("", text).lower()
        assert "99999999" not in figures
        assert "e-0" not in figures


def test_c17_a_model_without_a_price_is_not_served(db: None) -> None:
    row = CatalogModel.objects.create(model_id="acme/priceless:1", context_window=4096)
    with pytest.raises(ModelNotFound):
        catalog.load().find(row.model_id)
    ModelPrice.objects.create(model=row, input=1, cached_input=1, output=1)
    assert catalog.load().find(row.model_id).id == "acme/priceless:1"
