"""Events by themselves: what they cost, and that they end."""

from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import ExpressionWrapper, F, Q, QuerySet
from django.db.models.functions import Now

from billing.fields import MoneyField
from billing.models import UsageEvent
from billing.money import plain
from billing.reconcile.report import LISTED_MAX, Report
from billing.workers import is_live

# Beyond the time limit of a request: for the settlement, and for a timer that comes late.
_GRACE = timedelta(seconds=60)


def finished(since: datetime | None) -> QuerySet[UsageEvent]:
    events = UsageEvent.objects.filter(finished_at__isnull=False)
    return events if since is None else events.filter(finished_at__gte=since)


def costs(since: datetime | None) -> Report:
    """I4, over the events finished since `since`, or all."""
    events = finished(since)
    # Tokens times picodollars per token: the columns are whole numbers, the product is exact.
    expected = ExpressionWrapper(
        (F("prompt_tokens") - F("cached_tokens")) * F("input_price")
        + F("cached_tokens") * F("cached_input_price")
        + F("completion_tokens") * F("output_price"),
        output_field=MoneyField(),
    )
    is_paid = Q(state__in=[UsageEvent.State.SUCCEEDED, UsageEvent.State.CANCELLED])
    wrong = events.alias(expected=expected).filter(
        (is_paid & ~Q(cost=F("expected"))) | (~is_paid & ~Q(cost=0))
    )
    report = Report("I4 cost = tokens x prices", events.count())
    for event in wrong.only("cost")[:LISTED_MAX]:
        report.add(f"event {event.pk}", f"cost {plain(event.cost)} is not its tokens' cost")
    return report


def stuck(_: datetime | None) -> Report:
    """No event is in flight in a live process for longer than a request may take.

    What a dead process left is closed as lost; what a live one forgot, only it can know.
    """
    running = UsageEvent.objects.filter(state=UsageEvent.State.IN_FLIGHT)
    longest = timedelta(seconds=settings.KILN_TOTAL_SECONDS) + _GRACE
    report = Report("no request runs for ever", running.count())
    late = running.filter(is_live(), created_at__lt=Now() - longest).select_related("worker")
    for event in late[:LISTED_MAX]:
        report.add(
            f"event {event.pk}",
            f"in flight since {event.created_at:%Y-%m-%d %H:%M:%S} UTC in {event.worker}",
        )
    return report
