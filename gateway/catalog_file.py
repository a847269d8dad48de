"""The catalog as a TOML file: read it whole, then make the tables match it.

Keeps the form of the file. `parse` refuses what it does not understand, with the model and the
key in the text; `load` writes all of it or nothing. A listed model is made to match the file; a
model that the file does not list is never touched, and a price version is never changed.
"""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from billing.pricing import Prices
from gateway import policy
from gateway.models import Backend, CatalogModel, ModelPrice
from gateway.toml_table import Table, TableError


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend as the file lists it. `continuous_usage` None: as the operators' admin has it."""

    name: str
    url: str
    served_model_name: str
    api_key: str = field(default="", repr=False)
    api_key_env: str = ""
    weight: int = 1
    continuous_usage: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model as the file lists it."""

    id: str
    context_window: int
    prices: Prices
    image_input: bool = False
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = False
    status: str = CatalogModel.Status.SERVING
    parameters: Mapping[str, str] = field(default_factory=dict)
    backends: tuple[BackendEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` did, by model ID; a model can be in both `changed` and `repriced`."""

    created: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    repriced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


def read(path: Path) -> list[ModelEntry]:
    """Return the models of a catalog file. Raises TableError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(error.strerror) from None
    except UnicodeDecodeError:
        raise TableError("is not UTF-8") from None
    return parse(text)


def parse(text: str) -> list[ModelEntry]:
    """Return the models that the TOML text lists. Raises TableError."""
    try:
        top = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"not TOML: {error}") from None
    models = top.pop("models", None)
    for key in top:
        raise TableError(f"{key}: is not a known key; the file holds [[models]]")
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise TableError("models: there must be [[models]] tables")
    entries = [_model(number, values) for number, values in enumerate(models, 1)]
    ids = [entry.id for entry in entries]
    for model_id in ids:
        if ids.count(model_id) > 1:
            raise TableError(f"model '{model_id}': is listed more than once")
    return entries


def check_parameters(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return overrides of the parameter policy as they may be stored. Raises ValueError."""
    for name, action in parameters.items():
        if name in policy.FIXED:
            raise ValueError(f"{name}: the gateway decides on this itself")
        if action not in policy.ACTIONS:
            raise ValueError(f"{name}: must be one of {', '.join(policy.ACTIONS)}, not {action!r}")
    return dict(parameters)


def _model(number: int, values: dict[str, Any]) -> ModelEntry:
    table = Table(f"model number {number}", values)
    model_id = table.take("id", str)
    table.where = f"model '{model_id}'"
    input_price = table.take_price("input_usd_per_million")
    try:
        parameters = check_parameters(table.take("parameters", dict, {}))
    except ValueError as error:
        raise table.error("parameters", str(error)) from None
    entry = ModelEntry(
        id=model_id,
        context_window=table.take("context_window", int),
        prices=Prices(
            input=input_price,
            cached_input=table.take_price("cached_input_usd_per_million", input_price),
            output=table.take_price("output_usd_per_million"),
        ),
        image_input=table.take("image_input", bool, False),
        max_output_tokens=table.take("max_output_tokens", int, None),
        parallel_tool_calls=table.take("parallel_tool_calls", bool, False),
        status=table.take("status", str, CatalogModel.Status.SERVING),
        parameters=parameters,
        backends=tuple(
            _backend(f"{table.where}: backend {position}", backend)
            for position, backend in enumerate(table.take_tables("backends"), 1)
        ),
    )
    table.end()
    if entry.max_output_tokens is not None and entry.max_output_tokens < 1:
        raise table.error("max_output_tokens", "must be at least 1")
    _check_columns(table.where, CatalogModel(model_id=model_id, **_model_columns(entry)))
    _check_distinct(table, entry.backends)
    return entry


def _backend(where: str, values: dict[str, Any]) -> BackendEntry:
    table = Table(where, values)
    url = table.take("url", str)
    entry = BackendEntry(
        name=table.take("name", str, url.partition("://")[2].removesuffix("/").removesuffix("/v1")),
        url=url,
        served_model_name=table.take("served_model_name", str),
        api_key=table.take("api_key", str, ""),
        api_key_env=table.take("api_key_env", str, ""),
        weight=table.take("weight", int, 1),
        continuous_usage=table.take("continuous_usage", bool, None),
    )
    table.end()
    if entry.api_key and entry.api_key_env:
        raise table.error("api_key_env", "give it or api_key, not both")
    _check_columns(where, Backend(**_backend_columns(entry)))
    return entry


def _check_columns(where: str, row: CatalogModel | Backend) -> None:
    """Let the columns judge what fits them: lengths, ranges, URLs, choices."""
    try:
        row.clean_fields(exclude=["model"])
    except ValidationError as refusal:
        for name, messages in refusal.message_dict.items():
            key = "id" if name == "model_id" else name
            raise TableError(f"{where}: {key}: {' '.join(messages)}") from None


def _check_distinct(table: Table, backends: tuple[BackendEntry, ...]) -> None:
    if len({(entry.url, entry.served_model_name) for entry in backends}) < len(backends):
        raise table.error("backends", "two have the same url and served_model_name")
    if len({entry.name for entry in backends}) < len(backends):
        raise table.error("backends", "two have the same name; give each its own `name`")


def load(entries: list[ModelEntry]) -> Loaded:
    """Make the catalog match these entries, all or nothing, and return what was done."""
    loaded = Loaded()
    with transaction.atomic():
        # Under each row's lock, so that two loads at once make one price version; in one order, so
        # that they cannot wait for each other.
        for entry in sorted(entries, key=lambda entry: entry.id):
            columns = _model_columns(entry)
            model, created = CatalogModel.objects.select_for_update().get_or_create(
                model_id=entry.id, defaults=columns
            )
            changed = _change(model, columns)
            changed = _match_backends(model, entry.backends) or changed
            repriced = _reprice(model, entry.prices)
            if created:
                loaded.created.append(entry.id)
            elif not (changed or repriced):
                loaded.unchanged.append(entry.id)
            else:
                loaded.changed.extend([entry.id] if changed else [])
                loaded.repriced.extend([entry.id] if repriced else [])
    return loaded


def withdraw(*, except_for: Collection[str]) -> None:
    """Serve no other model than these; what is withdrawn is neither listed nor lost."""
    CatalogModel.objects.exclude(model_id__in=except_for).update(
        status=CatalogModel.Status.COMING_SOON
    )


def _model_columns(entry: ModelEntry) -> dict[str, Any]:
    return {
        "status": entry.status,
        "context_window": entry.context_window,
        "max_output_tokens": entry.max_output_tokens,
        "image_input": entry.image_input,
        "parallel_tool_calls": entry.parallel_tool_calls,
        "parameters": dict(entry.parameters),
    }


def _backend_columns(entry: BackendEntry) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "name": entry.name,
        "url": entry.url,
        "served_model_name": entry.served_model_name,
        "api_key": entry.api_key,
        "api_key_env": entry.api_key_env,
        "weight": entry.weight,
    }
    if entry.continuous_usage is not None:
        columns["continuous_usage"] = entry.continuous_usage
    return columns


def _change(row: CatalogModel | Backend, columns: dict[str, Any]) -> bool:
    changed = {name: value for name, value in columns.items() if getattr(row, name) != value}
    for name, value in changed.items():
        setattr(row, name, value)
    if changed:
        row.save(update_fields=list(changed))
    return bool(changed)


def _match_backends(model: CatalogModel, entries: tuple[BackendEntry, ...]) -> bool:
    # A backend is the same one while its name, its URL and its model name are the same; all else
    # of it is updated in place, and one that an operator disabled stays disabled.
    rows = {(row.name, row.url, row.served_model_name): row for row in model.backends.all()}
    wanted = {(entry.name, entry.url, entry.served_model_name): entry for entry in entries}
    gone = [row.pk for identity, row in rows.items() if identity not in wanted]
    # Nothing refers to a backend: usage events hold its name. Deleted first, to free the names.
    model.backends.filter(pk__in=gone).delete()
    changed = bool(gone)
    for identity, entry in wanted.items():
        columns = _backend_columns(entry)
        if identity not in rows:
            Backend.objects.create(model=model, **columns)
            changed = True
        elif _change(rows[identity], columns):
            changed = True
    return changed


def _reprice(model: CatalogModel, prices: Prices) -> bool:
    now = timezone.now()
    begun = model.prices.filter(effective_from__lte=now)
    current = begun.order_by("-effective_from", "-pk").first()
    if current and Prices(current.input, current.cached_input, current.output) == prices:
        return False
    ModelPrice.objects.create(
        model=model,
        input=prices.input,
        cached_input=prices.cached_input,
        output=prices.output,
        effective_from=now,
    )
    return True
