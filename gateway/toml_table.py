"""A TOML table that is read key by key, so that every error names its place and its key.

Knows types and prices; what a catalog is, `catalog_file` knows.
"""

from typing import Any, TypeVar, cast

from django.core.exceptions import ValidationError

from billing.fields import PriceField

T = TypeVar("T")

_REQUIRED = object()
_KINDS = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    list: "an array",
    dict: "a table",
}


class TableError(Exception):
    """The table is not as it must be; the text names the place and the key."""


class Table:
    """A TOML table, taken key by key; what nobody took is an unknown key."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self.where = where
        self.values = dict(values)

    def take(self, key: str, kind: type[T], default: Any = _REQUIRED) -> T:
        if key not in self.values:
            if default is _REQUIRED:
                raise self.error(key, "is missing")
            return cast(T, default)
        value = self.values.pop(key)
        # Python's True is an int; a file that says context_window = true is wrong.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(key, f"must be {_KINDS[kind]}, not {value!r}")
        return value

    def take_price(self, key: str, default: Any = _REQUIRED) -> Any:
        """Take USD per million tokens. TOML floats are refused: 0.1 would not be a tenth."""
        if key not in self.values and default is not _REQUIRED:
            return default
        value = self.values.get(key)
        if isinstance(value, float):
            raise self.error(key, f'is a float; write it as a string, as in "{value}"')
        if type(value) is int:
            self.values[key] = str(value)
        try:
            price = PriceField().clean(self.take(key, str), None)
        except ValidationError as refusal:
            raise self.error(key, " ".join(refusal.messages)) from None
        if price < 0:
            raise self.error(key, f"must not be negative: {value}")
        return price

    def take_tables(self, key: str) -> list[dict[str, Any]]:
        tables = self.take(key, list, [])
        if not all(isinstance(table, dict) for table in tables):
            raise self.error(key, f"must be tables: [[models.{key}]]")
        return tables

    def end(self) -> None:
        for key in self.values:
            raise self.error(key, "is not a known key")

    def error(self, key: str, what: str) -> TableError:
        return TableError(f"{self.where}: {key}: {what}")
