"""Seeded bugs: the tests that are named as their catchers fail with them, and pass without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import environment
from tests.mutants.catalog import MUTANTS, Change, Mutant

ROOT = Path(__file__).parent.parent
HOOK = Path(__file__).parent / "mutants" / "hook"

HERE = {name: mutant for name, mutant in MUTANTS.items() if mutant.database == environment.KIND}


def outcome(catchers: set[str], mutant: str | None) -> str:
    """Run these tests in a process of its own, and return pytest's last line, as "2 failed"."""
    chosen = {"KILN_TEST_MUTANT": mutant} if mutant else {}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=no", *sorted(catchers)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}", **chosen},
        capture_output=True,
        text=True,
        check=False,
    )
    *_, last = done.stdout.strip().splitlines() or [done.stderr]
    return re.sub(r" in [0-9.]+s.*$", "", last)


@pytest.mark.parametrize("name", HERE)
def test_a_mutant_is_caught_by_each_of_its_catchers(name: str) -> None:
    catchers = set(MUTANTS[name].catchers)
    assert outcome(catchers, name) == f"{len(catchers)} failed"


def test_the_catchers_pass_without_a_mutant() -> None:
    catchers = {catcher for mutant in HERE.values() for catcher in mutant.catchers}
    assert outcome(catchers, None) == f"{len(catchers)} passed"


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_changes_what_stands_in_its_module(mutant: Mutant) -> None:
    sources: dict[str, str] = {}
    for change in mutant.changes:
        module = ROOT / f"{change.module.replace('.', '/')}.py"
        source = sources.get(change.module, module.read_text())
        sources[change.module] = change.apply(source)
    for name, source in sources.items():
        compile(source, name, "exec")


def test_a_change_that_does_not_apply_is_an_error() -> None:
    for source in ("", "a a"):
        with pytest.raises(LookupError):
            Change("module", "a", "b").apply(source)


def test_the_docs_list_the_mutants_and_their_catchers() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    section = text.partition("\n## Mutants\n")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in section.splitlines() if row.startswith("|")]
    listed = {name.strip(): re.findall(r"`([^`]+)`", catchers) for name, catchers in rows[2:]}
    assert listed == {
        f"{name}{' (PostgreSQL)' if mutant.database != 'sqlite' else ''}": [
            catcher.rpartition("/")[2] for catcher in mutant.catchers
        ]
        for name, mutant in MUTANTS.items()
    }
