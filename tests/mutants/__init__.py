"""Bugs that the tests must catch: each is seeded into a module while that is imported.

Production code has no hook for it. `hook/` on PYTHONPATH makes Python import `sitecustomize`, which
sets the mutant named by KILN_TEST_MUTANT in place, in pytest and in every process that it starts.
"""
