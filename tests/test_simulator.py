"""The simulated workers: no seed breaks the books, and a seed is always the same story.

Ten thousand seeds: python -m tests.simulator --seeds 10000
"""

import subprocess
import sys

import pytest

# In parts, so that they run beside each other.
SEEDS = 50


def simulate(*options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("first", range(1, 301, SEEDS))
def test_no_seed_breaks_the_books(first: int) -> None:
    done = simulate("--seeds", SEEDS, "--first", first, "--exitfirst")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_is_always_the_same_story() -> None:
    once, again = simulate("--seed", 7), simulate("--seed", 7)
    assert once.returncode == 0
    assert once.stdout == again.stdout
