"""The project's settings on a database whose clock is virtual and which can fail at any call."""

import os

from kiln_site.settings import *  # noqa: F403
from kiln_site.settings import DATABASES

DATABASES["default"] = {
    "ENGINE": "tests.simulator.database",
    "NAME": os.environ["KILN_SIMULATED_DATABASE"],
    "OPTIONS": {
        "transaction_mode": "IMMEDIATE",
        # What would survive a crash is simulated; the real disk need not be waited for.
        "init_command": "PRAGMA journal_mode=MEMORY; PRAGMA synchronous=OFF;",
    },
}
