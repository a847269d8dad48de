"""Answers as bytes that are not streamed: completions, errors, the model list; wrong ones too.

The usage faults stand here, because a streamed and a whole answer report usage alike. This module
never does I/O.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kiln_site.demo.answers import Answer, Choice
from kiln_site.demo.asks import JsonObject, Refusal
from kiln_site.demo.faults import Faults

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
HTML_PAGE: Final = (
    b"<!DOCTYPE html><html><head><title>502 Bad Gateway</title></head>"
    b"<body><h1>Bad Gateway</h1><p>proxy at 10.0.0.7:8000</p></body></html>"
)
BAD_HEADERS: Final = (
    ("Set-Cookie", "session=backend; Path=/"),
    ("Location", "http://10.0.0.7:8000/"),
    ("X-Powered-By", "demo/1.0"),
    ("X-Neocloud-Generation-Id", "fake"),
    ("X-Request-Id", "backend-request"),
    ("X-RateLimit-Remaining", "0"),
)
LOGPROBS: Final = {
    "content": [
        {
            "token": "a",
            "logprob": float("-inf"),
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": float("nan"), "bytes": [98]}],
        }
    ]
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer: the status, what kind of body, the body, further headers."""

    status: int
    content_type: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Ident:
    """What every chunk of one answer repeats."""

    id: str
    created: int


def dump(value: object) -> bytes:
    """Serialize as real servers do: compact, UTF-8. Lone surrogates stay escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def error(
    message: str, status: int, *, type_: str, param: str | None = None, shape: str = "object"
) -> bytes:
    """An error body in one of the shapes that real servers use."""
    whole = {"message": message, "type": type_, "param": param, "code": status}
    bodies: Mapping[str, object] = {
        "object": {"error": whole},
        "string": {"error": message},
        "old": {"object": "error", **whole},
        "detail": {"detail": message},
        "details": {"detail": [{"type": type_, "loc": ["body", param], "msg": message}]},
    }
    return b"" if shape == "empty" else dump(bodies[shape])


def refused(refusal: Refusal, shape: str = "object") -> Reply:
    body = error(
        refusal.message, refusal.status, type_=refusal.type, param=refusal.param, shape=shape
    )
    return Reply(refusal.status, JSON, body)


def model_list(models: Sequence[str], created: int, context_window: int) -> Reply:
    data = [
        {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "demo",
            "max_model_len": context_window,
        }
        for model in models
    ]
    return Reply(200, JSON, dump({"object": "list", "data": data}))


def metrics(models: Sequence[str], counted: Counter[tuple[str, str]], started: int) -> Reply:
    """The token counters in Prometheus' text format, with vLLM's names and labels."""
    lines = [f"process_start_time_seconds {started}.0"]
    for kind in ("prompt_tokens", "generation_tokens"):
        for model in models:
            labels = f'{{engine="0",model_name="{model}"}}'
            lines.append(f"vllm:{kind}_total{labels} {counted[kind, model]}.0")
    return Reply(200, METRICS, "".join(f"{line}\n" for line in lines).encode())


def completion(answer: Answer, ident: Ident, faults: Faults) -> Reply:
    """The answer in one piece."""
    body: JsonObject = {
        "id": ident.id,
        "object": "chat.completion",
        "created": ident.created,
        "model": answer.model,
        "choices": [_choice(choice, faults) for choice in answer.choices],
    }
    kinds = faults.kinds("usage")
    if "none" not in kinds:
        body["usage"] = reported(answer.usage(), kinds)
    if faults.on("error_null"):
        body["error"] = None
    if faults.on("u2028"):
        body["system_fingerprint"] = "a\u2028b"
    return Reply(200, JSON, dump(body))


def reported(usage: JsonObject, kinds: frozenset[str]) -> Any:
    """The usage as these faults would have it reported."""
    prompt, made = usage["prompt_tokens"], usage["completion_tokens"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    if "null" in kinds:
        return None
    if "zero" in kinds:
        usage = dict.fromkeys(counts, 0)
    if "negative" in kinds:
        usage |= {"prompt_tokens": -prompt, "completion_tokens": -made, "total_tokens": -1}
    if "string" in kinds:
        usage |= {name: str(usage[name]) for name in counts}
    if "huge" in kinds:
        usage |= {"completion_tokens": 10**15, "total_tokens": prompt + 10**15}
    if "cached_over" in kinds:
        usage |= {"prompt_tokens_details": {"cached_tokens": prompt + 1}}
    if "wrong_total" in kinds:
        usage |= {"total_tokens": prompt + made + 1000}
    if "null_details" in kinds:
        usage |= {"prompt_tokens_details": None, "completion_tokens_details": None}
    if "null_counts" in kinds:
        usage |= {"completion_tokens": None}
    return usage


def instead(faults: Faults) -> Reply | None:
    """The reply that a fault sends instead of a completion, if one of them does."""
    status, plain = faults.count("status"), faults.count("plain_status")
    if status is not None:
        body = error(
            "The demo model server was asked to fail.",
            status,
            type_="InternalServerError" if status >= 500 else "BadRequestError",
            shape=faults.text("shape") or "object",
        )
        return Reply(status, JSON, body)
    if plain is not None:
        return Reply(plain, TEXT, b"Internal Server Error")
    if faults.on("redirect"):
        return Reply(307, TEXT, b"", [("Location", "http://127.0.0.1:9/v1/chat/completions")])
    if faults.on("html"):
        return Reply(200, "text/html; charset=utf-8", HTML_PAGE)
    if faults.on("odd_json"):
        return Reply(200, JSON, b'{"answer":"this is no completion","choices":"none"}')
    if faults.on("empty_body"):
        return Reply(200, JSON, b"")
    return None


def _choice(choice: Choice, faults: Faults) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": "".join(choice.pieces)}
    if choice.calls:
        message["content"] = None
        message["tool_calls"] = [
            {
                "id": one.id,
                "type": "function",
                "function": {"name": one.name, "arguments": one.arguments},
            }
            for one in choice.calls
        ]
    if choice.thoughts:
        message["reasoning"] = "".join(choice.thoughts)
    whole = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}
    return whole | {"logprobs": LOGPROBS} if faults.on("nan") else whole
