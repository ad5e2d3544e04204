"""Ghost clipping of models as flax and equinox users write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad, explain_clipped_grad

BATCH = 6


def batch():
    rng = np.random.default_rng(0)
    sizes = np.geomspace(0.2, 3, BATCH, dtype=np.float32)
    x = rng.standard_normal((BATCH, 8, 8, 1)).astype(np.float32)
    return x * sizes[:, None, None, None], np.arange(BATCH, dtype=np.int32) % 3


def cross_entropy(logits, label):
    return -jax.nn.log_softmax(logits)[label]


def agree(loss, params, *examples):
    """Ghost clipping against gradients of examples that were really made."""

    def results(limit, *args):
        methods = ("ghost", "one_pass")
        return [clipped_grad(loss, limit, method=name)(*args) for name in methods]

    with jax.numpy_rank_promotion("allow"):
        run = jax.jit(results)
        norms = run(jnp.inf, params, *examples)[1].norms
        ghost, known = run(jnp.median(norms), params, *examples)
    np.testing.assert_allclose(ghost.norms, known.norms, rtol=1e-6)
    assert np.any(known.factors < 1) and np.any(known.factors == 1)
    leaves = jax.tree.leaves(ghost.grads), jax.tree.leaves(known.grads)
    for got, want in zip(*leaves, strict=True):
        error = np.linalg.norm(np.float64(got) - np.float64(want))
        assert error <= 1e-6 * np.linalg.norm(np.float64(want))


def ways(loss, params, *examples):
    with jax.numpy_rank_promotion("allow"):
        leaves = explain_clipped_grad(loss, method="ghost")(params, *examples).leaves
    return {leaf.name: leaf.norm_by for leaf in leaves}


@pytest.mark.slow
def test_a_model_of_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.attend = nnx.MultiHeadAttention(
                2, 4, decode=False, rngs=rngs, use_bias=False
            )
            self.out = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.conv(x)).reshape(64, 4)[::8]
            x = x + self.attend(self.norm(x))
            return self.out(jnp.mean(x, 0))

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def loss(params, x, label):
        return cross_entropy(nnx.merge(graph, params)(x), label)

    agree(loss, params, *batch())
    found = ways(loss, params, *batch())
    kernels = {name: way for name, way in found.items() if "kernel" in name}
    assert kernels and "gradient" not in kernels.values()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ghost", "one_pass"])
def test_batch_norm_and_dropout_of_flax_nnx(method):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.norm(self.inner(x)))

    with jax.numpy_rank_promotion("allow"):
        graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

        def loss(params, rest, x, key):
            model = nnx.merge(graph, params, rest, copy=True)
            model.norm.use_running_average = True
            nnx.reseed(model, default=key)
            return jnp.sum(model(x) ** 2)

        x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
        keys = jax.random.split(jax.random.key(1), 4)
        grad = clipped_grad(loss, 1.0, shared_argnums=1, method=method)
        found = jax.jit(grad)(params, rest, x, keys)
        every = jax.vmap(jax.grad(loss), (None, None, 0, 0))(params, rest, x, keys)
    leaves = [np.asarray(g).reshape(4, -1) for g in jax.tree.leaves(every)]
    norms = np.linalg.norm(np.concatenate(leaves, 1).astype(np.float64), axis=1)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)


def test_a_model_of_equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 4, 3, key=keys[0]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.MLP(144, 3, 16, 2, key=keys[1]),
        ]
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x, label):
        logits = eqx.combine(params, static)(jnp.moveaxis(x, -1, 0))
        return cross_entropy(logits, label)

    agree(loss, params, *batch())
    found = ways(loss, params, *batch())
    weights = {name: way for name, way in found.items() if "weight" in name}
    assert weights and "gradient" not in weights.values()
