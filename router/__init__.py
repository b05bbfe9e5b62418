"""Policies over plain data: no Ray, no torch, no I/O, no wall clock."""
