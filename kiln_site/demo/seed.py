"""What the demo shows on its first page: two organizations, two people, a key, a month of requests.

Uses the house's own doors, so that the demo's ledger adds up as any other. Safe to repeat: what is
there stays, but for the key, which is issued anew because nobody can know the old one.
"""

import random
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from django.utils import timezone

from billing import keys, ledger, organizations, pricing, usage, workers
from billing.models import ApiKey, Membership, Organization, UsageEvent
from billing.pricing import Prices
from dashboard.models import User
from gateway import catalog_file
from gateway.catalog_file import BackendEntry, ModelEntry
from gateway.generation import new_id

CREDITS = Decimal(25)
CUSTOMER = "customer@demo.example"
OPERATOR = "operator@demo.example"
KEY_NAME = "demo"

_HISTORY_DAYS = 30
_HISTORY_EVENTS = 400

PAGE_MODELS = [
    ModelEntry(
        id="qwen3-32b",
        context_window=32768,
        prices=Prices(Decimal("0.08"), Decimal("0.04"), Decimal("0.28")),
    ),
    ModelEntry(
        id="gpt-oss-120b",
        context_window=131072,
        prices=Prices(Decimal("0.015"), Decimal("0.015"), Decimal("0.085")),
    ),
]


@dataclass(frozen=True)
class Seeded:
    """Who and what the banner names. `secret` is shown once."""

    organization: Organization
    customer: User
    operator: User
    secret: str


def seed(models: list[ModelEntry], *, with_history: bool) -> Seeded:
    """Load `models` and make what is missing of the demo's world."""
    catalog_file.load(models)
    # An earlier start may have served others, whose server is gone.
    catalog_file.withdraw(except_for=[model.id for model in models])
    organization, is_new = organizations.create(
        name="Demo Inc", actor="demo", opening_credits=CREDITS
    )
    other, _ = organizations.create(name="Globex", actor="demo", opening_credits=CREDITS)
    customer = _user(CUSTOMER, "Casey Customer")
    Membership.objects.get_or_create(
        organization=organization, user=customer, defaults={"role": Membership.Role.OWNER}
    )
    operator = _user(OPERATOR, "Robin Operator", is_operator=True)
    if is_new and with_history:
        _history(organization, PAGE_MODELS, _HISTORY_EVENTS, seed=1)
        _history(other, PAGE_MODELS, _HISTORY_EVENTS // 10, seed=2)
    for key in ApiKey.objects.filter(
        organization=organization, name=KEY_NAME, revoked_at__isnull=True
    ):
        keys.revoke(key)
    _, secret = keys.issue(organization=organization, name=KEY_NAME, created_by=customer)
    return Seeded(organization, customer, operator, secret)


def served_by(models: list[ModelEntry], url: str) -> list[ModelEntry]:
    """Return the models with one backend each, at `url`."""
    return [
        ModelEntry(
            id=model.id,
            context_window=model.context_window,
            prices=model.prices,
            backends=(BackendEntry(name="demo", url=url, served_model_name=model.id),),
        )
        for model in models
    ]


def _user(email: str, name: str, *, is_operator: bool = False) -> User:
    # No password: the links that the demo prints are the only way in.
    user = User.objects.filter(email=email).first()
    if user is None:
        user = User.objects.create_user(
            email, name=name, is_staff=is_operator, is_superuser=is_operator
        )
    return user


def _history(
    organization: Organization, models: list[ModelEntry], number: int, *, seed: int
) -> None:
    """Write a plausible month, failures included, through the same doors as live requests."""
    chance = random.Random(seed)  # noqa: S311 plausible, not secret
    worker_id = uuid.uuid4()
    workers.beat(worker_id=worker_id, host="history", pid=0)
    key, _ = keys.issue(organization=organization, name="history")
    now = timezone.now()
    moments = sorted(
        now - timedelta(seconds=chance.uniform(60, _HISTORY_DAYS * 86400)) for _ in range(number)
    )
    settlements = [
        _settlement(chance, organization, key, worker_id, chance.choice(models), moment)
        for moment in moments
    ]
    with ledger.locked_accounts([organization.pk]) as accounts:
        usage.settle(settlements, accounts)
    keys.revoke(key)
    workers.stop(worker_id)


def _settlement(
    chance: random.Random,
    organization: Organization,
    key: ApiKey,
    worker_id: uuid.UUID,
    model: ModelEntry,
    began: datetime,
) -> usage.Settlement:
    state = chance.choices(["succeeded", "cancelled", "failed"], [94, 4, 2])[0]
    prompt = int(chance.lognormvariate(6.3, 0.9))
    completion = int(chance.lognormvariate(4.6, 0.9))
    latency = 120 + completion * chance.randint(9, 16)
    is_paid, is_streamed = state != "failed", chance.random() < 0.7
    return usage.Settlement(
        admission=usage.Admission(
            generation_id=new_id(),
            organization_id=organization.pk,
            key_id=key.pk,
            worker_id=worker_id,
            model=model.id,
            backend="demo",
            streamed=is_streamed,
            prices=model.prices,
            hold=pricing.hold(
                prompt_tokens=prompt, output_tokens=1024, choices=1, prices=model.prices
            ),
            created_at=began,
        ),
        backend="demo",
        state=state,
        finished_at=began + timedelta(milliseconds=latency),
        status_code=200 if is_paid else 502,
        prompt_tokens=prompt if is_paid else 0,
        cached_tokens=int(prompt * chance.choice([0, 0, 0.4, 0.9])) if is_paid else 0,
        completion_tokens=completion if is_paid else 0,
        usage_source=UsageEvent.UsageSource.REPORTED if is_paid else UsageEvent.UsageSource.NONE,
        error="" if is_paid else "The model backend returned an error. Try again later.",
        finish_reason="stop" if state == "succeeded" else "",
        latency_ms=latency,
        time_to_first_token_ms=chance.randint(60, 400) if is_streamed and is_paid else None,
    )
