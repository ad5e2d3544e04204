"""What clippers become on a TPU v5e, compiled where libtpu is installed, without a TPU.

The default environment has no libtpu and skips this file. `bash .ci/run tpu` runs it.
"""

import functools
import os

import numpy as np
import optax
import pytest

import optaxclip
from benchmarks.compiled import program, step, targets

LARGEST = np.finfo(np.float32).max / 2

pytest.importorskip("libtpu")
os.environ.update(targets.TPU.variables)

LAYER: step.Shapes = [(128, 256), (256,), (256, 128), (128,)]
# On one chip enough tensors that what is done once for all of them is the smaller part.
# Collectives are counted, and one for each tensor would be seen among eight as well.
SHAPES = {"v5e": LAYER * 20, "v5e:4x4": LAYER * 2}
OURS = ["global norm", "tensor RMS", "AGC"]


@functools.cache
def text(name: str, target: str) -> str:
    found, _ = step.compiled(step.STEPS[name](), SHAPES[target], target, "float32")
    return found.as_text()


def counts(name: str, target: str) -> program.Counts:
    return program.counts_of(text(name, target))


@pytest.mark.parametrize("name", OURS)
def test_no_float64_on_a_tpu(name):
    assert counts(name, "v5e").float64 == 0


@pytest.mark.parametrize("name", OURS)
def test_numbers_are_scaled_before_they_are_squared_on_a_tpu(name):
    # These bounds keep XLA from squaring the scales, which would be 0 and inf.
    for bound in (LARGEST, -LARGEST):
        assert f"constant({bound:.9g})" in text(name, "v5e")


@pytest.mark.parametrize("name", OURS)
def test_no_gradient_is_copied_on_a_tpu(name):
    assert counts(name, "v5e").copies == 0


@pytest.mark.parametrize(
    "name, most", [("global norm", 1), ("tensor RMS", 1), ("AGC", 4)]
)
def test_few_collectives_on_a_mesh_of_tpus(name, most):
    # The summary of units takes three more: a maximum, what is there, and a mean.
    assert counts(name, "v5e:4x4").collectives <= most


def test_no_more_operations_on_numbers_than_optax():
    theirs = counts("optax, global norm", "v5e").scalars
    assert counts("global norm", "v5e").scalars <= theirs


@pytest.mark.parametrize("name", OURS)
def test_gradients_are_read_no_more_than_by_optax(name):
    theirs = counts(f"optax, {name}", "v5e").gigabytes
    assert counts(name, "v5e").gigabytes <= 1.05 * theirs


def test_counting_clipped_elements_reads_no_gradient_again():
    def gigabytes(clipper):
        optimizer = optax.chain(clipper, optax.adam(1e-3))
        found, _ = step.compiled(optimizer, SHAPES["v5e"], "v5e", "float32")
        return program.counts_of(found.as_text()).gigabytes

    theirs = gigabytes(optax.clip(0.01))
    assert gigabytes(optaxclip.clip_by_value(0.01)) <= 1.01 * theirs


def test_squares_of_large_layers_are_not_stored_on_a_mesh_of_tpus():
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked=1)
    optimizer, layers = optax.chain(clipper, optax.sgd(1.0)), (4, 2048, 2048)
    found, _ = step.compiled(optimizer, [layers], "v5e:4x4", "float32")
    temporary = found.memory_analysis().temp_size_in_bytes
    assert temporary < 0.1 * 4 * np.prod(layers)
