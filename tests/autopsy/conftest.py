"""pytest looks for doctests in every module, and this one needs flax and equinox."""

collect_ignore = ["faults.py"]
