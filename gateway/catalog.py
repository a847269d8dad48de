"""The catalog as values: what this process serves, from memory.

`load` reads the tables of the operators whole; `Catalog` answers from what it read. The tables are
small, so a process reads them anew every second (see `process`) rather than trust a version
counter that a hand in the database would forget to raise. Never decides which backend to use.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.utils import timezone

from billing.pricing import Prices
from gateway import policy
from gateway.errors import ModelNotFound, UnderMaintenance
from gateway.models import Backend as BackendRow
from gateway.models import CatalogModel, Maintenance, ModelPrice


@dataclass(frozen=True, slots=True)
class Backend:
    """A model server that may be asked now. `url` is the base of its API, without a last slash."""

    id: int
    name: str
    url: str
    served_model_name: str
    api_key: str = field(repr=False)
    weight: int
    continuous_usage: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """A maintenance that is on until its end."""

    message: str
    until: datetime

    def refuse(self) -> None:
        """Raise UnderMaintenance while the maintenance lasts."""
        if timezone.now() < self.until:
            raise UnderMaintenance(self.message, self.until)


@dataclass(frozen=True, slots=True)
class Model:
    """A serving model. Without prices it is listed nowhere and cannot be served."""

    id: str
    created_at: datetime
    context_window: int
    max_output_tokens: int
    image_input: bool
    parallel_tool_calls: bool
    prices: Prices
    cells: Mapping[str, policy.Cell]
    backends: tuple[Backend, ...]
    maintenance: Notice | None

    def refuse_maintenance(self) -> None:
        if self.maintenance:
            self.maintenance.refuse()


@dataclass(frozen=True, slots=True)
class Catalog:
    models: Mapping[str, Model]
    maintenance: Notice | None

    def find(self, model_id: str) -> Model:
        """Return the model of exactly this ID. Raises ModelNotFound."""
        model = self.models.get(model_id)
        if model is None:
            served = ", ".join(sorted(self.models)) or "none"
            raise ModelNotFound(
                f"The model '{model_id[:200]}' does not exist. Served models: {served}.",
                param="model",
            )
        return model

    def refuse_maintenance(self) -> None:
        if self.maintenance:
            self.maintenance.refuse()


def load() -> Catalog:
    """Read the catalog from the database."""
    now = timezone.now()
    prices: dict[int, Prices] = {}
    # The newest version that has begun is in force; `order_by` makes it the last to be set.
    for row in ModelPrice.objects.filter(effective_from__lte=now).order_by("effective_from", "pk"):
        prices[row.model_id] = Prices(row.input, row.cached_input, row.output)
    notices = {
        row.model_id: Notice(row.message, row.until)
        for row in Maintenance.objects.filter(until__gt=now)
    }
    backends: dict[int, list[Backend]] = {}
    for backend in BackendRow.objects.filter(enabled=True, weight__gt=0).order_by("pk"):
        backends.setdefault(backend.model_id, []).append(_backend(backend))
    models = {
        row.model_id: Model(
            id=row.model_id,
            created_at=row.created_at,
            context_window=row.context_window,
            max_output_tokens=row.max_output_tokens or row.context_window,
            image_input=row.image_input,
            parallel_tool_calls=row.parallel_tool_calls,
            prices=prices[row.pk],
            cells=policy.cells_of(row.model_id, row.parameters),
            backends=tuple(backends.get(row.pk, ())),
            maintenance=notices.get(row.pk),
        )
        for row in CatalogModel.objects.filter(status=CatalogModel.Status.SERVING)
        if row.pk in prices
    }
    return Catalog(models=models, maintenance=notices.get(None))


def _backend(row: BackendRow) -> Backend:
    return Backend(
        id=row.pk,
        name=row.name,
        url=row.url.rstrip("/"),
        served_model_name=row.served_model_name,
        api_key=os.environ.get(row.api_key_env, "") if row.api_key_env else row.api_key,
        weight=row.weight,
        continuous_usage=row.continuous_usage,
    )
