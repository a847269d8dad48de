"""Organizations and their members. Facts about a row only."""

from decimal import Decimal
from typing import ClassVar

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.db.models.functions import Now

from billing.fields import MoneyField


def default_max_in_flight() -> int:
    return int(settings.KILN_MAX_IN_FLIGHT)


class Organization(models.Model):
    """The paying account."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"

    name = models.CharField(max_length=200)
    slug = models.SlugField(max_length=64, unique=True)
    status = models.CharField(max_length=16, default=Status.ACTIVE)
    status_reason = models.CharField(
        max_length=200, blank=True, help_text="Shown to the customer with the 403."
    )
    max_in_flight = models.PositiveIntegerField(
        default=default_max_in_flight, help_text="Requests in flight at once; one more gets 429."
    )
    overdraft_limit = MoneyField(
        default=Decimal(0), help_text="USD that the balance may go below zero at admission."
    )
    requests_per_minute = models.PositiveIntegerField(
        null=True, blank=True, help_text="Requests admitted in a UTC minute; empty means no limit."
    )
    tokens_per_minute = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="Tokens settled and held in a UTC minute; empty means no limit.",
    )
    low_balance = MoneyField(
        null=True, blank=True, help_text="USD below which the owners are told, once per crossing."
    )
    webhook_url = models.CharField(
        "webhook URL", max_length=500, blank=True, help_text="Gets notices as signed JSON."
    )
    webhook_secret = models.CharField(max_length=100, blank=True, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    members = models.ManyToManyField(
        settings.AUTH_USER_MODEL, through="Membership", related_name="organizations"
    )

    class Meta:
        constraints: ClassVar = [
            CheckConstraint(
                name="organization_status_known",
                condition=Q(status__in=["active", "suspended"]),
            ),
            CheckConstraint(
                name="organization_overdraft_limit_not_negative",
                condition=Q(overdraft_limit__gte=0),
            ),
            CheckConstraint(
                name="organization_webhook_has_secret",
                condition=Q(webhook_url="") | ~Q(webhook_secret=""),
            ),
        ]

    def __str__(self) -> str:
        return self.slug


class Membership(models.Model):
    """A person's place in an organization."""

    class Role(models.TextChoices):
        OWNER = "owner"
        DEVELOPER = "developer"
        VIEWER = "viewer"

    organization = models.ForeignKey(
        Organization, on_delete=models.CASCADE, related_name="memberships"
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships"
    )
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.VIEWER)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(name="membership_once", fields=["organization", "user"]),
            CheckConstraint(
                name="membership_role_known",
                condition=Q(role__in=["owner", "developer", "viewer"]),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.user} in {self.organization} ({self.role})"
