"""Key spend limits, limits per minute, and the bound of the overdraft."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.db.models import DateTimeField, Value
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing import counters, keys, limits, organizations, standing, usage
from billing.models import ApiKey, GatewayWorker, KeySpend, MinuteUsage, Organization, UsageEvent
from billing.standing import (
    InsufficientCredits,
    RateLimitReached,
    SpendLimitReached,
    TooManyInFlight,
    refuse_one_more,
)
from tests.billing.world import (
    COST,
    PRICES,
    admission,
    admit,
    balance,
    served,
    settle,
    settlement,
    silence,
)


def limit(key: ApiKey, usd: Decimal | None, period: str = "none") -> None:
    ApiKey.objects.filter(pk=key.pk).update(spend_limit=usd, spend_period=period)


def limit_minute(organization: Organization, **fields: int | None) -> None:
    Organization.objects.filter(pk=organization.pk).update(**fields)


def spent(key: ApiKey) -> Decimal:
    return sum(KeySpend.objects.filter(api_key=key).values_list("spend", flat=True), Decimal(0))


class Clock:
    """The database's clock as limits see it: it stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = timezone.now()

    def __call__(self) -> Value:
        return Value(self.now, output_field=DateTimeField())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(standing, "Now", clock)
    monkeypatch.setattr(usage, "Now", clock)
    return clock


def statements(queries: CaptureQueriesContext) -> list[str]:
    return [each["sql"] for each in queries if "SAVEPOINT" not in each["sql"]]


# --- Spend limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "since", "resets_at"),
    [
        ("none", None, None),
        ("day", datetime(2028, 2, 29, tzinfo=UTC), datetime(2028, 3, 1, tzinfo=UTC)),
        ("week", datetime(2028, 2, 28, tzinfo=UTC), datetime(2028, 3, 6, tzinfo=UTC)),
        ("month", datetime(2028, 2, 1, tzinfo=UTC), datetime(2028, 3, 1, tzinfo=UTC)),
    ],
)
@pytest.mark.parametrize("offset", [-11, 0, 14])
def test_periods_are_those_of_utc(
    period: str, since: datetime | None, resets_at: datetime | None, offset: int
) -> None:
    tuesday = datetime(2028, 2, 29, 23, 59, 59, tzinfo=UTC)
    there = tuesday.astimezone(timezone.get_fixed_timezone(offset * 60))
    assert limits.span(period, there) == limits.Span(since, resets_at)


@given(st.datetimes(timezones=st.just(UTC)), st.sampled_from(["day", "week", "month"]))
def test_every_moment_is_in_its_period(moment: datetime, period: str) -> None:
    if moment.year == 9999:
        return
    span = limits.span(period, moment)
    assert span.since and span.resets_at
    assert span.since <= moment < span.resets_at
    assert limits.span(period, span.resets_at).since == span.resets_at
    if period == "week":
        assert span.since.weekday() == 0


def test_a_key_spends_up_to_its_limit(key: ApiKey, worker: GatewayWorker) -> None:
    limit(key, COST * 2)
    served(key, worker)
    served(key, worker)
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, SpendLimitReached)
    assert (refusal.spending.limit, refusal.spending.spent) == (COST * 2, COST * 2)
    assert refusal.spending.held == 0
    assert refusal.spending.resets_at is None
    limit(key, COST * 2 + Decimal("0.000000000001"))
    assert admit(admission(key, worker)) == [None]


def test_another_key_of_the_organization_does_not_notice(
    key: ApiKey, worker: GatewayWorker
) -> None:
    other, _ = keys.issue(organization=key.organization, name="other", spend_limit=Decimal(1))
    limit(key, Decimal(0))
    answers = admit(admission(key, worker), admission(other, worker))
    assert isinstance(answers[0], SpendLimitReached)
    assert answers[1] is None


def test_what_the_keys_other_requests_hold_counts(key: ApiKey, worker: GatewayWorker) -> None:
    limit(key, Decimal(1))
    other, _ = keys.issue(organization=key.organization, name="other")
    admit(admission(other, worker, hold=Decimal(5)))
    batch = [admission(key, worker, hold=Decimal("0.6")) for _ in range(3)]
    answers = admit(*batch)
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], SpendLimitReached)
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, SpendLimitReached)
    assert refusal.spending.spent == 0
    assert refusal.spending.held == Decimal("1.2")
    settle(settlement(batch[0], state="failed"))
    assert admit(admission(key, worker)) == [None]


def test_a_hold_of_a_dead_worker_does_not_count(key: ApiKey, worker: GatewayWorker) -> None:
    limit(key, Decimal(1))
    admit(admission(key, worker, hold=Decimal(2)))
    silence(worker, 11)
    refuse_one_more(key.pk)


def test_the_first_limit_counts_what_was_spent_before_it(
    key: ApiKey, worker: GatewayWorker
) -> None:
    served(key, worker)
    limit(key, COST, "day")
    assert isinstance(admit(admission(key, worker))[0], SpendLimitReached)


@pytest.mark.parametrize("period", ["day", "week", "month"])
def test_a_new_period_begins_at_zero(
    clock: Clock, key: ApiKey, worker: GatewayWorker, period: str
) -> None:
    limit(key, COST, period)
    served(key, worker)
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, SpendLimitReached)
    span = limits.span(period, clock.now)
    assert refusal.spending.resets_at == span.resets_at
    assert span.since
    KeySpend.objects.filter(api_key=key).update(day=span.since.date() - timedelta(days=1))
    assert admit(admission(key, worker)) == [None]
    KeySpend.objects.filter(api_key=key).update(day=span.since.date())
    assert isinstance(admit(admission(key, worker))[0], SpendLimitReached)
    limit(key, COST)
    assert isinstance(admit(admission(key, worker))[0], SpendLimitReached)


def test_the_day_is_the_one_of_the_admission(key: ApiKey, worker: GatewayWorker) -> None:
    late = datetime(2026, 1, 31, 23, 59, tzinfo=UTC)
    opened = [admission(key, worker, created_at=late + timedelta(minutes=n)) for n in range(3)]
    admit(*opened)
    settle(*map(settlement, opened))
    days = dict(KeySpend.objects.filter(api_key=key).values_list("day", "spend"))
    assert days == {date(2026, 1, 31): COST, date(2026, 2, 1): COST * 2}


def test_spend_moves_once_and_only_with_a_charge(key: ApiKey, worker: GatewayWorker) -> None:
    opened = admission(key, worker)
    admit(opened)
    settle(settlement(opened), settlement(opened))
    settle(settlement(opened))
    served(key, worker, state="failed")
    assert spent(key) == COST
    late = admission(key, worker)
    admit(late)
    usage.close_abandoned([late.generation_id])
    assert spent(key) == COST
    settle(settlement(late))
    assert spent(key) == COST * 2


def test_limits_cost_few_statements_and_none_where_they_are_not_set(
    clock: Clock, key: ApiKey, worker: GatewayWorker
) -> None:
    def counted() -> tuple[int, int]:
        opened = admission(key, worker)
        with CaptureQueriesContext(connection) as admitting:
            assert not isinstance(admit(opened)[0], Exception)
        with CaptureQueriesContext(connection) as settling:
            settle(settlement(opened))
        return len(statements(admitting)), len(statements(settling))

    # The lock, keys, holds and the insert; the lock, events, their upsert, the ledger's line, the
    # balance and the spend.
    assert counted() == (4, 6)
    limit(key, Decimal(1), "day")
    assert counted() == (5, 6)
    limit(key, None)
    limit_minute(key.organization, requests_per_minute=100)
    assert counted() == (7, 6)  # the first of its minute removes old ones
    assert counted() == (6, 6)
    limit_minute(key.organization, tokens_per_minute=10_000)
    assert counted() == (6, 7)


def test_many_keys_and_days_are_one_statement(acme: Organization, worker: GatewayWorker) -> None:
    several = [keys.issue(organization=acme, name=str(n))[0] for n in range(5)]
    opened = [admission(key, worker) for key in several]
    admit(*opened)
    with CaptureQueriesContext(connection) as queries:
        settle(*map(settlement, opened))
    assert sum("billing_keyspend" in sql for sql in statements(queries)) == 1
    assert [spent(key) for key in several] == [COST] * 5


def test_counters_add_to_what_is_there(key: ApiKey) -> None:
    day = date(2026, 1, 1)
    for _ in range(3):
        row = KeySpend(api_key=key, day=day, spend=Decimal("0.1"))
        other = KeySpend(api_key=key, day=day + timedelta(days=1), spend=Decimal(1))
        counters.add([other, row], to=["spend"], of=["api_key", "day"])
    days = dict(KeySpend.objects.filter(api_key=key).values_list("day", "spend"))
    assert days == {day: Decimal("0.3"), day + timedelta(days=1): Decimal(3)}


# --- Limits per minute ---------------------------------------------------------------------------


def test_requests_per_minute(
    clock: Clock, acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    limit_minute(acme, requests_per_minute=3)
    left = [
        (answer.requests_limit, answer.requests, answer.tokens_limit)
        for _ in range(3)
        for answer in admit(admission(key, worker))
        if isinstance(answer, limits.Minute)
    ]
    assert left == [(3, 1, None), (3, 2, None), (3, 3, None)]
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, RateLimitReached)
    assert refusal.which == "requests_per_minute"
    assert timedelta(0) < refusal.minute.resets_at - clock.now <= timedelta(minutes=1)
    # A request that ended frees no place in its minute, and a refused one took none.
    assert MinuteUsage.objects.get(organization=acme).requests == 3
    clock.now += timedelta(minutes=1)
    assert isinstance(admit(admission(key, worker))[0], limits.Minute)


def test_a_batch_counts_against_itself(
    clock: Clock, acme: Organization, globex: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    limit_minute(acme, requests_per_minute=2)
    other, _ = keys.issue(organization=globex, name="default")
    answers = admit(*[admission(each, worker) for each in (key, other, key, key, other)])
    kinds = [type(answer) for answer in answers]
    nothing = type(None)
    assert kinds == [limits.Minute, nothing, limits.Minute, RateLimitReached, nothing]
    assert MinuteUsage.objects.get().requests == 2


def test_tokens_per_minute_are_settled_and_held(
    clock: Clock, acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    limit_minute(acme, tokens_per_minute=300)
    first = admission(key, worker, held_tokens=299)
    second = admission(key, worker, held_tokens=5000)
    [left] = admit(first)
    assert isinstance(left, limits.Minute)
    assert (left.tokens_limit, left.tokens, left.requests_limit) == (300, 299, None)
    assert isinstance(admit(second)[0], limits.Minute)
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, RateLimitReached)
    assert (refusal.which, refusal.minute.tokens) == ("tokens_per_minute", 5299)
    settle(settlement(first))  # 110 tokens
    settle(settlement(second, completion_tokens=89))  # 189 tokens
    [left] = admit(admission(key, worker))
    assert isinstance(left, limits.Minute)
    assert left.tokens == 299
    settle(settlement(admission(key, worker), state="failed", prompt_tokens=0, cached_tokens=0))
    third = admission(key, worker)
    admit(third)
    settle(settlement(third, prompt_tokens=1, cached_tokens=0, completion_tokens=0))
    assert isinstance(admit(admission(key, worker))[0], RateLimitReached)
    clock.now += timedelta(minutes=1)
    assert isinstance(admit(admission(key, worker))[0], limits.Minute)


def test_what_a_dead_worker_holds_does_not_count(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    limit_minute(acme, tokens_per_minute=10)
    admit(admission(key, worker, held_tokens=10))
    with pytest.raises(RateLimitReached):
        refuse_one_more(key.pk)
    silence(worker, 11)
    refuse_one_more(key.pk)


def test_without_limits_no_minute_is_counted(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    served(key, worker)
    assert not MinuteUsage.objects.filter(organization=acme).exists()


def test_old_minutes_are_removed(
    clock: Clock, acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    limit_minute(acme, requests_per_minute=100)
    now = clock.now.replace(second=0, microsecond=0)
    for minutes in (30, 61, 62, 100_000):
        MinuteUsage.objects.create(organization=acme, minute=now - timedelta(minutes=minutes))
    admit(admission(key, worker))
    assert MinuteUsage.objects.filter(organization=acme).count() == 2


def test_the_order_of_the_refusals(acme: Organization, key: ApiKey, worker: GatewayWorker) -> None:
    def refusal() -> type:
        return type(admit(admission(key, worker))[0])

    organizations.suspend(acme, reason="late")
    limit_minute(acme, requests_per_minute=0, tokens_per_minute=0, max_in_flight=0)
    limit(key, Decimal(0))
    ApiKey.objects.filter(pk=key.pk).update(allowed_models=["gpt-oss-120b"])
    account = acme.account
    type(account).objects.filter(pk=account.pk).update(balance=0)
    assert refusal() is keys.OrganizationSuspended
    organizations.activate(acme)
    assert refusal() is keys.ModelNotAllowed
    ApiKey.objects.filter(pk=key.pk).update(allowed_models=["qwen3-32b"])
    assert refusal() is InsufficientCredits
    type(account).objects.filter(pk=account.pk).update(balance=1)
    assert refusal() is SpendLimitReached
    limit(key, Decimal(1))
    assert refusal() is TooManyInFlight
    limit_minute(acme, max_in_flight=8)
    assert refusal() is RateLimitReached
    assert not UsageEvent.objects.filter(organization=acme).exists()


# --- The bound of the overdraft (rulings.md 18) --------------------------------------------------

TOKEN = PRICES.output.scaleb(-6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.lists(st.integers(0, 500), min_size=1, max_size=4)),
        st.tuples(st.just("settle"), st.integers(0, 7), st.just(0) | st.integers(-500, 5000)),
    ),
    min_size=5,
    max_size=25,
)


def play(
    key: ApiKey, worker: GatewayWorker, overdraft_limit: Decimal, steps: Iterable[Any]
) -> None:
    """Admit and settle as the steps say; check the bound after each.

    Holds are of so many output tokens; a cost is of so many more, or fewer, than its hold.
    """
    running: list[usage.Admission] = []
    # Of those in flight at the last admission: what they cost beyond their holds, and their holds.
    beyond: dict[Any, Decimal] = {}
    holds: dict[Any, Decimal] = {}
    for step in steps:
        if step[0] == "admit":
            batch = [admission(key, worker, hold=tokens * TOKEN) for tokens in step[1]]
            admitted = [
                each
                for each, answer in zip(batch, admit(*batch), strict=True)
                if not isinstance(answer, Exception)
            ]
            running += admitted
            if admitted:
                beyond = {each.generation_id: Decimal(0) for each in running}
                holds = {each.generation_id: each.hold for each in running}
            assert len(running) <= 8
        elif running:
            each = running.pop(step[1] % len(running))
            used = max(int(each.hold / TOKEN) + step[2], 0)
            ended = settlement(each, prompt_tokens=0, cached_tokens=0, completion_tokens=used)
            [cost] = settle(ended)
            beyond[each.generation_id] = max(Decimal(0), cost - each.hold)
        allowed = sum(beyond.values(), max(holds.values(), default=Decimal(0)))
        assert balance(key.organization) >= -overdraft_limit - allowed


@given(
    credits=st.integers(0, 1000),
    overdraft=st.sampled_from([0, 1000]),
    steps=STEPS,
)
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_balance_never_falls_below_the_bound(
    db: None, worker: GatewayWorker, credits: int, overdraft: int, steps: list[Any]
) -> None:
    organization, _ = organizations.create(
        name=f"acme-{Organization.objects.count()}", actor="tests", opening_credits=credits * TOKEN
    )
    Organization.objects.filter(pk=organization.pk).update(overdraft_limit=overdraft * TOKEN)
    key, _ = keys.issue(organization=organization, name="default")
    silence(worker, -3600)  # nobody beats here: it stays fresh however long this takes
    play(key, worker, overdraft * TOKEN, steps)
