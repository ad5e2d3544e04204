"""Norms and clippers exported for batches of any size."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.helpers import apply
from tests.norms.leaves import EPS

BATCHES = {
    "global": optaxclip.global_norm,
    "tensor, stacked": partial(optaxclip.tensor_norm, stacked=1),
    "unit, columns": partial(optaxclip.unitwise_norm, axis=0),
    "unit, rows": partial(optaxclip.unitwise_norm, axis=-1),
}


@pytest.mark.slow
@pytest.mark.parametrize("ord", [None, 5.0, math.inf, "rms", "average"])
def test_norms_can_be_exported_for_batches_of_any_size(ord):
    def norms(x):
        found = [norm({"x": x, "y": x[:, :1]}, ord=ord) for norm in BATCHES.values()]
        return found, jax.grad(partial(optaxclip.global_norm, ord=ord))(x)

    check_exported(norms)


@pytest.mark.slow
def test_units_by_rank_can_be_exported_for_batches_above_1():
    """Of a batch of 1 the leaf is a vector, which no program for any size can know."""
    clipper = optaxclip.clip_by_unitwise_norm(0.1)

    def units(x):
        return optaxclip.unitwise_norm({"x": x, "y": x[:, 0]}), apply(clipper, x)[0]

    check_exported(units, sizes=(2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("ord", [None, "rms", "average"])
@pytest.mark.parametrize("axis", [None, -1])
def test_clip_cotangent_can_be_exported_for_batches_of_any_size(axis, ord):
    clip = partial(optaxclip.clip_cotangent, max_norm=0.1, axis=axis, ord=ord)
    check_exported(jax.grad(lambda x: jnp.sum(clip(x) ** 2)))


def check_exported(function, sizes=(1, 5)):
    """The exported program gives for several sizes what the function itself gives."""
    (batch,) = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    exported = jax.export.export(jax.jit(function))(shape)
    for size in sizes:
        x = np.random.default_rng(size).standard_normal((size, 3), np.float32)
        for found, wanted in zip(
            jax.tree.leaves(exported.call(x)),
            jax.tree.leaves(jax.jit(function)(x)),
            strict=True,
        ):
            np.testing.assert_allclose(found, wanted, rtol=8 * EPS, atol=EPS)
