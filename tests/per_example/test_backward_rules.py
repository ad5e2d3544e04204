"""Losses whose backward pass is not linear, since a rule of their own makes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from optaxclip import clip_cotangent
from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.sharded import mesh_of

LIMIT = 0.5


@jax.custom_vjp
def product(w, x):
    """x @ w, whose gradient by w has norm 1."""
    return x @ w


def backward_of_product(inputs, cotangent):
    w, x = inputs
    slope = jnp.outer(x, cotangent)
    return slope / jnp.linalg.norm(slope), w @ cotangent


product.defvjp(lambda w, x: (product(w, x), (w, x)), backward_of_product)


def clipped(w):
    return clip_cotangent(w, max_norm=1.0)


def of_the_parameter(p, x):
    return jnp.sum(jnp.sin(x @ clipped(p["w"]) + p["b"]))


def of_the_parameter_in_jit(p, x):
    return jnp.sum(jnp.sin(x @ jax.jit(clipped)(p["w"]) + p["b"]))


def where_parameter_and_data_meet(p, x):
    return jnp.sum(jnp.sin(product(p["w"], x) + p["b"]))


def in_a_branch(p, x):
    branches = product, lambda w, x: x @ w
    return jnp.sum(jnp.sin(lax.cond(x[0] > 0, *branches, p["w"], x) + p["b"]))


def in_each_turn_of_a_scan(p, x):
    def turn(total, row):
        w, x = row
        return total + jnp.sin(x * clipped(w)), None

    total, _ = lax.scan(turn, jnp.zeros(p["w"].shape[1]), (p["w"], x))
    return jnp.sum(total * p["b"])


def of_a_parameter_that_is_used_twice(p, x):
    return of_the_parameter(p, x) + jnp.sum(x @ p["w"])


LOSSES = [
    of_the_parameter,
    of_the_parameter_in_jit,
    where_parameter_and_data_meet,
    in_a_branch,
    in_each_turn_of_a_scan,
    of_a_parameter_that_is_used_twice,
]
PARAMS = {
    "w": np.linspace(-0.4, 0.5, 12, dtype=np.float32).reshape(4, 3),
    "b": np.linspace(0.1, 0.3, 3, dtype=np.float32),
}
# From small to large, so that some are clipped and some are not.
XS = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
XS *= np.geomspace(0.01, 100, 7, dtype=np.float32)[:, None]


def sum_of_clipped(loss, examples, limit):
    """sum_i g_i min(1, C / |g_i|), one example after another in float64."""
    total = {name: np.zeros(leaf.shape) for name, leaf in PARAMS.items()}
    for x in examples:
        found = jax.grad(loss)(PARAMS, x)
        grad = {name: np.asarray(leaf, np.float64) for name, leaf in found.items()}
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in grad.values()))
        for name, leaf in grad.items():
            total[name] += leaf * min(1, limit / norm)
    return total


@pytest.mark.parametrize("method", ["ghost", "auto", "one_pass"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_each_example_is_clipped_by_itself(loss, method):
    grad = clipped_grad(loss, LIMIT, method=method, mean=False)
    found = jax.jit(grad)(PARAMS, XS).grads
    expected = sum_of_clipped(loss, XS, LIMIT)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("microbatch", [1, 3, None])
def test_masked_and_broken_examples_have_no_part(microbatch):
    broken = XS.copy()
    broken[2] = np.nan
    mask = np.arange(7) != 4
    grad = clipped_grad(
        of_the_parameter, LIMIT, method="ghost", mean=False, microbatch=microbatch
    )
    found = jax.jit(grad)(PARAMS, broken, mask=mask)
    expected = sum_of_clipped(of_the_parameter, XS[[0, 1, 3, 5, 6]], LIMIT)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found.grads[name], leaf, rtol=2e-5, atol=1e-6)
    assert found.nonfinite == 1


def test_only_gradients_behind_the_rule_are_made_for_the_sum():
    def loss(p, x):
        return jnp.sum(jnp.sin(x @ clipped(p["w"]))) + jnp.sum(jnp.sin(x @ p["v"]))

    params = {"w": PARAMS["w"], "v": np.ones((4, 5), np.float32)}
    grad = clipped_grad(loss, LIMIT, method="ghost")
    text = str(jax.make_jaxpr(lambda p, x: grad(p, x).grads)(params, XS))
    assert "f32[7,4,3]" in text and "f32[7,4,5]" not in text


def test_beside_a_rule_in_each_turn_norms_come_from_factors():
    def loss(p, x):
        def turn(total, row):
            w, v, x = row
            behind, beside = jnp.sin(x @ clipped(w)), jnp.sin(x @ v)
            return total + jnp.sum(behind) + jnp.sum(beside), None

        return lax.scan(turn, 0.0, (p["w"], p["v"], x))[0]

    params = {"w": np.ones((2, 4, 3), np.float32), "v": np.ones((2, 4, 5), np.float32)}
    explain = explain_clipped_grad(loss, method="ghost")
    ways = {
        leaf.name: leaf.way for leaf in explain(params, XS[:6].reshape(3, 2, 4)).leaves
    }
    assert ways == {"w": "gradient", "v": "product"}


def test_examples_stay_apart_on_each_device():
    """The only parameter is behind a rule, and the batch is split over devices."""

    def loss(w, x):
        return jnp.sum(jnp.sin(product(w, x)))

    def of_shard(w, x):
        grad = clipped_grad(loss, LIMIT, method="ghost", mean=False)
        return lax.psum(grad(w, x).grads, "x")

    mesh = mesh_of((3,), ("x",))
    split = jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    whole = clipped_grad(loss, LIMIT, method="one_pass", mean=False)
    expected = whole(PARAMS["w"], XS[:6]).grads
    found = jax.jit(split)(PARAMS["w"], XS[:6])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
