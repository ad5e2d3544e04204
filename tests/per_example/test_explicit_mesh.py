"""On a mesh with Explicit axes a batch is clipped as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import clipped_grad

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
SPLITS = {
    "examples": (P(), P("x")),
    "numbers": (P("y"), P(None, "y")),
    "both": (P("y"), P("x", "y")),
}
GRADIENTS = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def loss(w, gradient):
    return jnp.sum(w * gradient)


def placed(array, spec):
    return jax.device_put(array, NamedSharding(MESH, spec))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one_pass", "two_pass", "auto"])
@pytest.mark.parametrize("split", SPLITS)
def test_it_gives_what_it_gives_on_one_device(method, split):
    of_weights, of_batch = SPLITS[split]
    grad = jax.jit(clipped_grad(loss, 2.0, method=method))
    wanted = grad(jnp.zeros(8), GRADIENTS)
    with jax.set_mesh(MESH):
        weights = placed(np.zeros(8), of_weights)
        found = grad(weights, placed(GRADIENTS, of_batch))
    np.testing.assert_allclose(found.grads, wanted.grads, 1e-6, 1e-7)
    np.testing.assert_allclose(found.norms, wanted.norms, 1e-6)
    assert found.grads.sharding.is_equivalent_to(weights.sharding, 1)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [2, 3, 5])
@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_devices_share_each_microbatch(method, microbatch):
    wanted = clipped_grad(loss, 2.0)(jnp.zeros(8), GRADIENTS)
    grad = jax.jit(clipped_grad(loss, 2.0, method=method, microbatch=microbatch))
    with jax.set_mesh(MESH):
        found = grad(placed(np.zeros(8), P()), placed(GRADIENTS, P("x")))
    np.testing.assert_allclose(found.grads, wanted.grads, 1e-6, 1e-7)
    np.testing.assert_allclose(found.norms, wanted.norms, 1e-6)


def test_a_microbatch_has_an_example_for_each_device():
    wanted = clipped_grad(loss, 2.0)(jnp.zeros(8), GRADIENTS)
    grad = jax.jit(clipped_grad(loss, 2.0, method="one_pass", microbatch=1))
    with jax.set_mesh(MESH):
        found = grad(placed(np.zeros(8), P()), placed(GRADIENTS, P("x")))
    np.testing.assert_allclose(found.grads, wanted.grads, 1e-6, 1e-7)


def test_ghost_clipping_says_that_it_cannot():
    weights, batch = placed(np.zeros(8), P()), placed(GRADIENTS, P("x"))
    with (
        jax.set_mesh(MESH),
        pytest.raises(ValueError, match=r"method must be .* Explicit axes, here"),
    ):
        clipped_grad(loss, 2.0, method="ghost")(weights, batch)
