"""The demo model's tokens: how text is cut, what a prompt amounts to, and the prefix cache.

The tokenizer is one regular expression. A token is up to 16 letters or digits of one word, or one
CJK character, or up to 4 other marks, each with the one blank before it; any other white space is
a token by itself. Joined, the tokens of a text are the text. This module never does I/O.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

TOKEN: Final = re.compile(
    r" ?[^\W\u3040-\u9fff\uac00-\ud7a3]{1,16}| ?[\u3040-\u9fff\uac00-\ud7a3]| ?[^\w\s]{1,4}|\s"
)
# What a chat template puts around each message and at the end of the prompt.
MESSAGE_START, MESSAGE_END, REPLY_START = "<start>", "<end>", "<reply>"


def tokenize(text: str) -> list[str]:
    return TOKEN.findall(text)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(part for part in parts if isinstance(part, str))


def prompt_tokens(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Lay the conversation out as the model would read it: tools, messages, reply mark."""
    tokens: list[str] = []
    for tool in tools:
        tokens += tokenize(json.dumps(tool, ensure_ascii=False))
    for message in messages:
        tokens.append(MESSAGE_START)
        tokens.append(str(message.get("role")))
        tokens += tokenize(text_of(message))
        if message.get("tool_calls"):
            tokens += tokenize(json.dumps(message["tool_calls"], ensure_ascii=False))
        tokens.append(MESSAGE_END)
    tokens.append(REPLY_START)
    return tokens


class PrefixCache:
    """Remember the beginnings of earlier prompts, in whole blocks, the oldest forgotten first.

    Whole blocks are what vLLM caches too: a prompt of fewer than 16 tokens is never cached.
    """

    BLOCK: Final = 16
    BLOCKS_MAX: Final = 8192

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def look_up(self, tokens: Sequence[str]) -> int:
        """Return how many leading tokens were known already, and know all of them from now on."""
        cached, missed = 0, False
        for key in self._keys(tokens):
            missed = missed or key not in self._blocks
            if not missed:
                cached += self.BLOCK
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.BLOCKS_MAX:
            self._blocks.popitem(last=False)
        return cached

    def clear(self) -> None:
        self._blocks.clear()

    def _keys(self, tokens: Sequence[str]) -> Iterator[int]:
        # Each key stands for the block and all that precedes it. The last token is left out: it
        # has to be computed in any case, so a whole prompt is never cached.
        key = 0
        for start in range(0, len(tokens) - self.BLOCK, self.BLOCK):
            key = hash((key, *tokens[start : start + self.BLOCK]))
            yield key


def cut_at_stop(tokens: Iterable[str], stops: Sequence[str]) -> list[str] | None:
    """Return the tokens before the first stop string, or None if none of them occurs."""
    text = "".join(tokens)
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return tokenize(text[: min(found)]) if found else None
