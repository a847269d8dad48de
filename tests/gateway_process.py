"""A gateway in a process of its own, as an operator would run it."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, Queue

SERVERS = {
    "uvicorn": ["-m", "uvicorn", "kiln_site.asgi:application", "--port", "0"],
    "daphne": ["-m", "daphne", "-b", "127.0.0.1", "-p", "0", "kiln_site.asgi:application"],
}
_READY = re.compile(r"(?:running on http://|Listening on TCP address )127\.0\.0\.1:(\d+)")
_START_SECONDS = 30


@dataclass
class GatewayProcess:
    """A running gateway: its address, its process, and what it has logged so far."""

    server: str
    port: int
    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What an SDK takes as its base URL."""
        return f"{self.url}/v1"


@contextmanager
def gateway(server: str = "uvicorn", **environment: str) -> Iterator[GatewayProcess]:
    """Run a gateway on the tests' database; `environment` adds settings, as KILN_IDLE_SECONDS="1".

    Fails when it logged an exception that nobody handled.
    """
    process = subprocess.Popen(
        [sys.executable, *SERVERS[server]],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = GatewayProcess(server, 0, process)
    lines: Queue[str] = Queue()
    reader = threading.Thread(target=_read, args=(process, running.log, lines), daemon=True)
    reader.start()
    try:
        running.port = _wait_for_port(running, lines)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        assert process.stdout
        process.stdout.close()
    assert "Traceback (most recent call last):" not in "\n".join(running.log), running.log


def _read(process: "subprocess.Popen[str]", log: list[str], lines: "Queue[str]") -> None:
    assert process.stdout
    for line in process.stdout:
        log.append(line.rstrip())
        lines.put(line)


def _wait_for_port(running: GatewayProcess, lines: "Queue[str]") -> int:
    while True:
        try:
            line = lines.get(timeout=_START_SECONDS)
        except Empty:
            raise AssertionError(f"the gateway did not start: {running.log}") from None
        if found := _READY.search(line):
            return int(found[1])
