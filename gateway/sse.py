"""Server-sent events, without I/O: bytes in, the data of whole events out.

A line ends with LF, CR or CRLF and with nothing else (WHATWG HTML, section 9.2.5): U+2028 or
U+0085 inside JSON is text. Takes linear time however the bytes are cut, and never holds more than
`frame_max` bytes. Comments and fields other than `data` are passed over.
"""

import re

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class FrameTooLarge(Exception):
    """An event is longer than `frame_max` bytes."""


def frame(data: bytes) -> bytes:
    """Return the event that carries `data`, which must be one line."""
    return b"data: " + data + b"\n\n"


KEEPALIVE = b": keepalive\n\n"
DONE = b"[DONE]"


class FrameParser:
    """Cut a byte stream into events; `feed` and `close` return their data, in order."""

    def __init__(self, frame_max: int) -> None:
        self._frame_max = frame_max
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._line_size = 0
        self._data: list[bytes] = []  # data lines of the event that has not ended yet
        self._data_size = 0
        self._at_start = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes. Raises FrameTooLarge."""
        if self._at_start:
            chunk = self._without_bom(chunk)
        if self._after_cr and chunk:
            # The LF of a CRLF that was cut in two: its CR has ended the line already.
            self._after_cr = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        lines = _LINE_END.split(chunk) if b"\r" in chunk else chunk.split(b"\n")
        self._line.append(lines[0])
        frames: list[bytes] = []
        if len(lines) > 1:
            self._end_line(b"".join(self._line), frames)
            for line in lines[1:-1]:
                self._end_line(line, frames)
            self._line, self._line_size = [lines[-1]], len(lines[-1])
        else:
            self._line_size += len(chunk)
        if self._line_size + self._data_size > self._frame_max:
            raise FrameTooLarge
        return frames

    def close(self) -> list[bytes]:
        """Take the end of the stream: a last event without its blank line still counts."""
        frames: list[bytes] = []
        self._end_line(b"".join(self._line), frames)
        self._end_line(b"", frames)
        self._line = []
        return frames

    def _without_bom(self, chunk: bytes) -> bytes:
        start = b"".join(self._line) + chunk
        self._line = []
        if len(start) < len(_BOM) and _BOM.startswith(start):
            self._line = [start]
            return b""
        self._at_start = False
        return start.removeprefix(_BOM)

    def _end_line(self, line: bytes, frames: list[bytes]) -> None:
        if not line:
            if self._data:
                frames.append(b"\n".join(self._data))
                self._data, self._data_size = [], 0
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            self._data_size += len(line)
