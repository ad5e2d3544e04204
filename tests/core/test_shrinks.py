"""Shrinks: those of users, whose zeros stay and whose derivatives are finite, `psac` at
the ends of its range, and updates without a limit, whose derivative is 1.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by_global_norm, rules, shrinks


@pytest.mark.parametrize(
    "shrink",
    [
        lambda norm, limit: norm * (limit / norm),
        lambda norm, limit: limit + 1 / norm,
    ],
)
def test_zeros_stay_where_a_shrink_has_no_number_for_them(shrink):
    tree = {"a": jnp.zeros(2), "b": jnp.array([3.0, 4.0])}
    clipper = optaxclip.clip_by_tensor_norm(1.0, shrink=shrink)
    updates, state = clipper.update(tree, clipper.init(tree))
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])
    assert (state.factor[0], state.clipped[0], state.nonfinite[0]) == (1, 0, 0)
    grad = optaxclip.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0, shrink=shrink)
    result = grad(jnp.ones(2), jnp.array([[0.0, 0.0], [3.0, 4.0]]))
    assert jnp.isfinite(result.grads).all() and result.nonfinite == 0


@pytest.mark.parametrize(
    ("shrink", "limit"),
    [
        (lambda norm, limit: jnp.minimum(norm * (limit / norm), norm), 1.0),
        (lambda norm, limit: jnp.sqrt(norm * limit), 1.0),
        (lambda norm, limit: limit * jnp.tanh(norm / limit), 0.0),
    ],
)
def test_derivatives_at_0_by_any_shrink_are_finite(shrink, limit):
    tree = {"a": jnp.zeros(2), "b": jnp.array([3.0, 4.0])}
    clipper = optaxclip.clip_by_tensor_norm(limit, shrink=shrink)
    state, ones = clipper.init(tree), jax.tree.map(jnp.ones_like, tree)
    _, back = jax.vjp(lambda x: clipper.update(x, state)[0], tree)
    _, moved = jax.jvp(lambda x: clipper.update(x, state)[0], (tree,), (ones,))
    # A product of 1 and the derivative, from both sides.
    for name, leaf in back(ones)[0].items():
        assert jnp.isfinite(leaf).all()
        np.testing.assert_allclose(leaf.sum(), moved[name].sum(), rtol=1e-5, atol=1e-6)


def test_a_shrink_that_is_broken_above_0_breaks_the_updates():
    grads = jnp.array([3.0, 4.0])
    clipper = optaxclip.clip_by_global_norm(1.0, shrink=lambda n, c: jnp.sqrt(c - n))
    updates, state = clipper.update(grads, clipper.init(grads))
    assert jnp.isnan(updates).all() and jnp.isnan(state.factor)


def test_a_shrink_that_takes_no_limit_has_its_derivative_at_limit_0():
    grads = jnp.array([3.0, 4.0])
    clipper = optaxclip.clip_by_global_norm(0.0, shrink=lambda n, c: n / 2)
    state = clipper.init(grads)
    slope = jax.jacobian(lambda x: clipper.update(x, state)[0])(grads)
    np.testing.assert_allclose(slope, np.eye(2) / 2, atol=1e-6)


NORMS = np.array([0.0, 1e-30, 0.5, 3.0, 1e30])


@pytest.mark.parametrize("r", [math.inf, 1e300, 1e38])
def test_with_a_large_r_it_is_auto_s_of_1(r):
    found = shrinks.psac(r)(jnp.float32(NORMS), jnp.float32(2.0))
    np.testing.assert_allclose(found, 2 * NORMS / (NORMS + 1), rtol=1e-6)


@pytest.mark.parametrize("r", [0, 1e-300, 1e-40])
def test_with_a_tiny_r_it_normalizes(r):
    found = shrinks.psac(r)(jnp.float32(NORMS), jnp.float32(2.0))
    np.testing.assert_allclose(found, [0, 2, 2, 2, 2], rtol=1e-6)


@pytest.mark.parametrize("r", [math.inf, 1e38, 0.1, 1e-30, 1e-300, 0])
def test_its_derivative_is_finite_at_zero(r):
    clipper = clip_by_global_norm(1.0, shrink=shrinks.psac(r))

    def total(grads):
        return clipper.update(grads, clipper.init(grads))[0].sum()

    for grads in (jnp.zeros(2), jnp.array([3.0, 4.0])):
        assert np.isfinite(jax.grad(total)(grads)).all()


WEIGHTS = jnp.array([1.0, 2.0])
SHRINKS = {"auto_s": shrinks.auto_s(), "psac": shrinks.psac()}
LIMITS = {
    "inf": math.inf,
    "schedule": optax.constant_schedule(math.inf),
    "first norm": rules.growth(),
}


def derivative(clipper, x):
    def total(x):
        return jnp.sum(WEIGHTS * clipper.update(x, clipper.init(x))[0])

    return jax.grad(total)(x)


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("shrink", SHRINKS)
def test_an_update_without_limit_has_the_derivative_of_its_input(shrink, limit):
    clipper = optaxclip.clip_by_global_norm(LIMITS[limit], shrink=SHRINKS[shrink])
    for x in (jnp.array([3.0, 4.0]), jnp.zeros(2)):
        np.testing.assert_array_equal(derivative(clipper, x), WEIGHTS)


@pytest.mark.slow
def test_the_sharpest_smooth_shrink_has_the_derivative_of_hard():
    x = jnp.array([3.0, 4.0])
    found = [
        derivative(optaxclip.clip_by_global_norm(1.0, shrink=shrink), x)
        for shrink in (shrinks.smooth(math.inf), shrinks.hard)
    ]
    # x / |x|: (w - u (u w)) / |x|, with u = (0.6, 0.8)
    np.testing.assert_allclose(found[0], [-0.064, 0.048], rtol=1e-5)
    np.testing.assert_array_equal(*found)
