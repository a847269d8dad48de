"""The meter: what it counts, what it believes, and what the client may see."""

import json
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.meter import ErrorEvent, Expected, Meter, NotACompletion, Usage

COST = Decimal("0.000001155")
GOOD = {"prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35}


def meter(**fields: Any) -> Meter:
    known = {
        "model": "m",
        "prompt_tokens": 7,
        "output_tokens_max": 100,
        "context_window": 1000,
        "choices": 1,
    }
    return Meter(Expected(**{**known, **fields}))


def chunk(content: str | None = None, *, index: int = 0, **fields: Any) -> bytes:
    choice = {"index": index, "delta": {} if content is None else {"content": content}}
    choice["finish_reason"] = fields.pop("finish_reason", None)
    return json.dumps({"id": "x", "model": "m", "choices": [choice], **fields}).encode()


def used(metered: Meter, *, is_complete: bool = True) -> Usage:
    return metered.usage(is_complete=is_complete)


def counts(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def test_it_works() -> None:
    metered = meter()
    said = [chunk(""), chunk("Hello"), chunk(" there"), chunk(finish_reason="stop")]
    for data in said:
        assert metered.read(data) is data  # the very bytes
    assert metered.read(json.dumps({"choices": [], "usage": GOOD}).encode()) is None
    assert metered.is_complete
    usage = used(metered)
    assert usage == Usage(30, 0, 5, None, source="reported")
    shown = json.loads(metered.usage_chunk(usage, COST), parse_float=Decimal)
    assert shown["choices"] == []
    assert shown["usage"] == {**GOOD, "cost": COST}
    assert (shown["id"], shown["model"], shown["object"]) == ("x", "m", "chat.completion.chunk")


# --- Usage ----------------------------------------------------------------------------------------


def test_the_last_complete_usage_wins_and_none_is_summed() -> None:
    metered = meter()
    for completion in (1, 2, 3):
        metered.read(chunk("a", usage={**GOOD, "completion_tokens": completion}))
    for later in (None, {}, {"prompt_tokens": 30}, {"prompt_tokens": 0, "completion_tokens": 0}):
        metered.read(chunk("a", usage=later))
    assert counts(used(metered)) == (30, 0, 3)


def test_a_first_zero_is_respected() -> None:
    metered = meter()
    metered.read(chunk("a", usage={"prompt_tokens": 0, "completion_tokens": 0}))
    assert (counts(used(metered)), used(metered).source) == ((0, 0, 0), "reported")


@pytest.mark.parametrize(
    "usage",
    [
        {**GOOD, "prompt_tokens": -1},
        {**GOOD, "completion_tokens": -1},
        {**GOOD, "prompt_tokens": "30"},
        {**GOOD, "completion_tokens": 5.0},
        {**GOOD, "completion_tokens": True},
        {**GOOD, "prompt_tokens": 1001},
        {**GOOD, "completion_tokens": 1001},
        {**GOOD, "completion_tokens": 10**15},
        {**GOOD, "prompt_tokens_details": {"cached_tokens": 31}},
        {**GOOD, "prompt_tokens_details": {"cached_tokens": -1}},
        {**GOOD, "prompt_tokens_details": {"cached_tokens": "5"}},
        {**GOOD, "completion_tokens_details": {"reasoning_tokens": -1}},
        "30",
        [30, 5],
        1,
        True,
    ],
    ids=str,
)
def test_nonsense_counts_as_missing_and_is_flagged(usage: object) -> None:
    metered = meter()
    metered.read(chunk("Hello", usage=usage))
    counted = used(metered)
    assert (counted.source, counts(counted)) == ("counted", (7, 0, 1))
    assert counted.anomaly
    whole = meter()
    whole.read_body(_body("Hello", usage=usage))
    estimated = used(whole)
    assert (estimated.source, counts(estimated)) == ("estimated", (7, 0, 2))
    assert estimated.anomaly


@pytest.mark.parametrize("usage", [None, {}, {**GOOD, "completion_tokens": None}], ids=str)
def test_null_is_absent(usage: object) -> None:
    metered = meter()
    metered.read(chunk("Hello", usage=usage))
    assert used(metered).source == "counted"


@pytest.mark.parametrize(
    "usage",
    [
        {**GOOD, "prompt_tokens": 1000, "completion_tokens": 1000},  # exactly the context window
        {"prompt_tokens": 30, "completion_tokens": 5},
        {**GOOD, "total_tokens": 99},
        {**GOOD, "prompt_tokens_details": None, "completion_tokens_details": None},
        {**GOOD, "prompt_tokens_details": {"cached_tokens": None, "audio_tokens": None}},
        {**GOOD, "prompt_tokens_details": {"cached_tokens": 30}},
    ],
    ids=str,
)
def test_what_is_believed_is_not_clamped(usage: dict[str, Any]) -> None:
    metered = meter(output_tokens_max=1)
    metered.read(chunk("Hello", usage=usage))
    believed = used(metered)
    assert believed.source == "reported"
    assert believed.prompt_tokens == usage["prompt_tokens"]
    assert believed.completion_tokens == usage["completion_tokens"]
    shown = json.loads(metered.usage_chunk(believed, COST))["usage"]
    assert shown["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert None not in shown.values()


def test_a_total_that_is_no_sum_is_flagged_and_not_billed() -> None:
    metered = meter()
    metered.read(chunk("Hello", usage={**GOOD, "total_tokens": 99}))
    assert counts(used(metered)) == (30, 0, 5)
    assert used(metered).anomaly


def test_many_choices_may_use_as_many_context_windows() -> None:
    metered = meter(choices=3)
    metered.read(chunk("a", usage={"prompt_tokens": 30, "completion_tokens": 3000}))
    assert used(metered).completion_tokens == 3000


def test_a_client_that_left_pays_by_the_last_running_count() -> None:
    metered = meter()
    metered.read(chunk("a", usage={"prompt_tokens": 30, "completion_tokens": 1}))
    assert used(metered, is_complete=False) == Usage(30, 0, 1, None, source="continuous")


def test_without_usage_non_empty_deltas_are_counted() -> None:
    metered = meter()
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": None, "reasoning": "b"},
        {"reasoning_content": "c"},
        {"reasoning": "d", "reasoning_content": "d"},  # one thought under two names
        {"content": None},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"function": {"arguments": "}"}}, {"function": {"arguments": "{}"}}]},
        {},
    ]
    for delta in deltas:
        metered.read(json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode())
    assert used(metered) == Usage(7, 0, 7, None, source="counted")


@pytest.mark.parametrize("calls", [5, True, "ab", {"a": 1}, [5], [{"function": 5}]], ids=str)
def test_tool_calls_of_another_shape_pass_and_count_nothing(calls: object) -> None:
    metered = meter()
    data = {"model": "m", "choices": [{"index": 0, "delta": {"tool_calls": calls}}]}
    sent = json.dumps(data).encode()
    assert metered.read(sent) is sent
    assert used(metered).completion_tokens == 0


def test_an_estimate_never_exceeds_what_was_held() -> None:
    metered, whole = meter(output_tokens_max=2), meter(output_tokens_max=2)
    for _ in range(5):
        metered.read(chunk("a"))
    whole.read_body(_body("a" * 100))
    assert used(metered).completion_tokens == used(whole).completion_tokens == 2


def test_a_whole_answer_is_estimated_by_its_bytes() -> None:
    whole = meter()
    message = {
        "content": "世界",
        "reasoning": "abc",
        "tool_calls": [{"function": {"arguments": "{}"}}],
    }
    whole.read_body(json.dumps({"choices": [{"message": message}]}).encode())
    assert used(whole) == Usage(7, 0, -(-(6 + 3 + 2) // 4), None, source="estimated")


# --- Ends -----------------------------------------------------------------------------------------


def test_a_stream_is_whole_when_every_choice_is_finished() -> None:
    metered = meter(choices=2)
    ends = [metered.is_complete]
    for data in (chunk("a"), chunk("b", index=1), chunk(finish_reason="stop")):
        metered.read(data)
        ends.append(metered.is_complete)
    metered.read(chunk(index=1, finish_reason="length"))
    assert [*ends, metered.is_complete] == [False, False, False, False, True]
    assert metered.finish_reason == "stop"


def test_done_alone_is_no_answer() -> None:
    metered = meter()
    metered.is_done = True
    before = metered.is_complete
    metered.read(chunk("a"))
    assert (before, metered.is_complete) == (False, True)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"error": {"message": "m", "code": 500}}, {"message": "m", "code": 500}),
        ({"error": "text", "choices": []}, "text"),
        ({"object": "error", "message": "m"}, {"object": "error", "message": "m"}),
    ],
)
def test_an_error_is_raised_wherever_it_stands(answer: dict[str, Any], error: object) -> None:
    for read in (meter().read, meter().read_body):
        with pytest.raises(ErrorEvent) as raised:
            read(json.dumps(answer).encode())
        assert raised.value.error == error


def test_a_null_error_is_none() -> None:
    data = chunk("a", error=None)
    assert meter().read(data) is data


# --- What the client sees -------------------------------------------------------------------------


def test_the_model_is_renamed_and_usage_is_taken_out() -> None:
    metered = meter(model="catalog-id")
    data = chunk("a", usage=GOOD, odd=[1.5, None, "\u2028"])
    seen = metered.read(data)
    assert seen is not None
    expected = {**json.loads(data), "model": "catalog-id"}
    del expected["usage"]
    assert json.loads(seen) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not JSON",
        b"[1]",
        b"1",
        b"null",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":null}',
        b'{"id":"","model":"","choices":[]}',
        b'{"choices":"x"}',
        b"[" * 100_000,
    ],
)
def test_what_carries_nothing_is_left_out(data: bytes) -> None:
    assert meter().read(data) is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_no_json_become_null(number: str) -> None:
    data = b'{"model":"m","choices":[{"delta":{"content":"a"},"logprob":%s}]}' % number.encode()
    seen = meter().read(data)
    assert seen is not None
    assert json.loads(seen)["choices"][0]["logprob"] is None


def test_a_lone_surrogate_stays_escaped() -> None:
    metered = meter(model="other")
    seen = metered.read(chunk("a\ud800", usage=GOOD))
    assert seen is not None
    assert rb"a\ud800" in seen
    whole = meter()
    whole.read_body(_body("a\ud800", usage=GOOD))
    answer = whole.answer(used(whole), COST)
    assert rb"a\ud800" in answer
    assert b'"cost":0.000001155' in answer


def test_data_of_several_lines_becomes_one() -> None:
    seen = meter().read(chunk("a").replace(b', "choices"', b',\n"choices"'))
    assert seen is not None
    assert b"\n" not in seen


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        ("0.000001155000", "0.000001155"),
        ("1E-12", "0.000000000001"),
        ("0", "0"),
        ("0E-12", "0"),
        ("12", "12"),
        ("1200.50", "1200.5"),
    ],
)
def test_the_cost_is_written_in_plain_decimals(cost: str, text: str) -> None:
    metered, whole = meter(), meter()
    metered.read(chunk("a", usage=GOOD))
    whole.read_body(_body("a", usage=GOOD))
    for seen in (
        metered.usage_chunk(used(metered), Decimal(cost)),
        whole.answer(used(whole), Decimal(cost)),
    ):
        assert f'"cost":{text}}}'.encode() in seen


def test_a_backend_cannot_name_the_cost() -> None:
    whole = meter()
    whole.read_body(_body("a", usage={**GOOD, "cost": 0, "total_cost": 9}))
    shown = json.loads(whole.answer(used(whole), COST), parse_float=Decimal)["usage"]
    assert shown["cost"] == COST


def test_a_whole_answer_keeps_everything_else() -> None:
    whole = meter(model="catalog-id")
    body = json.loads(_body("a", usage=GOOD, timings={"a": 1.5}, kv_transfer_params=None))
    whole.read_body(json.dumps(body).encode())
    seen = json.loads(whole.answer(used(whole), COST), parse_float=Decimal)
    assert seen.pop("usage") == {**GOOD, "cost": COST}
    del body["usage"]
    assert seen == {**body, "model": "catalog-id", "timings": {"a": Decimal("1.5")}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":"none"}',
        b"[" * 100_000,
    ],
)
def test_what_cannot_be_a_completion(body: bytes) -> None:
    with pytest.raises(NotACompletion):
        meter().read_body(body)


# Drawn from as one, so that objects stay as likely as all that may stand in their place.
_LEAVES = st.deferred(
    lambda: (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.sampled_from(["", "a", "\0", "1", [], ["a"], {}])
    )
)


def _either(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with some of these fields, or anything else in their place."""
    return st.fixed_dictionaries({}, optional=fields) | _LEAVES


_CALLS = st.lists(_either(function=_either(name=_LEAVES, arguments=_LEAVES)), max_size=2) | _LEAVES
_PART = _either(content=_LEAVES, reasoning=_LEAVES, reasoning_content=_LEAVES, tool_calls=_CALLS)
_COUNTS = st.integers(-5, 1005) | _LEAVES
_CHUNK = st.fixed_dictionaries(
    {},
    optional={
        "id": _LEAVES,
        "model": _LEAVES,
        "choices": st.lists(
            _either(index=_LEAVES, delta=_PART, message=_PART, finish_reason=_LEAVES), max_size=3
        )
        | _LEAVES,
        "usage": _either(
            prompt_tokens=_COUNTS,
            completion_tokens=_COUNTS,
            total_tokens=_COUNTS,
            prompt_tokens_details=_either(cached_tokens=_COUNTS),
            completion_tokens_details=_either(reasoning_tokens=_COUNTS),
        ),
    },
)


@settings(max_examples=300)
@given(st.lists(_CHUNK, max_size=4))
def test_no_backend_can_break_it_or_bill_nonsense(sent: list[dict[str, Any]]) -> None:
    metered = meter()
    for each in sent:
        seen = metered.read(json.dumps(each).encode())
        if seen is not None:
            json.loads(seen, parse_constant=lambda name: pytest.fail(name))
            assert "usage" not in json.loads(seen)
        whole = meter()
        try:
            whole.read_body(json.dumps(each).encode())
        except NotACompletion:
            continue
        _believable(used(whole))
        json.loads(whole.answer(used(whole), COST), parse_constant=lambda name: pytest.fail(name))
    _believable(used(metered))
    assert isinstance(metered.finish_reason, str)
    json.loads(metered.usage_chunk(used(metered), COST))


def _believable(usage: Usage) -> None:
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens <= 1000
    assert 0 <= usage.completion_tokens <= 1000
    assert usage.reasoning_tokens is None or usage.reasoning_tokens >= 0
    assert len(usage.anomaly) <= 100


def _body(content: str, **fields: Any) -> bytes:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "x", "model": "m", "choices": [choice], **fields}).encode()


def test_a_float_of_the_backend_keeps_its_value() -> None:
    seen = meter(model="other").read(chunk("a", logprob=-0.1234567890123456))
    assert seen is not None
    assert math.isclose(json.loads(seen)["logprob"], -0.1234567890123456, rel_tol=0, abs_tol=0)
