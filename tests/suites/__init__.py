"""Runs the tests that other packages ship, with our functions in place of theirs.

python -m tests.suites                             all packages that are installed
python -m tests.suites optax rlax                  some of them
python -m tests.suites --markdown PATH --json PATH  also writes docs/suites.md and
                                                    benchmarks/results/suites.json

What is named runs anew. The numbers of others in the JSON stay as they are, so that
suites can run in environments of their own. `jax_privacy_main` is jax_privacy from its
repository, and needs optax from its repository.

patches.py     which functions ours stand in for, and which tests are run
worker.py      runs them in a process of its own
explained.json why a test ends differently
compare.py     counts, and finds what differs without an explanation
page.py        the table and the page
"""
