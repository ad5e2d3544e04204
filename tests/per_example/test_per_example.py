"""Per-example clipping against `vmap(jax.grad)` followed by the clip."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip.per_example import clipped_grad
from optaxclip.shrinks import auto_s, psac
from tests.per_example.batches import (
    EPS,
    METHODS,
    MLP,
    SIZE,
    all_zero,
    close,
    examples,
    hard_factor,
    normal,
    norms_of,
    program,
    weighted,
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("microbatch", [None, 1, 4, 5, 50])
def test_the_mean_is_that_of_gradients_clipped_one_by_one(microbatch, method):
    _, params, batch = MLP
    values, leaves = examples()
    norms = norms_of(leaves)
    limit = float(np.median(norms))
    result = program(microbatch, method)(limit, params, batch)
    factors = hard_factor(norms, limit)
    close(result.grads, [leaf / SIZE for leaf in weighted(leaves, factors)], SIZE)
    np.testing.assert_allclose(result.norms, norms, rtol=64 * EPS)
    np.testing.assert_allclose(result.factors, factors, rtol=64 * EPS)
    np.testing.assert_allclose(result.values, values, rtol=64 * EPS, atol=64 * EPS)
    assert jax.tree.structure(result.grads) == jax.tree.structure(params)
    assert result.nonfinite == 0
    assert result.aux is None


FACTORS = {
    "hard": (optaxclip.shrinks.hard, hard_factor),
    "normalize": (optaxclip.shrinks.normalize, lambda n, c: c / n),
    "auto_s": (auto_s(), lambda n, c: c / (n + 0.01)),
    "auto_s(0.5)": (auto_s(0.5), lambda n, c: c / (n + 0.5)),
    "psac": (psac(), lambda n, c: c / (n + 0.1 / (n + 0.1))),
    "psac(0.3)": (psac(0.3), lambda n, c: c / (n + 0.3 / (n + 0.3))),
    "smooth": (optaxclip.shrinks.smooth(), lambda n, c: 1 / (1 + n / c)),
    "drop": (optaxclip.shrinks.drop, lambda n, c: np.where(n > c, 0.0, 1.0)),
    "a function": (
        lambda norm, limit: jnp.sqrt(norm) * limit,
        lambda n, c: c / np.sqrt(n),
    ),
}


@cache
def shrunk():
    """The results of all shrinks, in one program."""
    loss, params, batch = MLP
    kinds = {
        **{(name, "one_pass"): {"method": "one_pass"} for name in FACTORS},
        **{(name, "ghost"): {"method": "ghost"} for name in FACTORS},
    }
    return jax.jit(
        lambda *args: {
            kind: clipped_grad(loss, 0.7, shrink=FACTORS[kind[0]][0], **options)(*args)
            for kind, options in kinds.items()
        }
    )(params, batch)


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_every_shrink_gives_its_factor(name, method):
    leaves = examples()[1]
    factors = FACTORS[name][1](norms_of(leaves), 0.7)
    result = shrunk()[name, method]
    np.testing.assert_allclose(result.factors, factors, rtol=64 * EPS)
    close(result.grads, [leaf / SIZE for leaf in weighted(leaves, factors)], SIZE)


@pytest.mark.parametrize("shrink", [auto_s(), auto_s(0), psac(), psac(0.01)])
def test_automatic_shrinks_stay_within_the_limit_and_keep_zero(shrink):
    norms = np.asarray([0.0, 1e-30, 1e-6, 0.01, 1.0, 1e6, 1e30, 3e38], np.float32)
    new = np.asarray(jax.jit(shrink)(norms, np.full_like(norms, 2.0)))
    assert new[0] == 0
    assert np.all(new <= 2.0 * (1 + EPS))
    assert np.all(np.isfinite(new))


@pytest.mark.slow
def test_a_limit_for_each_part_clips_each_by_its_own_norm():
    loss, params, batch = MLP
    leaves = examples()[1]  # in/b, in/w, out
    limits = {"in": 0.3, "out": 0.9}
    result = jax.jit(clipped_grad(loss, limits, microbatch=5))(params, batch)
    inner, outer = norms_of(leaves[:2]), norms_of(leaves[2:])
    np.testing.assert_allclose(result.norms["in"], inner, rtol=64 * EPS)
    np.testing.assert_allclose(
        result.factors["out"], hard_factor(outer, 0.9), rtol=64 * EPS
    )
    expected = weighted(leaves[:2], hard_factor(inner, 0.3)) + weighted(
        leaves[2:], hard_factor(outer, 0.9)
    )
    close(result.grads, [leaf / SIZE for leaf in expected], SIZE)


@cache
def plain():
    """The gradient of the mean."""
    loss, params, batch = MLP
    grads = jax.jit(
        jax.grad(lambda p, batch: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))
    )(params, batch)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, np.inf, 1e9])
@pytest.mark.parametrize("method", METHODS)
def test_without_a_limit_it_is_the_gradient_of_the_mean(limit, method):
    _, params, batch = MLP
    close(program(method=method)(limit, params, batch).grads, plain(), SIZE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_aux_comes_for_each_example_in_the_order_of_the_batch(microbatch, method):
    def loss(p, x):
        return jnp.sum(p * x), {"x": x, "first": x[0] > 0}

    xs = normal(0, 5, 3)
    result = jax.jit(
        clipped_grad(loss, 1.0, has_aux=True, microbatch=microbatch, method=method)
    )(np.ones(3, np.float32), xs)
    np.testing.assert_array_equal(result.aux["x"], xs)
    np.testing.assert_array_equal(result.aux["first"], xs[:, 0] > 0)


@pytest.mark.parametrize("method", METHODS)
def test_several_arguments_and_several_batches(method):
    def loss(key, scale, w, x, b):
        return scale * jnp.sum(w * x) * b + b * jax.random.key_data(key)[1]

    words = np.array([[0, 3], [1, 5], [2, 0], [3, 2], [4, 7]], np.uint32)
    xs, w, b = normal(1, 5, 3), normal(2, 3), np.float32(1.5)
    leaves = [
        2.0 * b * np.asarray(xs, np.float64),
        2.0 * np.asarray(xs, np.float64) @ w + words[:, 1],
    ]
    run = jax.jit(
        clipped_grad(
            loss, 1.0, argnums=(2, -1), shared_argnums=1, microbatch=2, method=method
        )
    )
    result = run(jax.random.wrap_key_data(words), np.float32(2.0), w, xs, b)
    assert isinstance(result.grads, tuple)
    close(
        result.grads,
        [leaf / 5 for leaf in weighted(leaves, hard_factor(norms_of(leaves), 1.0))],
        5,
    )


def test_a_traced_negative_limit_counts_as_zero():
    _, params, batch = MLP
    assert all_zero(program()(-1.0, params, batch).grads)
