"""Notices: an organization's owners are told, once per crossing, by e-mail and by webhook.

    low_balance   the balance is below the organization's threshold; over when it is above 120 % of
                  it, so that a balance that swings around the threshold is one crossing
    key_expiry    a key expires within seven days; over when it has, or no longer does

The only writer of Notice, and of where notices go. What could not be sent is tried again at
growing intervals, at most `ATTEMPTS_MAX` times. A process that dies between sending and noting it
sends again: the webhook's `webhook-id` is the same. Moves no money.
"""

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from smtplib import SMTPException
from typing import Any

from django.core.exceptions import ValidationError
from django.core.mail import EmailMessage
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from billing import webhooks
from billing.models import ApiKey, CreditAccount, Membership, Notice, Organization
from billing.money import plain

log = logging.getLogger(__name__)

KEY_EXPIRY_DAYS = 7
ATTEMPTS_MAX = 8
# 5, 10, 20 … minutes between attempts: the last is half a day after the first.
_FIRST_PAUSE = timedelta(minutes=5)
_CLEARED_ABOVE = Decimal("1.2")


class NoticesRefused(Exception):
    """Notices cannot go there; `field` names what is wrong, and the text says why."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def direct(
    organization: Organization,
    *,
    low_balance: Decimal | None,
    webhook_url: str,
    new_secret: bool = False,
) -> str | None:
    """Set when and where the organization is told; return the webhook's secret if it is new.

    A new URL gets a new secret: whoever had the old one cannot sign for the new receiver. Raises
    NoticesRefused.
    """
    _refuse_unfit(low_balance=low_balance, webhook_url=webhook_url)
    secret = organization.webhook_secret
    made = bool(webhook_url) and (new_secret or webhook_url != organization.webhook_url)
    if made:
        secret = webhooks.new_secret()
    Organization.objects.filter(pk=organization.pk).update(
        low_balance=low_balance,
        webhook_url=webhook_url,
        webhook_secret=secret if webhook_url else "",
    )
    organization.refresh_from_db(fields=["low_balance", "webhook_url", "webhook_secret"])
    return secret if made else None


def _refuse_unfit(*, low_balance: Decimal | None, webhook_url: str) -> None:
    field = "low_balance"
    try:
        Organization._meta.get_field("low_balance").clean(low_balance, None)
        if low_balance is not None and low_balance < 0:
            raise ValidationError("The threshold cannot be below zero.")
        field = "webhook_url"
        Organization._meta.get_field("webhook_url").clean(webhook_url, None)
        if webhook_url:
            webhooks.refuse_bad_url(webhook_url)
    except ValidationError as refusal:
        raise NoticesRefused(field, " ".join(refusal.messages)) from None
    except webhooks.WebhookRefused as refusal:
        raise NoticesRefused(field, str(refusal)) from None


def expiring_keys(organization: Organization) -> QuerySet[ApiKey]:
    """Return the organization's live keys that expire soon, the next one first."""
    keys = ApiKey.objects.filter(_expires_soon(), organization=organization)
    return keys.order_by("expires_at", "pk")


def look() -> None:
    """Note the crossings since the last look, there and back. Safe to repeat."""
    now = timezone.now()
    low = CreditAccount.objects.filter(balance__lt=F("organization__low_balance"))
    crossings = [
        Notice(organization_id=pk, kind=Notice.Kind.LOW_BALANCE, crossed_at=now)
        for pk in low.values_list("pk", flat=True)
    ]
    expiring = ApiKey.objects.filter(_expires_soon()).values_list("organization_id", "pk")
    crossings += [
        Notice(organization_id=of, kind=Notice.Kind.KEY_EXPIRY, subject=str(pk), crossed_at=now)
        for of, pk in expiring
    ]
    # One that is not cleared yet is this very crossing: the database keeps it and ignores ours.
    Notice.objects.bulk_create(crossings, ignore_conflicts=True)
    still = {str(pk) for _, pk in expiring}
    over = [
        notice.pk
        for notice in _open().select_related("organization__account")
        if _is_over(notice, expiring=still)
    ]
    Notice.objects.filter(pk__in=over).update(cleared_at=now)


def send() -> None:
    """Send what is due and has not been sent."""
    now = timezone.now()
    for notice in _unsent().select_related("organization__account"):
        pause = _FIRST_PAUSE * 2 ** max(notice.attempts - 1, 0)
        if notice.attempted_at and notice.attempted_at + pause > now:
            continue
        # Of two processes that see it due, the one whose update finds the number sends it; the
        # pause before the next attempt is longer than an attempt can take.
        claim = Notice.objects.filter(pk=notice.pk, attempts=notice.attempts)
        if claim.update(attempts=F("attempts") + 1, attempted_at=timezone.now()):
            _send(notice)


def _expires_soon() -> Q:
    now = timezone.now()
    soon = Q(expires_at__gt=now, expires_at__lte=now + timedelta(days=KEY_EXPIRY_DAYS))
    return soon & Q(revoked_at__isnull=True)


def _open() -> QuerySet[Notice]:
    return Notice.objects.filter(cleared_at__isnull=True)


def _unsent() -> QuerySet[Notice]:
    undelivered = Q(delivered_at__isnull=True) & ~Q(organization__webhook_url="")
    unsent = _open().filter(Q(mailed_at__isnull=True) | undelivered, attempts__lt=ATTEMPTS_MAX)
    return unsent.order_by("pk")


def _is_over(notice: Notice, *, expiring: set[str]) -> bool:
    if notice.kind == Notice.Kind.KEY_EXPIRY:
        return notice.subject not in expiring
    threshold = notice.organization.low_balance
    balance = notice.organization.account.balance
    return threshold is None or balance > threshold * _CLEARED_ABOVE


@dataclass(frozen=True, slots=True)
class _Words:
    """A notice in words for a person, and as data for a program."""

    subject: str
    text: str
    data: dict[str, Any]


def _send(notice: Notice) -> None:
    words = _words(notice)
    if notice.mailed_at is None and _mail(notice, words):
        Notice.objects.filter(pk=notice.pk).update(mailed_at=timezone.now())
    if notice.organization.webhook_url and notice.delivered_at is None and _deliver(notice, words):
        Notice.objects.filter(pk=notice.pk).update(delivered_at=timezone.now())


def _words(notice: Notice) -> _Words:
    organization = notice.organization
    name = " ".join(organization.name.split())  # a subject is one line
    if notice.kind == Notice.Kind.KEY_EXPIRY:
        key = ApiKey.objects.get(pk=int(notice.subject))
        expires_at = _instant(key.expires_at)
        return _Words(
            subject=f"An API key of {name} expires soon",
            text=f"The API key {key} of {name} expires at {expires_at}. Requests with it are "
            "refused with 401 from then on. Issue another key and change to it before.",
            data={
                "key": {"name": key.name, "prefix": key.prefix, "last4": key.last4},
                "expires_at": expires_at,
            },
        )
    threshold = plain(organization.low_balance or Decimal(0))
    balance = plain(organization.account.balance)
    return _Words(
        subject=f"The balance of {name} is low",
        text=f"The balance of {name} is {balance} USD, below the {threshold} USD that its owners "
        "set to be told of. Requests are refused with 402 when no credits are left.",
        data={"balance": balance, "low_balance": threshold},
    )


def _mail(notice: Notice, words: _Words) -> bool:
    owners = Membership.objects.filter(
        organization=notice.organization, role=Membership.Role.OWNER, user__is_active=True
    ).order_by("pk")
    addresses = list(owners.values_list("user__email", flat=True))
    if not addresses:
        log.warning("notice %d: %s has no owner to mail", notice.pk, notice.organization)
        return False
    text = f"{words.text}\n\nYou get this because you own {notice.organization} at Kiln.\n"
    try:
        EmailMessage(words.subject, text, to=addresses).send()
    except (OSError, SMTPException) as failure:
        log.warning("notice %d was not mailed: %s", notice.pk, failure)
        return False
    return True


def _deliver(notice: Notice, words: _Words) -> bool:
    organization = notice.organization
    message = {
        "type": notice.kind,
        "timestamp": _instant(notice.crossed_at),
        "data": {"organization": organization.slug, **words.data},
    }
    try:
        webhooks.post(
            organization.webhook_url,
            secret=organization.webhook_secret,
            message_id=f"notice-{notice.pk}",
            body=json.dumps(message).encode(),
        )
    except (webhooks.WebhookFailed, webhooks.WebhookRefused) as failure:
        log.warning("notice %d was not delivered: %s", notice.pk, failure)
        return False
    return True


def _instant(moment: datetime | None) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z") if moment else ""
