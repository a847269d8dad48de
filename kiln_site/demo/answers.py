"""The demo model's answer to a request: text or tool calls, why it ended, and what it counts.

The same conversation always gets the same answer; only the cached tokens depend on what was asked
before. This module never does I/O.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kiln_site.demo import prose, tool_calls
from kiln_site.demo.asks import Ask, JsonObject, Refusal
from kiln_site.demo.faults import without_words
from kiln_site.demo.tokens import PrefixCache, cut_at_stop, prompt_tokens, text_of, tokenize
from kiln_site.demo.tool_calls import ToolCall

EMOJI: Final = ("你好", " 🎉", " 👩\u200d👩\u200d👧", " — und ", "日", "本")
SEPARATORS: Final = (" one\u2028two", " three\u2029four", " five\u0085six")
BIG_TOKEN: Final = 16  # characters of one token in a very long word, as the tokenizer cuts it


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers. A piece is what one chunk carries; mostly it is one token."""

    index: int
    pieces: tuple[str, ...]
    finish_reason: str
    thoughts: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    call_tokens: int = 0
    big: bool = False

    @property
    def tokens(self) -> int:
        said = sum(piece_tokens(piece) for piece in self.pieces) if self.big else len(self.pieces)
        return len(self.thoughts) + said + self.call_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int

    def usage(self, completion_tokens: int | None = None) -> JsonObject:
        """What is reported at the end, or so far when the tokens made so far are given."""
        made = self.completion_tokens if completion_tokens is None else completion_tokens
        usage: JsonObject = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        thoughts = sum(len(choice.thoughts) for choice in self.choices)
        if thoughts:
            usage["completion_tokens_details"] = {"reasoning_tokens": min(thoughts, made)}
        return usage

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)


def piece_tokens(piece: str) -> int:
    """Count a piece as the tokenizer would, without building a list for a piece of megabytes."""
    return max(1, -(-len(piece) // BIG_TOKEN))


def compose(ask: Ask, cache: PrefixCache, context_window: int) -> Answer:
    """Answer a request; refuse it when the prompt leaves no room in the context window."""
    faults = ask.faults
    prompt = prompt_tokens(ask.messages, ask.tools)
    room = context_window - len(prompt)
    if room < 1:
        raise Refusal(
            f"This model's maximum context length is {context_window} tokens. However, your"
            f" prompt contains {len(prompt)} input tokens. Please reduce the length of the input"
            " prompt.",
            param="input_tokens",
        )
    cached = cache.look_up(prompt)
    limit = min(room, ask.output_max or room)
    forced_prompt, forced_cached = faults.count("prompt_tokens"), faults.count("cached")
    return Answer(
        model="another-model" if faults.on("other_model") else ask.model,
        choices=tuple(_choice(ask, index, limit) for index in range(ask.n)),
        prompt_tokens=len(prompt) if forced_prompt is None else forced_prompt,
        cached_tokens=cached if forced_cached is None else forced_cached,
    )


def _choice(ask: Ask, index: int, limit: int) -> Choice:
    faults, key = ask.faults, _key(ask, index)
    about = without_words(ask.last_user_text)
    thoughts = prose.exactly(faults.count("reasoning") or 0, about, key, thinking=True)[:limit]
    if ask.tools and ask.tool_choice != "none" and ask.messages[-1].get("role") == "user":
        return _tool_choice(ask, index, about, key, thoughts)
    if faults.on("big"):
        big = ("x" * max(1, faults.count("big") or 0),)
        return Choice(index, big, "stop", thoughts, big=True)
    room = limit - len(thoughts)
    pieces = list(_pieces(ask, about, key, room))
    before = cut_at_stop(pieces, ask.stop) if ask.stop else None
    if before is not None and len(before) <= room:
        return Choice(index, tuple(before), "stop", thoughts)
    reason = "length" if len(pieces) > room else "stop"
    return Choice(index, tuple(pieces[:room]), reason, thoughts)


def _pieces(ask: Ask, about: str, key: str, room: int) -> Sequence[str]:
    faults = ask.faults
    count = faults.count("tokens")
    if count is not None:
        return prose.exactly(min(count, room + 1), about, key)
    last = ask.messages[-1]
    if last.get("role") == "tool":
        return tokenize(f"The tool says: {text_of(last)}. That is what I would go by.")
    texts = (text_of(message).lower() for message in ask.messages)
    brief = any("brief" in text or "short" in text for text in texts)
    pieces = list(prose.answer(about, key, brief=brief))
    if faults.on("emoji"):
        pieces += EMOJI
    if faults.on("u2028"):
        pieces += SEPARATORS
    if faults.on("surrogate"):
        pieces.append(" \ud800")
    if faults.on("nul"):
        pieces.append(" \0")
    return pieces


def _tool_choice(ask: Ask, index: int, about: str, key: str, thoughts: tuple[str, ...]) -> Choice:
    faults = ask.faults
    named = [tool for tool in ask.tools if tool["function"]["name"] == ask.tool_choice]
    tool = (named or ask.tools)[0]
    count = faults.count("tool_calls") or 1
    calls = [
        tool_calls.call(tool, about, f"{key}/{number}", ascii_only=faults.on("tool_calls"))
        for number in range(count)
    ]
    if faults.on("empty_arguments"):
        calls = [ToolCall(one.id, one.name, "{}") for one in calls]
    if faults.on("big"):
        blob = json.dumps({"blob": "x" * (faults.count("big") or 0)})
        calls = [ToolCall(one.id, one.name, blob) for one in calls]
    tokens = sum(
        len(tokenize(one.name)) + piece_tokens(one.arguments)
        if faults.on("big")
        else len(tokenize(one.name)) + len(tokenize(one.arguments))
        for one in calls
    )
    reason = "stop" if faults.on("empty_arguments") else "tool_calls"
    return Choice(index, (), reason, thoughts, tuple(calls), tokens)


def _key(ask: Ask, index: int) -> str:
    """What the choice of words depends on: all that was said, the seed, the index."""
    said = hashlib.blake2b(digest_size=16)
    for message in ask.messages:
        said.update(
            f"{message.get('role')}\n{without_words(text_of(message))}\n".encode("utf-8", "replace")
        )
    return f"{said.hexdigest()}/{ask.seed}/{index}"
