"""The ledger as its organization sees it: every line, and the balance after it."""

from dataclasses import dataclass
from decimal import Decimal

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from billing.models import LedgerEntry, Organization
from billing.standing import standing
from billing.statements import balance_at
from dashboard import access, paging
from dashboard.access import PersonRequest, member_page
from dashboard.pages import PAGE_SIZE, frame


@dataclass(frozen=True, slots=True)
class _Line:
    entry: LedgerEntry
    balance: Decimal


@require_safe
@member_page
def lines(request: PersonRequest, organization: Organization) -> HttpResponse:
    """List the lines of the ledger, newest first."""
    page = paging.asked_for(request, access.ledger_of(organization), size=PAGE_SIZE)
    return render(
        request,
        "dashboard/credits.html",
        {
            **frame(request, organization, section="credits"),
            "standing": standing(organization.pk),
            "page": page,
            "lines": _with_balances(page.rows),
        },
    )


def _with_balances(entries: list[LedgerEntry]) -> list[_Line]:
    """Sum the ledger once, up to the newest of these lines, and count back from there."""
    balance = balance_at(entries[0]) if entries else Decimal(0)
    found = []
    for entry in entries:
        found.append(_Line(entry, balance))
        balance -= entry.amount
    return found
