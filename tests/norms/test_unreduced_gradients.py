"""Gradients of an Explicit mesh that are accumulated before they are summed over
devices, and then clipped.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optaxclip
from tests.helpers import only_by_a_cpu

CLIP = optaxclip.clip_by_global_norm(1.0)
WEIGHTS = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
BATCHES = np.random.default_rng(1).standard_normal((5, 16, 8)).astype(np.float32)


def loss(w, x):
    return jnp.mean(jnp.sum((x @ w) ** 2, axis=1))


def step(w, batches):
    weights = jax.reshard(w, P(reduced={"data"}))
    start = jax.reshard(jnp.zeros_like(w), P(unreduced={"data"}))

    def add(total, x):
        return total + jax.grad(loss)(weights, x), None

    total, _ = lax.scan(add, start, batches)
    mean = jax.reshard(total, jax.typeof(w).sharding) / len(batches)
    updates, state = CLIP.update(mean, CLIP.init(w))
    return updates, state.norm


@only_by_a_cpu
@pytest.mark.parametrize("spec", [P(), P("data")], ids=["whole", "as in FSDP"])
def test_devices_send_them_once_for_a_step(spec):
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        w = jax.reshard(WEIGHTS, spec)
        compiled = jax.jit(step).lower(w, jax.reshard(BATCHES, P(None, "data")))
        loop, _, rest = compiled.compile().as_text().partition("\nENTRY")
        updates, norm = jax.jit(step)(w, jax.reshard(BATCHES, P(None, "data")))
    kinds = ("all-reduce(", "reduce-scatter(", "all-gather(")
    assert not any(kind in loop for kind in kinds)
    # In FSDP the weights are gathered, and the squares of parts of the norm summed.
    found = [rest.count(f" {kind}") for kind in kinds]
    assert found == ([1, 0, 0] if spec == P() else [2, 0, 1])
    x = np.float64(BATCHES.reshape(-1, 8))
    mean = 2 * x.T @ (x @ np.float64(WEIGHTS)) / len(x)
    np.testing.assert_allclose(norm, np.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(updates, mean / np.linalg.norm(mean), atol=1e-6)
