"""Usage events, their workers, and the minutes they fall into. Facts about a row only."""

import uuid
from decimal import Decimal
from typing import ClassVar

from django.db import models
from django.db.models import CheckConstraint, F, Q, UniqueConstraint
from django.db.models.functions import Now

from billing.fields import MoneyField, PriceField
from billing.models.keys import ApiKey
from billing.models.organizations import Organization
from billing.money import MONEY_MAX
from billing.pricing import Prices


class GatewayWorker(models.Model):
    """One gateway process. A slot or a hold counts only while its worker's heartbeat is fresh."""

    id = models.UUIDField(primary_key=True, editable=False)
    host = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    started_at = models.DateTimeField(db_default=Now())
    heartbeat_at = models.DateTimeField(db_default=Now())
    stopped_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class UsageEvent(models.Model):
    """One request: its slot and its hold while it runs, its audit record for ever after.

    The ID is the generation ID, a UUIDv7 that is made before the insert, so that whoever asked
    for the insert can close it by ID even when the answer was lost. Model, backend and prices are
    copied as values: billing has no key into the catalog.
    """

    class State(models.TextChoices):
        IN_FLIGHT = "in_flight"
        SUCCEEDED = "succeeded"
        CANCELLED = "cancelled"
        FAILED = "failed"
        LOST = "lost"

    class UsageSource(models.TextChoices):
        """Where the token counts came from."""

        NONE = "none"  # no tokens are counted: the request failed or still runs
        REPORTED = "reported"  # the backend's final usage
        CONTINUOUS = "continuous"  # the backend's running usage, at the moment the client left
        COUNTED = "counted"  # deltas counted by the gateway
        ESTIMATED = "estimated"  # from the number of bytes

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(
        Organization, on_delete=models.PROTECT, related_name="events", db_index=False
    )
    api_key = models.ForeignKey(
        ApiKey, on_delete=models.PROTECT, related_name="events", db_index=False
    )
    worker = models.ForeignKey(
        GatewayWorker, on_delete=models.PROTECT, related_name="events", db_index=False
    )
    state = models.CharField(max_length=16, default=State.IN_FLIGHT)
    model = models.CharField(max_length=200)
    backend = models.CharField(max_length=200)
    streamed = models.BooleanField()
    input_price = PriceField()
    cached_input_price = PriceField()
    output_price = PriceField()
    hold = MoneyField()
    held_tokens = models.PositiveBigIntegerField(default=0)
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)
    prompt_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField(default=0)
    reasoning_tokens = models.PositiveIntegerField(null=True)
    usage_source = models.CharField(max_length=16, default=UsageSource.NONE)
    cost = MoneyField(default=Decimal(0))
    status_code = models.PositiveSmallIntegerField(null=True)
    error = models.CharField(max_length=300, blank=True, default="")
    anomaly = models.CharField(
        max_length=100, blank=True, default="", help_text="What was odd about the reported usage."
    )
    finish_reason = models.CharField(max_length=32, blank=True, default="")
    latency_ms = models.PositiveIntegerField(null=True)
    time_to_first_token_ms = models.PositiveIntegerField(null=True)

    class Meta:
        constraints: ClassVar = [
            CheckConstraint(
                name="usage_event_state_known",
                condition=Q(state__in=["in_flight", "succeeded", "cancelled", "failed", "lost"]),
            ),
            CheckConstraint(
                name="usage_event_in_flight_or_finished",
                condition=Q(state="in_flight", finished_at__isnull=True)
                | (~Q(state="in_flight") & Q(finished_at__isnull=False)),
            ),
            CheckConstraint(
                name="usage_event_unpaid_while_unserved",
                condition=Q(state__in=["succeeded", "cancelled"]) | Q(cost=0),
            ),
            CheckConstraint(
                name="usage_event_cost_within_bounds", condition=Q(cost__gte=0, cost__lte=MONEY_MAX)
            ),
            CheckConstraint(
                name="usage_event_hold_within_bounds", condition=Q(hold__gte=0, hold__lte=MONEY_MAX)
            ),
            CheckConstraint(
                name="usage_event_prices_not_negative",
                condition=Q(input_price__gte=0, cached_input_price__gte=0, output_price__gte=0),
            ),
            CheckConstraint(
                name="usage_event_cached_within_prompt",
                condition=Q(cached_tokens__lte=F("prompt_tokens")),
            ),
        ]
        indexes: ClassVar = [
            # The slots and holds of an organization: a handful of rows, however long the history.
            models.Index(
                name="usage_event_in_flight",
                fields=["organization", "worker"],
                condition=Q(state="in_flight"),
            ),
            models.Index(
                name="usage_event_worker_in_flight",
                fields=["worker"],
                condition=Q(state="in_flight"),
            ),
            models.Index(name="usage_event_page", fields=["organization", "-created_at", "-id"]),
            models.Index(name="usage_event_of_key", fields=["api_key", "-created_at"]),
            models.Index(name="usage_event_finished", fields=["finished_at"]),
        ]

    def __str__(self) -> str:
        return str(self.id)

    @property
    def prices(self) -> Prices:
        return Prices(self.input_price, self.cached_input_price, self.output_price)


class MinuteUsage(models.Model):
    """Requests admitted and tokens settled in a UTC minute, for organizations with such limits."""

    organization = models.ForeignKey(
        Organization, on_delete=models.PROTECT, related_name="minutes", db_index=False
    )
    minute = models.DateTimeField()
    requests = models.PositiveIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(name="minute_usage_once", fields=["organization", "minute"]),
        ]

    def __str__(self) -> str:
        return f"{self.organization} at {self.minute:%Y-%m-%d %H:%M}"
