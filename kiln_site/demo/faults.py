"""Faults: the words of the form `demo:NAME` that make the demo model server misbehave.

`FAULTS` is the one table. It decides which words are understood and what they take, and it is
printed as `--help` and as the section of the documentation. What each fault does stands beside
the code that it bends. This module never does I/O.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

WORD = re.compile(r"(?<![\w:/])demo:([a-z][a-z0-9_]*)(?:=([^\s\"'<>`]+))?")
INTEGERS = frozenset({"N", "MS", "CODE", "BYTES"})


class UnknownFault(ValueError):
    """A `demo:` word that is not in the table, or a value that its fault cannot take."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row: the word, what it takes and, in one sentence, what the server then does."""

    name: str
    says: str
    takes: str = ""
    # What the word means when it stands alone; None where a value must follow.
    alone: str | None = None
    most: int = 10_000_000
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def usage(self) -> str:
        if not self.takes:
            return f"demo:{self.name}"
        if self.alone is not None:
            return f"demo:{self.name}[={self.takes}]"
        return f"demo:{self.name}={self.takes}"

    def read(self, value: str | None) -> str:
        """Return the value as text once it is known to fit this row."""
        value = self.alone if value is None else value.rstrip(".,;:!?)]}")
        if not self.takes:
            if value:
                raise UnknownFault(f"{self.usage} takes no value.")
            return ""
        if value is None:
            raise UnknownFault(f"{self.usage} needs a value.")
        if self.kinds and value not in self.kinds:
            raise UnknownFault(f"{self.usage}: KIND is one of {', '.join(self.kinds)}.")
        if self.takes in INTEGERS and not re.fullmatch(r"\d{1,9}", value):
            raise UnknownFault(f"{self.usage}: {value!r} is not a whole number.")
        if self.takes == "SECONDS" and not re.fullmatch(r"\d{1,5}(\.\d{1,6})?", value):
            raise UnknownFault(f"{self.usage}: {value!r} is not a number of seconds.")
        least = 200 if self.takes == "CODE" else 0
        if self.takes in INTEGERS and not least <= int(value) <= self.most:
            raise UnknownFault(f"{self.usage}: {least} to {self.most}.")
        return value


USAGE_KINDS = {
    "none": "never sent, though asked for",
    "unasked": "sent although nobody asked",
    "null": "the usage chunk says null",
    "null_between": "null on every chunk but the usage chunk",
    "null_details": "the details in it are null",
    "null_counts": "completion_tokens in it is null",
    "zero": "all counts are 0",
    "negative": "the counts are below 0",
    "string": "the counts are strings",
    "huge": "the counts are absurdly large",
    "cached_over": "more cached tokens than prompt tokens",
    "wrong_total": "total_tokens is not the sum",
    "last_content": "on the chunk with the finish_reason, no chunk of its own",
    "every_chunk": "cumulative, on every chunk",
    "zero_between": "cumulative on every chunk, but zeros on the first and on one in the middle",
    "no_choices": "the usage chunk has no choices",
    "null_choices": "the usage chunk's choices are null",
    "twice": "the usage chunk is sent twice",
}
SHAPE_KINDS = {
    "object": '{"error":{"message",...}}',
    "string": '{"error":"..."}',
    "old": '{"object":"error","message":...}',
    "detail": '{"detail":"..."}',
    "details": '{"detail":[{"msg":...}]}',
    "empty": "no body",
}

FAULTS: tuple[Fault, ...] = (
    # The answer and its counts
    Fault("tokens", "the answer has exactly N tokens", "N"),
    Fault("reasoning", "N reasoning deltas come first, counted in completion tokens", "N"),
    Fault("prompt_tokens", "N prompt tokens are reported", "N", most=999_999_999),
    Fault("cached", "N cached tokens are reported", "N", most=999_999_999),
    Fault("big", "one content delta, or tool argument, is BYTES long", "BYTES", most=500_000_000),
    Fault("usage", "the usage is wrong in one way, or repeat the word for several", "KIND",
          kinds=USAGE_KINDS),
    Fault("tool_calls", "N interleaved tool calls, arguments cut anywhere", "N", most=64),
    Fault("empty_arguments", 'a tool call with the arguments "{}" and finish_reason "stop"'),
    Fault("other_model", "the reply names another model than was asked for"),
    Fault("emoji", "the text has emoji and Chinese in it"),
    Fault("u2028", "text and usage chunk hold U+2028, U+2029 and U+0085, unescaped"),
    Fault("nan", "logprobs of -Infinity and NaN, which are not JSON"),
    Fault("surrogate", "the text has a lone surrogate, escaped"),
    Fault("nul", "the text has U+0000, escaped"),
    # Time
    Fault("pace", "MS milliseconds between tokens", "MS", most=600_000),
    Fault("wait", "SECONDS before the response head", "SECONDS"),
    Fault("think", "SECONDS between the head and the first chunk", "SECONDS"),
    Fault("finish_late", "SECONDS between the finish_reason and the usage chunk", "SECONDS"),
    Fault("gate", "the head waits until the test opens the gate"),
    Fault("gate_after", "after N chunks the stream waits until the test opens the gate", "N"),
    # Silence and breaks; N counts chunks, the role chunk too, or bytes of an unstreamed body
    Fault("hang", "the head never comes"),
    Fault("hang_after", "N chunks, then silence on an open socket", "N"),
    Fault("pings", "only `: ping` comments, one each MS milliseconds, for ever", "MS", "100"),
    Fault("reset", "the connection is reset before the head"),
    Fault("reset_after", "N chunks, then a reset", "N"),
    Fault("eof", "the connection is closed before the head"),
    Fault("eof_after", "N chunks, then a close in the middle of the body", "N"),
    Fault("end_after", "N chunks, then a proper end: no finish_reason, no [DONE]", "N"),
    Fault("stay_open", "the body is not ended after [DONE]"),
    Fault("close", "the connection closes after a whole answer, unannounced, like llama.cpp's"),
    Fault("drop_next", "the next request on this connection meets a close without a byte"),
    # Answers that are no completion
    Fault("status", "a JSON error with status CODE", "CODE", most=599),
    Fault("plain_status", "a plain text error with status CODE", "CODE", most=599),
    Fault("shape", "the form of every error's body", "KIND", kinds=SHAPE_KINDS),
    Fault("redirect", "a 307 to another address"),
    Fault("html", "an HTML page with status 200"),
    Fault("half_json", "a 200 whose JSON stops half way"),
    Fault("odd_json", "a 200 with JSON that is no completion"),
    Fault("empty_body", "a 200 without a body"),
    Fault("whole", "a completion in one piece although a stream was asked for"),
    Fault("not_http", "bytes that are not HTTP"),
    Fault("headers", "headers that must not reach a customer: Set-Cookie, Location, ..."),
    Fault("gzip", "the body is compressed although identity was asked for"),
    Fault("script", "the raw bytes that the test registered under NAME, then a close", "NAME"),
    # Events of a stream
    Fault("error_first", "the first event is an error with this code", "CODE", "500", most=599),
    Fault("error_after", "N chunks, an error event, then [DONE]", "N"),
    Fault("error_string", "as error_after, but the error is a bare string", "N", "0"),
    Fault("error_null", 'every chunk has "error": null beside its choices'),
    Fault("finish_with_text", "the finish_reason comes with the last text"),
    Fault("empty_chunks", "chunks without id, model and choices between the others"),
    Fault("no_done", "no [DONE]"),
    Fault("done_twice", "[DONE] twice"),
    Fault("after_done", "a chunk after [DONE]"),
    # Bytes of a stream
    Fault("comment", "comments before the first chunk and between chunks"),
    Fault("junk", "data lines that are not JSON between chunks"),
    Fault("split", "N bytes a write", "N", most=1_000_000),
    Fault("glue", "N events a write", "N", most=10_000),
    Fault("crlf", "lines end in CR LF"),
    Fault("cr", "lines end in CR"),
    Fault("no_space", "no blank after `data:`"),
    Fault("bom", "the body begins with a byte order mark"),
    Fault("no_final_blank", "the last event lacks its blank line"),
    Fault("endless_line", "after the first chunk a line that never ends"),
)  # fmt: skip
BY_NAME: Mapping[str, Fault] = {fault.name: fault for fault in FAULTS}


class Faults:
    """The faults of one request. Asking for a word that the table lacks is a KeyError."""

    def __init__(self, values: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._values = dict(values or {})

    def __bool__(self) -> bool:
        return bool(self._values)

    def on(self, name: str) -> bool:
        return bool(self._values) and BY_NAME[name].name in self._values

    def count(self, name: str) -> int | None:
        return int(self._values[name][-1]) if self.on(name) else None

    def seconds(self, name: str) -> float:
        return float(self._values[name][-1]) if self.on(name) else 0.0

    def text(self, name: str) -> str | None:
        return self._values[name][-1] if self.on(name) else None

    def kinds(self, name: str) -> frozenset[str]:
        return frozenset(self._values[name]) if self.on(name) else frozenset()


NO_FAULTS = Faults()


def read(*texts: str) -> Faults:
    """Find the faults that these texts ask for; raise UnknownFault for a word not in the table."""
    values: dict[str, tuple[str, ...]] = {}
    for text in texts:
        if "demo:" not in text:
            continue
        for name, value in _words(text):
            if name not in BY_NAME:
                raise UnknownFault(f"demo:{name} is not known. Known: {', '.join(BY_NAME)}.")
            values[name] = (*values.get(name, ()), BY_NAME[name].read(value))
    return Faults(values) if values else NO_FAULTS


def without_words(text: str) -> str:
    """The text that is left to answer: the same one whichever faults were asked for."""
    return " ".join(WORD.sub("", text).split()) if "demo:" in text else text


def lines() -> Iterable[str]:
    """The table as text, for --help."""
    for fault in FAULTS:
        yield f"  {fault.usage:<24} {fault.says}"
        for kind, says in fault.kinds.items():
            yield f"      ={kind:<18} {says}"


def markdown() -> str:
    """The table as Markdown, for the documentation."""
    rows = ["| word | what the server does |", "|---|---|"]
    for fault in FAULTS:
        kinds = "; ".join(f"`{kind}` {says}" for kind, says in fault.kinds.items())
        rows.append(f"| `{fault.usage}` | {fault.says}{': ' + kinds if kinds else ''} |")
    return "\n".join(rows) + "\n"


def _words(text: str) -> Iterable[tuple[str, str | None]]:
    return ((found[1], found[2]) for found in WORD.finditer(text))
