"""Run all scenarios and print what came of it; exit 1 unless all zeros are zeros."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.cluster import Cluster


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Kill, crash, pause and starve real gateway processes under load, and compare "
        "what customers were told with the books. Starts a PostgreSQL cluster of its own.",
    )
    parser.add_argument("--requests", type=int, default=10_000, help="in all scenarios together")
    parser.add_argument("--workers", type=int, default=4, help="gateway processes")
    parser.add_argument("--organizations", type=int, default=6)
    parser.add_argument("--ttl", type=float, default=10.0, help="heartbeat TTL in seconds")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", help="one scenario, by name")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kiln-chaos-") as folder:
        Path(folder).chmod(0o755)  # the cluster's user must get through
        return _run_in(Path(folder), options)


def _run_in(folder: Path, options: argparse.Namespace) -> int:
    cluster = Cluster(folder / "postgresql")
    cluster.start()
    # Before Django is imported: it reads its settings then.
    os.environ.update(
        DATABASE_URL=cluster.url,
        KILN_VAR_DIR=str(folder / "var"),
        SECRET_KEY="chaos-" + "0123456789" * 5,
        ALLOWED_HOSTS="127.0.0.1",
        KILN_HEARTBEAT_SECONDS=str(options.ttl / 5),
        KILN_HEARTBEAT_TTL_SECONDS=str(options.ttl),
        DJANGO_SETTINGS_MODULE="kiln_site.settings",
        LOG_LEVEL="WARNING",
    )
    os.environ.pop("REDIS_URL", None)
    import django

    django.setup()
    from tests.chaos.run import run

    try:
        return run(cluster, folder, options)
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
