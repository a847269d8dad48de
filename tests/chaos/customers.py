"""Customers that keep what they were told: every generation ID, and every cost."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import aiohttp

_COST = re.compile(rb'"cost":([0-9.]+)')
_CODE = re.compile(rb'"code":"([a-z_]+)"')


@dataclass
class Told:
    """What all customers heard."""

    sent: int = 0
    ids: set[str] = field(default_factory=set)
    costs: dict[str, Decimal] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)


class Customers:
    """Clients of several organizations, each more than its limit at once, on all workers' ports."""

    def __init__(self, urls: Sequence[str], secrets: Sequence[str], told: Told, seed: int) -> None:
        self._urls = list(urls)
        self._secrets = secrets
        self._told = told
        self._chance = random.Random(seed)

    async def send(self, number: int, *, per_organization: int = 10) -> None:
        """Send `number` requests; return when all have ended, one way or another."""
        left = iter(range(number))
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(
                *(
                    self._customer(session, secret, left)
                    for secret in self._secrets
                    for _ in range(per_organization)
                )
            )

    async def _customer(
        self, session: aiohttp.ClientSession, secret: str, left: Iterator[int]
    ) -> None:
        for _ in left:
            self._told.sent += 1
            outcome = await self._outcome(session, secret)
            self._told.outcomes[outcome] += 1
            if outcome.startswith(("429", "503")):
                await asyncio.sleep(self._chance.uniform(0.01, 0.05))

    async def _outcome(self, session: aiohttp.ClientSession, secret: str) -> str:
        while True:
            try:
                return await self._request(session, secret)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)  # that worker is down; nothing was sent
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return f"broken: {type(error).__name__}"

    async def _request(self, session: aiohttp.ClientSession, secret: str) -> str:
        kind = self._chance.choices(["plain", "stream", "leave", "fault"], weights=[40, 40, 12, 8])[
            0
        ]
        words = f"demo:tokens={self._chance.randint(5, 40)} demo:pace={self._chance.randint(0, 25)}"
        if kind == "fault":
            words += self._chance.choice([" demo:reset_after=3", " demo:status=500"])
        body = {
            "model": "qwen3-32b",
            "messages": [{"role": "user", "content": f"Hello! {words}"}],
            "max_tokens": 64,
            "stream": kind != "plain",
        }
        if kind != "plain":
            body["stream_options"] = {"include_usage": True}
        async with session.post(
            self._chance.choice(self._urls),
            json=body,
            headers={"Authorization": f"Bearer {secret}"},
        ) as answer:
            generation_id = answer.headers.get("X-Neocloud-Generation-Id")
            if generation_id:
                self._told.ids.add(generation_id)
            if kind == "leave" and answer.status == 200:
                await answer.content.readline()
                answer.close()
                return "left"
            text = await answer.read()
        # A cost counts as told as soon as it was read, whatever came after it.
        if answer.status == 200 and generation_id and (cost := _COST.search(text)):
            self._told.costs[generation_id] = Decimal(cost[1].decode())
            return "served"
        if answer.status == 200:
            return "cut"  # by an error event
        code = _CODE.search(text)
        return f"{answer.status} {code[1].decode() if code else ''}".rstrip()
