"""The disk of the simulation: stands for `os` in gateway.spool.

What was written and not synced is gone, in whole or in part, once its process is killed.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulator.faults import FAULTS


class Disk:
    """Everything is real but for what goes wrong."""

    def __init__(self) -> None:
        self.begin(lambda: None)

    def begin(self, between: Callable[[], None]) -> None:
        """`between` is called where another process could come in between."""
        self._between = between
        self._synced: dict[int, int] = {}  # by file: the bytes that a crash would leave
        self._new: dict[int, str] = {}  # files whose names a crash would take
        self.owners: dict[int, object] = {}
        self.owner: object = None

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        is_new = bool(flags & os.O_CREAT) and not path.exists()
        file = os.open(path, flags, mode)
        self.owners[file] = self.owner
        if not path.is_dir():
            self._synced[file] = os.fstat(file).st_size
        if is_new:
            self._new[file] = str(path)
        self._between()
        return file

    def write(self, file: int, data: memoryview) -> int:
        if FAULTS.is_disk_full or FAULTS.happens("disk full at write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if FAULTS.happens("disk takes only a part"):
            data = data[: FAULTS.chance.randint(1, len(data))]
        written = os.write(file, data)
        FAULTS.maybe_kill("write")
        return written

    def fsync(self, file: int) -> None:
        FAULTS.maybe_kill("fsync")
        if FAULTS.happens("error at fsync"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if file in self._synced:
            self._synced[file] = os.fstat(file).st_size
        else:
            self._new.clear()  # a folder was synced, and with it the names in it

    def ftruncate(self, file: int, size: int) -> None:
        FAULTS.maybe_kill("ftruncate")
        os.ftruncate(file, size)
        self._synced[file] = min(self._synced[file], size)
        self._between()

    def close(self, file: int) -> None:
        for known in (self.owners, self._synced, self._new):
            known.pop(file, None)
        os.close(file)

    def crash(self, owner: object) -> None:
        """Take from the files of this owner what was not synced, and close them."""
        for file in [file for file, whose in self.owners.items() if whose is owner]:
            size = self._synced.get(file)
            if size is not None and (more := os.fstat(file).st_size - size) > 0:
                os.ftruncate(file, size + FAULTS.chance.randint(0, more))
            if file in self._new:
                Path(self._new[file]).unlink(missing_ok=True)
            self.close(file)


DISK = Disk()
