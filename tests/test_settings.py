"""Settings: every variable is documented, and production does not start half configured."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCTION = {
    "DATABASE_URL": "sqlite:///kiln.sqlite3",
    "SECRET_KEY": "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "ALLOWED_HOSTS": "api.example.com",
}


def source() -> str:
    return (ROOT / "kiln_site" / "settings.py").read_text()


def documented() -> dict[str, str]:
    """Return the names in the table of docs/settings.md, with their defaults."""
    table = (ROOT / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (.*?) \|", table, re.M)
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def check(folder: Path, values: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run Django's system checks in an environment that holds these values and no others."""
    environment = {"PATH": os.environ["PATH"], "KILN_VAR_DIR": str(folder), **values}
    if "DATABASE_URL" in values:
        environment["DATABASE_URL"] = f"sqlite:///{folder / 'kiln.sqlite3'}"
    return subprocess.run(
        [sys.executable, "-W", "error", "manage.py", "check", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_table_names_every_variable_and_no_other() -> None:
    read = re.findall(r'(?:env\.\w+|_required)\(\s*"([A-Z0-9_]+)"', source())
    assert set(documented()) == set(read)


def test_the_table_has_the_defaults() -> None:
    numbers = re.findall(r'env\.(?:int|float)\("([A-Z0-9_]+)", default=([0-9.]+)\)', source())
    assert numbers
    table = documented()
    assert {name: float(table[name]) for name, _ in numbers} == {
        name: float(default) for name, default in numbers
    }


@pytest.mark.parametrize("missing", sorted(PRODUCTION))
def test_production_does_not_start_without(tmp_path: Path, missing: str) -> None:
    values = {name: value for name, value in PRODUCTION.items() if name != missing}
    refused = check(tmp_path, values)
    assert refused.returncode != 0
    assert f"{missing} is not set." in refused.stderr


def test_an_empty_value_is_no_value(tmp_path: Path) -> None:
    refused = check(tmp_path, {**PRODUCTION, "SECRET_KEY": ""})
    assert "SECRET_KEY is not set." in refused.stderr


def test_production_passes_the_checks_of_a_deployment(tmp_path: Path) -> None:
    passed = check(tmp_path, PRODUCTION, "--deploy", "--fail-level", "WARNING")
    assert (passed.returncode, passed.stderr) == (0, "")


def test_a_secret_can_come_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(PRODUCTION["SECRET_KEY"])
    values = {name: value for name, value in PRODUCTION.items() if name != "SECRET_KEY"}
    assert check(tmp_path, {**values, "SECRET_KEY_FILE": str(secret)}).returncode == 0


def test_development_needs_nothing(tmp_path: Path) -> None:
    assert check(tmp_path, {"DEBUG": "True"}).returncode == 0
