"""`python -m benchmarks`."""

from .command import main

main()
