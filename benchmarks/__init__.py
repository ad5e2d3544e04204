"""What clipping costs: `python -m benchmarks` prints tables and writes the same
numbers, with all raw times, as JSON.

    python -m benchmarks                          everything: 5 GiB of memory, hours
    python -m benchmarks --quick                  the same tables at toy sizes, to see
                                                  that they work. Their numbers mean
                                                  nothing
    python -m benchmarks --only whole_step        training steps on the device at hand
    python -m benchmarks --only whole_step_compiled
                                                  the same as GPUs and TPUs would run
                                                  them, compiled without having one
    python -m benchmarks --json PATH              in place of benchmarks/results.json.
                                                  Tables that are not measured stay

Every time in a table is a ratio of two times from one process, taken in turns. Absolute
seconds are only in the JSON. Leave JAX_COMPILATION_CACHE_DIR unset: a compilation that
is read from disk is not measured. The machine must do nothing else.

    steps, networks    what is compared, and what is trained
    whole_step         the table of whole steps that run
    compiled           the table of whole steps that are compiled for described devices
    per_example        gradients whose examples are clipped
    timing, report     runs in turns, and tables
    pages, pictures    write what README.md and docs/ show

`python -m benchmarks.methods` asks another question: which clip helps.
"""

from .command import main as main
