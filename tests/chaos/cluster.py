"""A PostgreSQL cluster of the harness's own, which it may stop as rudely as it likes."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.chaos.ports import free_port


class Cluster:
    """Made in `folder`, listening on 127.0.0.1 only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._bin = _bin_folder()
        # PostgreSQL refuses to run as root.
        self._as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        folder.mkdir(parents=True)
        if self._as_user:
            shutil.chown(folder, "postgres")
        self._run("initdb", "-D", str(folder), "-U", "kiln", "-A", "trust", "--no-sync")

    @property
    def url(self) -> str:
        return f"postgres://kiln@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        options = (
            f"-p {self._port} -c listen_addresses=127.0.0.1 "
            f"-c unix_socket_directories={self._folder} -c max_connections=100"
        )
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._folder), "-w", "-l", log, "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` is a crash: no checkpoint, connections cut, recovery at the next start."""
        self._run("pg_ctl", "-D", str(self._folder), "-w", "-m", mode, "stop")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [*self._as_user, str(self._bin / program), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            cwd="/",
        )


def _bin_folder() -> Path:
    if found := shutil.which("pg_ctl"):
        return Path(found).parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    if not versions:
        raise SystemExit("chaos needs PostgreSQL's server programs (initdb, pg_ctl)")
    return versions[-1].parent
