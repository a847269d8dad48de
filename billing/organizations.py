"""Organizations: create, find, suspend, activate. Opens the credit account with the organization.

Keeps that an organization never exists without its account, which is the lock under which its
requests and its money move. Never moves money itself: opening credits are a grant of the ledger.
"""

from decimal import Decimal

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils.text import slugify

from billing import ledger
from billing.models import Organization

# One per organization: creating it again can never grant twice.
_OPENING_CREDITS_KEY = "opening-credits"


class OrganizationNotFound(Exception):
    """No organization has that name or slug, or several have that name; the text says which."""


class OrganizationRefused(Exception):
    """The organization cannot be as asked for; the text says why."""


def create(
    *,
    name: str,
    actor: str,
    opening_credits: Decimal = Decimal(0),
    max_in_flight: int | None = None,
) -> tuple[Organization, bool]:
    """Return the organization of that name, and whether it was made now.

    One that has this name, or the slug made from it, is returned as it is: nothing of it changes
    and nothing is granted. Raises OrganizationRefused.
    """
    slug = slugify(name)[: Organization._meta.get_field("slug").max_length].strip("-")
    if not slug:
        raise OrganizationRefused(
            f"{name!r} makes no slug: a name needs at least one ASCII letter or digit."
        )
    if max_in_flight is not None and max_in_flight < 1:
        raise OrganizationRefused("The limit of requests in flight must be at least 1.")
    existing = Organization.objects.filter(Q(slug=slug) | Q(name=name)).order_by("pk").first()
    if existing is not None:
        return existing, False
    organization = Organization(name=name, slug=slug)
    if max_in_flight is not None:
        organization.max_in_flight = max_in_flight
    try:
        organization.clean_fields()
    except ValidationError as refusal:
        raise OrganizationRefused("; ".join(refusal.messages)) from None
    created = True
    try:
        with transaction.atomic():
            register(organization)
            if opening_credits:
                ledger.grant(
                    organization=organization,
                    amount=opening_credits,
                    actor=actor,
                    reason="Opening credits",
                    idempotency_key=_OPENING_CREDITS_KEY,
                )
    except IntegrityError:
        created = False  # somebody else did, between the look and the insert
    return Organization.objects.get(slug=slug), created


def register(organization: Organization) -> Organization:
    """Store a new organization together with its credit account."""
    with transaction.atomic():
        organization.save(force_insert=True)
        ledger.open_account(organization)
    return organization


def find(name_or_slug: str) -> Organization:
    """Return the organization of that slug, else of that name. Raises OrganizationNotFound."""
    by_slug = Organization.objects.filter(slug=name_or_slug).first()
    if by_slug is not None:
        return by_slug
    named = list(Organization.objects.filter(name=name_or_slug).order_by("slug")[:10])
    if not named:
        raise OrganizationNotFound(f"No organization has the name or slug {name_or_slug!r}.")
    if len(named) > 1:
        slugs = ", ".join(organization.slug for organization in named)
        raise OrganizationNotFound(
            f"Several organizations are named {name_or_slug!r}; use a slug: {slugs}."
        )
    return named[0]


def suspend(organization: Organization, *, reason: str) -> None:
    """Refuse the organization's next requests with 403; `reason` is shown to the customer."""
    try:
        Organization._meta.get_field("status_reason").clean(reason, None)
    except ValidationError as refusal:
        raise OrganizationRefused(f"The reason: {' '.join(refusal.messages)}") from None
    Organization.objects.filter(pk=organization.pk).update(
        status=Organization.Status.SUSPENDED, status_reason=reason
    )


def activate(organization: Organization) -> None:
    """Let the organization's requests run again."""
    Organization.objects.filter(pk=organization.pk).update(
        status=Organization.Status.ACTIVE, status_reason=""
    )
