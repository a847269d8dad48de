"""The forms in which an operator moves money: grant, purchase, adjustment, refund.

Each is one page that asks and one call of `billing.ledger`; the operator is the actor. The
idempotency key comes with the form: sent twice, it moves money once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import uuid4

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse

from billing import ledger
from billing.admin.columns import ModelAdmin
from billing.models import LedgerEntry
from billing.money import MONEY_MAX, USD_PLACES, plain

_LEAST = Decimal(1).scaleb(-USD_PLACES)


def _amount(least: Decimal, **options: Any) -> forms.DecimalField:
    return forms.DecimalField(
        label="Amount (USD)",
        min_value=least,
        max_value=MONEY_MAX,
        max_digits=7 + USD_PLACES,
        decimal_places=USD_PLACES,
        widget=forms.TextInput(attrs={"inputmode": "decimal"}),
        **options,
    )


class MovementForm(forms.Form):
    amount = _amount(_LEAST)
    reason = forms.CharField(max_length=300, help_text="It stays in the ledger.")
    idempotency_key = forms.CharField(
        max_length=200, help_text="Names this movement: the same key never moves money twice."
    )


class AdjustmentForm(MovementForm):
    amount = _amount(-MONEY_MAX, help_text="Below zero takes credits away.")


class RefundForm(MovementForm):
    amount = _amount(_LEAST, required=False, help_text="Empty: all that is left of the charge.")


@dataclass(frozen=True, slots=True)
class Movement:
    """One form: its words, and the function of the ledger that takes what was filled in."""

    title: str
    button: str
    did: str
    book: Callable[..., LedgerEntry]
    form: type[MovementForm] = MovementForm


OF_ORGANIZATION = {
    "grant": Movement("Grant credits", "Grant", "granted", ledger.grant),
    "purchase": Movement("Record a purchase", "Record", "purchased", ledger.purchase),
    "adjust": Movement("Adjust credits", "Adjust", "adjusted", ledger.adjust, AdjustmentForm),
}
REFUND = Movement("Refund", "Refund", "refunded", ledger.refund, RefundForm)


def may_move_money(request: HttpRequest) -> bool:
    # Every movement is a new line of the ledger, so that is the permission it needs.
    return request.user.has_perm("billing.add_ledgerentry")


def movement_page(
    page_of: ModelAdmin,
    request: HttpRequest,
    movement: Movement,
    subject: Model,
    *,
    facts: str,
    **target: Any,
) -> HttpResponse:
    """Ask for what the movement needs, and book it on `target`; it is told on `subject`'s page."""
    if not may_move_money(request):
        raise PermissionDenied
    form = movement.form(request.POST or None, initial={"idempotency_key": f"admin-{uuid4()}"})
    if request.method == "POST" and form.is_valid():
        line = _book(movement, form, actor=request.user.get_username(), **target)
        if line is not None:
            text = f"{plain(line.amount)} USD {movement.did} (ledger entry {line.pk})"
            page_of.log_change(request, subject, f"{text}: {line.reason}")
            page_of.message_user(request, f"{text}: {subject}.", messages.SUCCESS)
            names = page_of.opts
            return redirect(f"admin:{names.app_label}_{names.model_name}_changelist")
    context = {
        **page_of.admin_site.each_context(request),
        "title": f"{movement.title}: {subject}",
        "opts": page_of.opts,
        "original": subject,
        "movement": movement,
        "facts": facts,
        "form": form,
    }
    return TemplateResponse(request, "admin/billing/movement.html", context)


def _book(
    movement: Movement, form: MovementForm, *, actor: str, **target: Any
) -> LedgerEntry | None:
    try:
        return movement.book(**target, **form.cleaned_data, actor=actor)
    except ledger.LedgerError as refusal:
        form.add_error(None, str(refusal))
        return None
