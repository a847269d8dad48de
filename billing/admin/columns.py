"""What the pages of the admin have in common: exact amounts, and rows that nobody may change."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest

from billing.money import plain

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin  # generic in the stubs only


def usd(field: str) -> Callable[[Any], str]:
    """Return a column that shows the amount in `field` to the last digit."""

    @admin.display(description=f"{field.replace('_', ' ')} (USD)")
    def column(row: Any) -> str:
        return plain(getattr(row, field))

    return column


class ReadOnlyAdmin(ModelAdmin):
    """Shows rows whose one writer is a module of billing; `shown` is what their pages hold."""

    shown: ClassVar[Sequence[str | Callable[[Any], str]]]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.shown

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.shown

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
