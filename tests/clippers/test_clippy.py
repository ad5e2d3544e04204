"""Clippy beside its equation in float64 NumPy, and the figures of TensorFlow
Recommenders' tests.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import clippy
from tests import oracles
from tests.helpers import apply


def clip(updates, params, *args, **options):
    clipper = clippy(*args, **options)
    return clipper.update(updates, clipper.init(params), params)


# (update, weight, relative, absolute, result, scale)
PUBLIC = [
    (2.0, 4.0, 0.1, 0.02, 0.42, 0.21),
    (2.0, -4.0, 0.1, 0.02, 0.42, 0.21),
    (-2.0, 4.0, 0.1, 0.02, -0.42, 0.21),
    (-2.0, 4.0, 0.1, 0.0, -0.4, 0.2),
    (-2.0, 0.0, 0.1, 0.0, 0.0, 0.0),
    (2.0, 20.0, 0.1, 0.1, 2.0, 1.0),
    (-2.0, 20.0, 0.1, 0.1, -2.0, 1.0),
    (0.0, 1.0, 0.1, 0.1, 0.0, 1.0),
    (0.0, 1.0, 0.1, 0.0, 0.0, 1.0),
    (0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    (2.0, 0.0, 0.1, 0.02, 0.02, 0.01),
    ([1.0, 1.0], [1.0, 0.1], 0.1, 0.01, [0.02, 0.02], 0.02),
    (
        [1.0, 1.0, 0.0, 0.0],
        [1.0, 0.1, 1.0, 0.0],
        0.1,
        0.0,
        [0.01, 0.01, 0.0, 0.0],
        0.01,
    ),
    ([1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], 0.1, 0.0, [0.0, 0.0, 0.0, 0.0], 0.0),
    (
        [[1.0, 2.0], [1.0, 2.0]],
        [[1.0, 1.0], [1.0, 1.0]],
        0.1,
        0.1,
        [[0.1, 0.2], [0.1, 0.2]],
        0.1,
    ),
    ([10.0, 10.0], [1.0, 2.0], 0.4, 0.2, [0.6, 0.6], 0.06),
]


@pytest.mark.parametrize(
    ("update", "weight", "relative", "absolute", "result", "factor"), PUBLIC
)
def test_the_public_figures(update, weight, relative, absolute, result, factor):
    updates, state = clip(jnp.float32(update), jnp.float32(weight), relative, absolute)
    np.testing.assert_allclose(updates, np.float64(result), rtol=1e-6)
    # A tensor of zeros is multiplied by nothing that matters.
    if np.any(update):
        np.testing.assert_allclose(state.factor, factor, rtol=1e-6)


def test_the_smallest_normal_update_within_its_bounds_does_not_change():
    updates, weights = jnp.array([2.0**-126]), jnp.ones(1)
    clipper = optaxclip.clippy()
    found, state = clipper.update(updates, clipper.init(weights), weights)
    np.testing.assert_array_equal(found, updates)
    assert state.clipped == 0


def test_one_wild_coordinate_is_seen():
    params, updates = jnp.ones(10_000), jnp.full(10_000, 1e-3).at[17].set(10.0)
    clipped, state = clip(updates, params)
    np.testing.assert_allclose(clipped[17], 0.1, rtol=1e-6)
    # 10 is 100 times its bound of 0.1.
    np.testing.assert_allclose((state.norm, state.limit), (100.0, 1.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("update", "absolute"), [(1e-30, 0.0), (1.0, 1e-39), (1e30, 1e-30)]
)
def test_a_tensor_stays_where_a_bound_is_0_or_far_below(update, absolute):
    updates = jnp.array([update, 0.1])
    clipped, state = clip(updates, jnp.array([0.0, 1.0]), 0.1, absolute)
    np.testing.assert_array_equal(clipped, 0)
    assert (state.factor, state.limit, state.nonfinite) == (0, 0, 0)
    assert np.isfinite(state.norm)


def test_the_smallest_normal_bound_is_not_0():
    smallest = 2.0**-126
    _, state = clip(jnp.ones(1), jnp.ones(1), smallest, 0.0)
    assert (state.norm, state.limit) == (1 / smallest, 1)


def test_a_broken_update_is_seen_where_the_bound_is_0():
    for broken in (math.nan, math.inf):
        clipped, state = clip(jnp.array([broken, 1.0]), jnp.zeros(2), 0.1, 0.0)
        assert np.isnan(clipped).all() and state.nonfinite == 1


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_update_becomes_nan_and_is_counted(broken):
    updates = {"a": jnp.array([1.0, broken]), "b": jnp.array([1.0, 2.0])}
    clipped, state = clip(updates, {"a": jnp.ones(2), "b": jnp.ones(2)})
    assert np.isnan(clipped["a"]).all() and np.isfinite(clipped["b"]).all()
    np.testing.assert_array_equal(state.nonfinite, [1, 0])
    assert np.isnan(clip(jnp.ones(2), jnp.array([1.0, math.nan]))[0]).all()
    assert np.isnan(clip(jnp.zeros(2), jnp.array([1.0, math.nan]))[0]).all()


@pytest.mark.slow
def test_the_derivative_is_finite():
    def total(updates):
        return jnp.sum(clip(updates, jnp.array([1.0, 0.0, 2.0]), 0.1, 0.0)[0])

    for updates in (
        jnp.zeros(3),
        jnp.array([1.0, 0.0, 3.0]),
        jnp.array([1.0, 1.0, 3.0]),
        jnp.array([1e-3, 0.0, 1e-3]),
    ):
        assert np.isfinite(jax.grad(total)(updates)).all()


@pytest.mark.parametrize(
    "bounds", [(np.inf, 0.0), (0.0, np.inf)], ids=["relative", "absolute"]
)
def test_an_infinite_bound_of_either_kind_touches_nothing(bounds):
    updates = jnp.array([1e30, -2.0, 0.0])
    clipped, state = apply(clippy(*bounds), updates, jnp.array([1e-3, 0.0, 2.0]))
    assert oracles.same_bits(clipped, updates)
    assert state.limit == np.inf and state.nonfinite == 0


def test_the_smallest_weights_still_bound_their_updates():
    clipped, _ = apply(
        clippy(0.5, 0.0), jnp.array([4e-30, 1e-31]), jnp.array([2e-30, 2e-30])
    )
    np.testing.assert_allclose(clipped, [1e-30, 2.5e-32], rtol=1e-6)


def test_complex_updates_are_compared_by_modulus():
    clipped, _ = apply(
        clippy(0.5, 0.0), jnp.array([3 + 4j, 1j]), jnp.array([2 + 0j, 2j])
    )
    np.testing.assert_allclose(clipped, [0.6 + 0.8j, 0.2j], rtol=1e-6)
