"""What all exchanges of one demo model server share: its settings, its memory, its records.

Used by the server's loop alone; of the rest only the records are safe for other threads.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from kiln_site.demo.records import Records
from kiln_site.demo.tokens import PrefixCache


@dataclass(slots=True)
class State:
    models: tuple[str, ...]
    api_key: str = ""
    pace: float = 0.0  # tokens a second; 0 is as fast as possible
    context_window: int = 32768
    always: str = ""  # faults of every chat request, as words
    healthy: bool = True
    scripts: dict[str, list[bytes]] = field(default_factory=dict)
    records: Records = field(default_factory=Records)
    cache: PrefixCache = field(default_factory=PrefixCache)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    # Tokens since the start by kind and model, sent or not: what GET /metrics publishes.
    counted: Counter[tuple[str, str]] = field(default_factory=Counter)
    created: int = field(default_factory=lambda: int(time.time()))
