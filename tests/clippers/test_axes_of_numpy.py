"""Axes and numbers of columns that are ints of NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

pytestmark = pytest.mark.slow


def test_columns_may_be_an_int_of_numpy():
    grads = jnp.diag(jnp.array([3.0, 0.5]))
    clipper = optaxclip.clip_by_spectral_norm(1.0, columns=np.int64(1))
    updates, _ = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(updates, np.diag([1.0, 0.5]), rtol=1e-5, atol=1e-6)


def test_a_tuple_of_axes_may_hold_ints_of_numpy():
    grads = jnp.array([[3.0, 0.3], [4.0, 0.4]])
    one = (np.int64(1),)
    for clipper in (
        optaxclip.clip_by_tensor_norm(1.0, stacked=one),
        optaxclip.clip_by_unitwise_norm(1.0, axis=(np.int64(0),)),
    ):
        updates, _ = clipper.update(grads, clipper.init(grads))
        expected = np.array([[0.6, 0.3], [0.8, 0.4]])
        np.testing.assert_allclose(updates, expected, rtol=2e-6)
