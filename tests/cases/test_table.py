"""docs/cases.md is complete: every case has its row, and every test that a row names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
TABLE = TESTS.parent / "docs" / "cases.md"
# fmt: off
IDS = [
    "C01", "C02", "C03", "C04", "C05", "C07", "C09", "C10", "C11",
    "C12", "C14", "C15", "C16", "C17", "C19", "C20", "C21",
    "C22", "C23", "C24", "C26", "C27", "C28", "C30", "C32", "C33", "C34",
    "C35", "C36", "C38", "C39", "C40",
    "C41", "C42", "C43", "C45", "C46", "C47", "C48", "C49", "C51", "C52", "C53", "C54",
    "C56", "C58", "C59", "C60", "C62", "C63", "C64", "C65", "C66", "C67", "C68", "C69",
    "C70", "C71", "C72",
    "C74", "C75", "C76", "C78", "C79", "C80", "C81", "C82",
]
# fmt: on


@cache
def rows() -> dict[str, tuple[str, str, list[str]]]:
    """Return what goes wrong elsewhere, the outcome here, and the tests of each case."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    for line in TABLE.read_text().splitlines():
        if re.match(r"\| C\d\d \|", line):
            case, elsewhere, outcome, tests = (cell.strip() for cell in line.split("|")[1:-1])
            assert case not in found
            found[case] = elsewhere, outcome, re.findall(r"`([^`]+)`", tests)
    return found


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_case_has_its_row() -> None:
    assert len(IDS) == 67
    assert list(rows()) == IDS


@pytest.mark.parametrize("case", IDS)
def test_a_row_tells_what_shows_it(case: str) -> None:
    elsewhere, outcome, tests = rows()[case]
    assert 3 <= len(elsewhere.split()) <= 12
    is_open = outcome.startswith("**open**: ")
    assert is_open or (tests and "open" not in outcome.split())
    for test in tests:
        file, _, function = test.partition("::")
        assert function in functions(file), test


def test_every_test_here_is_in_the_row_of_its_case() -> None:
    for file in sorted((TESTS / "cases").glob("test_*.py")):
        name = f"cases/{file.name}"
        for function in functions(name) if file.name != Path(__file__).name else ():
            if function.startswith("test_"):
                case = function.split("_")[1].upper()
                assert f"{name}::{function}" in rows()[case][2]
