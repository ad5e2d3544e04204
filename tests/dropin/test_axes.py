"""Axes of `tf.clip_by_norm` in every form of an int."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.dropin.tensorflow_style import clip_by_norm


@pytest.mark.parametrize(
    "axes", [[np.int64(1)], (np.int32(-1),), np.int64(1)], ids=repr
)
def test_axes_may_be_numpy_ints(axes):
    found = clip_by_norm(jnp.array([[3.0, 4.0], [0.3, 0.4]]), 1.0, axes)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
