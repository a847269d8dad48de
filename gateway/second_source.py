"""The second source: what model servers say they computed, against what usage events say.

Servers publish their token counters (vLLM's `/metrics`); for those whose backends name a metrics
URL, what was counted since the last reading is compared with the events of the same time. A
difference above 1 % is a finding: tokens that nobody paid, or that nobody made. The only writer of
BackendReading.
"""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import httpx
from django.db.models import Max, Q, Sum
from django.utils import timezone

from billing.models import UsageEvent
from billing.reconcile import Check, Report
from gateway.models import Backend, BackendReading

log = logging.getLogger(__name__)

_DRIFT_MAX_PERCENT = 1
_SECONDS = 5.0
_BODY_MAX = 8 * 2**20

_PROMPT = "vllm:prompt_tokens_total"
_COMPLETION = "vllm:generation_tokens_total"
_STARTED = "process_start_time_seconds"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([-+.\w]+)(?:\s+-?\d+)?$", re.ASCII)
_MODEL_NAME = re.compile(r'(?:^|,)\s*model_name="((?:[^"\\]|\\.)*)"')


class Unreadable(Exception):
    """The counters could not be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Counters:
    prompt_tokens: int
    completion_tokens: int
    server_started: float | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A model on a model server, and the (model, backend) by which events call it."""

    metrics_url: str
    served_model_name: str
    called: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        return f"backend {', '.join(sorted(name for _, name in self.called))}"


def compare(_: datetime | None = None) -> Report:
    """Read the counters of all servers that have some, and compare each with its last reading."""
    report = Report("gateway's tokens = model servers' tokens", 0)
    with httpx.Client(timeout=_SECONDS, trust_env=False, follow_redirects=False) as client:
        for server in _servers():
            try:
                now = parse(_fetch(client, server.metrics_url), server.served_model_name)
            except Unreadable as problem:
                # Not a finding: the next reading covers the time since the last one.
                log.warning("%s: %s: %s", server, server.metrics_url, problem)
                report.notes.append(f"{server}: {problem}")
                continue
            report.counted += 1
            _compare_one(report, server, now, timezone.now())
    return report


CHECK = Check("second_source", compare)


def parse(text: str, model_name: str) -> Counters:
    """Return the counters of this model in Prometheus' text format. Raises Unreadable.

    Engines of one server are added up. A sample without a model's name counts for every model.
    """
    sums: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or sample[1] not in {_PROMPT, _COMPLETION, _STARTED}:
            continue
        named = _MODEL_NAME.search(sample[2] or "")
        if named is None or named[1] == model_name:
            sums[sample[1]] = sums.get(sample[1], 0) + _number(sample[3])
    if _PROMPT not in sums or _COMPLETION not in sums:
        raise Unreadable(f"no token counters of {model_name!r}")
    return Counters(int(sums[_PROMPT]), int(sums[_COMPLETION]), sums.get(_STARTED))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < 2**63:  # NaN neither
        raise Unreadable(f"a counter of {text[:40]}")
    return number


def _fetch(client: httpx.Client, url: str) -> str:
    body = bytearray()
    try:
        with client.stream("GET", url) as answer:
            if answer.status_code != 200:
                raise Unreadable(f"status {answer.status_code}")
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > _BODY_MAX:
                    raise Unreadable(f"more than {_BODY_MAX} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreadable(f"{type(error).__name__} {error}".strip()) from None
    return body.decode("utf-8", "replace")


def _servers() -> Iterable[Server]:
    called: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for backend in Backend.objects.exclude(metrics_url="").select_related("model").order_by("pk"):
        server = (backend.metrics_url, backend.served_model_name)
        called.setdefault(server, set()).add((backend.model.model_id, backend.name))
    return [Server(url, name, frozenset(names)) for (url, name), names in called.items()]


def _compare_one(report: Report, server: Server, now: Counters, read_at: datetime) -> None:
    last = BackendReading.objects.filter(
        metrics_url=server.metrics_url, served_model_name=server.served_model_name
    ).first()
    if last is None:
        report.notes.append(f"{server}: first reading")
    elif _has_restarted(last, now):
        report.notes.append(f"{server}: its counters began anew")
    else:
        _judge(report, server, last, now, read_at)
    BackendReading.objects.update_or_create(
        metrics_url=server.metrics_url,
        served_model_name=server.served_model_name,
        defaults={
            "read_at": read_at,
            "server_started": now.server_started,
            "prompt_tokens": now.prompt_tokens,
            "completion_tokens": now.completion_tokens,
        },
    )


def _has_restarted(last: BackendReading, now: Counters) -> bool:
    return (
        now.prompt_tokens < last.prompt_tokens
        or now.completion_tokens < last.completion_tokens
        or (
            None not in {last.server_started, now.server_started}
            and last.server_started != now.server_started
        )
    )


def _judge(
    report: Report, server: Server, last: BackendReading, now: Counters, read_at: datetime
) -> None:
    for kind in ("prompt_tokens", "completion_tokens"):
        theirs = getattr(now, kind) - getattr(last, kind)
        ours, uncertain = _tokens(server, kind, last.read_at, read_at)
        drift = abs(theirs - ours)
        if drift * 100 > max(theirs, ours) * _DRIFT_MAX_PERCENT and drift > uncertain:
            report.add(
                f"{server}: {kind.replace('_', ' ')}",
                f"the server counted {theirs}, the gateway {ours}, from "
                f"{last.read_at:%Y-%m-%d %H:%M:%S} to {read_at:%Y-%m-%d %H:%M:%S} UTC",
            )


def _tokens(server: Server, kind: str, since: datetime, until: datetime) -> tuple[int, int]:
    """Return the gateway's tokens in that time, and how many of them are uncertain.

    A server counts while it works, the gateway when a request ends. Of a request that ran at the
    time of a reading, nobody knows on which side its tokens fell: all of them are uncertain if it
    has ended, and as many as of the largest request if it has not.
    """
    mine = Q(pk__in=[])
    for model, backend in server.called:
        mine |= Q(model=model, backend=backend)
    ended = UsageEvent.objects.filter(mine, finished_at__gt=since, finished_at__lte=until)
    sums = ended.aggregate(
        ours=Sum(kind, default=0),
        crossing=Sum(kind, filter=Q(created_at__lte=since), default=0),
        largest=Max(kind, default=0),
    )
    open_at_end = UsageEvent.objects.filter(mine, created_at__lte=until).filter(
        Q(finished_at__isnull=True) | Q(finished_at__gt=until)
    )
    return sums["ours"], sums["crossing"] + open_at_end.count() * sums["largest"]
