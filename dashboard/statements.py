"""Monthly statements: a page, and the same as CSV and JSON, for people and for keys alike."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson
from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from billing import statements
from billing.models import LedgerEntry, Organization
from billing.money import plain
from billing.statements import Month, NoStatement, Statement
from dashboard.access import PersonRequest, member_page
from dashboard.exports import Cell, csv_text
from dashboard.pages import frame

# The page shows so many of the lines that are no charges; the files hold all.
CREDITS_SHOWN_MAX = 500

CSV_TYPE = "text/csv; charset=utf-8"
_CSV_HEADER = (
    *("row", "day", "model", "requests", "line", "generation_id", "reason", "amount_usd"),
)


@require_safe
@member_page
def months(request: PersonRequest, organization: Organization) -> HttpResponse:
    """List the months that have a statement."""
    context = {
        **frame(request, organization, section="statements"),
        "months": statements.months(organization),
    }
    return render(request, "dashboard/statements.html", context)


@require_safe
@member_page
def page(request: PersonRequest, organization: Organization, month: str) -> HttpResponse:
    statement = _find(organization, month)
    kinds = dict(LedgerEntry.Kind.choices)
    context = {
        **frame(request, organization, section="statements"),
        "statement": statement,
        "credited": [(kinds[kind], sum_) for kind, sum_ in statement.credited.items()],
        "credits": [(kinds[each.kind], each) for each in statement.credits[:CREDITS_SHOWN_MAX]],
        "credits_hidden": max(len(statement.credits) - CREDITS_SHOWN_MAX, 0),
    }
    return render(request, "dashboard/statement.html", context)


@require_safe
@member_page
def as_csv(request: PersonRequest, organization: Organization, month: str) -> HttpResponse:
    return _file(_find(organization, month), "csv")


@require_safe
@member_page
def as_json(request: PersonRequest, organization: Organization, month: str) -> HttpResponse:
    return _file(_find(organization, month), "json")


def _find(organization: Organization, month: str) -> Statement:
    try:
        return statements.statement(organization, Month.parse(month))
    except NoStatement:
        raise Http404 from None


def _file(statement: Statement, form: str) -> HttpResponse:
    answer = (
        HttpResponse(csv_of(statement), content_type=CSV_TYPE)
        if form == "csv"
        else HttpResponse(orjson.dumps(json_of(statement)), content_type="application/json")
    )
    name = f"{statement.organization.slug}-{statement.month}.{form}"
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


def json_of(statement: Statement) -> dict[str, Any]:
    """Return the statement as the API shows it; amounts are exact decimal strings in USD."""
    month = statement.month
    return {
        "object": "statement",
        "month": str(month),
        "organization": {
            "name": statement.organization.name,
            "slug": statement.organization.slug,
        },
        "start": _instant(month.start),
        "end": _instant(month.end),
        "final": month.is_over,
        "opening_balance": plain(statement.opening),
        "charges": [
            {
                "day": str(each.day),
                "model": each.model,
                "requests": each.requests,
                "amount": plain(each.amount),
            }
            for each in statement.charges
        ],
        "credits": [
            {
                "line": each.line,
                "created_at": _instant(each.created_at),
                "kind": each.kind,
                "amount": plain(each.amount),
                "reason": each.reason,
                "generation_id": str(each.generation_id) if each.generation_id else None,
            }
            for each in statement.credits
        ],
        "totals": {
            "charge": plain(statement.charged),
            **{kind: plain(amount) for kind, amount in statement.credited.items()},
        },
        "closing_balance": plain(statement.closing),
    }


def csv_of(statement: Statement) -> str:
    """Return the statement as one table: all rows but the last add up to the last."""
    return csv_text(_CSV_HEADER, _rows(statement))


def _rows(statement: Statement) -> Iterator[tuple[Cell, ...]]:
    first, last = str(statement.month.start.date()), str(statement.month.next.start.date())
    yield ("opening_balance", first, None, None, None, None, None, statement.opening)
    for day in statement.charges:
        yield ("charge", str(day.day), day.model, day.requests, None, None, None, day.amount)
    for each in statement.credits:
        day_of_line = str(each.created_at.astimezone(UTC).date())
        request = str(each.generation_id) if each.generation_id else None
        yield (
            *(each.kind, day_of_line, None, None),
            *(each.line, request, each.reason, each.amount),
        )
    yield ("closing_balance", last, None, None, None, None, None, statement.closing)


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
