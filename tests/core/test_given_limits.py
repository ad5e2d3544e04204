"""`limit=` and `grad_norm=` of an update: numbers for one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.core.steps import same_bits
from tests.helpers import smallest

GRADS = jnp.array([3.0, 4.0])  # norm 5


def updated(**given):
    clipper = optaxclip.clip_by_global_norm(1.0)
    return clipper.update(GRADS, clipper.init(GRADS), **given)


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        (-1.0, ValueError),
        (np.float32(-1), ValueError),
        (1e39, ValueError),
        (float("nan"), ValueError),
        (True, TypeError),
        ("1", TypeError),
    ],
)
def test_a_given_limit_is_checked_like_any_other(limit, error):
    with pytest.raises(error, match="clip_by_global_norm: limit must"):
        updated(limit=limit)


def test_a_given_negative_limit_on_a_device_counts_as_0():
    for update in (updated, jax.jit(updated)):
        updates, state = update(limit=jnp.float32(-1.0))
        np.testing.assert_array_equal(updates, [0.0, 0.0])
        np.testing.assert_array_equal(state.limit, 0.0)


def test_a_large_given_integer_keeps_its_value():
    for large in (2**33, np.int64(2**33), np.array(2**33)):
        updates, state = updated(limit=large)
        np.testing.assert_array_equal(updates, GRADS)
        np.testing.assert_array_equal(state.limit, 2.0**33)
        updates, state = updated(grad_norm=large)
        np.testing.assert_array_equal(state.norm, 2.0**33)
        expected = np.float64([3.0, 4.0]) / 2.0**33
        np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_a_limit_is_given_to_a_clipper_without_one():
    clipper = optaxclip.clip_by_global_norm(None)
    grads = jnp.array([3.0, 4.0])
    state = clipper.init(grads)
    updates, _ = clipper.update(grads, state, limit=1.0)
    np.testing.assert_allclose(updates, [0.6, 0.8], 1e-6)
    # A given norm alone changes nothing, not even what is subnormal.
    least = jnp.float32(smallest("float32"))
    updates, _ = clipper.update(least, state, grad_norm=jnp.float32(5.0))
    same_bits(updates, least)
