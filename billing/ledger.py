"""The ledger and the balances: the only writer of LedgerEntry and CreditAccount.

Every movement is one new line and the balance moved by exactly its amount, in one transaction
under the account's row lock. Never changes or deletes a line: a correction is a new one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal

from django.core.exceptions import ValidationError
from django.db import connection, transaction

from billing.models import CreditAccount, LedgerEntry, Organization, UsageEvent
from billing.money import MONEY_MAX


class LedgerError(Exception):
    """The movement is refused; the text says why and may be shown to whoever asked for it."""


@contextmanager
def locked_accounts(
    organization_ids: Iterable[int], *, wait_ms: int | None = None
) -> Iterator[dict[int, CreditAccount]]:
    """Open a transaction that holds the rows of these accounts, and yield them by organization.

    With `wait_ms`, PostgreSQL raises OperationalError where a lock takes longer to get.

    The locks are its first statement and are taken in one order by everybody, so two batches
    cannot wait for each other. What is counted under them must be read by a later statement:
    one that locks and counts at once counts with the snapshot from before it got the lock.
    """
    with transaction.atomic():
        if wait_ms is not None and connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{wait_ms}ms"])
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


def grant(
    *,
    organization: Organization,
    amount: Decimal,
    actor: str,
    reason: str,
    idempotency_key: str,
) -> LedgerEntry:
    """Add credits once for this idempotency key, and return the line.

    Raises LedgerError when the amount is not above zero, when the key was used before for another
    amount or reason, or when the line or the balance would leave the bounds of its column.
    """
    if amount <= 0:
        raise LedgerError("A grant must be above zero.")
    entry = LedgerEntry(
        organization=organization,
        kind=LedgerEntry.Kind.GRANT,
        amount=amount,
        actor=actor,
        reason=reason,
        idempotency_key=idempotency_key,
    )
    try:
        entry.clean_fields(exclude=["organization"])
    except ValidationError as refusal:
        raise LedgerError("; ".join(refusal.messages)) from None
    with locked_accounts([organization.pk]) as accounts:
        earlier = LedgerEntry.objects.filter(
            organization=organization, idempotency_key=idempotency_key
        ).first()
        if earlier is None:
            if accounts[organization.pk].balance + amount > MONEY_MAX:
                raise LedgerError(f"The balance would be above {MONEY_MAX} USD.")
            _post([entry], accounts)
            return LedgerEntry.objects.get(
                organization=organization, idempotency_key=idempotency_key
            )
    same = (LedgerEntry.Kind.GRANT, amount, reason)
    if (earlier.kind, earlier.amount, earlier.reason) != same:
        raise LedgerError(
            f"The idempotency key {idempotency_key!r} was used before for "
            f"{earlier.kind} of {earlier.amount.normalize():f} USD ({earlier.reason})."
        )
    return earlier


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
