"""What clipping costs: `python -m benchmarks` prints tables and writes the same
numbers, with all raw times, as JSON.

    python -m benchmarks                          everything: 124 M parameters, about 7
                                                  GiB of memory, half an hour
    python -m benchmarks --quick                  the same tables at toy sizes, to see
                                                  that they work. Their numbers mean
                                                  nothing
    python -m benchmarks --only step --only torch
    python -m benchmarks --only compiled          what GPUs and TPUs would run, compiled
                                                  without having one: an hour
    python -m benchmarks --json PATH              in place of benchmarks/results.json

Every time in a table is a ratio of two times from one process, taken in turns. Absolute
seconds are only in the JSON. Leave JAX_COMPILATION_CACHE_DIR unset: a compilation that
is read from disk is not measured.
"""

from .command import main as main
