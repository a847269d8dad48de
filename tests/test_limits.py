"""Limits through real gateways: exact over processes, in the words and headers of the API page's
family, and in force from the next request on."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest
from django.db.models import Sum
from django.test import Client

from billing import keys, organizations
from billing.models import ApiKey, Membership, MinuteUsage, Organization, RefusalCount
from billing.money import plain
from dashboard.models import User
from kiln_site.demo.model_server import DemoModelServer
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess, gateway
from tests.test_completions import body
from tests.test_document import Api, error, wait_until

RATE_HEADERS = ("limit", "remaining", "reset")


@pytest.fixture(scope="module")
def second(uvicorn_served: GatewayProcess) -> Iterator[GatewayProcess]:
    """Another process of the same gateway."""
    with gateway("uvicorn") as running:
        yield running


@pytest.fixture
def apis(
    uvicorn_served: GatewayProcess,
    second: GatewayProcess,
    acme: Tenant,
    model_server: DemoModelServer,
) -> list[Api]:
    """Acme's view of two processes."""
    model_server.reset_counters()
    return [Api(each, acme, model_server) for each in (uvicorn_served, second)]


def limit_key(api: Api, usd: Decimal | None, period: str = "none") -> None:
    ApiKey.objects.filter(pk=api.tenant.key.pk).update(spend_limit=usd, spend_period=period)


def limit_minute(api: Api, **fields: int | None) -> None:
    Organization.objects.filter(pk=api.tenant.organization.pk).update(**fields)


def rates(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if "ratelimit" in name}


def all_at_once(apis: list[Api], number: int) -> list[httpx.Response]:
    """Send so many requests, to the processes in turn."""
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(lambda n: apis[n % len(apis)].post(body()), range(number)))


# --- Spend limits --------------------------------------------------------------------------------


def test_402_when_the_keys_limit_is_spent(apis: list[Api]) -> None:
    limit_key(apis[0], Decimal("0.000000000001"), "month")
    assert apis[0].post(body()).status_code == 200
    for api in (*apis, *apis):
        answer = api.post(body())
        assert answer.status_code == 402
        refusal = error(answer)
        assert (refusal["type"], refusal["code"]) == ("billing_error", "spend_limit_reached")
        spent = plain(-sum(api.tenant.charges(), Decimal(0)))
        assert f"0.000000000001 USD a month: {spent} USD are spent" in refusal["message"]
        assert "-01 00:00 UTC." in refusal["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert not rates(answer)
        assert "retry-after" not in answer.headers
        assert "x-neocloud-generation-id" not in answer.headers
        key = api.get("key").json()
        assert (key["spend"], key["spend_limit"]) == (spent, "0.000000000001")
    _, other = keys.issue(organization=apis[0].tenant.organization, name="other")
    headers = {"Authorization": f"Bearer {other}"}
    answer = httpx.post(
        f"{apis[0].gateway.base_url}/chat/completions", json=body(), headers=headers
    )
    assert answer.status_code == 200
    limit_key(apis[0], Decimal(1))
    assert [api.post(body()).status_code for api in apis] == [200, 200]


def test_a_suspect_is_refused_before_its_body_is_read(apis: list[Api]) -> None:
    limit_key(apis[0], Decimal(0))
    assert apis[0].post(body()).status_code == 402
    assert apis[0].post(b"{").status_code == 402  # the body would be a 400
    limit_key(apis[0], None)
    assert apis[0].post(b"{").status_code == 400


def test_a_spend_limit_is_exact_over_processes(apis: list[Api]) -> None:
    limit_key(apis[0], Decimal("0.000000000001"), "day")
    limit_minute(apis[0], max_in_flight=100)
    answers = all_at_once(apis, 20)
    # What is held counts, so the first is the only one.
    assert sorted(answer.status_code for answer in answers) == [200] + [402] * 19
    assert len(apis[0].tenant.charges()) == 1


# --- Limits per minute ---------------------------------------------------------------------------


def test_requests_per_minute_are_exact_over_processes(apis: list[Api]) -> None:
    limit_minute(apis[0], requests_per_minute=5, max_in_flight=100)
    answers = all_at_once(apis, 24)
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    rows = MinuteUsage.objects.filter(organization=apis[0].tenant.organization)
    used = list(rows.values_list("requests", flat=True))
    # More than two minutes' worth, so that one minute at least was full.
    assert max(used) == 5
    assert len(served) == sum(used) == len(apis[0].tenant.events())
    for answer in refused:
        assert answer.status_code == 429
        refusal = error(answer)
        assert (refusal["type"], refusal["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert refusal["param"] == "requests_per_minute"
        assert "limit of 5 requests per minute is reached" in refusal["message"]
        assert answer.headers["x-ratelimit-limit-requests"] == "5"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert 0 <= int(answer.headers["x-ratelimit-reset-requests"]) <= 60
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert "x-should-retry" not in answer.headers
        assert "x-neocloud-generation-id" not in answer.headers
        assert len(rates(answer)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_answers_say_what_is_left(apis: list[Api], stream: bool) -> None:
    limit_minute(apis[0], requests_per_minute=100, tokens_per_minute=50_000)
    answer = apis[0].post(body(max_tokens=30, stream=stream))
    assert answer.status_code == 200
    assert set(rates(answer)) == {
        f"x-ratelimit-{each}-{what}" for each in RATE_HEADERS for what in ("requests", "tokens")
    }
    assert "retry-after" not in answer.headers
    assert answer.headers["x-ratelimit-remaining-requests"] == "99"
    event = apis[0].tenant.event(answer)
    assert event.held_tokens >= 30
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert left == 50_000 - event.held_tokens
    assert 0 <= int(answer.headers["x-ratelimit-reset-tokens"]) <= 60
    assert apis[1].get("credits").status_code == 200  # not a request of the limit
    limit_minute(apis[0], requests_per_minute=None)
    names = set(rates(apis[1].post(body())))
    assert names == {f"x-ratelimit-{each}-tokens" for each in RATE_HEADERS}


def test_what_is_held_counts_as_tokens_in_every_process(apis: list[Api]) -> None:
    limit_minute(apis[0], tokens_per_minute=10)
    with apis[0].streaming() as running:
        assert running.headers["x-ratelimit-remaining-tokens"] == "0"
        for api in apis:
            answer = api.post(body())
            assert answer.status_code == 429
            refusal = error(answer)
            assert refusal["param"] == "tokens_per_minute"
            assert "limit of 10 tokens, settled and held, per minute" in refusal["message"]
            assert set(rates(answer)) == {f"x-ratelimit-{each}-tokens" for each in RATE_HEADERS}
            assert 1 <= int(answer.headers["retry-after"]) <= 60
    wait_until(lambda: apis[0].tenant.standing.in_flight == 0)


def test_without_limits_there_are_no_headers(apis: list[Api]) -> None:
    assert not rates(apis[0].post(body()))
    with apis[0].in_flight(8):
        answer = apis[1].post(body())
        assert answer.status_code == 429
        assert error(answer)["param"] is None
        assert not rates(answer)
        assert "retry-after" not in answer.headers


def test_eight_in_flight_say_nothing_of_limits_per_minute(apis: list[Api]) -> None:
    limit_minute(apis[0], requests_per_minute=1000)
    with apis[0].in_flight(8):
        answer = apis[1].post(body())
        assert answer.status_code == 429
        assert not rates(answer)
        assert "retry-after" not in answer.headers


# --- The next request ----------------------------------------------------------------------------


def switches(api: Api) -> dict[str, tuple[Callable[[], Any], int, str]]:
    key, organization = api.tenant.key, api.tenant.organization

    def allow_another() -> None:
        ApiKey.objects.filter(pk=key.pk).update(allowed_models=["gpt-oss-120b"])

    return {
        "revoke": (lambda: keys.revoke(key), 401, "invalid_api_key"),
        "pause": (lambda: keys.pause(key), 403, "key_paused"),
        "suspend": (
            lambda: organizations.suspend(organization, reason="Late."),
            403,
            "organization_suspended",
        ),
        "allow-list": (allow_another, 403, "model_not_allowed"),
        "spend limit": (lambda: limit_key(api, Decimal(0)), 402, "spend_limit_reached"),
        "in flight": (lambda: limit_minute(api, max_in_flight=0), 429, "rate_limit_exceeded"),
        "requests": (
            lambda: limit_minute(api, requests_per_minute=0),
            429,
            "rate_limit_exceeded",
        ),
        "rotate": (
            lambda: keys.rotate(key, timedelta(0)),
            401,
            "invalid_api_key",
        ),
    }


@pytest.mark.parametrize(
    "what",
    [
        *("revoke", "pause", "suspend", "allow-list"),
        *("spend limit", "in flight", "requests", "rotate"),
    ],
)
def test_it_bites_on_the_next_request_in_every_process(apis: list[Api], what: str) -> None:
    switch, status, code = switches(apis[0])[what]
    for api in apis:  # both have the key in memory now
        assert api.post(body()).status_code == 200
    switch()
    for api in apis:
        answer = api.post(body())
        assert (answer.status_code, error(answer)["code"]) == (status, code)
    assert len(apis[0].tenant.events()) == 2


def test_a_resumed_key_and_an_active_organization_run_again(apis: list[Api]) -> None:
    keys.pause(apis[0].tenant.key)
    organizations.suspend(apis[0].tenant.organization, reason="Late.")
    assert [api.post(body()).status_code for api in apis] == [403, 403]
    keys.resume(apis[0].tenant.key)
    organizations.activate(apis[0].tenant.organization)
    for api in apis:  # a refusal is remembered for two seconds
        wait_until(lambda api=api: api.post(body()).status_code == 200)  # type: ignore[misc]


# --- What was refused ----------------------------------------------------------------------------


def counted(api: Api) -> dict[tuple[int, str], int]:
    rows = RefusalCount.objects.filter(organization=api.tenant.organization).order_by()
    return {
        (status, code): number
        for status, code, number in rows.values_list("status_code", "code").annotate(Sum("number"))
    }


def test_refusals_are_counted_over_processes_and_shown(apis: list[Api], globex: Tenant) -> None:
    big = json.dumps(body("x" * 21 * 2**20)).encode()
    for api in apis:
        api.post(b"{")
        api.post(body(messages=[]))
        api.post(body(model="none"))
        api.post(big)
        api.of(globex).post(body(model="none"))
    with apis[0].in_flight(8):
        apis[1].post(body())
    limit_key(apis[0], Decimal(0))
    apis[0].post(body())
    keys.pause(apis[0].tenant.key)
    apis[1].post(body())
    expected = {
        (400, ""): 2,
        (400, "empty_array"): 2,
        (404, "model_not_found"): 2,
        (413, "request_too_large"): 2,
        (429, "rate_limit_exceeded"): 1,
        (402, "spend_limit_reached"): 1,
        (403, "key_paused"): 1,
    }
    wait_until(lambda: counted(apis[0]) == expected)
    wait_until(lambda: counted(apis[0].of(globex)) == {(404, "model_not_found"): 2})
    slug = apis[0].tenant.organization.slug
    person = User.objects.create_user(f"{slug}@kiln.test")
    Membership.objects.create(user=person, organization=apis[0].tenant.organization)
    browser = Client()
    browser.force_login(person)
    page = browser.get(f"/o/{slug}/requests/", headers={"host": "localhost"}).text
    assert "Refused in the last 24 hours" in page
    assert page.count("model_not_found") == 1


def test_a_revoked_key_is_counted_and_an_unknown_one_is_not(apis: list[Api]) -> None:
    keys.revoke(apis[0].tenant.key)
    apis[0].post(body())
    httpx.post(
        f"{apis[0].gateway.base_url}/chat/completions",
        json=body(),
        headers={"Authorization": "Bearer sk-bk-" + "0" * 38},
    )
    wait_until(lambda: counted(apis[0]) == {(401, "invalid_api_key"): 1})


def test_a_process_that_ends_stores_what_it_counted(
    catalog: None, acme: Tenant, model_server: DemoModelServer
) -> None:
    with gateway("uvicorn") as running:
        api = Api(running, acme, model_server)
        for _ in range(3):
            assert api.post(body(model="none")).status_code == 404
    assert counted(api) == {(404, "model_not_found"): 3}


def test_an_admitted_request_is_no_refusal(apis: list[Api]) -> None:
    assert apis[0].post(body("demo:status=400")).status_code == 400
    assert apis[0].post(body("demo:status=500")).status_code == 502
    apis[0].post(body(model="none"))
    wait_until(lambda: counted(apis[0]) == {(404, "model_not_found"): 1})
