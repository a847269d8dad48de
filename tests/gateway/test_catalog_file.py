"""The catalog file: its form, its errors, and that loading it makes the tables match it."""

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from billing.pricing import Prices, cost
from gateway import catalog_file
from gateway.catalog_file import BackendEntry, ModelEntry
from gateway.models import Backend, CatalogModel, ModelPrice
from gateway.toml_table import TableError

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "catalog.example.toml"
WHOLE = """
[[models]]
id = "test/qwen"
context_window = 32768
input_usd_per_million = "0.08"
cached_input_usd_per_million = "0.04"
output_usd_per_million = "0.28"
image_input = false
[models.parameters]
stop = "forward"
[[models.backends]]
url = "http://127.0.0.1:9000/v1"
served_model_name = "qwen"
api_key = ""
weight = 1
"""
LEAST = """
[[models]]
id = "test/qwen"
context_window = 32768
input_usd_per_million = 1
output_usd_per_million = "2"
"""
BACKEND = """
[[models.backends]]
url = "http://10.0.0.7:8000/v1"
served_model_name = "qwen"
"""
QWEN = Prices(input=Decimal("0.08"), cached_input=Decimal("0.04"), output=Decimal("0.28"))


def parse_one(text: str) -> ModelEntry:
    [entry] = catalog_file.parse(text)
    return entry


def model() -> CatalogModel:
    return CatalogModel.objects.get(model_id="test/qwen")


def prices() -> list[Prices]:
    rows = ModelPrice.objects.filter(model__model_id="test/qwen").order_by("effective_from", "pk")
    return [Prices(row.input, row.cached_input, row.output) for row in rows]


def backends() -> list[Backend]:
    return list(Backend.objects.filter(model__model_id="test/qwen").order_by("pk"))


def load(*entries: ModelEntry) -> dict[str, list[str]]:
    """Load, and return what was done to which models, where anything was."""
    loaded = catalog_file.load(list(entries))
    return {
        what: ids
        for what in ("created", "changed", "repriced", "unchanged")
        if (ids := getattr(loaded, what))
    }


def test_it_works() -> None:
    assert parse_one(WHOLE) == ModelEntry(
        id="test/qwen",
        context_window=32768,
        prices=QWEN,
        image_input=False,
        parameters={"stop": "forward"},
        backends=(
            BackendEntry(
                name="127.0.0.1:9000", url="http://127.0.0.1:9000/v1", served_model_name="qwen"
            ),
        ),
    )


def test_what_may_be_left_out() -> None:
    entry = parse_one(LEAST)
    assert entry.prices == Prices(Decimal(1), Decimal(1), Decimal(2))
    assert (entry.max_output_tokens, entry.parallel_tool_calls) == (None, False)
    assert (entry.status, entry.parameters, entry.backends) == ("serving", {}, ())


def test_the_optional_keys() -> None:
    entry = parse_one(
        LEAST
        + 'max_output_tokens = 100\nparallel_tool_calls = true\nstatus = "coming_soon"\n'
        + BACKEND
        + 'name = "rack-1"\napi_key_env = "RACK_KEY"\nweight = 3\ncontinuous_usage = true\n'
    )
    assert (entry.max_output_tokens, entry.parallel_tool_calls) == (100, True)
    assert entry.status == "coming_soon"
    [backend] = entry.backends
    assert (backend.name, backend.api_key_env) == ("rack-1", "RACK_KEY")
    assert (backend.weight, backend.continuous_usage) == (3, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= 1", "not TOML"),
        ("", r"there must be \[\[models\]\]"),
        ("models = 1", r"there must be \[\[models\]\]"),
        ("models = [1]", r"there must be \[\[models\]\]"),
        ("version = 1\n" + WHOLE, "version: is not a known key"),
        ("[[models]]\n", "model number 1: id: is missing"),
        (WHOLE + WHOLE, "model 'test/qwen': is listed more than once"),
    ],
)
def test_a_file_that_is_no_catalog(text: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        catalog_file.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "test/qwen"', 'id = ""', "id: This field cannot be blank"),
        ('id = "test/qwen"', "id = 7", "model number 1: id: must be a string, not 7"),
        ("context_window = 32768", "", "context_window: is missing"),
        ("context_window = 32768", "context_window = true", "must be a whole number, not True"),
        ("context_window = 32768", "context_window = 0", "context_window: Ensure"),
        ("context_window = 32768", "context_window = -1", "context_window: Ensure"),
        ('"0.08"', "0.08", r'input_usd_per_million: is a float; write it .*"0\.08"'),
        ('"0.08"', '"cheap"', "input_usd_per_million: 'cheap' is not an amount"),
        ('"0.08"', '"NaN"', "input_usd_per_million: 'NaN' is not an amount"),
        ('"0.08"', '"-1"', "input_usd_per_million: must not be negative: -1"),
        ('"0.28"', '"0.0000001"', "output_usd_per_million: .* more than 6 decimal places"),
        ('"0.28"', '"9000001"', "output_usd_per_million: Ensure"),
        ('"0.28"', "true", "output_usd_per_million: must be a string"),
        ('output_usd_per_million = "0.28"', "", "output_usd_per_million: is missing"),
        ("image_input = false", 'image_input = "no"', "image_input: must be true or false"),
        ("image_input = false", "images = false", "images: is not a known key"),
        ("image_input = false", "max_output_tokens = 0", "max_output_tokens: must be at least"),
        ("image_input = false", 'status = "sold"', "status: Value 'sold' is not a valid choice"),
        ('stop = "forward"', 'stop = "keep"', "parameters: stop: must be one of forward, drop"),
        ('stop = "forward"', "stop = true", "parameters: stop: must be one of forward, drop"),
        ('stop = "forward"', 'stream = "drop"', "parameters: stream: the gateway decides"),
        ('stop = "forward"', 'model = "drop"', "parameters: model: the gateway decides"),
    ],
)
def test_an_error_names_the_model_and_the_key(old: str, new: str, message: str) -> None:
    assert old in WHOLE
    with pytest.raises(TableError, match=message) as refusal:
        catalog_file.parse(WHOLE.replace(old, new))
    assert "id:" in str(refusal.value) or "model 'test/qwen': " in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('url = "http://127.0.0.1:9000/v1"', "", "url: is missing"),
        ("http://127.0.0.1:9000/v1", "ftp://127.0.0.1/v1", "url: An http or https URL"),
        ("http://127.0.0.1:9000/v1", "http://user@127.0.0.1/v1", "url: An http or https URL"),
        ('served_model_name = "qwen"', "", "served_model_name: is missing"),
        ('api_key = ""', 'api_key = "a"\napi_key_env = "B"', "api_key_env: give it or api_key"),
        ("weight = 1", "weight = 1.5", "weight: must be a whole number"),
        ("weight = 1", "weight = -1", "weight: Ensure"),
        ("weight = 1", "wait = 1", "wait: is not a known key"),
    ],
)
def test_an_error_of_a_backend_says_which(old: str, new: str, message: str) -> None:
    assert old in WHOLE
    with pytest.raises(TableError, match=f"model 'test/qwen': backend 1: {message}"):
        catalog_file.parse(WHOLE.replace(old, new))


def test_two_backends_must_differ() -> None:
    with pytest.raises(TableError, match="two have the same url and served_model_name"):
        catalog_file.parse(LEAST + BACKEND + BACKEND)
    other = BACKEND.replace('"qwen"', '"qwen-fp8"')
    with pytest.raises(TableError, match="two have the same name"):
        catalog_file.parse(LEAST + BACKEND + other)
    catalog_file.parse(LEAST + BACKEND + other + 'name = "fp8"')


def test_a_key_is_not_in_the_repr() -> None:
    assert "hush" not in repr(parse_one(LEAST + BACKEND + 'api_key = "hush"'))


def test_loading_makes_the_rows(db: None) -> None:
    assert load(parse_one(WHOLE)) == {"created": ["test/qwen"]}
    row = model()
    assert (row.context_window, row.image_input, row.parameters) == (
        32768,
        False,
        {"stop": "forward"},
    )
    assert prices() == [QWEN]
    [backend] = backends()
    assert (backend.url, backend.weight) == ("http://127.0.0.1:9000/v1", 1)
    assert (backend.enabled, backend.continuous_usage) == (True, False)


def test_loading_again_changes_nothing(db: None) -> None:
    load(parse_one(WHOLE))
    before = (model(), prices(), backends())
    assert load(parse_one(WHOLE)) == {"unchanged": ["test/qwen"]}
    assert (model(), prices(), backends()) == before


def test_a_changed_price_is_a_new_version_and_history_stays(db: None) -> None:
    load(parse_one(WHOLE))
    dearer = replace(QWEN, output=Decimal("0.3"))
    assert load(replace(parse_one(WHOLE), prices=dearer)) == {"repriced": ["test/qwen"]}
    assert prices() == [QWEN, dearer]
    assert load(parse_one(WHOLE)) == {"repriced": ["test/qwen"]}
    assert prices() == [QWEN, dearer, QWEN]


def test_the_same_price_in_other_words_is_no_new_version(db: None) -> None:
    load(parse_one(WHOLE))
    load(parse_one(WHOLE.replace('"0.08"', '"0.080"')))
    assert prices() == [QWEN]


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: replace(entry, context_window=1000),
        lambda entry: replace(entry, status="retired"),
        lambda entry: replace(entry, parameters={}),
        lambda entry: replace(entry, max_output_tokens=5),
    ],
)
def test_a_listed_model_is_made_to_match(
    db: None, change: Callable[[ModelEntry], ModelEntry]
) -> None:
    load(parse_one(WHOLE))
    changed = change(parse_one(WHOLE))
    assert load(changed) == {"changed": ["test/qwen"]}
    assert load(changed) == {"unchanged": ["test/qwen"]}
    assert model().context_window == changed.context_window
    assert model().parameters == changed.parameters


def test_backends_are_made_to_match(db: None) -> None:
    load(parse_one(LEAST + BACKEND))
    [first] = backends()
    second = BACKEND.replace("10.0.0.7", "10.0.0.8")
    assert load(parse_one(LEAST + BACKEND + "weight = 5\n" + second)) == {"changed": ["test/qwen"]}
    assert [(row.name, row.weight) for row in backends()] == [
        ("10.0.0.7:8000", 5),
        ("10.0.0.8:8000", 1),
    ]
    assert backends()[0].pk == first.pk
    assert load(parse_one(LEAST + second)) == {"changed": ["test/qwen"]}
    assert [row.name for row in backends()] == ["10.0.0.8:8000"]


def test_backends_may_swap_their_names(db: None) -> None:
    second = BACKEND.replace("10.0.0.7", "10.0.0.8")
    load(parse_one(f'{LEAST}{BACKEND}name = "a"\n{second}name = "b"'))
    load(parse_one(f'{LEAST}{BACKEND}name = "b"\n{second}name = "a"'))
    assert {row.name: row.url for row in backends()} == {
        "a": "http://10.0.0.8:8000/v1",
        "b": "http://10.0.0.7:8000/v1",
    }


def test_what_an_operator_set_in_the_admin_stays(db: None) -> None:
    load(parse_one(LEAST + BACKEND))
    Backend.objects.filter(model=model()).update(enabled=False, continuous_usage=True)
    assert load(parse_one(LEAST + BACKEND)) == {"unchanged": ["test/qwen"]}
    [backend] = backends()
    assert (backend.enabled, backend.continuous_usage) == (False, True)


def test_models_that_are_not_listed_are_not_touched(db: None) -> None:
    load(parse_one(WHOLE))
    load(replace(parse_one(WHOLE), id="test/other"))
    assert len(backends()) == 1
    assert model().status == "serving"


def test_it_loads_all_or_nothing(db: None) -> None:
    bad = replace(parse_one(WHOLE), id="test/bad", status="sold")
    with pytest.raises(Exception, match="catalog_model_status_known"):
        load(parse_one(WHOLE), bad)
    assert not CatalogModel.objects.filter(model_id__startswith="test/").exists()


def test_the_example_has_the_models_of_the_page(db: None) -> None:
    qwen, gpt_oss = catalog_file.read(EXAMPLE)
    assert (qwen.id, qwen.context_window, qwen.prices) == ("qwen3-32b", 32768, QWEN)
    assert (gpt_oss.id, gpt_oss.context_window) == ("gpt-oss-120b", 131072)
    assert not gpt_oss.parallel_tool_calls

    class Example:
        prompt_tokens, cached_tokens, completion_tokens = 9, 0, 12

    assert cost(Example(), gpt_oss.prices) == Decimal("0.000001155")
    load(qwen, gpt_oss)


def test_the_command(db: None, tmp_path: Path) -> None:
    file = tmp_path / "catalog.toml"
    file.write_text(WHOLE)

    def run(*options: str) -> str:
        out = StringIO()
        call_command("load_catalog", str(file), *options, stdout=out)
        return out.getvalue()

    assert run() == "created: test/qwen.\n"
    told: dict[str, Any] = json.loads(run("--json"))
    assert told == {"created": [], "changed": [], "repriced": [], "unchanged": ["test/qwen"]}
    file.write_text(WHOLE.replace('"0.08"', "0.08"))
    with pytest.raises(CommandError, match=r"catalog\.toml: model 'test/qwen': input_usd"):
        run()
    with pytest.raises(CommandError, match=r"nothing\.toml: No such file"):
        call_command("load_catalog", str(tmp_path / "nothing.toml"))


def test_what_is_withdrawn_is_kept_but_not_served(db: None) -> None:
    catalog_file.load(catalog_file.parse(WHOLE))
    served = CatalogModel.objects.create(model_id="served", context_window=1)
    catalog_file.withdraw(except_for=["served"])
    statuses = dict(CatalogModel.objects.values_list("model_id", "status"))
    assert statuses.pop("served") == served.status == "serving"
    assert set(statuses.values()) == {"coming_soon"}
