"""Norm functions of the user's that return other numbers than float32 arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
TWO = [2, 2.0, np.float64(2), np.int32(2), jnp.int32(2), jnp.bfloat16(2), np.array(2)]


@pytest.mark.parametrize("norm", TWO, ids=lambda x: f"{type(x).__name__}-{x!r}")
def test_a_norm_may_be_any_real_number(norm):
    # g * 1.5 / 2. In the dtype of an integer norm the limit was 1.
    for own in (norm, {"a": norm, "b": norm}):
        clipper = optaxclip.clip_by(lambda tree, own=own: own, 1.5)
        updates, state = clipper.update(GRADS, clipper.init(GRADS))
        for name in GRADS:
            expected = np.float64(GRADS[name]) * 0.75
            np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
        np.testing.assert_array_equal(state.limit, np.full_like(state.norm, 1.5))
        recorder = optaxclip.record_norm(lambda tree, own=own: own)
        _, state = recorder.update(GRADS, recorder.init(GRADS))
        np.testing.assert_array_equal(state.norm, np.full_like(state.norm, 2.0))


def test_integer_norms_are_taken_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        clipper = optaxclip.clip_by(lambda tree: jnp.int32(2), 1.5)
        _, state = clipper.update(GRADS, clipper.init(GRADS))
    np.testing.assert_array_equal(state.norm, np.float32(2))


def test_one_norm_for_everything_is_a_number_in_the_state():
    for norm, shape in ((lambda tree: 2.0, ()), (lambda tree: [2.0, 3.0], (2,))):
        assert optaxclip.record_norm(norm).init([1.0, 2.0]).norm.shape == shape
