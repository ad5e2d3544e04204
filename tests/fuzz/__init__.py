"""Random trees, limits and methods, held against NumPy.

    python -m tests.fuzz --minutes 30 --seed 1

trees.py     random trees, as Python source
cases.py     a case: a method, its limit, the trees of some steps
expected.py  what a clipper must make of a tree, in float64 NumPy
checks.py    what is checked of a case
switches.py  JAX's switches, under which a clipper does the same
search.py    draws cases with hypothesis, and has those that fail shrunk

A case is text: trees and limits are Python source, so that what a finding prints is
what ran. `tests/core/test_properties.py` draws from the same cases.
"""
