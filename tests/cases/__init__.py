"""Reported failures of systems like this one, as small inputs; docs/cases.md is their table."""
