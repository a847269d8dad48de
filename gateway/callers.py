"""Who calls: keys that were looked up a moment ago, in memory.

An answer is at most two seconds old (rulings.md 4 and 24), and what was revoked meanwhile is still
refused at admission, which reads the key again under the lock. Never holds a key: only digests.
"""

import asyncio
from dataclasses import dataclass
from time import monotonic

from billing import keys
from gateway.commits import Commits
from gateway.refusal_counts import RefusalCounts
from gateway.refusals import in_words_of_api

_MAX_AGE_SECONDS = 2.0
_ENTRIES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Entry:
    looked_up_at: float
    answer: "asyncio.Future[keys.Caller | keys.KeyRefused]"


class Callers:
    """Authenticate by memory, and by one look-up for all who ask for the same key meanwhile."""

    def __init__(self, commits: Commits, refusals: RefusalCounts) -> None:
        self._commits = commits
        self._refusals = refusals
        self._entries: dict[bytes, _Entry] = {}

    async def authenticate(self, secret: str) -> keys.Caller:
        """Return who calls with this key. Raises InvalidApiKey, KeyPaused, OrganizationSuspended.

        A malformed key costs no look-up: its checksum is wrong.
        """
        if not keys.is_well_formed(secret):
            raise in_words_of_api(keys.KeyInvalid())
        digest = keys.digest(secret)
        entry = self._entries.get(digest)
        if entry is None or monotonic() - entry.looked_up_at > _MAX_AGE_SECONDS:
            if len(self._entries) >= _ENTRIES_MAX:
                self._entries.clear()
            entry = _Entry(monotonic(), asyncio.get_running_loop().create_future())
            self._entries[digest] = entry
            await self._look_up(secret, digest, entry)
        # Shielded: one of many who wait may leave without taking the answer from the others.
        answer = await asyncio.shield(entry.answer)
        if isinstance(answer, keys.KeyRefused):
            refusal = in_words_of_api(answer)
            if answer.key:
                self._refusals.count(answer.key.organization_id, answer.key.pk, refusal)
            raise refusal
        return answer

    async def _look_up(self, secret: str, digest: bytes, entry: _Entry) -> None:
        try:
            entry.answer.set_result(await self._commits.read(_authenticate, secret))
        except BaseException as error:
            # Not remembered, and told to those who wait for this look-up.
            self._entries.pop(digest, None)
            if isinstance(error, Exception):
                entry.answer.set_exception(error)
            else:
                entry.answer.cancel()
                raise


def _authenticate(secret: str) -> keys.Caller | keys.KeyRefused:
    try:
        caller, _ = keys.authenticate(secret)
    except keys.KeyRefused as refusal:
        return refusal
    return caller
