"""Run seeds and print what came of them; exit 1 unless all zeros are zeros."""

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator",
        description="Run the real writer, spool and billing under faults that follow from a seed, "
        "and compare what customers were told with the books.",
    )
    parser.add_argument("--seeds", type=int, default=300, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int, help="this one only, and tell which faults happened")
    parser.add_argument("--exitfirst", action="store_true", help="stop at a seed that fails")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kiln-simulator-") as folder:
        # Before Django is imported: it reads its settings then.
        os.environ.update(
            KILN_SIMULATED_DATABASE=f"{folder}/kiln.sqlite3",
            DATABASE_URL=f"sqlite:///{folder}/unused.sqlite3",
            KILN_VAR_DIR=folder,
            SECRET_KEY="simulator-" + "0123456789" * 5,
            ALLOWED_HOSTS="127.0.0.1",
            DEBUG="False",
            DJANGO_SETTINGS_MODULE="tests.simulator.settings",
        )
        os.environ.pop("REDIS_URL", None)
        import django

        django.setup()
        logging.disable(logging.CRITICAL)
        from tests.simulator.run import run

        if options.seed is not None:
            return run(Path(folder), [options.seed], is_verbose=True)
        seeds = range(options.first, options.first + options.seeds)
        return run(Path(folder), seeds, exit_first=options.exitfirst)


if __name__ == "__main__":
    sys.exit(main())
