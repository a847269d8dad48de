"""What must not reach a log."""

import logging
import re


class RedactKeys(logging.Filter):
    """Blank out API keys in log records.

    Customers put keys into addresses, where they are refused but logged by every server in between.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._key = re.compile(re.escape(prefix) + r"[0-9A-Za-z]{8,}")
        self._blank = f"{prefix}…"

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = self._redacted(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(self._redacted, record.args))
        return True

    def _redacted(self, value: object) -> object:
        return self._key.sub(self._blank, value) if isinstance(value, str) else value
