"""What no invariant forbids and somebody should look at: shares, flags, balances too low."""

from datetime import datetime
from decimal import Decimal

from django.db.models import Count, ExpressionWrapper, F, Max, OuterRef, Q, QuerySet, Subquery

from billing.fields import MoneyField
from billing.models import CreditAccount, UsageEvent
from billing.money import plain
from billing.reconcile.report import LISTED_MAX, Report
from billing.reconcile.usage import finished

_SHARE_MAX_PERCENT = 1

_Source = UsageEvent.UsageSource


def anomalies(since: datetime | None) -> Report:
    """Flagged usage, estimated or unpaid shares above 1 %, balances below their bound."""
    events = finished(since)
    report = Report("nothing odd about usage and balances", 0)
    _flags(report, events)
    _shares(report, events)
    _overdrafts(report)
    return report


def _flags(report: Report, events: QuerySet[UsageEvent]) -> None:
    """Usage that a backend reported and the meter could not believe (rulings.md 17)."""
    flagged = (
        events.exclude(anomaly="")
        .order_by("model", "backend", "anomaly")
        .values_list("model", "backend", "anomaly")
        .annotate(number=Count("pk"), newest=Max("finished_at"))
    )
    for model, backend, anomaly, number, newest in flagged[:LISTED_MAX]:
        report.add(
            f"backend {backend} of {model}: {anomaly}",
            f"{number} events, the newest finished at {newest:%Y-%m-%d %H:%M:%S} UTC",
        )


def _shares(report: Report, events: QuerySet[UsageEvent]) -> None:
    """Requests that are paid by a guess, or that made output and were not paid (rulings.md 16)."""
    guessed = Q(usage_source__in=[_Source.COUNTED, _Source.ESTIMATED])
    unpaid = Q(state=UsageEvent.State.FAILED, time_to_first_token_ms__isnull=False)
    rows = (
        events.order_by("organization__slug")
        .values_list("organization__slug")
        .annotate(
            number=Count("pk"),
            guessed=Count("pk", filter=guessed),
            unpaid=Count("pk", filter=unpaid),
        )
    )
    for slug, number, guesses, failures in rows:
        report.counted += number
        for subject, part, what in (
            ("usage", guesses, "billed by counted or estimated tokens"),
            ("failures", failures, "failed after output had begun, and cost nothing"),
        ):
            if part * 100 > number * _SHARE_MAX_PERCENT:
                report.add(f"organization {slug}: {subject}", f"{part} of {number} events {what}")


def _overdrafts(report: Report) -> None:
    """Balances that even the requests in flight at the last admission do not explain.

    Admission needs a balance above the overdraft limit; what runs then may cost more than it held
    (rulings.md 18), but none costs more than the dearest request there was.
    """
    dearest = (
        UsageEvent.objects.filter(organization=OuterRef("pk"), cost__gt=0)
        .order_by()
        .values("organization")
        .annotate(most=Max("cost"))
        .values("most")
    )
    left = ExpressionWrapper(
        F("balance") + F("organization__overdraft_limit"), output_field=MoneyField()
    )
    below = (
        CreditAccount.objects.select_related("organization")
        .annotate(left=left)
        .filter(left__lt=0)
        .annotate(dearest=Subquery(dearest))
    )
    for account in below.order_by("pk")[:LISTED_MAX]:
        organization = account.organization
        bound = organization.max_in_flight * (account.dearest or Decimal(0))
        if account.left < -bound:
            report.add(
                f"organization {organization}: overdraft",
                f"balance {plain(account.balance)}, overdraft limit "
                f"{plain(organization.overdraft_limit)}, and at most {plain(bound)} "
                "may have been in flight",
            )
