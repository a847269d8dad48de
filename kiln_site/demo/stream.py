"""A streamed answer as a plan: what is sent, in which order, and where a fault breaks in.

`plan` yields events (one `data:` line each) and acts (be silent, reset, ...); the connection
carries them out. Nothing is sent, timed or counted here: this module never does I/O.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import zip_longest
from json import JSONEncoder
from typing import Any, Final

from kiln_site.demo.answers import Answer, Choice, piece_tokens
from kiln_site.demo.asks import Ask
from kiln_site.demo.faults import Faults
from kiln_site.demo.replies import LOGPROBS, Ident, error, reported
from kiln_site.demo.tokens import tokenize

DONE: Final = "[DONE]"
FRAGMENT: Final = 5  # characters of an argument fragment: cuts inside a \\u escape sooner or later
encode = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Kind(Enum):
    ROLE = auto()
    TEXT = auto()
    FINISH = auto()
    USAGE = auto()
    ERROR = auto()
    DONE = auto()
    STRAY = auto()  # bytes that are no chunk: comments and the like


class Act(Enum):
    SILENCE = auto()
    RESET = auto()
    BREAK = auto()  # close in the middle of the body
    END = auto()  # end the body properly, here
    GATE = auto()
    ENDLESS = auto()


@dataclass(frozen=True, slots=True)
class Event:
    """What follows `data: `, or a whole line of its own if it is stray."""

    kind: Kind
    text: str
    tokens: int = 0

    @property
    def is_chunk(self) -> bool:
        return self.kind not in (Kind.DONE, Kind.STRAY, Kind.ERROR)


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Step = Event | Act | Pause


def plan(answer: Answer, ask: Ask, ident: Ident) -> Iterator[Step]:
    """Everything that the answer to this request sends, faults included."""
    faults = ask.faults
    events = _Chunks(answer, ask, ident).events()
    if not faults:
        yield from events
        return
    if faults.on("think"):
        yield Pause(faults.seconds("think"))
    if faults.on("error_first"):
        yield Event(Kind.ERROR, _error(faults, faults.count("error_first") or 500))
        yield Event(Kind.DONE, DONE)
        yield Act.END
        return
    steps = _broken_off(_littered(events, faults), faults)
    yield from _ended(steps, faults)


def _broken_off(events: Iterator[Event], faults: Faults) -> Iterator[Step]:
    """Let the faults named NAME_after=N break in behind the N-th chunk."""
    breaks = _breaks(faults)
    sent = 0
    yield from breaks.pop(0, ())
    for event in events:
        if event.kind is Kind.USAGE and faults.on("finish_late"):
            yield Pause(faults.seconds("finish_late"))
        yield event
        if event.is_chunk:
            sent += 1
            yield from breaks.pop(sent, ())


def _breaks(faults: Faults) -> dict[int, tuple[Step, ...]]:
    found: dict[int, tuple[Step, ...]] = {}
    acts = {
        "gate_after": Act.GATE,
        "hang_after": Act.SILENCE,
        "reset_after": Act.RESET,
        "eof_after": Act.BREAK,
        "end_after": Act.END,
    }
    for name, act in acts.items():
        count = faults.count(name)
        if count is not None:
            found[count] = (*found.get(count, ()), act)
    for name, shape in (("error_after", None), ("error_string", "string")):
        count = faults.count(name)
        if count is not None:
            failed = Event(Kind.ERROR, _error(faults, 500, shape))
            found[count] = (failed, Event(Kind.DONE, DONE), Act.END)
    if faults.on("endless_line"):
        found[1] = (Act.ENDLESS,)
    return found


def _littered(events: Iterator[Event], faults: Faults) -> Iterator[Event]:
    """Put between the chunks what does not belong there."""
    comment, junk = faults.on("comment"), faults.on("junk")
    empty = faults.on("empty_chunks")
    if comment:
        yield Event(Kind.STRAY, ": DEMO PROCESSING")
    for event in events:
        yield event
        if event.kind is not Kind.TEXT:
            continue
        if comment:
            yield Event(Kind.STRAY, ":")
        if junk:
            yield Event(Kind.STRAY, "data: : keepalive")
        if empty:
            yield Event(Kind.STRAY, 'data: {"id":"","model":"","choices":[]}')


def _ended(steps: Iterator[Step], faults: Faults) -> Iterator[Step]:
    """Bend the end of the stream: [DONE] and what comes with it."""
    for step in steps:
        if not (isinstance(step, Event) and step.kind is Kind.DONE):
            yield step
            continue
        if not faults.on("no_done"):
            yield step
        if faults.on("done_twice"):
            yield step
        if faults.on("after_done"):
            yield Event(
                Kind.STRAY,
                'data: {"id":"late","choices":[{"index":0,"delta":'
                '{"content":"late"},"finish_reason":null}]}',
            )
        if faults.on("stay_open"):
            yield Act.SILENCE


def _error(faults: Faults, code: int, shape: str | None = None) -> str:
    body = error(
        "EngineCore encountered an issue at 10.0.0.7.",
        code,
        type_="BadRequestError" if code == 400 else "InternalServerError",
        shape=shape or faults.text("shape") or "object",
    )
    return body.decode()


class _Chunks:
    """The chunks of one answer, in order. What they all share is rendered once."""

    def __init__(self, answer: Answer, ask: Ask, ident: Ident) -> None:
        self._answer, self._ask, self._kinds = answer, ask, ask.faults.kinds("usage")
        self._made = 0
        self._start = (
            f'{{"id":{encode(ident.id)},"object":"chat.completion.chunk",'
            f'"created":{ident.created},"model":{encode(answer.model)},'
        )
        self._extra = ',"error":null' if ask.faults.on("error_null") else ""
        self._logprobs = f',"logprobs":{encode(LOGPROBS)}' if ask.faults.on("nan") else ""
        self._continuous = ask.continuous_usage or bool(
            self._kinds & {"every_chunk", "zero_between"}
        )
        self._chunks = 0

    def events(self) -> Iterator[Event]:
        choices = self._answer.choices
        for choice in choices:
            content = "null" if choice.calls else '""'
            yield self._event(
                Kind.ROLE, choice.index, f'{{"role":"assistant","content":{content}}}'
            )
        if len(choices) == 1:
            yield from self._choice(choices[0])
        else:
            # As a batch does it: one token of each choice in turn, each ending when it ends.
            for row in zip_longest(*(self._choice(choice) for choice in choices)):
                yield from (event for event in row if event is not None)
        yield from self._usage()
        yield Event(Kind.DONE, DONE)

    def _choice(self, choice: Choice) -> Iterator[Event]:
        index = choice.index
        for thought in choice.thoughts:
            yield self._event(Kind.TEXT, index, f'{{"reasoning":{encode(thought)}}}', tokens=1)
        last = len(choice.pieces) - 1
        early = self._ask.faults.on("finish_with_text")
        for number, piece in enumerate(choice.pieces):
            tokens = piece_tokens(piece) if choice.big else 1
            reason = choice.finish_reason if early and number == last else None
            kind = Kind.FINISH if reason else Kind.TEXT
            yield self._event(kind, index, f'{{"content":{encode(piece)}}}', reason, tokens)
        if choice.calls:
            yield from self._calls(choice)
        if not (early and choice.pieces):
            yield self._event(Kind.FINISH, index, "{}", choice.finish_reason)

    def _calls(self, choice: Choice) -> Iterator[Event]:
        """Name first, then the arguments in fragments; several calls take turns."""
        left = choice.call_tokens
        for number, call in enumerate(choice.calls):
            left -= len(tokenize(call.name))
            yield self._fragment(
                choice.index,
                len(tokenize(call.name)),
                {
                    "index": number,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": ""},
                },
            )
        faults = self._ask.faults
        cut = _slices if faults.on("tool_calls") else tokenize
        pieces = [
            [call.arguments] if faults.on("big") else cut(call.arguments) for call in choice.calls
        ]
        fragments = [
            (number, piece)
            for row in zip_longest(*pieces)
            for number, piece in enumerate(row)
            if piece is not None
        ]
        for at, (number, piece) in enumerate(fragments):
            # The rest of the tokens is spread so that the last fragment brings the exact sum.
            tokens = left * (at + 1) // len(fragments) - left * at // len(fragments)
            yield self._fragment(
                choice.index, tokens, {"index": number, "function": {"arguments": piece}}
            )

    def _fragment(self, index: int, tokens: int, call: Mapping[str, Any]) -> Event:
        return self._event(Kind.TEXT, index, f'{{"tool_calls":[{encode(call)}]}}', None, tokens)

    def _usage(self) -> Iterator[Event]:
        if self._kinds & {"none", "last_content"}:
            return
        if not (self._ask.include_usage or "unasked" in self._kinds):
            return
        choices = '"choices":[]'
        if "no_choices" in self._kinds:
            choices = '"object":"chat.completion.chunk"'
        if "null_choices" in self._kinds:
            choices = '"choices":null'
        usage = encode(reported(self._answer.usage(), self._kinds))
        mark = (
            ',"system_fingerprint":"a\u2028b\u2029c\u0085d"' if self._ask.faults.on("u2028") else ""
        )
        for _ in range(2 if "twice" in self._kinds else 1):
            yield Event(Kind.USAGE, f'{self._start}{choices}{mark},"usage":{usage}}}')

    def _event(
        self, kind: Kind, index: int, delta: str, reason: str | None = None, tokens: int = 0
    ) -> Event:
        self._made += tokens
        self._chunks += 1
        finish = f'"{reason}"' if reason else "null"
        logprobs = self._logprobs if kind is Kind.TEXT else ""
        usage = self._running_usage(kind)
        return Event(
            kind,
            f'{self._start}"choices":[{{"index":{index},"delta":{delta}{logprobs},'
            f'"finish_reason":{finish}}}]{self._extra}{usage}}}',
            tokens,
        )

    def _running_usage(self, kind: Kind) -> str:
        """The usage that an ordinary chunk carries: usually none."""
        kinds = self._kinds
        if "last_content" in kinds and kind is Kind.FINISH and self._done():
            return f',"usage":{encode(reported(self._answer.usage(), kinds))}'
        if "null_between" in kinds:
            return ',"usage":null'
        if not self._continuous or "none" in kinds:
            return ""
        usage = reported(self._answer.usage(self._made), kinds)
        if "zero_between" in kinds and self._chunks in (1, 4):
            usage = reported(self._answer.usage(), frozenset({"zero"}))
        return f',"usage":{encode(usage)}'

    def _done(self) -> bool:
        return self._made >= self._answer.completion_tokens


def _slices(text: str) -> list[str]:
    return [text[at : at + FRAGMENT] for at in range(0, len(text), FRAGMENT)]
