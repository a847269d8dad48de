"""Request bodies: what is read of them, and that they are forwarded as they were sent."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import payload
from gateway.errors import EmptyArray, InvalidRequest
from gateway.payload import ChatRequest

DEPTH_MAX = 64
MESSAGES = [{"role": "user", "content": "Hello!"}]


def parsed(**fields: object) -> ChatRequest:
    content = {"model": "m", "messages": MESSAGES, **fields}
    return payload.parse(json.dumps(content).encode(), depth_max=DEPTH_MAX)


def forwarded(request: ChatRequest, *, continuous_usage: bool = False) -> Any:
    return json.loads(
        payload.forward(request, served_model_name="served", continuous_usage=continuous_usage)
    )


def test_it_works() -> None:
    request = parsed(stream=True, stream_options={"include_usage": True}, max_tokens=7, n=2)
    assert request.model == "m"
    assert request.stream
    assert request.include_usage
    assert request.prompt_tokens == 2
    assert request.output_tokens_max == 7
    assert request.choices == 2
    payload.check(request, image_input=False)


# --- What is forwarded ----------------------------------------------------------------------------

_NUMBERS = (
    st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
)
# Surrogates are text of Python only: JSON that is UTF-8 has none.
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_VALUES = st.recursive(
    st.none() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(fields=st.dictionaries(_TEXTS, _VALUES, max_size=5), ascii_only=st.booleans())
def test_what_is_forwarded_is_what_was_sent(fields: dict[str, Any], ascii_only: bool) -> None:
    for name in ("stream", "stream_options"):
        fields.pop(name, None)
    sent = {**fields, "model": "m", "messages": MESSAGES}
    content = json.dumps(sent, ensure_ascii=ascii_only, indent=1).encode()
    request = payload.parse(content, depth_max=DEPTH_MAX)
    written = json.dumps(forwarded(request), sort_keys=True)
    assert written == json.dumps({**sent, "model": "served"}, sort_keys=True)


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_bytes_that_are_no_request_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        payload.parse(content, depth_max=DEPTH_MAX)


@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "stream", "stream_options", "tools", "n"]), _VALUES
    )
)
def test_anything_is_read_or_refused(fields: dict[str, Any]) -> None:
    sent = {"model": "m", "messages": MESSAGES, **fields}
    try:
        request = payload.parse(json.dumps(sent).encode(), depth_max=DEPTH_MAX)
        payload.check(request, image_input=True)
    except InvalidRequest:
        return
    assert forwarded(request)["messages"] == sent["messages"]


def test_the_flag_is_sent_on_every_stream() -> None:
    options: list[Any] = [
        None,
        {},
        {"include_usage": False},
        {"include_usage": True},
        {"include_usage": None},
        {"continuous_usage_stats": True},
    ]
    for each in options:
        request = parsed(stream=True, stream_options=each)
        assert forwarded(request)["stream_options"] == {"include_usage": True}
        assert forwarded(request, continuous_usage=True)["stream_options"] == {
            "include_usage": True,
            "continuous_usage_stats": True,
        }
        assert request.include_usage is ((each or {}).get("include_usage") is True)


def test_other_stream_options_go_along() -> None:
    request = parsed(stream=True, stream_options={"include_obfuscation": False})
    assert forwarded(request)["stream_options"] == {
        "include_usage": True,
        "include_obfuscation": False,
    }


@pytest.mark.parametrize(
    ("value", "stream"),
    [
        (True, True),
        ("true", True),
        (1, True),
        (False, False),
        ("false", False),
        (0, False),
        (None, False),
    ],
)
def test_stream_and_what_is_forwarded_agree(value: object, stream: bool) -> None:
    request = parsed(stream=value)
    assert request.stream is stream
    assert forwarded(request)["stream"] is stream


def test_an_answer_of_one_piece_is_asked_for_without_stream_options() -> None:
    # vLLM refuses the key without a stream, even as null.
    assert "stream_options" not in forwarded(parsed(stream_options=None))
    assert "stream" not in forwarded(parsed())


def test_forwarding_changes_nothing_of_the_request() -> None:
    request = parsed(stream="true", stream_options={"include_usage": False})
    before = json.dumps(request.fields)
    forwarded(request)
    assert json.dumps(request.fields) == before


# --- What is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"n_predict": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 6, "n_predict": 4}, 6),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -5}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": 5.5}, None),
        ({"max_tokens": None, "n_predict": 3}, 3),
    ],
)
def test_the_largest_limit_counts(fields: dict[str, Any], limit: int | None) -> None:
    assert parsed(**fields).output_tokens_max == limit


@pytest.mark.parametrize(
    ("n", "choices"), [(1, 1), (3, 3), (0, 1), (-1, 1), (None, 1), ("3", 1), (True, 1), (2.5, 1)]
)
def test_choices(n: object, choices: int) -> None:
    assert parsed(n=n).choices == choices


@pytest.mark.parametrize(
    ("contents", "tokens"),
    [
        ([""], 0),
        (["a"], 1),
        (["abcd"], 1),
        (["abcde"], 2),
        (["ab", "cd", "e"], 2),
        (["é"], 1),
        (["世界"], 2),
        (["🎉"], 1),
        ([None], 0),
        ([[{"type": "text", "text": "abcd"}, {"type": "text", "text": "e"}]], 2),
        ([[{"type": "image_url", "image_url": {"url": "data:" + "x" * 4000}}]], 0),
        ([[], [None], [{"text": 1}], {"text": "not a part"}, 5], 0),
    ],
)
def test_the_prompt_is_a_quarter_of_the_bytes_of_its_texts(
    contents: list[Any], tokens: int
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    assert parsed(messages=messages).prompt_tokens == tokens


@pytest.mark.parametrize("messages", [None, []])
def test_an_empty_array_has_its_own_error(messages: object) -> None:
    with pytest.raises(EmptyArray):
        parsed(messages=messages)


def test_a_missing_array_is_an_empty_one() -> None:
    with pytest.raises(EmptyArray):
        payload.parse(b'{"model":"m"}', depth_max=DEPTH_MAX)


@pytest.mark.parametrize("levels", [1, 3, DEPTH_MAX])
def test_the_depth_is_limited_exactly(levels: int) -> None:
    deep: object = 1
    for _ in range(levels - 1):
        deep = [deep]
    content = json.dumps({"model": "m", "messages": MESSAGES, "x": deep}).encode()
    messages_levels = 3  # the body, the array, a message
    if levels >= messages_levels:
        payload.parse(content, depth_max=levels)
    with pytest.raises(InvalidRequest, match="deeper"):
        payload.parse(content, depth_max=max(levels, messages_levels) - 1)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"a":2}',
        b'{"x":[{"a":1,"b":2,"a":3}]}',
        b'{"a":1,"\\u0061":2}',
        b'{"a:":1,"a:":2}',
        b'{"":1,"":2}',
        '{"é":1,"\\u00e9":2}'.encode(),
    ],
)
def test_equal_keys_are_refused(content: bytes) -> None:
    good = json.dumps({"model": "m", "messages": MESSAGES})[:-1].encode()
    with pytest.raises(InvalidRequest, match="twice"):
        payload.parse(good + b"," + content[1:], depth_max=DEPTH_MAX)


def test_an_equal_key_cannot_hide_behind_escaped_colons() -> None:
    content = b'{"model":"a","x":"\\u003a","model":"m","messages":[{"role":"user","content":"a"}]}'
    try:
        request = payload.parse(content, depth_max=DEPTH_MAX)
    except InvalidRequest:
        return
    # Decided on and forwarded is the same one.
    assert (request.model, request.fields["model"]) == ("m", "m")


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -(2**63), 10**18, -(10**18)])
def test_integers_of_64_bits_are_exact(number: int) -> None:
    assert forwarded(parsed(seed=number))["seed"] == number


@pytest.mark.parametrize(
    "digits",
    [str(2**64), str(-(2**63) - 1), "9" * 20, "1" + "0" * 30, "-1" + "0" * 30, "9" * 5000],
    ids=lambda digits: digits[:24],
)
def test_integers_beyond_64_bits_are_refused(digits: str) -> None:
    content = b'{"model":"m","messages":[{"role":"user","content":"a"}],"seed":%s}'
    with pytest.raises(InvalidRequest):
        payload.parse(content % digits.encode(), depth_max=DEPTH_MAX)


def test_digits_in_a_text_are_no_integer() -> None:
    assert forwarded(parsed(user="9" * 100))["user"] == "9" * 100


# --- What is checked ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": ""},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "unheard-of"}], "name": None, "extra": {}},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "tool", "tool_call_id": "", "content": [{"type": "text", "text": "{}"}]},
    ],
    ids=str,
)
def test_what_the_page_allows_passes(message: dict[str, Any]) -> None:
    request = parsed(messages=[message])
    payload.check(request, image_input=False)
    assert forwarded(request)["messages"] == [message]


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/cat.png",
        "HTTPS://EXAMPLE.COM/cat.png",
        "https://example.com:8443/a?b=c#d",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]/",
        "https://xn--bcher-kva.example/",
        "https://bücher.example/",
        "https://internal.example.com/",
        "data:image/png;base64,iVBORw0KGgo=",
        "DATA:image/png;base64,iVBORw0KGgo=",
    ],
)
@pytest.mark.parametrize("is_object", [True, False])
def test_images_of_public_addresses_pass(url: str, is_object: bool) -> None:
    image = {"type": "image_url", "image_url": {"url": url} if is_object else url}
    payload.check(parsed(messages=[{"role": "user", "content": [image]}]), image_input=True)


@pytest.mark.parametrize(
    "tools",
    [
        None,
        [],
        [{"type": "function", "function": {"name": "f", "description": "Does f."}}],
        [{"type": "unheard-of"}],
    ],
)
def test_tools_that_pass(tools: object) -> None:
    payload.check(parsed(tools=tools), image_input=False)
