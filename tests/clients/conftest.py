"""pytest looks for doctests in every module, and these need the packages they run."""

collect_ignore_glob = ["run_*.py"]
