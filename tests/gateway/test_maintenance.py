"""Maintenance: the switch, for all and for one model, and its command."""

import json
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.utils import timezone

from gateway import maintenance
from gateway.models import CatalogModel, Maintenance

UNTIL = datetime(2090, 1, 31, 18, 0, tzinfo=UTC)


@pytest.fixture
def model(db: None) -> CatalogModel:
    return CatalogModel.objects.create(model_id="test/qwen", context_window=1000)


def switches() -> list[tuple[str | None, datetime, str]]:
    rows = Maintenance.objects.select_related("model").order_by("until")
    return [(row.model.model_id if row.model else None, row.until, row.message) for row in rows]


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("maintenance", *arguments, stdout=out)
    return out.getvalue()


def test_it_works(model: CatalogModel) -> None:
    maintenance.switch_on(until=UNTIL, message="New disks.")
    assert switches() == [(None, UNTIL, "New disks.")]
    assert maintenance.switch_off()
    assert switches() == []


def test_one_model_and_all_are_two_switches(model: CatalogModel) -> None:
    maintenance.switch_on(until=UNTIL)
    maintenance.switch_on(until=UNTIL + timedelta(1), model_id="test/qwen")
    assert [who for who, *_ in switches()] == [None, "test/qwen"]
    maintenance.switch_off()
    assert [who for who, *_ in switches()] == ["test/qwen"]


@pytest.mark.parametrize("model_id", [None, "test/qwen"])
def test_switching_on_again_moves_the_end(model: CatalogModel, model_id: str | None) -> None:
    first = maintenance.switch_on(until=UNTIL, model_id=model_id)
    later = UNTIL + timedelta(1)
    again = maintenance.switch_on(until=later, model_id=model_id, message="Longer.")
    assert again.pk == first.pk
    assert switches() == [(model_id, later, "Longer.")]


def test_one_that_ran_out_is_over(model: CatalogModel) -> None:
    past = timezone.now() - timedelta(hours=1)
    old = Maintenance.objects.create(model=model, until=past)
    assert maintenance.switch_on(until=UNTIL, model_id="test/qwen").pk != old.pk
    Maintenance.objects.update(until=past)
    assert not maintenance.switch_off(model_id="test/qwen")
    assert switches() == []


def test_switching_off_twice_is_no_error(db: None) -> None:
    maintenance.switch_off()
    assert not maintenance.switch_off()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"until": datetime(2020, 1, 1, tzinfo=UTC)}, "2020-01-01 00:00:00 UTC is in the past"),
        ({"model_id": "test/nothing"}, "No model has the ID 'test/nothing'"),
        ({"message": "x" * 301}, "The message:"),
    ],
)
def test_it_refuses(model: CatalogModel, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(maintenance.MaintenanceRefused, match=message):
        maintenance.switch_on(**{"until": UNTIL, **fields})
    assert switches() == []


def test_it_cannot_end_the_maintenance_of_an_unknown_model(db: None) -> None:
    with pytest.raises(maintenance.MaintenanceRefused):
        maintenance.switch_off(model_id="test/nothing")


def test_the_command(model: CatalogModel) -> None:
    assert run("on", "--until", "2090-01-31T19:00+01:00", "--message", "New disks.") == (
        "Maintenance of all models is on until 2090-01-31 18:00:00 UTC.\n"
    )
    assert switches() == [(None, UNTIL, "New disks.")]
    assert run("off") == "Maintenance of all models is off.\n"
    assert run("off") == "Maintenance of all models is off, as it was before.\n"


def test_the_command_for_a_model_in_json(model: CatalogModel) -> None:
    told = json.loads(run("on", "--until=2090-01-31T18:00:00Z", "--model=test/qwen", "--json"))
    assert told == {
        "maintenance": "on",
        "model": "test/qwen",
        "until": "2090-01-31T18:00:00+00:00",
        "message": "",
    }
    told = json.loads(run("off", "--model", "test/qwen", "--json"))
    assert told == {"maintenance": "off", "model": "test/qwen", "was_on": True}


def test_a_time_without_a_zone_is_utc(db: None) -> None:
    run("on", "--until", "2090-01-31T18:00:00")
    assert switches() == [(None, UNTIL, "")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["on"], "needs --until"),
        (["on", "--until", "soon"], "'soon' is no ISO 8601 time"),
        (["on", "--until", "2020-01-01T00:00:00Z"], "is in the past"),
        (["on", "--until", "2090-01-01", "--model", "nothing"], "No model has the ID"),
        (["off", "--until", "2090-01-01"], "takes no --until"),
        (["off", "--model", "nothing"], "No model has the ID"),
    ],
)
def test_the_command_refuses(db: None, arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*arguments)
