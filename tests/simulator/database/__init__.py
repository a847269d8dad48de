"""Django's backend for SQLite, with the faults and the clock of the simulation."""
