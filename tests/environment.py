"""The environment of a test run, set before Django reads its settings.

Each pytest process has a database of its own, so runs can go side by side. KILN_TEST_DATABASE
chooses sqlite (the default) or postgresql; the second needs KILN_TEST_POSTGRES_URL, the URL of
any database of a server where databases can be created.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

NAME = f"kiln_test_{os.getpid()}"
KIND = os.environ.get("KILN_TEST_DATABASE", "sqlite")
POSTGRES_URL = os.environ.get("KILN_TEST_POSTGRES_URL", "")
VAR_DIR = Path(tempfile.mkdtemp(prefix="kiln-test-"))


def _database_url() -> str:
    if KIND == "sqlite":
        return f"sqlite:///{VAR_DIR / 'kiln.sqlite3'}"
    if KIND != "postgresql" or not POSTGRES_URL:
        raise SystemExit("KILN_TEST_DATABASE=postgresql needs KILN_TEST_POSTGRES_URL")
    return urlunsplit(urlsplit(POSTGRES_URL)._replace(path=f"/{NAME}"))


# Production settings, as customers meet them; pages come over plain HTTP on 127.0.0.1.
os.environ.update(
    DATABASE_URL=_database_url(),
    SECRET_KEY="a-secret-of-the-tests-" + "0123456789" * 4,
    ALLOWED_HOSTS="localhost,127.0.0.1,testserver",
    KILN_VAR_DIR=str(VAR_DIR),
    HTTPS_ONLY="False",
    DEBUG="False",
)
os.environ.pop("REDIS_URL", None)
atexit.register(shutil.rmtree, VAR_DIR, ignore_errors=True)
