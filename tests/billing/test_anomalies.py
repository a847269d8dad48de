"""What no invariant forbids: flags, shares above one percent, balances below their bound."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone

from billing import reconcile
from billing.models import ApiKey, CreditAccount, GatewayWorker, Organization, UsageEvent
from tests.billing.world import COST, served


def told(of: str) -> list[str]:
    """Return the findings about this."""
    return [str(each) for each in reconcile.anomalies(None).findings if of in each.subject]


def many(key: ApiKey, worker: GatewayWorker, number: int, **fields: Any) -> None:
    """Make this many events in all; the last one has these fields."""
    event = served(key, worker, **fields)
    UsageEvent.objects.bulk_create(
        UsageEvent(
            organization_id=key.organization_id,
            api_key=key,
            worker=worker,
            state="succeeded",
            model=event.model,
            backend=event.backend,
            streamed=False,
            usage_source="reported",
            input_price=0,
            cached_input_price=0,
            output_price=0,
            hold=0,
            created_at=event.created_at,
            finished_at=event.finished_at,
        )
        for _ in range(number - 1)
    )


def test_sound_requests_are_not_odd(key: ApiKey, worker: GatewayWorker) -> None:
    served(key, worker)
    served(key, worker, state="failed", status_code=502)
    served(key, worker, state="cancelled", usage_source="continuous")
    report = reconcile.anomalies(timezone.now() - timedelta(hours=1))
    assert report.counted >= 3
    assert [each for each in report.findings if "acme" in each.subject] == []


def test_flagged_usage_is_told_by_backend(key: ApiKey, worker: GatewayWorker) -> None:
    for _ in range(2):
        served(key, worker, backend="odd-1", anomaly="usage_beyond_context")
    served(key, worker, backend="odd-1", anomaly="total_differs")
    beyond, total = sorted(told("odd-1"), reverse=True)
    assert beyond.startswith("backend odd-1 of qwen3-32b: usage_beyond_context: 2 events, ")
    assert total.startswith("backend odd-1 of qwen3-32b: total_differs: 1 events, ")


@pytest.mark.parametrize(
    ("odd", "subject"),
    [
        ({"state": "cancelled", "usage_source": "counted"}, "organization acme: usage"),
        ({"usage_source": "estimated"}, "organization acme: usage"),
        ({"state": "failed", "time_to_first_token_ms": 9}, "organization acme: failures"),
    ],
)
def test_a_share_above_one_percent_is_told(
    key: ApiKey, worker: GatewayWorker, odd: dict[str, Any], subject: str
) -> None:
    many(key, worker, 99, **odd)
    [line] = told("acme")
    assert line.startswith(f"{subject}: 1 of 99 events ")
    many(key, worker, 1)
    assert told("acme") == []  # 1 of 100 is not above one percent


def test_a_failure_before_output_is_no_loss(key: ApiKey, worker: GatewayWorker) -> None:
    many(key, worker, 2, state="failed", status_code=502)
    assert told("acme") == []


def test_a_balance_below_what_can_have_run_is_told(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    served(key, worker)  # the dearest of acme; eight of them may run at once
    Organization.objects.filter(pk=acme.pk).update(overdraft_limit=1)

    def below(balance: Decimal) -> list[str]:
        CreditAccount.objects.filter(pk=acme.pk).update(balance=balance)
        return told("overdraft")

    lowest = -1 - 8 * COST
    assert below(lowest) == []
    assert below(lowest - Decimal("0.000000000001")) == [
        "organization acme: overdraft: balance -1.000073600001, overdraft limit 1, "
        "and at most 0.0000736 may have been in flight"
    ]
