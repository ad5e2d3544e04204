"""Ghost clipping of the models that one pass and the benchmarks are tested with, by the
gradients of examples that were really made.
"""

from functools import cache

import jax
import numpy as np
import pytest

from benchmarks.per_example.losses import cases
from optaxclip.per_example import clipped_grad, explain_clipped_grad

from . import test_ghost as oracle
from .test_per_example import MODELS

with jax.numpy_rank_promotion("allow"):
    CASES = cases(quick=True)
BENCHMARKED = {
    f"benchmark, {case.kind}": (
        lambda p, example, loss=case.loss: loss(p, *example),
        case.params,
        case.batch,
    )
    for case in CASES
}
ALL = MODELS | BENCHMARKED
# The parameters whose gradients of examples ghost clipping makes. All others have
# another way.
FALL_BACK = {
    "mlp": {"in/b"},
    "convolution": set(),
    "embedding": set(),
    "rnn": set(),
    "benchmark, perceptron": {"0.bias", "2.bias", "4.bias"},
    "benchmark, transformer": {
        "places.weight",
        "blocks.0.norm1.weight",
        "blocks.0.norm1.bias",
        "blocks.0.norm2.weight",
        "blocks.0.norm2.bias",
        "blocks.0.up.bias",
        "blocks.0.down.bias",
    },
    "benchmark, convolution": {"0.bias", "2.bias", "4.bias", "8.bias"},
}


@cache
def examples(name):
    loss, params, batch = ALL[name]
    with jax.numpy_rank_promotion("allow"):
        grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)


@cache
def ghost(name):
    loss, params, batch = ALL[name]
    limit = float(np.median(oracle.norms_of(examples(name))))
    with jax.numpy_rank_promotion("allow"):
        grad = jax.jit(clipped_grad(loss, limit, method="ghost"))
        return limit, grad(params, batch)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_norms_are_within_a_millionth(name):
    norms = oracle.norms_of(examples(name))
    np.testing.assert_allclose(ghost(name)[1].norms, norms, rtol=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_gradients_are_within_a_millionth_of_their_norm(name):
    limit, result = ghost(name)
    oracle.close(result.grads, oracle.mean_of_clipped(examples(name), limit))


@pytest.mark.parametrize("name", ALL)
def test_every_leaf_that_falls_back_is_named(name):
    loss, params, batch = ALL[name]
    with jax.numpy_rank_promotion("allow"):
        found = explain_clipped_grad(loss, method="ghost")(params, batch).leaves
    assert {leaf.name for leaf in found if leaf.way == "gradient"} == FALL_BACK[name]
