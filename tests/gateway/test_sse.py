"""Server-sent events, cut in every way that a network can cut them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import DONE, FrameParser, FrameTooLarge, frame

FRAME_MAX = 1000


def parsed(*pieces: bytes, frame_max: int = FRAME_MAX) -> list[bytes]:
    parser = FrameParser(frame_max)
    frames = [one for piece in pieces for one in parser.feed(piece)]
    return frames + parser.close()


def bytewise(stream: bytes) -> list[bytes]:
    return parsed(*(stream[at : at + 1] for at in range(len(stream))))


def test_it_works() -> None:
    assert parsed(frame(b'{"a":1}') + frame(DONE)) == [b'{"a":1}', b"[DONE]"]


@pytest.mark.parametrize(
    ("stream", "frames"),
    [
        (b"", []),
        (b"\n\n\n", []),
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),  # one blank belongs to the field, the second to the data
        (b"data: a\r\n\r\n", [b"a"]),
        (b"data: a\r\r", [b"a"]),
        (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a", [b"a"]),  # a last line counts at the end, though its blank line is missing
        (b"data: a\n", [b"a"]),
        (b": comment\n\ndata: a\n\n", [b"a"]),
        (b":\n\n:\n\n", []),
        (b"event: x\nid: 1\nretry: 5\ndata: a\n\n", [b"a"]),
        (b"event: x\n\n", []),
        (b" data: a\n\n", []),
        (b"database: a\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [b"b"]),  # only one mark is ignored
        (b"data: \xef\xbb\xbfa\n\n", [b"\xef\xbb\xbfa"]),
        (b"\xef", []),
        ("data: a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\n\n".encode(), None),
    ],
)
def test_whole_or_byte_by_byte(stream: bytes, frames: list[bytes] | None) -> None:
    if frames is None:  # none of these ends a line
        frames = [stream[6:-2]]
    assert parsed(stream) == frames
    assert bytewise(stream) == frames


def test_a_mark_at_the_start_may_be_cut_anywhere() -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n"
    for cut in range(len(stream)):
        assert parsed(b"", stream[:cut], b"", stream[cut:], b"") == [b"a"]


def test_what_only_begins_like_a_mark_is_kept() -> None:
    assert parsed(b"\xef", b"\xbb", b"data: a\n\ndata: b\n\n") == [b"b"]


def test_a_cut_between_cr_and_lf_makes_no_second_line_end() -> None:
    assert parsed(b"data: a\r", b"\ndata: b\r", b"\n", b"\r", b"\n") == [b"a\nb"]
    assert parsed(b"data: a\r", b"\r", b"data: b\r", b"", b"\n\n") == [b"a", b"b"]


def test_each_event_is_returned_by_the_feed_that_ends_it() -> None:
    parser = FrameParser(FRAME_MAX)
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b\n\ndata: c") == [b"a", b"b"]
    assert parser.feed(b"\r") == []
    assert parser.feed(b"\r") == [b"c"]  # not held back in case a LF follows
    assert parser.close() == []


_LINES = st.one_of(
    st.just(b""),
    st.sampled_from(
        [b": ping", b":", b"id: 7", b"event: x", b"retry: 1", b"data", b"\xef\xbb\xbf"]
    ),
    st.builds(
        lambda field, text: field + text.encode("utf-8", "surrogatepass"),
        st.sampled_from([b"data: ", b"data:", b"", b"dat"]),
        st.text(
            st.characters(exclude_characters="\r\n", exclude_categories=())
            | st.sampled_from("\u2028\u2029\u0085\x0b\x0c你🎉"),
            max_size=12,
        ),
    ),
)


def _expected(lines: list[bytes]) -> list[bytes]:
    """Read whole lines as the standard says (WHATWG HTML, section 9.2.6), the last event too."""
    frames: list[bytes] = []
    data: list[bytes] = []
    for line in [*lines, b""]:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            frames.append(b"\n".join(data))
            data = []
    return frames


@given(
    lines=st.lists(_LINES, max_size=12),
    line_end=st.sampled_from([b"\n", b"\r", b"\r\n"]),
    has_mark=st.booleans(),
    data=st.data(),
)
def test_any_cut_of_any_stream_gives_the_same_events(
    lines: list[bytes], line_end: bytes, has_mark: bool, data: st.DataObject
) -> None:
    if not has_mark and lines:
        lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    stream = (b"\xef\xbb\xbf" if has_mark else b"") + b"".join(line + line_end for line in lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    pieces = [
        stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
    assert parsed(*pieces) == bytewise(stream) == _expected(lines)


@given(st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=5), st.integers(1))
def test_what_is_framed_is_read_back(value: object, size: int) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream = frame(data) + frame(DONE)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert parsed(*pieces, frame_max=len(stream)) == [data, DONE]


# --- The limit ------------------------------------------------------------------------------------


def test_an_event_of_the_limit_passes() -> None:
    line = b"data: " + b"x" * (FRAME_MAX - 6)
    assert parsed(line, b"\n\n") == [line[6:]]


@pytest.mark.parametrize("size", [1, 7, FRAME_MAX])
def test_a_line_beyond_the_limit_is_refused_before_it_ends(size: int) -> None:
    parser = FrameParser(FRAME_MAX)
    fed = 0
    with pytest.raises(FrameTooLarge):
        while True:
            parser.feed(b"x" * size)
            fed += size
    assert fed <= FRAME_MAX


def test_many_lines_of_one_event_count_together() -> None:
    parser = FrameParser(FRAME_MAX)
    with pytest.raises(FrameTooLarge):
        for _ in range(FRAME_MAX):
            parser.feed(b"data: 0123456789\n")


def test_the_limit_is_of_one_event_not_of_the_stream() -> None:
    assert len(parsed(*([frame(b"x" * 500)] * 100))) == 100
    assert parsed(*([b": " + b"x" * 500 + b"\n"] * 100)) == []


def test_the_time_is_linear_in_the_length_of_a_line() -> None:
    # Joining what has come so far with each of the million pieces would copy half a terabyte.
    parser = FrameParser(2**21)
    for _ in range(10**6):
        parser.feed(b"x")
    assert parser.feed(b"\n\n") == []
    parser.feed(b"data: ")
    for _ in range(10**6):
        parser.feed(b"x")
    assert parser.feed(b"\n\n") == [b"x" * 10**6]
