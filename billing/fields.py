"""The model fields of money: an exact Decimal outside, a whole number in a BIGINT inside.

Refuse every value that would have to be rounded. Why not a DecimalField: SQLite keeps it as a
double and loses the twelfth place at 100,000 USD.
"""

from decimal import Context, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from billing.money import MONEY_MAX, PRICE_PLACES, USD_PLACES, plain

# Python's default context rounds at 28 digits, silently.
_EXACT = Context(prec=40)

if TYPE_CHECKING:
    _Field = models.Field[Any, Any]
else:
    _Field = models.Field  # generic in the stubs only


class PlainDecimalField(forms.DecimalField):
    """Shows an amount in plain decimals, where Django would show 0E-12 for nothing."""

    def prepare_value(self, value: Any) -> Any:
        return plain(value) if isinstance(value, Decimal) else value


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
            if amount.is_nan():
                raise InvalidOperation
            exact = amount == Decimal(value)
        except (InvalidOperation, TypeError, ValueError):
            raise ValidationError(f"{value!r} is not an amount.", code="invalid") from None
        if not exact:
            raise ValidationError(
                f"{value} has more than {self.places} decimal places.", code="inexact"
            )
        return amount

    def get_prep_value(self, value: Any) -> int | None:
        if type(value) is Decimal and value.is_finite():
            # The way of every amount of every request: a quarter of the time of to_python.
            units = value.scaleb(self.places, _EXACT)
            if units == (number := int(units)):
                return number
        amount = self.to_python(value)
        return None if amount is None else int(amount.scaleb(self.places, _EXACT))

    def formfield(self, **kwargs: Any) -> Any:
        return super().formfield(
            **{
                "form_class": PlainDecimalField,
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
