"""Trains with programs of other packages, with optax's clip and with ours in its place.

python -m tests.clients                              all packages that are installed
python -m tests.clients numpyro optimistix           some of them
python -m tests.clients --markdown PATH --json PATH  also writes docs/clients.md and
                                                     benchmarks/results/clients.json

trained.py     what a run hands back, and the packages
run_*.py       one package each: a few steps of its own trainer, saved and restored
worker.py      one run, in a process of its own
compare.py     both runs of a package, and what is wrong between them
page.py        the table and the page
"""
