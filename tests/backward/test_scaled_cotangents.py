"""Scaled cotangents, and arguments that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import scale_cotangent
from tests.backward.cotangents import close, normal, pulled_back


@pytest.mark.parametrize("scale", [0.0, 0.1, 0.5, 1.0, -1.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_scale_scales_derivatives_in_both_modes(scale, dtype):
    x, other = jnp.asarray(normal(0, 3, 2), dtype), jnp.asarray(normal(1, 3, 2), dtype)
    scaled = pulled_back(lambda x: scale_cotangent(x, scale), x, other)
    value, tangent = jax.jvp(lambda x: scale_cotangent(x, scale), (x,), (other,))
    assert scaled.dtype == value.dtype == tangent.dtype == dtype
    np.testing.assert_array_equal(value, x)
    wide = np.asarray(other).astype(np.complex128)
    for ours in (scaled, tangent):
        np.testing.assert_allclose(
            np.asarray(ours).astype(np.complex128),
            scale * wide,
            2 * float(jnp.finfo(dtype).eps),
        )


def test_scale_may_be_traced_and_trees_keep_their_structure():
    tree = {"x": jnp.ones(2), "n": jnp.arange(2), "none": None}
    assert jax.tree.structure(scale_cotangent(tree, 0.5)) == jax.tree.structure(tree)

    def loss(x, scale):
        return jnp.sum(scale_cotangent({**tree, "x": x}, scale)["x"] ** 2)

    by_x, by_scale = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))(
        jnp.ones((3, 2)), jnp.array([0.1, 0.5, 1.0])
    )
    close(by_x, np.array([[0.2, 0.2], [1, 1], [2, 2]]))
    assert not by_scale.any()
