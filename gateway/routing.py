"""Which backend serves a request. Decides without awaiting; knows nothing of connections."""

import random
from collections.abc import Collection

from gateway.catalog import Backend, Model
from gateway.errors import Unavailable


def choose(model: Model, *, except_for: Collection[int] = ()) -> Backend:
    """Choose among the model's backends by weight. Raises Unavailable when none is left."""
    candidates = [backend for backend in model.backends if backend.id not in except_for]
    if not candidates:
        raise Unavailable(f"No backend of '{model.id}' is available. Try again later.")
    if len(candidates) == 1:
        return candidates[0]
    weights = [backend.weight for backend in candidates]
    return random.choices(candidates, weights)[0]  # noqa: S311 balances load, guards nothing
