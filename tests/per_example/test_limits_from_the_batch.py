"""A limit that is a function of all norms of the batch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import normal

EPS = float(np.finfo(np.float32).eps)
SIZE = 12
PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
random = np.random.default_rng(0)
INPUTS = random.standard_normal((SIZE, 3)).astype(np.float32)
SLOPES = random.standard_normal((SIZE, 2)).astype(np.float32)
FUNCTIONS = {
    "median": (jnp.nanmedian, np.median),
    "minimum": (jnp.nanmin, np.min),
    "a tree to JAX": (jax.tree_util.Partial(jnp.nanquantile, q=0.5), np.median),
}


def loss(params, x, slopes):
    """Whose gradients are x' slopes and slopes."""
    return jnp.sum((x @ params["w"] + params["b"]) * slopes)


def expected(function, keeps, inputs=INPUTS, slopes=SLOPES):
    """The limit, and the sum of the clipped gradients, in float64."""
    x, c = inputs[keeps].astype(np.float64), slopes[keeps].astype(np.float64)
    norms = np.sqrt(np.sum(x**2, 1) + 1) * np.sqrt(np.sum(c**2, 1))
    limit = function(norms)
    clipped = np.minimum(1, limit / norms)[:, None] * c
    return limit, {"w": x.T @ clipped, "b": clipped.sum(0)}


def close(found, wanted):
    # A norm, its quotient and the sum of 12 products, each of a few roundings.
    for name, own in wanted.items():
        np.testing.assert_allclose(found[name], own, rtol=1e-5, atol=64 * EPS)


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_what_the_function_gives(name, method):
    ours, numpys = FUNCTIONS[name]
    of_batch = partial(clipped_grad, loss, ours, private=False, mean=False)
    grad = jax.jit(of_batch(method=method))
    limit, wanted = expected(numpys, np.ones(SIZE, bool))
    found = grad(PARAMS, INPUTS, SLOPES)
    close(found.grads, wanted)
    longest = np.max(found.norms * found.factors)
    np.testing.assert_allclose(longest, limit, rtol=16 * EPS)


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
def test_masked_and_broken_examples_are_nan_to_it(method):
    inputs, mask = INPUTS.copy(), np.arange(SIZE) != 3
    inputs[3], inputs[7], inputs[9], inputs[10] = 1e6, np.nan, np.inf, -np.inf
    grad = clipped_grad(loss, jnp.nanmedian, private=False, mean=False, method=method)
    counts = mask & np.all(np.isfinite(inputs), 1)
    limit, wanted = expected(np.median, counts)
    found = jax.jit(grad)(PARAMS, inputs, SLOPES, mask=mask)
    close(found.grads, wanted)
    assert found.nonfinite == 3
    longest = np.max((found.norms * found.factors)[counts])
    np.testing.assert_allclose(longest, limit, rtol=16 * EPS)


def test_no_microbatch_has_a_limit_of_its_own():
    """Also where "auto" chooses a few examples at once for a limit that is a number."""

    def long_sequence(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    sizes = np.linspace(0.1, 1, SIZE, dtype=np.float32).reshape(SIZE, 1, 1)
    batch = normal(0, SIZE, 144, 256) * sizes
    weights = normal(1, 256, 256) / 100
    assert explain_clipped_grad(long_sequence)(weights, batch).microbatch < SIZE
    grad = clipped_grad(long_sequence, jnp.nanmedian, private=False, mean=False)
    found = jax.jit(grad)(weights, batch)
    clipped = np.minimum(found.norms, np.median(found.norms))
    np.testing.assert_allclose(found.norms * found.factors, clipped, rtol=16 * EPS)


def test_without_any_example_the_sum_is_zero():
    for method in ("ghost", "one_pass"):
        options = {"private": False, "mean": False, "method": method}
        grad = jax.jit(clipped_grad(loss, jnp.nanmedian, **options))
        found = grad(PARAMS, INPUTS, SLOPES, mask=np.zeros(SIZE, bool))
        assert not any(np.any(x) for x in jax.tree.leaves(found.grads))
        assert not np.any(found.factors) and found.nonfinite == 0


def test_parts_of_the_tree_have_functions_of_their_own():
    limits = {"w": None, "b": jnp.nanmin}
    grad = clipped_grad(loss, limits, private=False, mean=False)
    c = SLOPES.astype(np.float64)
    norms = np.sqrt(np.sum(c**2, 1))
    wanted = {"w": INPUTS.T @ c, "b": np.sum(c * (norms.min() / norms)[:, None], 0)}
    close(grad(PARAMS, INPUTS, SLOPES).grads, wanted)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_over_devices_has_one_limit(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    grad = clipped_grad(loss, jnp.nanmedian, private=False, mean=False)
    _, wanted = expected(np.median, np.ones(SIZE, bool))
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P("data"))
        batch = jax.device_put((INPUTS, SLOPES), split)
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        found = jax.jit(grad)(params, *batch)
    close(found.grads, wanted)


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
def test_in_shard_map_it_gets_the_norms_of_all_devices(method):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    grad = clipped_grad(loss, jnp.nanmedian, private=False, mean=False, method=method)

    def total(*args):
        return jax.lax.psum(grad(*args).grads, ("x", "y"))

    split = P(("x", "y"))
    specs = {"in_specs": (P(), split, split), "out_specs": P()}
    found = jax.jit(jax.shard_map(total, mesh=mesh, **specs))(PARAMS, INPUTS, SLOPES)
    close(found, expected(np.median, np.ones(SIZE, bool))[1])


WRONG: dict[str, dict[str, Any]] = {
    "max_norm=.* needs private=False .* got private=True": {},
    "what max_norm returns must be a scalar, got": {"private": False},
    "max_norm=.*=None, got .* microbatch=3": {"private": False, "microbatch": 3},
}


def test_an_error_names_the_argument():
    for text, options in WRONG.items():
        with pytest.raises(ValueError, match=f"clipped_grad: {text}"):
            clipped_grad(loss, lambda norms: norms, **options)(PARAMS, INPUTS, SLOPES)
