"""The tables of billing, and the rules that the database itself keeps.

Facts about a row only. Who may write them: ApiKey `keys`, UsageEvent `usage`, LedgerEntry and
CreditAccount `ledger`, GatewayWorker `workers`. Money points with PROTECT: nothing that a ledger
line refers to can be deleted.
"""

import uuid
from decimal import Decimal
from typing import ClassVar

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, F, Q, UniqueConstraint
from django.db.models.functions import Now

from billing.fields import MoneyField, PriceField
from billing.money import MONEY_MAX
from billing.pricing import Prices


def _within_bounds(field: str) -> Q:
    return Q(**{f"{field}__gte": -MONEY_MAX, f"{field}__lte": MONEY_MAX})


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


class ApiKey(models.Model):
    """What is stored of a key: enough to find it and to show it, never the key."""

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

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(
                name="api_key_live_name_once",
                fields=["organization", "name"],
                condition=Q(revoked_at__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…{self.last4})"


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


class CreditAccount(models.Model):
    """An organization's balance; its row is the lock under which slots, holds and money move."""

    organization = models.OneToOneField(
        Organization, on_delete=models.PROTECT, primary_key=True, related_name="account"
    )
    balance = MoneyField(default=Decimal(0))

    class Meta:
        constraints: ClassVar = [
            CheckConstraint(
                name="credit_account_balance_within_bounds", condition=_within_bounds("balance")
            ),
        ]

    def __str__(self) -> str:
        return str(self.organization)


class LedgerEntry(models.Model):
    """A line of an organization's ledger. Triggers refuse UPDATE and DELETE on both databases."""

    class Kind(models.TextChoices):
        PURCHASE = "purchase"
        GRANT = "grant"
        CHARGE = "charge"
        REFUND = "refund"
        ADJUSTMENT = "adjustment"
        PAYMENT_REVERSAL = "payment_reversal"

    organization = models.ForeignKey(
        Organization, on_delete=models.PROTECT, related_name="ledger", db_index=False
    )
    kind = models.CharField(max_length=20, choices=Kind.choices)
    amount = MoneyField(help_text="USD; positive adds to the balance.")
    event = models.ForeignKey(
        UsageEvent, on_delete=models.PROTECT, null=True, blank=True, related_name="ledger"
    )
    idempotency_key = models.CharField(max_length=200, null=True, blank=True)  # noqa: DJ001
    actor = models.CharField(max_length=200, help_text="Who moved the money.")
    reason = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        verbose_name_plural = "ledger entries"
        constraints: ClassVar = [
            CheckConstraint(
                name="ledger_entry_kind_known",
                condition=Q(
                    kind__in=[
                        "purchase",
                        "grant",
                        "charge",
                        "refund",
                        "adjustment",
                        "payment_reversal",
                    ]
                ),
            ),
            CheckConstraint(
                name="ledger_entry_sign_of_kind",
                condition=Q(kind__in=["purchase", "grant", "refund"], amount__gt=0)
                | Q(kind__in=["charge", "payment_reversal"], amount__lt=0)
                | (Q(kind="adjustment") & ~Q(amount=0)),
            ),
            CheckConstraint(
                name="ledger_entry_amount_within_bounds", condition=_within_bounds("amount")
            ),
            CheckConstraint(
                name="ledger_entry_charge_has_event",
                condition=~Q(kind="charge") | Q(event__isnull=False),
            ),
            UniqueConstraint(
                name="ledger_entry_one_charge_per_event",
                fields=["event"],
                condition=Q(kind="charge"),
            ),
            UniqueConstraint(
                name="ledger_entry_idempotency_key_once",
                fields=["organization", "idempotency_key"],
            ),
        ]
        indexes: ClassVar = [
            models.Index(name="ledger_entry_page", fields=["organization", "-created_at", "-id"]),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.amount} USD"
