"""The environment of `manage.py demo`: production settings, with data and secrets under var/demo.

Runs before Django reads its settings, so it imports nothing of Django. Never touches a database
that somebody configured: it refuses to start beside DATABASE_URL or REDIS_URL.
"""

import os
import secrets
import shutil
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent


def prepare(arguments: list[str]) -> None:
    """Set the variables that settings.py reads. Exits with a message where that is not safe."""
    configured = [name for name in ("DATABASE_URL", "REDIS_URL") if os.environ.get(name)]
    if configured:
        sys.exit(
            f"demo: {' and '.join(configured)} is set. The demo makes a database of its own and "
            "must not touch yours: unset it and try again."
        )
    folder = Path(os.environ.get("KILN_VAR_DIR") or _ROOT / "var") / "demo"
    if "--reset" in arguments:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.update(
        DEBUG="False",
        DATABASE_URL=f"sqlite:///{folder / 'kiln.sqlite3'}",
        SECRET_KEY=_secret_key(folder / "secret_key"),
        ALLOWED_HOSTS="localhost,127.0.0.1",
        HTTPS_ONLY="False",  # it listens on the loopback interface only
        KILN_VAR_DIR=str(folder),
        LOG_LEVEL=os.environ.get("LOG_LEVEL", "WARNING"),
    )


def _secret_key(file: Path) -> str:
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(64))
    return file.read_text()
