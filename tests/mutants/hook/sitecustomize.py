"""Python imports this by itself at its start where this folder is on PYTHONPATH."""

import os

from tests.mutants.seeding import seed

if "KILN_TEST_MUTANT" in os.environ:
    seed(os.environ["KILN_TEST_MUTANT"])
