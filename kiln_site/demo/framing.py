"""The bytes of a stream: events as SSE lines, lines as chunks of an HTTP body, cut into writes.

The faults that concern bytes stand here: line ends, blanks, a byte order mark, compression, how
much goes into one write. This module never does I/O.
"""

import zlib
from typing import Final

from kiln_site.demo.faults import Faults
from kiln_site.demo.stream import Event, Kind

LAST_CHUNK: Final = b"0\r\n\r\n"
BOM: Final = b"\xef\xbb\xbf"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Framing:
    """Turn events into writes. Each method returns what is to be written now, write by write."""

    def __init__(self, faults: Faults) -> None:
        self._start = b"data:" if faults.on("no_space") else b"data: "
        self._eol = b"\r\n" if faults.on("crlf") else b"\r" if faults.on("cr") else b"\n"
        self._glue = faults.count("glue") or 1
        self._split = faults.count("split") or 0
        self._no_final_blank = faults.on("no_final_blank")
        self._pending = [BOM] if faults.on("bom") else []
        self._events = 0
        self._held: Event | None = None
        self._gzip = zlib.compressobj(wbits=31) if faults.on("gzip") else None
        self._plain = not faults

    def add(self, event: Event) -> list[bytes]:
        """Frame one event. [DONE] is held back, so that it leaves with the end of the body."""
        if self._plain and event.kind is not Kind.DONE:
            return [chunk(b"data: %b\n\n" % event.text.encode("utf-8", "backslashreplace"))]
        before = self._take_held()
        if event.kind is Kind.DONE or self._no_final_blank:
            self._held = event
        else:
            self._frame(event)
        return before + (self._take() if self._events >= self._glue else [])

    def flush(self) -> list[bytes]:
        """Let go of what is held back: nothing may follow for a while."""
        return self._take_held() + self._take()

    def end(self) -> list[bytes]:
        """The last writes of the body; [DONE] and the end are one write, as servers do it."""
        if self._held is not None:
            self._frame(self._held, blank=not self._no_final_blank)
            self._held = None
        writes = self._take()
        if self._gzip is not None:
            writes.append(chunk(self._gzip.flush()))
        if not writes or self._split:
            return [*writes, LAST_CHUNK]
        return [*writes[:-1], writes[-1] + LAST_CHUNK]

    def _take_held(self) -> list[bytes]:
        if self._held is None:
            return []
        self._frame(self._held)
        self._held = None
        return self._take() if self._events >= self._glue else []

    def _frame(self, event: Event, *, blank: bool = True) -> None:
        text = event.text.encode("utf-8", "backslashreplace")
        line = text if event.kind is Kind.STRAY else self._start + text
        self._pending.append(line + self._eol * (2 if blank else 1))
        self._events += 1

    def _take(self) -> list[bytes]:
        data = b"".join(self._pending)
        self._pending, self._events = [], 0
        if not data:
            return []
        if self._gzip is not None:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        # A piece is an HTTP chunk of its own, so that the cut survives a reader that is slow
        # enough to get several writes at once.
        size = self._split or len(data)
        return [chunk(data[at : at + size]) for at in range(0, len(data), size)]
