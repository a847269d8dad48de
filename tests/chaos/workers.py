"""Gateway workers that are killed, stopped and paused, and come back on the same port."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.chaos.ports import free_port

_READY_SECONDS = 40


class Worker:
    """One uvicorn process on a port of its own."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.port = free_port()
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.file_size_max: int | None = None  # bytes that it may write to any file

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/chat/completions"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "uvicorn", "kiln_site.asgi:application"),
                    *("--port", str(self.port), "--no-access-log"),
                ],
                env={**os.environ, **self._environment},
                stdout=subprocess.PIPE if self.file_size_max is not None else log,
                stderr=subprocess.STDOUT,
                preexec_fn=self._limit if self.file_size_max is not None else None,
            )

    def _limit(self) -> None:
        size = self.file_size_max or 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(f"worker {self.port} is not ready; see {self._log}")

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        self._wait()

    def terminate(self) -> float:
        """Ask it to end, and return how many seconds it took."""
        began = time.monotonic()
        self._send(signal.SIGTERM)
        self._wait()
        return time.monotonic() - began

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self) -> None:
        if self._process:
            self._process.wait(60)
            if self._process.stdout:
                self._process.stdout.close()
            self._process = None
