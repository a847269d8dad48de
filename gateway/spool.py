"""Settlements that the database could not take, on the local disk until it can.

One file per process, `<worker ID>.jsonl` under `KILN_VAR_DIR/spool`, a settlement a line, synced to
the disk before the customer is told a cost. Its process holds a lock on it while it lives, so that
another may replay what a dead one left. A replay is safe to repeat: the state of the event and the
one charge per event decide, so a crash between commit and truncation costs nothing.

Never decides when to spool or to replay: the writer does.
"""

import fcntl
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import orjson

from billing.pricing import Prices
from billing.usage import Admission, Settlement

log = logging.getLogger(__name__)

# Settles a list and returns those of it that the database refuses for good.
Settle = Callable[[list[Settlement]], list[Settlement]]

_GROUP = 256


def dump(settlement: Settlement) -> bytes:
    """Return a settlement as one line of JSON; amounts and prices as exact decimal strings."""
    return orjson.dumps(settlement, default=str) + b"\n"


def load(line: bytes) -> Settlement:
    """Return the settlement of a line. Raises ValueError, KeyError or TypeError if it is none."""
    values = orjson.loads(line)
    admission = values["admission"]
    prices = {name: Decimal(price) for name, price in admission["prices"].items()}
    admission.update(
        generation_id=uuid.UUID(admission["generation_id"]),
        worker_id=uuid.UUID(admission["worker_id"]),
        prices=Prices(**prices),
        hold=Decimal(admission["hold"]),
        created_at=datetime.fromisoformat(admission["created_at"]),
    )
    values.update(
        admission=Admission(**admission),
        finished_at=datetime.fromisoformat(values["finished_at"]),
    )
    return Settlement(**values)


class Spool:
    """The file of one process. Used by its writer thread only."""

    def __init__(self, folder: Path, worker_id: uuid.UUID) -> None:
        self._folder = folder
        self._path = folder / f"{worker_id}.jsonl"
        self._file: int | None = None
        self.count = 0  # settlements in the file

    def append(self, settlements: Sequence[Settlement]) -> None:
        """Write settlements and sync them to the disk. Raises OSError; then none was taken."""
        file = self._open()
        end = os.fstat(file).st_size
        try:
            _write_all(file, b"".join(map(dump, settlements)))
            os.fsync(file)
        except OSError:
            os.ftruncate(file, end)  # half a line would spoil the next one
            raise
        self.count += len(settlements)

    def replay(self, settle: Settle) -> list[Settlement]:
        """Settle what the file holds, empty it, and return what was settled.

        Raises what `settle` raises; the file stays then.
        """
        settled = _settle_all(self._path, settle)
        os.ftruncate(self._open(), 0)
        os.fsync(self._open())
        self.count = 0
        return settled

    def close(self) -> None:
        """Let go of the file, and remove it if it holds nothing."""
        if self._file is not None:
            if os.fstat(self._file).st_size == 0:
                self._path.unlink(missing_ok=True)
            os.close(self._file)  # and its lock
            self._file = None

    def _open(self) -> int:
        while self._file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                _sync_folder(self._folder)
            except OSError:
                os.close(file)
                raise
            # Before the lock it looked like the file of a dead process, which others remove.
            if os.fstat(file).st_nlink:
                self._file = file
            else:
                os.close(file)
        return self._file


def replay_orphans(folder: Path, settle: Settle) -> list[Settlement]:
    """Settle what dead processes left in `folder`, and remove their files.

    A file whose lock is taken belongs to a process that lives. Raises what `settle` raises.
    """
    settled: list[Settlement] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # another process was faster
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        try:
            settled += _settle_all(path, settle)
            path.unlink(missing_ok=True)
        finally:
            os.close(file)
    return settled


def _read(path: Path) -> list[Settlement]:
    """Read a file. A last line without its end was never synced, so nobody was told its cost."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    settlements = []
    for line in lines:
        try:
            settlements.append(load(line))
        except (ValueError, KeyError, TypeError):
            if line.endswith(b"\n"):
                log.error("%s has a line that is no settlement; set aside", path.name)
                _set_aside(path, line)
    return settlements


def _settle_all(path: Path, settle: Settle) -> list[Settlement]:
    settlements = _read(path)
    for start in range(0, len(settlements), _GROUP):
        for refused in settle(settlements[start : start + _GROUP]):
            log.error("%s is refused by the database; set aside", refused.admission.generation_id)
            _set_aside(path, dump(refused))
    return settlements


def _set_aside(path: Path, line: bytes) -> None:
    file = os.open(path.with_suffix(".rejected"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        _write_all(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(folder: Path) -> None:
    """Let the names of new files survive a crash as well."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
