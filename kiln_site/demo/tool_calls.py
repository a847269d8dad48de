"""The tool calls of the demo model: arguments built from the JSON schema and the prompt's words.

They fit the usual schemas (objects, enums, ranges, arrays, $ref, anyOf) and are the same for the
same prompt. They are no proof of understanding. This module never does I/O.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln_site.demo.prose import topics

NAMES = re.compile(r"(?<!^)(?<![.!?] )\b[A-Z][\w-]+")
NUMBERS = re.compile(r"-?\d+(?:\.\d+)?")
DEPTH_MAX = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


def call(tool: Mapping[str, Any], text: str, key: str, *, ascii_only: bool = False) -> ToolCall:
    """Call this tool with arguments made from its schema and from what the user said."""
    function = tool["function"]
    schema = function.get("parameters")
    value = _value(schema, "", text, schema, 0) if isinstance(schema, dict) else {}
    if not isinstance(value, dict):
        value = {}
    digest = hashlib.blake2b(f"{key}/{function['name']}".encode("utf-8", "replace"), digest_size=12)
    return ToolCall(
        id=f"call_{digest.hexdigest()}",
        name=function["name"],
        arguments=json.dumps(value, ensure_ascii=ascii_only),
    )


def _value(schema: Any, name: str, text: str, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return None
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return _option(schema["enum"], text)
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(several), list) and schema[several]:
            return _value(schema[several][0], name, text, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        return _value(_referred(schema["$ref"], root), name, text, root, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties")
        items = properties.items() if isinstance(properties, dict) else ()
        return {key: _value(part, str(key), text, root, depth + 1) for key, part in items}
    if kind == "array":
        return [_value(schema.get("items", {"type": "string"}), name, text, root, depth + 1)]
    if kind in ("integer", "number"):
        return _number(schema, text, whole=kind == "integer")
    if kind == "boolean":
        return True
    return None if kind == "null" else _string(name, text)


def _option(options: Sequence[Any], text: str) -> Any:
    """The first option that the user named, else the first."""
    named = (option for option in options if str(option).lower() in text.lower())
    return next(named, options[0])


def _number(schema: Mapping[str, Any], text: str, *, whole: bool) -> float | int:
    found = NUMBERS.search(text)
    value = float(found[0]) if found else 1.0
    least, most = schema.get("minimum"), schema.get("maximum")
    if isinstance(least, int | float):
        value = max(value, least)
    if isinstance(most, int | float):
        value = min(value, most)
    return int(value) if whole or value == int(value) else value


def _string(name: str, text: str) -> str:
    """A proper name, else a word worth talking about, else the name of the argument itself."""
    names = NAMES.findall(text)
    if names:
        return str(names[-1])
    words = topics(text)
    return words[-1] if words else (name or "value")


def _referred(reference: str, root: Any) -> Any:
    """Follow a reference like `#/$defs/place` within the schema."""
    for step in reference.removeprefix("#/").split("/"):
        root = root.get(step) if isinstance(root, dict) else None
    return root
