"""The second source: model servers' own token counters against usage events."""

import uuid
from decimal import Decimal
from typing import Any

import httpx
import pytest
from django.utils import timezone

from billing import keys, organizations, workers
from billing.models import ApiKey, Finding, GatewayWorker, UsageEvent
from billing.reconcile import Report
from gateway import second_source, tasks
from gateway.models import Backend, BackendReading, CatalogModel
from gateway.second_source import Counters, Unreadable, compare, parse
from kiln_site.demo.model_server import DemoModelServer
from tests.billing.world import admission, admit, served
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess

VLLM = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="qwen"} 1234.0
vllm:prompt_tokens_total{engine="1",model_name="qwen"} 6.0
vllm:prompt_tokens_total{engine="0",model_name="other"} 9000.0
vllm:prompt_tokens_created{engine="0",model_name="qwen"} 1.7959724e+09
vllm:generation_tokens_total{engine="0",model_name="qwen"} 1.5e+02 1795972491000
process_start_time_seconds 1.79597249e+09
vllm:request_success_total{finished_reason="stop",model_name="qwen"} 3.0
"""


def test_counters_are_read_as_vllm_writes_them() -> None:
    assert parse(VLLM, "qwen") == Counters(1240, 150, 1795972490.0)


def test_counters_without_a_model_count_for_every_model() -> None:
    text = "vllm:prompt_tokens_total 5\nvllm:generation_tokens_total 6\n"
    assert parse(text, "qwen") == Counters(5, 6, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        VLLM.replace("qwen", "else"),
        VLLM.replace("1234.0", "NaN"),
        VLLM.replace("1234.0", "-1"),
        VLLM.replace("1234.0", "1e300"),
        VLLM.replace("1234.0", "many"),
    ],
)
def test_anything_else_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        parse(text, "qwen")


@pytest.fixture
def key(db: None) -> ApiKey:
    organization, _ = organizations.create(name="Acme", actor="tests", opening_credits=Decimal(10))
    return keys.issue(organization=organization, name="default")[0]


@pytest.fixture
def worker(db: None) -> GatewayWorker:
    worker_id = uuid.uuid4()
    workers.beat(worker_id=worker_id, host="tests", pid=1)
    return GatewayWorker.objects.get(pk=worker_id)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A server whose counters the test sets."""
    state: dict[str, Any] = {"prompt": 0, "completion": 0, "started": 1.0}

    def fetch(client: object, url: str) -> str:
        return (
            f"vllm:prompt_tokens_total {state['prompt']}\n"
            f"vllm:generation_tokens_total {state['completion']}\n"
            f"process_start_time_seconds {state['started']}\n"
        )

    monkeypatch.setattr(second_source, "_fetch", fetch)
    return state


def backend(model: str = "qwen3-32b", name: str = "rack-1", **fields: Any) -> Backend:
    row, _ = CatalogModel.objects.get_or_create(model_id=model, defaults={"context_window": 1000})
    return Backend.objects.create(
        **{
            "model": row,
            "name": name,
            "url": f"http://{name}/v1",
            "served_model_name": "qwen",
            "metrics_url": "http://rack-1/metrics",
            **fields,
        }
    )


def reread(server: dict[str, Any], *, prompt: int, completion: int) -> Report:
    """Let the server have counted so much more, and compare."""
    server["prompt"] += prompt
    server["completion"] += completion
    return compare()


def test_agreement_is_silent(key: ApiKey, worker: GatewayWorker, server: dict[str, Any]) -> None:
    backend()
    server.update(prompt=5000, completion=700)  # from before the gateway
    first = compare()
    assert (first.counted, first.findings, first.notes) == (
        1,
        [],
        ["backend rack-1: first reading"],
    )
    served(key, worker)  # 100 + 10 tokens
    served(key, worker, backend="rack-2")
    served(key, worker, state="failed", prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    assert reread(server, prompt=100, completion=10).findings == []
    assert reread(server, prompt=0, completion=0).findings == []


@pytest.mark.parametrize(
    ("prompt", "completion", "subjects"),
    [
        (100, 11, ["backend rack-1: completion tokens"]),
        (100, 9, ["backend rack-1: completion tokens"]),
        (102, 10, ["backend rack-1: prompt tokens"]),
        (101, 10, []),
        (0, 0, ["backend rack-1: prompt tokens", "backend rack-1: completion tokens"]),
    ],
)
def test_a_drift_above_one_percent_is_found(
    key: ApiKey,
    worker: GatewayWorker,
    server: dict[str, Any],
    prompt: int,
    completion: int,
    subjects: list[str],
) -> None:
    backend()
    compare()
    served(key, worker)
    found = reread(server, prompt=prompt, completion=completion).findings
    assert [broken.subject for broken in found] == subjects


def test_what_ran_at_a_reading_may_fall_on_either_side(
    key: ApiKey, worker: GatewayWorker, server: dict[str, Any]
) -> None:
    backend()
    compare()
    served(key, worker)
    admit(admission(key, worker))  # the server is at it: as much as the largest, at most
    assert reread(server, prompt=200, completion=20).findings == []
    UsageEvent.objects.filter(state="in_flight").update(
        state="succeeded", finished_at=timezone.now(), prompt_tokens=100, completion_tokens=10
    )
    assert reread(server, prompt=0, completion=0).findings == []
    served(key, worker)
    assert len(reread(server, prompt=0, completion=0).findings) == 2


@pytest.mark.parametrize("anew", [{"prompt": 3}, {"started": 2.0, "prompt": 9999}])
def test_counters_that_began_anew_are_not_compared(
    key: ApiKey, worker: GatewayWorker, server: dict[str, Any], anew: dict[str, Any]
) -> None:
    backend()
    server["prompt"] = 500
    compare()
    served(key, worker)
    server.update(anew)
    report = compare()
    assert (report.findings, report.notes) == ([], ["backend rack-1: its counters began anew"])
    served(key, worker)
    assert reread(server, prompt=100, completion=10).findings == []


def test_models_that_share_a_server_are_added_up(
    key: ApiKey, worker: GatewayWorker, server: dict[str, Any]
) -> None:
    backend()
    backend("qwen-alias", "rack-1a")
    compare()
    served(key, worker)
    served(key, worker, backend="rack-1a")  # of qwen3-32b, so of another server
    aliased = admission(key, worker, model="qwen-alias", backend="rack-1a")
    admit(aliased)
    UsageEvent.objects.filter(pk=aliased.generation_id).update(
        state="succeeded", finished_at=timezone.now(), prompt_tokens=50, completion_tokens=5
    )
    report = reread(server, prompt=150, completion=15)
    assert (report.counted, report.findings) == (1, [])


def test_a_server_that_cannot_be_read_is_a_note_and_is_compared_later(
    key: ApiKey,
    worker: GatewayWorker,
    server: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend()
    compare()
    served(key, worker)

    def fail(client: object, url: str) -> str:
        raise Unreadable("status 503")

    with monkeypatch.context() as patch:
        patch.setattr(second_source, "_fetch", fail)
        report = compare()
    assert (report.counted, report.notes) == (0, ["backend rack-1: status 503"])
    assert len(reread(server, prompt=100, completion=20).findings) == 1


def test_the_demo_model_server_is_read(db: None) -> None:
    with DemoModelServer() as demo:
        url = demo.url.removesuffix("/v1")
        backend(metrics_url=f"{url}/metrics", served_model_name="qwen3-32b")
        backend(name="rack-2", metrics_url=f"{url}/health", served_model_name="qwen3-32b")
        backend(name="rack-3", metrics_url=f"{url}/nowhere", served_model_name="qwen3-32b")
        tasks.compare_second_source()
        notes = compare().notes
    backend(name="rack-4", metrics_url=f"{url}/metrics", served_model_name="gone")
    assert BackendReading.objects.get().prompt_tokens == 0
    assert notes == [
        "backend rack-2: no token counters of 'qwen3-32b'",
        "backend rack-3: status 404",
    ]
    assert all("ConnectError" in note for note in compare().notes if "rack-4" in note)


def test_a_drift_is_a_finding(key: ApiKey, worker: GatewayWorker, server: dict[str, Any]) -> None:
    backend()
    tasks.compare_second_source()
    served(key, worker)
    tasks.compare_second_source()
    found = Finding.objects.filter(invariant="second_source").order_by("pk")
    assert [finding.subject for finding in found] == [
        "backend rack-1: prompt tokens",
        "backend rack-1: completion tokens",
    ]
    assert found[0].detail.startswith("the server counted 0, the gateway 100, from ")


def test_the_gateway_and_its_model_server_agree(
    uvicorn_served: GatewayProcess, acme: Tenant, model_server: DemoModelServer
) -> None:
    """Through real sockets."""
    mine = Backend.objects.filter(model__model_id="qwen3-32b")
    mine.update(metrics_url=model_server.url.removesuffix("/v1") + "/metrics")
    body = {"model": "qwen3-32b", "messages": [{"role": "user", "content": "Say something."}]}
    try:
        assert compare().findings == []
        for stream in (False, True):
            answer = httpx.post(
                f"{uvicorn_served.base_url}/chat/completions",
                json={**body, "stream": stream},
                headers=acme.headers,
                timeout=30,
            )
            assert answer.status_code == 200
        report = compare()
        assert (report.findings, report.notes) == ([], [])
        events = acme.events()
        reading = BackendReading.objects.get()
        assert reading.prompt_tokens >= sum(event.prompt_tokens for event in events) > 0
    finally:
        mine.update(metrics_url="")
        BackendReading.objects.all().delete()
