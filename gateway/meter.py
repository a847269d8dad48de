"""What an answer used, and what of it the client may see.

Takes the backend's frames or its whole body; keeps the last complete usage, counts deltas in case
there is none, and returns the bytes that go on to the client: unchanged but for `model`, `usage`
and `cost`. Does no I/O and knows no prices: the cost is told to it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson

from billing.money import plain

_ENVELOPE = ("id", "object", "created", "model", "system_fingerprint", "service_tier")


class NotACompletion(Exception):
    """The backend sent what cannot be a completion; the text is for the operator's log."""


class ErrorEvent(Exception):
    """The backend reported an error inside a 200; `error` is its object or text."""

    def __init__(self, error: Any) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer, where they came from, and what was odd about the reported ones.

    `source` is one of reported, continuous, counted, estimated, none.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None
    source: str
    anomaly: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known before the answer; bounds what can be believed of it.

    `output_tokens_max` is of all choices together: an estimate never costs more than the hold.
    """

    model: str
    prompt_tokens: int
    output_tokens_max: int
    context_window: int
    choices: int


class Meter:
    """Meter one answer, streamed (`read`) or whole (`read_body`)."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._reported: dict[str, Any] | None = None
        self._anomalies: list[str] = []
        self._envelope: dict[str, Any] = {}  # the chunk that the usage chunk is made from
        self._answer: dict[str, Any] = {}
        self._finish_reasons: dict[int, str | None] = {}
        self._bytes: int | None = None  # of a whole answer's text
        self.deltas = 0  # non-empty ones: about one token each
        self.is_done = False  # [DONE] was seen

    # --- streamed ---------------------------------------------------------------------------------

    def read(self, data: bytes) -> bytes | None:
        """Take one event's data and return what the client may see of it, None for nothing.

        Raises ErrorEvent.
        """
        try:
            chunk, changed = _load(data)
        except ValueError:
            self._note("unreadable_event")
            return None
        if not isinstance(chunk, dict):
            self._note("unreadable_event")
            return None
        _raise_error_in(chunk)
        has_usage = "usage" in chunk
        if has_usage:
            self._read_usage(chunk.pop("usage"))
            changed = True
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices:
            # Nothing but usage, or nothing at all; strict clients die on such a chunk.
            if has_usage:
                # Its ID is the stream's: stray chunks have an empty one.
                known = self._envelope.get("id")
                self._envelope.update(chunk)
                if known:
                    self._envelope["id"] = known
            return None
        if not self._envelope.get("id"):
            self._envelope.update({name: chunk[name] for name in _ENVELOPE if name in chunk})
        for choice in choices:
            self._read_choice(choice)
        if chunk.get("model") != self._expected.model:
            chunk["model"] = self._expected.model
            changed = True
        return _dump(chunk) if changed or b"\n" in data else data

    @property
    def is_finished(self) -> bool:
        """Every choice that was seen has its finish_reason; only usage can follow."""
        return bool(self._finish_reasons) and all(self._finish_reasons.values())

    @property
    def has_usage(self) -> bool:
        return self._reported is not None

    @property
    def is_complete(self) -> bool:
        """A stream is whole with [DONE], or without it when every choice is finished."""
        return bool(self._finish_reasons) and (self.is_done or self.is_finished)

    def usage_chunk(self, usage: Usage, cost: Decimal) -> bytes:
        """Return the last chunk: `choices` empty, usage and cost (API page, include_usage)."""
        chunk = {
            **self._envelope,
            "object": "chat.completion.chunk",
            "model": self._expected.model,
            "choices": [],
            "usage": self._visible(usage, cost),
        }
        return _dump(chunk)

    # --- whole ------------------------------------------------------------------------------------

    def read_body(self, body: bytes) -> None:
        """Take a whole answer. Raises NotACompletion or ErrorEvent."""
        try:
            answer, _ = _load(body)
        except ValueError:
            raise NotACompletion("the body is not JSON") from None
        if not isinstance(answer, dict):
            raise NotACompletion("the body is not an object")
        _raise_error_in(answer)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise NotACompletion("the body has no choices")
        self._read_usage(answer.pop("usage", None))
        self._bytes = 0
        for choice in choices:
            self._read_choice(choice)
        self._answer = answer

    def answer(self, usage: Usage, cost: Decimal) -> bytes:
        """Return the body for the client: usage and cost added, everything else as it came."""
        return _dump(
            {
                **self._answer,
                "model": self._expected.model,
                "usage": self._visible(usage, cost),
            }
        )

    # --- what it used -----------------------------------------------------------------------------

    @property
    def finish_reason(self) -> str:
        """The finish reason of the first choice, empty if none was given."""
        return (self._finish_reasons.get(0) or "").replace("\0", "")[:32]

    def usage(self, *, is_complete: bool) -> Usage:
        """Return what the answer used: reported, else counted or estimated (rulings.md 17)."""
        anomaly = ",".join(self._anomalies)[:100]
        reported = self._reported
        if reported is None:
            output = self.deltas if self._bytes is None else -(-self._bytes // 4)
            return Usage(
                prompt_tokens=self._expected.prompt_tokens,
                cached_tokens=0,
                completion_tokens=min(output, self._expected.output_tokens_max),
                reasoning_tokens=None,
                source="counted" if self._bytes is None else "estimated",
                anomaly=anomaly,
            )
        return Usage(
            prompt_tokens=reported["prompt_tokens"],
            cached_tokens=_detail(reported, "prompt_tokens_details", "cached_tokens") or 0,
            completion_tokens=reported["completion_tokens"],
            reasoning_tokens=_detail(reported, "completion_tokens_details", "reasoning_tokens"),
            source="reported" if is_complete else "continuous",
            anomaly=anomaly,
        )

    def _visible(self, usage: Usage, cost: Decimal) -> orjson.Fragment:
        visible: dict[str, Any] = {
            key: value
            for key, value in (self._reported or {}).items()
            if value is not None and not _is_empty_detail(value)
        }
        visible["prompt_tokens"] = usage.prompt_tokens
        visible["completion_tokens"] = usage.completion_tokens
        visible["total_tokens"] = usage.prompt_tokens + usage.completion_tokens
        # A fragment prints as it is: any float would print 0.000001155 as 1.155e-06.
        visible["cost"] = orjson.Fragment(plain(cost).encode())
        return orjson.Fragment(orjson.dumps(visible))

    def _read_usage(self, reported: Any) -> None:
        if reported is None:
            return
        problem = self._problem_of(reported)
        if problem:
            self._note(problem)
            return
        is_zero = not reported["prompt_tokens"] and not reported["completion_tokens"]
        if is_zero and self._reported is not None:
            return  # a later all-zero object says nothing
        self._reported = reported

    def _problem_of(self, reported: Any) -> str:
        """Name what is wrong with a usage object; empty if it can be believed."""
        if not isinstance(reported, dict):
            return "usage_not_an_object"
        prompt, completion = reported.get("prompt_tokens"), reported.get("completion_tokens")
        if prompt is None or completion is None:
            return "usage_incomplete"
        cached = _detail(reported, "prompt_tokens_details", "cached_tokens")
        counts = (prompt, completion, 0 if cached is None else cached)
        if any(type(count) is not int or count < 0 for count in counts):
            return "usage_not_counts"
        if counts[2] > prompt:
            return "cached_beyond_prompt"
        if (
            prompt > self._expected.context_window
            or completion > self._expected.context_window * self._expected.choices
        ):
            return "usage_beyond_context"
        reasoning = _detail(reported, "completion_tokens_details", "reasoning_tokens")
        if reasoning is not None and (type(reasoning) is not int or reasoning < 0):
            return "usage_not_counts"
        if reported.get("total_tokens") not in (None, prompt + completion):
            self._note("total_differs")  # prompt and completion are billed, not their total
        return ""

    def _read_choice(self, choice: Any) -> None:
        if not isinstance(choice, dict):
            return
        index = choice.get("index")
        index = index if type(index) is int else 0
        reason = choice.get("finish_reason")
        known = self._finish_reasons.get(index)
        self._finish_reasons[index] = reason if isinstance(reason, str) and reason else known
        part = choice.get("delta") or choice.get("message")
        if not isinstance(part, dict):
            return
        texts = [part.get("content"), part.get("reasoning") or part.get("reasoning_content")]
        calls = part.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            texts.append(function.get("arguments") if isinstance(function, dict) else None)
        for text in texts:
            if isinstance(text, str) and text:
                self.deltas += 1
                if self._bytes is not None:
                    self._bytes += len(text.encode("utf-8", "surrogatepass"))

    def _note(self, anomaly: str) -> None:
        if anomaly not in self._anomalies:
            self._anomalies.append(anomaly)


def _raise_error_in(answer: Mapping[str, Any]) -> None:
    if answer.get("error"):
        raise ErrorEvent(answer["error"])
    if answer.get("object") == "error":
        raise ErrorEvent(answer)


def _detail(reported: Mapping[str, Any], group: str, name: str) -> Any:
    details = reported.get(group)
    return details.get(name) if isinstance(details, dict) else None


def _is_empty_detail(value: Any) -> bool:
    return isinstance(value, dict) and all(item is None for item in value.values())


def _load(data: bytes) -> tuple[Any, bool]:
    """Parse what a backend sent; tell whether it must be written anew to be valid JSON."""
    try:
        return orjson.loads(data), False
    except ValueError:
        # Python's parser also takes NaN, Infinity and lone surrogates, which real servers send.
        # The first two become null, the last are written escaped.
        try:
            return json.loads(data, parse_constant=lambda _: None, parse_float=_finite), True
        except RecursionError:
            raise ValueError("nested too deep") from None


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None  # 1e400 is read as infinity


def _dump(answer: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(answer)
    except TypeError:  # a lone surrogate: only its escaped form is valid
        return orjson.dumps(
            {
                key: value
                if isinstance(value, orjson.Fragment)
                else orjson.Fragment(json.dumps(value).encode())
                for key, value in answer.items()
            }
        )
