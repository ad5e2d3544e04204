"""What a whole training step becomes on a GPU or TPU, compiled without having one.

JAX compiles for a device that is only described. Nothing runs, so no time is measured:
GB over the memory's bandwidth, and kernels times about 2 us, are two floors that a real
device cannot beat. What stands in a loop counts as often as the loop runs.

    arguments    arrays that the step takes: weights, state and batch
    kernels      top-level instructions that move arrays. On a GPU each is a launch
    scalars      top-level instructions on single numbers. A TPU runs each by itself
    GB           what those read and write in main memory. What stays in the on-chip
                 memory of a TPU is free
    collectives  on a mesh the batch is split over one axis, matrices over both, and
                 vectors are whole
    temporary    MB beside arguments and results
    compile      processor seconds to trace, lower and compile

Each kind of device needs packages of its own, so another process compiles, in the
environment .venv-gpu or .venv-tpu beside the folder benchmarks. The table says how to
make one that is missing.
"""

from .step import table as table
