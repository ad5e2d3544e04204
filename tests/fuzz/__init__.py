"""Random trees, limits, methods and transformations, held against NumPy.

    python -m tests.fuzz --minutes 30 --seed 1

A case is text: the trees and the limit are Python source, so that what a finding prints
is what ran. `search` draws cases with hypothesis and has them shrunk.
"""
