"""Faults against real processes: what customers were told must be what the books say.

`python -m tests.chaos --help`, or `make chaos`. Starts a PostgreSQL cluster of its own, never
touches another.
"""
