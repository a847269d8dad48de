"""What the demo model says: plain sentences about the words of the prompt, always the same ones.

The choice of sentences is a function of the conversation, the seed and the index of the choice.
It knows nothing and says so in general terms. This module never does I/O.
"""

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache

from kiln_site.demo.tokens import tokenize

WORD = re.compile(r"[^\W\d_][\w'-]{3,}")
GREETING = re.compile(r"\s*(hello|hi|hey|good (morning|day|evening))\b", re.IGNORECASE)
COMMON_WORDS = """
about above after again also always answer around because been before being below best brief
briefly call called come could does doing down each else every explain find first from gets give
goes good have hello help here hers into just keep kind know less like list long look make many
mean more most much must need next once only other over part please same should show some such
sure take tell text than that their them then there these they thing things this those through
time told under until upon user very want well were what when where which while whom whose will
with within without word words work would write your
"""
COMMON = frozenset(COMMON_WORDS.split())
SENTENCES = (
    "The short answer is that {a} depends on {b} more than most people expect.",
    "It helps to look at {a} first and to leave {b} for later.",
    "A simple way to think of {a} is to picture one small case and follow it to the end.",
    "In practice {a} and {b} are seldom far apart.",
    "Most of the work lies in {a}; the rest follows from it.",
    "If {a} is not clear yet, write down what you know about {b} and compare.",
    "There are two sides to {a}: what it promises, and what it costs.",
    "People who care about {b} usually start by measuring {a}.",
    "One good example of {a} says more than a long definition.",
    "Nothing about {a} is hard once {b} has been named properly.",
    "The usual mistake is to change {a} and {b} at the same time.",
    "Keep {a} small, check it often, and {b} will take care of itself.",
    "Before anything else, decide what {a} should never do.",
    "When {a} goes wrong, the cause is often found in {b}.",
    "A careful reader would ask where {a} ends and {b} begins.",
    "So much for {a}; the same holds, with small changes, for {b}.",
)
THOUGHTS = (
    "The question is about {a}, so {b} has to be settled first.",
    "Let me check {a} against {b} once more.",
    "That seems to hold for {a}; now for {b}.",
    "I should not promise more about {a} than I know.",
)


def topics(text: str) -> tuple[str, ...]:
    """The words of a text that are worth talking about, in order, at most six."""
    words = (word.lower() for word in WORD.findall(text))
    return tuple(dict.fromkeys(word for word in words if word not in COMMON))[:6]


@lru_cache(maxsize=4096)
def answer(about: str, key: str, *, brief: bool) -> tuple[str, ...]:
    """The tokens of a whole answer to the text `about`; `key` chooses among the many possible."""
    words = topics(about)
    greeting = ["Hello! How can I help?"] if GREETING.match(about) else []
    if greeting and not words:
        return tuple(tokenize(greeting[0]))
    picks = _picks(key)
    size = 1 + next(picks) % 2 if brief else 3 + next(picks) % 5
    sentences = _sentences(words, picks, SENTENCES)
    return tuple(tokenize(" ".join(greeting + [next(sentences) for _ in range(size)])))


@lru_cache(maxsize=256)
def exactly(count: int, about: str, key: str, *, thinking: bool = False) -> tuple[str, ...]:
    """The first `count` tokens of an answer that would never end."""
    tokens: list[str] = []
    for sentence in _sentences(topics(about), _picks(key), THOUGHTS if thinking else SENTENCES):
        tokens += tokenize(f" {sentence}" if tokens else sentence)
        if len(tokens) >= count:
            break
    return tuple(tokens[:count])


def _sentences(
    words: tuple[str, ...], picks: Iterator[int], templates: tuple[str, ...]
) -> Iterator[str]:
    words = words or ("the question",)
    last = -1
    while True:
        number = next(picks) % len(templates)
        # The same sentence twice in a row would read like a fault.
        last = (number + 1) % len(templates) if number == last else number
        first = next(picks) % len(words)
        second = words[(first + 1) % len(words)] if len(words) > 1 else "the details"
        yield templates[last].format(a=words[first], b=second)


def _picks(key: str) -> Iterator[int]:
    block = key.encode("utf-8", "replace")
    while True:
        block = hashlib.blake2b(block, digest_size=32).digest()
        yield from block
