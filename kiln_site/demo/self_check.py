"""The demo's test of itself: two requests through the real endpoint, and do the books agree?"""

import re
from collections.abc import Iterator
from decimal import Decimal

import httpx

from billing import reconcile
from billing.models import LedgerEntry, UsageEvent
from billing.money import plain

_COST = re.compile(r'"cost":([0-9.]+)')


class CheckFailed(Exception):
    """What did not agree."""


def run(base_url: str, secret: str, model: str) -> Iterator[str]:
    """Send a plain and a streamed request; yield a line for each thing that agrees.

    Raises CheckFailed.
    """
    for stream in (False, True):
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 32,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = httpx.post(
            f"{base_url}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=60,
        )
        yield f"{'streamed' if stream else 'plain'} request: {plain(_agree(answer))} USD"
    for invariant in reconcile.INVARIANTS:
        report = invariant(None)
        if report.findings:
            raise CheckFailed(f"{report.invariant}: {report.findings}")
        yield f"{report.invariant}: {report.counted} counted, 0 found"


def _agree(answer: httpx.Response) -> Decimal:
    """Compare the cost in the answer with event and ledger, to the last digit."""
    if answer.status_code != 200:
        raise CheckFailed(f"status {answer.status_code}: {answer.text[:300]}")
    named = _COST.search(answer.text)
    event = UsageEvent.objects.get(pk=answer.headers["X-Neocloud-Generation-Id"])
    charged = -LedgerEntry.objects.get(event=event, kind=LedgerEntry.Kind.CHARGE).amount
    if named is None or not Decimal(named[1]) == event.cost == charged:
        raise CheckFailed(f"answer {named and named[1]}, event {event.cost}, ledger {charged}")
    return Decimal(named[1])
