"""Shrinks of the user's: zeros stay, and derivatives are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip


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
