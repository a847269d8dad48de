"""The operators' admin of the catalog: prices are added, keys go in and never come out."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from gateway.models import Backend, CatalogModel, Maintenance, ModelPrice

NO_PRICES = {"prices-TOTAL_FORMS": "0", "prices-INITIAL_FORMS": "0"}
NO_BACKENDS = {"backends-TOTAL_FORMS": "0", "backends-INITIAL_FORMS": "0"}
MODEL = {"model_id": "test/qwen", "status": "serving", "context_window": "1000"}
PRICE = {
    "prices-TOTAL_FORMS": "1",
    "prices-INITIAL_FORMS": "0",
    "prices-0-input": "0.08",
    "prices-0-cached_input": "0.04",
    "prices-0-output": "0.28",
    "prices-0-effective_from_0": "",
    "prices-0-effective_from_1": "",
}
BACKEND = {
    "name": "rack-1",
    "url": "http://10.0.0.7:8000/v1",
    "served_model_name": "qwen",
    "weight": "1",
    "enabled": "on",
}


@pytest.fixture
def page(django_user_model: Any, client: Client) -> Client:
    """A browser of the operator."""
    operator = django_user_model.objects.create_superuser("operator@kiln.test", "correct horse")
    client.force_login(operator)
    return client


@pytest.fixture
def model(db: None) -> CatalogModel:
    return CatalogModel.objects.create(model_id="test/qwen", context_window=1000)


@pytest.fixture
def backend(model: CatalogModel) -> Backend:
    fields = {"url": "http://10.0.0.7:8000/v1", "served_model_name": "qwen", "name": "rack-1"}
    return Backend.objects.create(model=model, api_key="hush-hush", **fields)


def post(page: Client, where: str, *fields: dict[str, Any]) -> Any:
    sent = {name: value for each in fields for name, value in each.items()}
    return page.post(f"/admin/gateway/{where}", sent)


def test_a_model_is_added_with_its_price(page: Client) -> None:
    answer = post(page, "catalogmodel/add/", MODEL, PRICE, NO_BACKENDS)
    assert answer.status_code == 302
    [price] = ModelPrice.objects.filter(model__model_id="test/qwen")
    assert (price.input, price.output) == (Decimal("0.08"), Decimal("0.28"))
    assert str(price.created_by) == "operator@kiln.test"


def test_a_model_is_not_added_without_a_price(page: Client) -> None:
    empty = {name: "" if "-0-" in name else value for name, value in PRICE.items()}
    assert post(page, "catalogmodel/add/", MODEL, empty, NO_BACKENDS).status_code == 200
    assert not CatalogModel.objects.filter(model_id="test/qwen").exists()


def test_a_price_is_added_and_never_changed(page: Client, model: CatalogModel) -> None:
    old = ModelPrice.objects.create(model=model, input=1, cached_input=1, output=1)
    form = page.get(f"/admin/gateway/catalogmodel/{model.pk}/change/").content.decode()
    assert 'name="prices-0-input"' not in form
    assert "prices-0-DELETE" not in form
    sent = {
        "prices-TOTAL_FORMS": "2",
        "prices-INITIAL_FORMS": "1",
        "prices-0-id": old.pk,
        "prices-0-input": "0",
        "prices-0-DELETE": "on",
        **{name.replace("-0-", "-1-"): value for name, value in PRICE.items() if "-0-" in name},
    }
    answer = post(page, f"catalogmodel/{model.pk}/change/", MODEL, sent, NO_BACKENDS)
    assert answer.status_code == 302
    inputs = model.prices.order_by("pk").values_list("input", flat=True)
    assert list(inputs) == [1, Decimal("0.08")]


@pytest.mark.parametrize(
    "bad",
    [
        {"prices-0-input": "-1"},
        {"prices-0-input": "0.0000001"},
        {"prices-0-input": "NaN"},
        {"prices-0-effective_from_0": "2020-01-01", "prices-0-effective_from_1": "00:00"},
    ],
)
def test_a_bad_price_is_an_error_of_the_form(page: Client, bad: dict[str, str]) -> None:
    assert post(page, "catalogmodel/add/", MODEL, {**PRICE, **bad}, NO_BACKENDS).status_code == 200
    assert not CatalogModel.objects.filter(model_id="test/qwen").exists()


@pytest.mark.parametrize(
    "parameters", ['{"stop": "keep"}', '{"model": "drop"}', "[]x", '["stop"]', '{"stop": 1}']
)
def test_a_bad_policy_is_an_error_of_the_form(
    page: Client, model: CatalogModel, parameters: str
) -> None:
    where = f"catalogmodel/{model.pk}/change/"
    answer = post(page, where, MODEL, NO_PRICES, NO_BACKENDS, {"parameters": parameters})
    assert answer.status_code == 200
    assert b"errorlist" in answer.content


def test_a_policy_is_switched(page: Client, model: CatalogModel) -> None:
    where = f"catalogmodel/{model.pk}/change/"
    sent = {"parameters": '{"stop": "forward"}', "model_id": "renamed"}
    assert post(page, where, MODEL, NO_PRICES, NO_BACKENDS, sent).status_code == 302
    model.refresh_from_db()
    assert (model.model_id, model.parameters) == ("test/qwen", {"stop": "forward"})


def test_a_model_is_not_deleted(page: Client, model: CatalogModel) -> None:
    assert post(page, f"catalogmodel/{model.pk}/delete/", {"post": "yes"}).status_code == 403


def test_a_key_of_a_backend_is_never_shown(page: Client, backend: Backend) -> None:
    for where in (
        "backend/",
        f"backend/{backend.pk}/change/",
        f"backend/{backend.pk}/history/",
        f"catalogmodel/{backend.model_id}/change/",
    ):
        answer = page.get(f"/admin/gateway/{where}")
        assert answer.status_code == 200
        assert b"hush-hush" not in answer.content


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ({"api_key": ""}, ("hush-hush", "")),
        ({}, ("hush-hush", "")),
        ({"api_key": "new"}, ("new", "")),
        ({"api_key_env": "RACK_KEY"}, ("", "RACK_KEY")),
    ],
)
def test_an_empty_key_keeps_the_stored_one(
    page: Client, backend: Backend, sent: dict[str, str], stored: tuple[str, str]
) -> None:
    where = f"backend/{backend.pk}/change/"
    answer = post(page, where, BACKEND, {"model": backend.model_id, **sent})
    assert answer.status_code == 302
    backend.refresh_from_db()
    assert (backend.api_key, backend.api_key_env) == stored
    told = LogEntry.objects.get().get_change_message()
    assert ("API key." in told) == ("api_key" in sent and bool(sent["api_key"]))
    assert "hush" not in told


def test_a_key_and_a_variable_are_not_both_given(page: Client, backend: Backend) -> None:
    both = {"model": backend.model_id, "api_key": "a", "api_key_env": "B"}
    answer = post(page, f"backend/{backend.pk}/change/", BACKEND, both)
    assert b"not both" in answer.content


def test_a_backend_url_carries_no_password(page: Client, model: CatalogModel) -> None:
    bad = {"model": model.pk, "url": "http://user:password@10.0.0.7/v1"}
    assert post(page, "backend/add/", BACKEND, bad).status_code == 200
    assert not model.backends.exists()


def test_backends_are_switched_off_and_on(page: Client, backend: Backend) -> None:
    selected = {"_selected_action": [backend.pk]}
    post(page, "backend/", {"action": "disable", **selected})
    backend.refresh_from_db()
    assert not backend.enabled
    post(page, "backend/", {"action": "enable", **selected})
    backend.refresh_from_db()
    assert backend.enabled


def test_maintenance_is_switched_on_moved_and_off(page: Client, model: CatalogModel) -> None:
    end = {"until_0": "2090-01-31", "until_1": "18:00:00", "message": "New disks."}
    assert post(page, "maintenance/add/", {"model": model.pk, **end}).status_code == 302
    row = Maintenance.objects.get(model=model)
    assert (row.until, row.message) == (datetime(2090, 1, 31, 18, tzinfo=UTC), "New disks.")
    later = {**end, "until_0": "2090-02-01"}
    assert post(page, f"maintenance/{row.pk}/change/", later).status_code == 302
    row.refresh_from_db()
    assert (row.until.day, row.model) == (1, model)
    assert post(page, f"maintenance/{row.pk}/delete/", {"post": "yes"}).status_code == 302
    assert not Maintenance.objects.filter(model=model).exists()


def test_maintenance_of_all_models_is_one(page: Client) -> None:
    end = {"until_0": "2090-01-31", "until_1": "18:00:00"}
    assert post(page, "maintenance/add/", end).status_code == 302
    assert post(page, "maintenance/add/", end).status_code == 200
    selected = {"_selected_action": list(Maintenance.objects.values_list("pk", flat=True))}
    post(page, "maintenance/", {"action": "delete_selected", "post": "yes", **selected})
    assert not Maintenance.objects.exists()


def test_maintenance_does_not_end_in_the_past(page: Client) -> None:
    answer = post(page, "maintenance/add/", {"until_0": "2020-01-31", "until_1": "18:00:00"})
    assert b"The end is in the past." in answer.content
