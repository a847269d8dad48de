"""The parameter policy: what the gateway does with each parameter of a request.

One table drives behaviour, `/v1/models` and the docs. It is the API page's "Request body", with
an `action` for each `status` (beyond-the-page.md section 5, rulings.md 10 and 30). A catalog model
may override the action of any cell. Reads and returns values; never touches messages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import UnsupportedParameter

ACTIONS = ("forward", "drop", "reject")


@dataclass(frozen=True, slots=True)
class Cell:
    """What the page says of a parameter, and what is done with it: forward, drop or reject."""

    status: str  # supported, passed_through, ignored, not_supported
    action: str


DEFAULTS: dict[str, Cell] = {
    "model": Cell("supported", "forward"),
    "messages": Cell("supported", "forward"),
    "max_tokens": Cell("supported", "forward"),
    "stream": Cell("supported", "forward"),
    "tools": Cell("supported", "forward"),
    # This cell means the forced forms, "required" and a named function; "auto" and "none" pass.
    "tool_choice": Cell("not_supported", "reject"),
    "stream_options": Cell("supported", "forward"),
    "parallel_tool_calls": Cell("not_supported", "forward"),
    "reasoning_effort": Cell("supported", "forward"),
    "temperature": Cell("passed_through", "forward"),
    "top_p": Cell("passed_through", "forward"),
    "n": Cell("passed_through", "forward"),
    "seed": Cell("passed_through", "forward"),
    "presence_penalty": Cell("passed_through", "forward"),
    "frequency_penalty": Cell("passed_through", "forward"),
    "stop": Cell("ignored", "drop"),
    "response_format": Cell("not_supported", "forward"),
    # This cell means the value true.
    "ignore_eos": Cell("not_supported", "forward"),
    # Control fields of model servers, no OpenAI parameters: a customer has no business with the
    # scheduling or the cache of a backend.
    "priority": Cell("not_supported", "drop"),
    "timings_per_token": Cell("not_supported", "drop"),
    "cache_salt": Cell("not_supported", "drop"),
    "kv_transfer_params": Cell("not_supported", "drop"),
}

# The gateway decides on these itself; an override would be a dead option.
FIXED = frozenset({"model", "messages", "stream", "stream_options"})


def _is_forced(tool_choice: Any) -> bool:
    return tool_choice == "required" or isinstance(tool_choice, dict)


# Cells that mean some values of their parameter only.
_MEANT: dict[str, Callable[[Any], bool]] = {
    "tool_choice": _is_forced,
    "ignore_eos": lambda value: value is True,
}

_ADVICE = {
    "tool_choice": "Forced tool choice is not supported on this model; send 'auto'.",
    "ignore_eos": "'ignore_eos' is not supported on this model.",
}


def cells_of(model_id: str, overrides: Mapping[str, str]) -> dict[str, Cell]:
    """Return the policy of a model: the defaults, what its family says, its overrides."""
    cells = dict(DEFAULTS)
    if model_id.startswith("gpt-oss"):
        cells["ignore_eos"] = Cell("not_supported", "reject")
    for name, action in overrides.items():
        known = cells.get(name, Cell("passed_through", "forward"))
        cells[name] = Cell(known.status, action)
    return cells


def apply(fields: Mapping[str, Any], cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Return the fields that are forwarded. Raises UnsupportedParameter.

    A null is an absent parameter: it is forwarded as it is, never rejected.
    """
    forwarded = {}
    for name, value in fields.items():
        cell = cells.get(name)
        if cell is None or cell.action == "forward" or not _is_meant(name, value):
            forwarded[name] = value
        elif cell.action == "reject":
            raise UnsupportedParameter(
                _ADVICE.get(name, f"'{name}' is not supported on this model."), param=name
            )
    return forwarded


def _is_meant(name: str, value: Any) -> bool:
    meant = _MEANT.get(name)
    return value is not None and (meant is None or meant(value))
