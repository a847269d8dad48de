"""The money: accounts, ledger lines, and the digests that seal them. Facts about a row only."""

from decimal import Decimal
from typing import ClassVar

from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.db.models.functions import Now

from billing.fields import MoneyField
from billing.models.organizations import Organization
from billing.models.usage import UsageEvent
from billing.money import MONEY_MAX


def _within_bounds(field: str) -> Q:
    return Q(**{f"{field}__gte": -MONEY_MAX, f"{field}__lte": MONEY_MAX})


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
    reverses = models.ForeignKey(
        "self",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="reversals",
        help_text="The charge that a refund gives back, or the purchase whose payment was taken "
        "back, in whole or in part.",
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
            CheckConstraint(
                name="ledger_entry_reverses_of_kind",
                condition=Q(kind__in=["refund", "payment_reversal"], reverses__isnull=False)
                | (~Q(kind__in=["refund", "payment_reversal"]) & Q(reverses__isnull=True)),
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


class LedgerDigest(models.Model):
    """A link of an organization's digest chain: what its ledger was at the end of a UTC day.

    Each digest covers the one before and the day's lines, so a line that was changed behind the
    triggers' back breaks every later link.
    """

    organization = models.ForeignKey(
        Organization, on_delete=models.PROTECT, related_name="digests", db_index=False
    )
    day = models.DateField()
    last_entry = models.ForeignKey(LedgerEntry, on_delete=models.PROTECT, related_name="+")
    entries = models.PositiveBigIntegerField(help_text="Lines from the first to this day's last.")
    balance = MoneyField()
    digest = models.BinaryField(max_length=32)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints: ClassVar = [
            UniqueConstraint(name="ledger_digest_day_once", fields=["organization", "day"]),
        ]

    def __str__(self) -> str:
        return f"{self.organization} {self.day}"
