"""What was looked at, what was found, and what customers were told. Facts about a row only."""

from typing import ClassVar

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint

from billing.models.organizations import Organization


class ReconciliationRun(models.Model):
    """One look at one invariant: what it covered, counted and found."""

    invariant = models.CharField(max_length=32)
    since = models.DateTimeField(null=True, help_text="Empty means all of history.")
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()
    counted = models.PositiveBigIntegerField()
    found = models.PositiveIntegerField()

    class Meta:
        indexes: ClassVar = [
            models.Index(name="reconciliation_run_page", fields=["-started_at", "-id"]),
        ]

    def __str__(self) -> str:
        return f"{self.invariant} {self.started_at:%Y-%m-%d %H:%M}"


class Finding(models.Model):
    """Something that breaks an invariant, until somebody has dealt with it."""

    class State(models.TextChoices):
        OPEN = "open"
        ACKNOWLEDGED = "acknowledged"
        FIXED = "fixed"

    invariant = models.CharField(max_length=32)
    subject = models.CharField(max_length=200, help_text="What is broken, as organization acme.")
    detail = models.TextField()
    state = models.CharField(max_length=16, choices=State.choices, default=State.OPEN)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
    )
    note = models.TextField(blank=True)
    first_seen_at = models.DateTimeField()
    last_seen_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(
                name="finding_once_until_fixed",
                fields=["invariant", "subject"],
                condition=~Q(state="fixed"),
            ),
            CheckConstraint(
                name="finding_state_known", condition=Q(state__in=["open", "acknowledged", "fixed"])
            ),
        ]

    def __str__(self) -> str:
        return f"{self.invariant}: {self.subject}"


class Notice(models.Model):
    """A crossing that the customer is told of once, until it is crossed back."""

    class Kind(models.TextChoices):
        LOW_BALANCE = "low_balance"
        KEY_EXPIRY = "key_expiry"

    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="notices")
    kind = models.CharField(max_length=16, choices=Kind.choices)
    subject = models.CharField(max_length=200, blank=True)
    crossed_at = models.DateTimeField()
    mailed_at = models.DateTimeField(null=True)
    delivered_at = models.DateTimeField(null=True, help_text="When the webhook took it.")
    attempts = models.PositiveIntegerField(default=0)
    attempted_at = models.DateTimeField(null=True)
    cleared_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(
                name="notice_once_per_crossing",
                fields=["organization", "kind", "subject"],
                condition=Q(cleared_at__isnull=True),
            ),
            CheckConstraint(
                name="notice_kind_known", condition=Q(kind__in=["low_balance", "key_expiry"])
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}"
