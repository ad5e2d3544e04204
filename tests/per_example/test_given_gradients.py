"""Clipping per-example gradients that are given, as in optax."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.per_example import (
    per_example_global_norm_clip,
    per_example_layer_norm_clip,
)
from tests.per_example.batches import (
    EPS,
    close,
    hard_factor,
    normal,
    norms_of,
    weighted,
)


def batches(seed=0, dtype=np.float32):
    return {
        "w": normal(seed, 6, 4, 3).astype(dtype),
        "b": (normal(seed + 1, 6, 3) * 3).astype(dtype),
        "s": (normal(seed + 2, 6) + 1).astype(dtype),
    }


@jax.jit
def clipped_twice(grads, limit):
    """By our functions and by those of optax, in one program for every limit; the
    layers as a list.
    """
    layers = jax.tree.leaves(grads)
    return {
        "all": (
            per_example_global_norm_clip(grads, limit),
            optax.per_example_global_norm_clip(grads, limit),
        ),
        "uniform": (
            per_example_layer_norm_clip(layers, limit),
            optax.per_example_layer_norm_clip(layers, limit),
        ),
        "by size": (
            per_example_layer_norm_clip(layers, limit, False),
            optax.per_example_layer_norm_clip(layers, limit, False),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.0, 0.5, 4.0, 100.0, np.inf])
@pytest.mark.parametrize("kind", ["all", "uniform", "by size"])
def test_healthy_gradients_give_what_optax_gives(kind, limit):
    ours, theirs = clipped_twice(batches(), limit)[kind]
    wanted = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(theirs[0])]
    close(ours[0], wanted, 6)
    assert jax.tree.map(int, ours[1]) == jax.tree.map(int, theirs[1])
    types = [jax.tree.map(jax.typeof, result) for result in (ours, theirs)]
    assert types[0] == types[1]


def test_integers_and_bfloat16_sum_to_float32_as_in_optax():
    integers = [np.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
    total, count = jax.jit(lambda grads: per_example_global_norm_clip(grads, 1.25))(
        integers
    )
    np.testing.assert_allclose(total[0], [1.75, 1.75, 1.75], rtol=4 * EPS)
    assert int(count) == 3
    sums, _ = jax.eval_shape(
        lambda grads: per_example_global_norm_clip(grads, 1.0),
        batches(dtype=ml_dtypes.bfloat16),
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(sums))


@pytest.mark.parametrize(
    "size, dtype", [(60000.0, jnp.float16), (1e30, jnp.bfloat16), (1e-30, jnp.float32)]
)
def test_the_bound_holds_where_squares_leave_the_range(size, dtype):
    grads = np.full((2, 1000), size, dtype)
    total, count = jax.jit(
        lambda grads: per_example_global_norm_clip(grads, 1e-3 * size)
    )(grads)
    np.testing.assert_allclose(
        np.linalg.norm(np.asarray(total, np.float64)), 2e-3 * size, rtol=16 * EPS
    )
    assert int(count) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_gradient_is_left_out_and_counted(bad):
    grads = batches()
    healthy = [np.asarray(leaf, np.float64)[1:] for leaf in jax.tree.leaves(grads)]
    norms = norms_of(healthy)
    grads["b"][0, 1] = bad
    found = clipped_twice(grads, 4.0)
    total, count = found["all"][0]
    close(total, weighted(healthy, hard_factor(norms, 4.0)), 6)
    assert int(count) == 1 + np.sum(norms > 4.0)
    sums, counts = found["uniform"][0]
    limit = 4.0 / np.sqrt(3)
    close(
        sums,
        [weighted([leaf], hard_factor(norms_of([leaf]), limit))[0] for leaf in healthy],
        6,
    )
    assert [int(n) for n in jax.tree.leaves(counts)] == [
        1 + np.sum(norms_of([leaf]) > limit) for leaf in healthy
    ]


def test_a_limit_of_few_bits_is_shared_in_float32():
    layers, limit = jax.tree.leaves(batches()), jnp.bfloat16(1.5)
    for uniform in (True, False):
        found = per_example_layer_norm_clip(layers, limit, uniform)
        wanted = per_example_layer_norm_clip(layers, 1.5, uniform)
        close(found, wanted, 6)


def test_no_gradients_at_all():
    assert per_example_global_norm_clip({}, 1.0) == ({}, 0)
    assert per_example_layer_norm_clip([None], 1.0) == ([None], [None])


@pytest.mark.slow
def test_factors_are_1_for_zeros_and_without_a_limit():
    batch = jnp.array([0.0, 2.0])
    for shrink in (optaxclip.shrinks.hard, optaxclip.shrinks.normalize):
        result = optaxclip.clipped_grad(lambda w, x: w * x, None, shrink=shrink)(
            jnp.ones(()), batch
        )
        np.testing.assert_array_equal(result.factors, [1.0, 1.0])
    result = optaxclip.clipped_grad(lambda w, x: w * x, 1.0)(jnp.ones(()), batch)
    np.testing.assert_array_equal(result.factors, [1.0, 0.5])
