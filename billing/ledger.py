"""The ledger and the balances: the only writer of LedgerEntry and CreditAccount.

Every movement is one new line and the balance moved by exactly its amount, in one transaction
under the account's row lock. Never changes or deletes a line: a correction is a new one, and an
event keeps the cost it was settled with.

    purchase, grant     +    credits that were paid for, and that were not
    charge              -    what a request cost
    refund              +    gives back a charge, at most all of it
    payment_reversal    -    a payment that was taken back, at most all of it
    adjustment          ±    everything else, by hand
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import TypedDict, Unpack, cast
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Sum

from billing.models import CreditAccount, LedgerEntry, Organization, UsageEvent
from billing.money import MONEY_MAX, plain

Kind = LedgerEntry.Kind


class LedgerError(Exception):
    """The movement is refused; the text says why and may be shown to whoever asked for it."""


@contextmanager
def locked_accounts(
    organization_ids: Iterable[int],
) -> Iterator[dict[int, CreditAccount]]:
    """Open a transaction that holds the rows of these accounts, and yield them by organization.

    The locks are its first statement and are taken in one order by everybody, so two batches
    cannot wait for each other. What is counted under them must be read by a later statement:
    one that locks and counts at once counts with the snapshot from before it got the lock.
    """
    with transaction.atomic():
        rows = (
            CreditAccount.objects.select_for_update()
            .filter(pk__in=set(organization_ids))
            .order_by("pk")
        )
        yield {account.pk: account for account in rows}


def charge(events: Iterable[UsageEvent], accounts: dict[int, CreditAccount]) -> None:
    """Deduct the cost of each event; an event that cost nothing gets no line.

    Needs the accounts of `locked_accounts`. The database refuses a second charge of one event.
    """
    entries = [
        LedgerEntry(
            organization_id=event.organization_id,
            kind=LedgerEntry.Kind.CHARGE,
            amount=-event.cost,
            event=event,
            actor="gateway",
        )
        for event in events
        if event.cost
    ]
    _post(entries, accounts)


class Because(TypedDict):
    """Who moves money and why. Under one idempotency key an organization's money moves once."""

    actor: str
    reason: str
    idempotency_key: str


def purchase(
    *, organization: Organization, amount: Decimal, **because: Unpack[Because]
) -> LedgerEntry:
    """Add credits that were paid for, and return the line.

    The idempotency key is the payment's own reference, by which `find_purchase` knows it again.
    Raises LedgerError, as all that move money do, for an amount or a word that does not fit, and
    for an idempotency key that stands for another movement.
    """
    _refuse_unless_positive(amount)
    return _book(LedgerEntry(organization=organization, kind=Kind.PURCHASE, amount=amount), because)


def grant(
    *, organization: Organization, amount: Decimal, **because: Unpack[Because]
) -> LedgerEntry:
    """Add credits that nobody paid for, and return the line."""
    _refuse_unless_positive(amount)
    return _book(LedgerEntry(organization=organization, kind=Kind.GRANT, amount=amount), because)


def adjust(
    *, organization: Organization, amount: Decimal, **because: Unpack[Because]
) -> LedgerEntry:
    """Add a signed amount that corrects the balance, and return the line."""
    if not amount:
        raise LedgerError("An adjustment cannot be zero.")
    line = LedgerEntry(organization=organization, kind=Kind.ADJUSTMENT, amount=amount)
    return _book(line, because)


def refund(
    *, charge: LedgerEntry, amount: Decimal | None, **because: Unpack[Because]
) -> LedgerEntry:
    """Give back a charge, or this much of it (None: all that is left), and return the line.

    All refunds of one charge are together never more than the charge. The event keeps its cost.
    """
    if amount is not None:
        _refuse_unless_positive(amount)
    return _reverse(charge, Kind.CHARGE, Kind.REFUND, amount, because)


def reverse_payment(
    *, purchase: LedgerEntry, amount: Decimal | None, **because: Unpack[Because]
) -> LedgerEntry:
    """Take back the credits of a payment that was taken back, in whole (None) or in part.

    All reversals of one purchase are together never more than the purchase. The credits may be
    spent already: the balance can end below zero.
    """
    if amount is not None:
        _refuse_unless_positive(amount)
        amount = -amount
    return _reverse(purchase, Kind.PURCHASE, Kind.PAYMENT_REVERSAL, amount, because)


def find_charge(generation_id: str) -> LedgerEntry:
    """Return the charge of the request with this generation ID. Raises LedgerError."""
    try:
        event = UsageEvent.objects.filter(pk=UUID(generation_id)).first()
    except ValueError:
        event = None
    if event is None:
        raise LedgerError(f"No request has the generation ID {generation_id!r}.")
    lines = LedgerEntry.objects.select_related("organization")
    charge = lines.filter(event=event, kind=Kind.CHARGE).first()
    if charge is None:
        raise LedgerError(f"Request {event.pk} was not charged.")
    return charge


def find_purchase(organization: Organization, reference: str) -> LedgerEntry:
    """Return the purchase that was booked under this reference. Raises LedgerError."""
    lines = LedgerEntry.objects.filter(organization=organization, kind=Kind.PURCHASE)
    purchase = lines.filter(idempotency_key=reference).first()
    if purchase is None:
        raise LedgerError(f"{organization} has no purchase with the reference {reference!r}.")
    return purchase


def left_of(line: LedgerEntry) -> Decimal:
    """Return the signed amount that would undo what earlier reversals left of this line."""
    undone = line.reversals.aggregate(sum=Sum("amount", default=Decimal(0)))["sum"]
    left: Decimal = -(line.amount + undone)
    return left


def _refuse_unless_positive(amount: Decimal) -> None:
    if not amount > 0:
        raise LedgerError("The amount must be above zero.")


def _reverse(
    line: LedgerEntry, of_kind: str, to_kind: str, amount: Decimal | None, because: Because
) -> LedgerEntry:
    if line.kind != of_kind:
        raise LedgerError(
            f"Line {line.pk} is a {line.get_kind_display().lower()}: not a {of_kind}."
        )
    reversal = LedgerEntry(
        organization_id=line.organization_id, kind=to_kind, reverses=line, event_id=line.event_id
    )
    if amount is not None:
        reversal.amount = amount
    return _book(reversal, because, all_that_is_left=amount is None)


def _book(line: LedgerEntry, because: Because, *, all_that_is_left: bool = False) -> LedgerEntry:
    """Post the line once for its idempotency key, and return it, or the one that was first."""
    for name, word in because.items():
        setattr(line, name, word)
    _refuse_unfit(line, amount_is_open=all_that_is_left)
    with locked_accounts([line.organization_id]) as accounts:
        same_key = LedgerEntry.objects.filter(
            organization=line.organization_id, idempotency_key=line.idempotency_key
        )
        earlier = same_key.first()
        if earlier is None:
            if line.reverses is not None:
                line.amount = _within_what_is_left(line, all_of_it=all_that_is_left)
            if abs(accounts[line.organization_id].balance + line.amount) > MONEY_MAX:
                raise LedgerError(f"The balance would be beyond {MONEY_MAX} USD.")
            _post([line], accounts)
            return same_key.get()
    compared = ["kind", "reason", "reverses_id"] + ([] if all_that_is_left else ["amount"])
    if any(getattr(earlier, name) != getattr(line, name) for name in compared):
        raise LedgerError(
            f"The idempotency key {line.idempotency_key!r} was used before for "
            f"{earlier.kind} of {plain(earlier.amount)} USD ({earlier.reason})."
        )
    return earlier


def _refuse_unfit(line: LedgerEntry, *, amount_is_open: bool) -> None:
    if not line.reason.strip() or not (line.idempotency_key or "").strip():
        raise LedgerError("A movement needs a reason and an idempotency key.")
    # What it points to was read a moment ago: its existence need not be asked for again.
    known = ["organization", "event", "reverses", *(["amount"] if amount_is_open else [])]
    try:
        line.clean_fields(exclude=known)
    except ValidationError as refusal:
        raise LedgerError("; ".join(refusal.messages)) from None


def _within_what_is_left(reversal: LedgerEntry, *, all_of_it: bool) -> Decimal:
    """Return the amount of a reversal that does not exceed its line. Needs the account's lock."""
    line = cast(LedgerEntry, reversal.reverses)
    left = left_of(line)
    if not left:
        raise LedgerError(f"Nothing is left of {line.kind} {line.pk}.")
    amount: Decimal = left if all_of_it else reversal.amount
    if abs(amount) > abs(left):
        raise LedgerError(f"Only {plain(abs(left))} USD are left of {line.kind} {line.pk}.")
    return amount


def open_account(organization: Organization) -> CreditAccount:
    """Return the organization's account, made with a balance of zero if there is none yet."""
    account, _ = CreditAccount.objects.get_or_create(organization=organization)
    return account


def _post(entries: list[LedgerEntry], accounts: dict[int, CreditAccount]) -> None:
    if not entries:
        return
    moved = set()
    for entry in entries:
        accounts[entry.organization_id].balance += entry.amount
        moved.add(entry.organization_id)
    LedgerEntry.objects.bulk_create(entries)
    # The rows are locked and exist: the upsert is one UPDATE of many rows in one statement.
    CreditAccount.objects.bulk_create(
        [accounts[pk] for pk in sorted(moved)],
        update_conflicts=True,
        unique_fields=["organization"],
        update_fields=["balance"],
    )
