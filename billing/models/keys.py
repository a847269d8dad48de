"""API keys, and what is counted of each. Facts about a row only."""

from typing import ClassVar

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.db.models.functions import Now

from billing.fields import MoneyField
from billing.models.organizations import Organization


class ApiKey(models.Model):
    """What is stored of a key: enough to find it and to show it, never the key."""

    class SpendPeriod(models.TextChoices):
        NONE = "none"
        DAY = "day"
        WEEK = "week"  # from Monday
        MONTH = "month"

    organization = models.ForeignKey(Organization, on_delete=models.PROTECT, related_name="keys")
    name = models.CharField(max_length=100)
    digest = models.BinaryField(max_length=32, unique=True, editable=False)
    prefix = models.CharField(max_length=16, editable=False)
    last4 = models.CharField(max_length=4, editable=False)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        editable=False,
        related_name="+",
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    paused_at = models.DateTimeField(null=True, blank=True, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)
    allowed_models = models.JSONField(
        default=list, blank=True, help_text="Model IDs this key may call; empty means all."
    )
    spend_limit = MoneyField(
        null=True, blank=True, help_text="USD this key may spend in its period; empty: no limit."
    )
    spend_period = models.CharField(
        max_length=8,
        choices=SpendPeriod.choices,
        default=SpendPeriod.NONE,
        help_text="When the spend counts from zero again (UTC); none means never.",
    )

    class Meta:
        verbose_name = "API key"
        constraints: ClassVar = [
            UniqueConstraint(
                name="api_key_live_name_once",
                fields=["organization", "name"],
                condition=Q(revoked_at__isnull=True),
            ),
            CheckConstraint(
                name="api_key_spend_period_known",
                condition=Q(spend_period__in=["none", "day", "week", "month"]),
            ),
            CheckConstraint(
                name="api_key_spend_limit_not_negative",
                condition=Q(spend_limit__isnull=True) | Q(spend_limit__gte=0),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…{self.last4})"


class KeySpend(models.Model):
    """What a key spent on a UTC day; moved with the charge, so limits need no sum over events."""

    api_key = models.ForeignKey(
        ApiKey, on_delete=models.PROTECT, related_name="spends", db_index=False
    )
    day = models.DateField()
    spend = MoneyField()

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(name="key_spend_day_once", fields=["api_key", "day"]),
        ]

    def __str__(self) -> str:
        return f"{self.api_key} on {self.day}"


class RefusalCount(models.Model):
    """How often requests of a key were refused for a reason in a minute; no row each."""

    organization = models.ForeignKey(
        Organization, on_delete=models.PROTECT, related_name="refusals", db_index=False
    )
    api_key = models.ForeignKey(
        ApiKey, on_delete=models.PROTECT, related_name="refusals", db_index=False
    )
    minute = models.DateTimeField()
    status_code = models.PositiveSmallIntegerField()
    code = models.CharField(max_length=64, blank=True)
    number = models.PositiveIntegerField()

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(
                name="refusal_count_once",
                fields=["organization", "minute", "api_key", "status_code", "code"],
            ),
        ]

    def __str__(self) -> str:
        return f"{self.number} x {self.status_code} {self.code}"
