"""The catalog as operators keep it: models, their price versions, their backends, maintenance.

Facts about a row only. The serving process reads these tables through `catalog`, as values.
"""

from typing import ClassVar

from django.conf import settings
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint, Value
from django.db.models.functions import Coalesce, Now

from billing.fields import PriceField

HTTP_URL = RegexValidator(
    r"^https?://[^\s/?#@\\]+(/[^\s?#\\]*)?$",
    "An http or https URL without user, query or fragment.",
)


class CatalogModel(models.Model):
    """What can be asked for, by an ID that is compared exactly."""

    class Status(models.TextChoices):
        SERVING = "serving"
        COMING_SOON = "coming_soon"
        RETIRED = "retired"

    model_id = models.CharField("model ID", max_length=200, unique=True)
    status = models.CharField(max_length=16, choices=Status.choices, default=Status.SERVING)
    context_window = models.PositiveIntegerField(validators=[MinValueValidator(1)])
    max_output_tokens = models.PositiveIntegerField(
        null=True, blank=True, help_text="Empty means the context window."
    )
    image_input = models.BooleanField(default=False)
    parallel_tool_calls = models.BooleanField(default=False)
    parameters = models.JSONField(
        default=dict,
        blank=True,
        help_text='Overrides of the default policy: {"stop": "forward"}; forward, drop or reject.',
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        verbose_name = "model"
        constraints: ClassVar = [
            CheckConstraint(
                name="catalog_model_status_known",
                condition=Q(status__in=["serving", "coming_soon", "retired"]),
            ),
            CheckConstraint(name="catalog_model_id_not_empty", condition=~Q(model_id="")),
        ]

    def __str__(self) -> str:
        return self.model_id


class ModelPrice(models.Model):
    """A price version; the newest one that has begun is in force. History stays."""

    model = models.ForeignKey(CatalogModel, on_delete=models.PROTECT, related_name="prices")
    input = PriceField(help_text="USD per million prompt tokens.")
    cached_input = PriceField(help_text="USD per million prompt tokens from the prefix cache.")
    output = PriceField(help_text="USD per million completion tokens.")
    effective_from = models.DateTimeField(db_default=Now())
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        editable=False,
        related_name="+",
    )

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(name="model_price_version", fields=["model", "effective_from"]),
            CheckConstraint(
                name="model_price_not_negative",
                condition=Q(input__gte=0, cached_input__gte=0, output__gte=0),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model} {self.input}/{self.cached_input}/{self.output}"


class Backend(models.Model):
    """A model server that serves one catalog model."""

    model = models.ForeignKey(CatalogModel, on_delete=models.PROTECT, related_name="backends")
    name = models.CharField(max_length=200, help_text="What usage events call it.")
    url = models.CharField(
        "URL",
        max_length=500,
        validators=[HTTP_URL],
        help_text="The base of its API, as in http://10.0.0.7:8000/v1.",
    )
    served_model_name = models.CharField(max_length=200)
    api_key = models.CharField("API key", max_length=500, blank=True)
    api_key_env = models.CharField(
        "API key variable",
        max_length=100,
        blank=True,
        help_text="An environment variable that holds the key, instead of the key.",
    )
    weight = models.PositiveIntegerField(default=1)
    enabled = models.BooleanField(default=True)
    continuous_usage = models.BooleanField(
        default=False,
        help_text="Ask for usage in every chunk (vLLM), so that a client that leaves is billed "
        "by the server's own count.",
    )
    metrics_url = models.CharField(
        "metrics URL",
        max_length=500,
        blank=True,
        validators=[HTTP_URL],
        help_text="Where vLLM publishes its counters, as in http://10.0.0.7:8000/metrics: its "
        "tokens are compared with those of usage events. Empty: no comparison.",
    )

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(name="backend_once", fields=["model", "url", "served_model_name"]),
            UniqueConstraint(name="backend_name_once", fields=["model", "name"]),
        ]

    def __str__(self) -> str:
        return f"{self.model}: {self.name}"


class BackendReading(models.Model):
    """The token counters of a model server at its last reading; `second_source` is its writer.

    Not of a Backend row: two models may share a server, and a catalog file makes rows anew.
    """

    metrics_url = models.CharField("metrics URL", max_length=500)
    served_model_name = models.CharField(max_length=200)
    read_at = models.DateTimeField()
    server_started = models.FloatField(null=True, help_text="The server's own clock, if it says.")
    prompt_tokens = models.PositiveBigIntegerField()
    completion_tokens = models.PositiveBigIntegerField()

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(
                name="backend_reading_once", fields=["metrics_url", "served_model_name"]
            ),
        ]

    def __str__(self) -> str:
        return f"{self.served_model_name} at {self.metrics_url}"


class Maintenance(models.Model):
    """A maintenance that is on: new requests get 503 until it is switched off or its end comes."""

    model = models.OneToOneField(
        CatalogModel,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="maintenance",
        help_text="Empty means all models.",
    )
    until = models.DateTimeField(help_text="Sent as Retry-After.")
    message = models.CharField(max_length=300, blank=True)
    started_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        verbose_name_plural = "maintenance"
        constraints: ClassVar = [
            # NULLs are distinct in a unique column, so OneToOne alone would let "all" twice.
            UniqueConstraint(Coalesce("model", Value(0)), name="maintenance_once"),
        ]

    def __str__(self) -> str:
        return f"{self.model or 'all models'} until {self.until:%Y-%m-%d %H:%M} UTC"
