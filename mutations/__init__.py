"""Deliberate faults, one line each, made in the library one after the other: every one must turn a test red. `python -m mutations` does it."""
