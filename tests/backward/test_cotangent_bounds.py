"""`clip_cotangent` takes two bounds, as rlax's `clip_gradient(x, low, high)` does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clip_cotangent

COTANGENT = np.array(
    [-3.0, -0.75, -0.25, 0.25, 0.75, 3.0, np.nan, np.inf, -np.inf], np.float32
)


def back(**bounds):
    """What becomes of the cotangent."""
    _, pull = jax.vjp(lambda x: clip_cotangent(x, **bounds), jnp.zeros(len(COTANGENT)))
    return pull(jnp.asarray(COTANGENT))[0]


@pytest.mark.parametrize(
    ("low", "high"), [(-0.5, 1.0), (-1.0, 0.5), (0.0, 1.0), (0.5, 1.0), (-np.inf, 0.5)]
)
def test_each_element_is_held_between_both_bounds(low, high):
    expected = np.clip(COTANGENT, low, high)
    np.testing.assert_array_equal(back(min_value=low, max_value=high), expected)


def test_bounds_may_be_traced_and_differ_between_examples():
    def pulled(low, high):
        return jax.grad(
            lambda x: jnp.sum(-2 * clip_cotangent(x, min_value=low, max_value=high))
        )(0.0)

    lows, highs = jnp.array([-1.0, -3.0]), jnp.array([1.0, 1.0])
    assert jax.jit(jax.vmap(pulled))(lows, highs).tolist() == [-1.0, -2.0]


def test_a_bound_has_no_gradient():
    def loss(low, high):
        return -2 * clip_cotangent(3.0, min_value=low, max_value=high)

    assert jax.grad(loss, (0, 1))(-1.0, 1.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"min_value": 2.0, "max_value": 1.0},
            ValueError,
            "min_value must be at most max_value, got min_value=2.0 and max_value=1.0",
        ),
        ({"min_value": -1.0}, ValueError, "give one of max_value and max_norm"),
        (
            {"min_value": -1.0, "max_norm": 1.0},
            ValueError,
            "min_value=-1.0 belongs to max_value",
        ),
        (
            {"min_value": "low", "max_value": 1.0},
            TypeError,
            "min_value must be a real number, got 'low'",
        ),
    ],
)
def test_bounds_that_cannot_be_are_named(arguments, error, text):
    with pytest.raises(error, match=f"^clip_cotangent: {text}"):
        clip_cotangent(jnp.ones(2), **arguments)


def test_complex_elements_have_no_order_between_bounds():
    with pytest.raises(TypeError, match=r"^clip_cotangent: the leaf 'z' is complex"):
        clip_cotangent({"z": jnp.ones(2) * 1j}, min_value=-1.0, max_value=1.0)
