"""API keys: issue, authenticate, pause, revoke. The only writer of ApiKey.

A key is `sk-bk-` + 32 base62 characters of randomness + 6 base62 characters of the CRC-32 of all
before (beyond-the-page.md section 2). Stored is its SHA-256, never the key: with 190 random bits
there is nothing to guess, so a slow hash would protect nothing and cost every request.
"""

import hashlib
import secrets
import string
import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now
from django.utils import timezone

from billing.models import ApiKey, Organization

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_RANDOM_LENGTH = 32
_CHECKSUM_LENGTH = 6
OVERLAP_HOURS = 24
OVERLAP_HOURS_MAX = 24 * 365
_LAST_USED_EVERY = timedelta(minutes=1)


class KeyRefused(Exception):
    """Base of what `authenticate` raises; `key` is the one it is about, where that is known."""

    def __init__(self, key: ApiKey | None = None, text: str = "") -> None:
        super().__init__(text)
        self.key = key


class KeyInvalid(KeyRefused):
    """Missing, malformed, unknown, revoked or expired: one answer for all, so nothing leaks."""


class KeyPaused(KeyRefused):
    """The key is paused."""


class OrganizationSuspended(KeyRefused):
    """The organization is suspended; the text is the operator's reason, perhaps empty."""


class ModelNotAllowed(KeyRefused):
    """The key has a list of models, and the one whose ID is the text is not on it."""


class KeyNameTaken(Exception):
    """The organization has a live key of that name."""


class KeyNotFound(Exception):
    """The organization has no live key of that name."""


class KeyEnded(Exception):
    """The key was revoked or has expired."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: a key that was good when it was looked up, and its organization."""

    key_id: int
    organization_id: int
    allowed_models: frozenset[str]
    max_in_flight: int
    has_credits: bool  # by the balance and the overdraft limit; holds are not looked at


def _checksum(text: str) -> str:
    number, digits = zlib.crc32(text.encode()), []
    for _ in range(_CHECKSUM_LENGTH):
        number, digit = divmod(number, 62)
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))


def is_well_formed(secret: str) -> bool:
    """Tell whether `secret` has the form and the checksum of a key, without any look-up."""
    prefix = settings.KILN_KEY_PREFIX
    return (
        len(secret) == len(prefix) + _RANDOM_LENGTH + _CHECKSUM_LENGTH
        and secret.isascii()
        and secret.startswith(prefix)
        and _checksum(secret[:-_CHECKSUM_LENGTH]) == secret[-_CHECKSUM_LENGTH:]
    )


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def issue(
    *, organization: Organization, name: str, created_by: Any = None, **fields: Any
) -> tuple[ApiKey, str]:
    """Make a key and return it with its secret, which exists nowhere else from then on.

    `fields` are expires_at, allowed_models, spend_limit and spend_period. Raises KeyNameTaken.
    """
    body = settings.KILN_KEY_PREFIX + "".join(
        secrets.choice(_BASE62) for _ in range(_RANDOM_LENGTH)
    )
    secret = body + _checksum(body)
    try:
        # Its own savepoint: a caller's transaction stays usable after a name that is taken.
        with transaction.atomic():
            key = ApiKey.objects.create(
                organization=organization,
                name=name,
                digest=digest(secret),
                prefix=settings.KILN_KEY_PREFIX,
                last4=secret[-4:],
                created_by=created_by,
                **fields,
            )
    except IntegrityError:
        raise KeyNameTaken(f"{organization} has a live key named {name!r}.") from None
    return key, secret


def authenticate(secret: str) -> tuple[Caller, ApiKey]:
    """Return who calls with this key. Raises KeyInvalid, KeyPaused or OrganizationSuspended."""
    if not is_well_formed(secret):
        raise KeyInvalid
    key = (
        ApiKey.objects.select_related("organization__account").filter(digest=digest(secret)).first()
    )
    if key is None:
        raise KeyInvalid
    refuse_unusable(key)
    _note_use(key)
    organization = key.organization
    caller = Caller(
        key_id=key.pk,
        organization_id=organization.pk,
        allowed_models=frozenset(key.allowed_models),
        max_in_flight=organization.max_in_flight,
        has_credits=organization.account.balance + organization.overdraft_limit > 0,
    )
    return caller, key


def refuse_unusable(key: ApiKey) -> None:
    """Raise what `authenticate` says of a key that was revoked, expired, paused or suspended."""
    if key.revoked_at or (key.expires_at and key.expires_at <= timezone.now()):
        raise KeyInvalid(key)
    if key.paused_at:
        raise KeyPaused(key)
    if key.organization.status == Organization.Status.SUSPENDED:
        raise OrganizationSuspended(key, key.organization.status_reason)


def refuse_unlisted(key: ApiKey, model: str) -> None:
    """Raise ModelNotAllowed for a model that is not on the key's list, if it has one."""
    if key.allowed_models and model not in key.allowed_models:
        raise ModelNotAllowed(key, model)


def find(organization: Organization, name: str) -> ApiKey:
    """Return the organization's key of that name that was not revoked. Raises KeyNotFound."""
    key = ApiKey.objects.filter(organization=organization, name=name, revoked_at=None).first()
    if key is None:
        raise KeyNotFound(f"{organization} has no live key named {name!r}.")
    return key


def rotate(key: ApiKey, overlap: timedelta, *, created_by: Any = None) -> tuple[ApiKey, str]:
    """Replace a key: return a new one of its name and limits, and its secret.

    The old one is renamed and ends after `overlap`, or earlier if it would have anyway. The new
    one keeps the old one's end, allow-list, spend limit and pause; its spend begins at zero.
    Raises KeyEnded when there is nothing to replace, and KeyNameTaken.
    """
    with transaction.atomic():
        old = ApiKey.objects.select_for_update(no_key=True).get(pk=key.pk)
        now = timezone.now()
        if old.revoked_at or (old.expires_at and old.expires_at <= now):
            raise KeyEnded(f"The key {old.name!r} has ended; issue a new one.")
        ends_at = min(now + overlap, old.expires_at or now + overlap)
        _rename(old, _name_of_rotated(old), expires_at=ends_at)
        return issue(
            organization=old.organization,
            name=old.name,
            created_by=created_by,
            expires_at=old.expires_at,
            allowed_models=old.allowed_models,
            spend_limit=old.spend_limit,
            spend_period=old.spend_period,
            paused_at=old.paused_at,
        )


def _rename(key: ApiKey, name: str, **fields: Any) -> None:
    try:
        with transaction.atomic():
            ApiKey.objects.filter(pk=key.pk).update(name=name, **fields)
    except IntegrityError:
        raise KeyNameTaken(f"{key.organization} has a live key named {name!r}.") from None


def _name_of_rotated(key: ApiKey) -> str:
    # With its ID, so that the name is free however often keys of one name are rotated.
    suffix = f" (rotated, {key.pk})"
    length = ApiKey._meta.get_field("name").max_length or 0
    return key.name[: length - len(suffix)] + suffix


def revoke(key: ApiKey) -> None:
    """End the key for good; its next request gets 401 in every process."""
    ApiKey.objects.filter(pk=key.pk, revoked_at__isnull=True).update(revoked_at=Now())


def pause(key: ApiKey) -> None:
    ApiKey.objects.filter(pk=key.pk, paused_at__isnull=True).update(paused_at=Now())


def resume(key: ApiKey) -> None:
    ApiKey.objects.filter(pk=key.pk).update(paused_at=None)


def _note_use(key: ApiKey) -> None:
    # Once a minute is enough for "last used", and a write per request would not be.
    now = timezone.now()
    if key.last_used_at is None or key.last_used_at < now - _LAST_USED_EVERY:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
