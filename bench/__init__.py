"""Measurements: each is a command that prints a table, and one JSON line with ``--json``."""
