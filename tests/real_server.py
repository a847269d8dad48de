"""llama.cpp's own server with a real model, behind the gateways of the tests.

It needs the packages of requirements-realserver.txt: in the environment that runs the tests, in
that of the Python named by KILN_REALSERVER_PYTHON (of the same version), or in var/realserver.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kiln_site.demo import llama
from tests.requirements import absent

ROOT = Path(__file__).parent.parent
READY_SECONDS = 120.0


@contextmanager
def real_server(model: str, *, alias: str, context: int, parallel: int) -> Iterator[str]:
    """Run a model server and give its base URL; `model` is "tiny" or "smollm2"."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", _packages(), prepend=os.pathsep)
        try:
            server = llama.start(
                model, alias, context=context, parallel=parallel, ready_seconds=READY_SECONDS
            )
        except llama.LlamaFailed as failure:
            pytest.fail(f"the real model server did not start: {failure}", pytrace=False)
    with server:
        yield server.url


def _packages() -> str:
    """Return the folder that the server's packages are in."""
    python = os.environ.get("KILN_REALSERVER_PYTHON")
    if python is None and importlib.util.find_spec("xllamacpp"):
        python = sys.executable
    if python is None:
        python = str(ROOT / "var" / "realserver" / "bin" / "python")
    if not Path(python).exists():
        absent("a real model server: make realserver")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run(
        [python, "-c", show], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def wait_until(what: str, seconds: float = 60.0) -> Iterator[None]:
    """Loop over this while something that cannot be awaited has not happened yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")
