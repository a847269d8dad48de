"""USD as whole picodollars (1e-12 USD): the model fields, and the text a customer reads.

Keeps the two conversions between a database integer and an exact Decimal, and refuses every value
that would have to be rounded. Never rounds and never uses a float: SQLite loses the twelfth place
of a DecimalField at 100,000 USD, and a double prints 0.000001155 as 1.155e-06.
"""

from decimal import Context, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

USD_PLACES = 12
PRICE_PLACES = 6

# A signed 64-bit column ends at 9.22e18; the constraints of the tables stop at this round figure.
MONEY_MAX = Decimal(9_000_000)

# Python's default context rounds at 28 digits, silently.
_EXACT = Context(prec=40)


def plain(amount: Decimal) -> str:
    """Return `amount` in plain decimals: no exponent, no trailing zeros, `0` for zero.

    This text stands in `usage.cost`, the usage API, pages and files alike, so that one amount
    reads the same everywhere to the last digit.
    """
    text = f"{amount:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in {"-0", ""} else text


if TYPE_CHECKING:
    _Field = models.Field[Any, Any]
else:
    _Field = models.Field  # generic in the stubs only


class ExactDecimalField(_Field):
    """A Decimal of fixed `places`, stored as a whole number of the smallest unit in a BIGINT.

    Assigning a value with more places, or one that is no number, raises ValidationError when it
    is written: what is stored is what was meant, or nothing is stored.
    """

    places: int
    default_validators = [MinValueValidator(-MONEY_MAX), MaxValueValidator(MONEY_MAX)]

    def get_internal_type(self) -> str:
        return "BigIntegerField"

    @property
    def unit(self) -> Decimal:
        return Decimal(1).scaleb(-self.places)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Decimal | None:
        # PostgreSQL's SUM over BIGINT is a numeric, so an aggregate arrives as a Decimal.
        return None if value is None else Decimal(value).scaleb(-self.places, _EXACT)

    def to_python(self, value: Any) -> Decimal | None:
        if value is None:
            return None
        if isinstance(value, float):
            raise ValidationError("Money is never a float.", code="float")
        try:
            amount = Decimal(value).quantize(self.unit, context=_EXACT)
            exact = amount == Decimal(value)
        except (InvalidOperation, TypeError, ValueError):
            raise ValidationError(f"{value!r} is not an amount.", code="invalid") from None
        if not exact:
            raise ValidationError(
                f"{value} has more than {self.places} decimal places.", code="inexact"
            )
        return amount

    def get_prep_value(self, value: Any) -> int | None:
        amount = self.to_python(value)
        return None if amount is None else int(amount.scaleb(self.places, _EXACT))

    def formfield(self, **kwargs: Any) -> Any:
        return super().formfield(
            **{
                "form_class": forms.DecimalField,
                "decimal_places": self.places,
                "max_digits": 7 + self.places,
                **kwargs,
            }
        )

    def value_to_string(self, obj: models.Model) -> str:
        return plain(self.value_from_object(obj))


class MoneyField(ExactDecimalField):
    """An amount in USD, exact to the picodollar; at most `MONEY_MAX` either way."""

    places = USD_PLACES


class PriceField(ExactDecimalField):
    """A price in USD per million tokens, with up to six decimals.

    Its stored integer is picodollars per token, so tokens times price is a whole number.
    """

    places = PRICE_PLACES
