"""What some tests need beyond the Python packages, and what happens where it is absent.

Such a test says what it needs and is skipped there. Where KILN_REQUIRE_ALL=1 (.ci/run) nothing may
be skipped: absence is a failure.
"""

import os
import shutil
from typing import NoReturn

import pytest

REQUIRE_ALL = os.environ.get("KILN_REQUIRE_ALL") == "1"


def require(*commands: str) -> None:
    """Go on only where all these commands are on the PATH."""
    for command in commands:
        if shutil.which(command) is None:
            absent(f"the command {command}")


def absent(what: str) -> NoReturn:
    """Skip the test, or fail it where everything is required."""
    if REQUIRE_ALL:
        pytest.fail(f"needs {what}, and KILN_REQUIRE_ALL=1", pytrace=False)
    pytest.skip(f"needs {what}")
