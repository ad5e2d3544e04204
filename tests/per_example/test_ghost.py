"""Ghost clipping against gradients of examples that were really made."""

from functools import cache

import jax
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad, explain_clipped_grad

from .batches import EPS
from .models import MODELS


@cache
def examples(name):
    """The loss of each example, and its gradient as float64 leaves."""
    model = MODELS[name]
    run = jax.jit(jax.vmap(jax.value_and_grad(model.loss), (None, 0)))
    values, grads = run(model.params, model.batch)
    return values, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)


def norms_of(grads):
    squares = [leaf.reshape(len(leaf), -1) ** 2 for leaf in jax.tree.leaves(grads)]
    return np.sqrt(sum(each.sum(1) for each in squares))


def mean_of_clipped(grads, limit):
    """(1 / B) sum_i g_i min(1, C / |g_i|)."""
    norms = norms_of(grads)
    factors = np.minimum(1, limit / np.maximum(norms, 1e-300))
    return jax.tree.map(
        lambda leaf: np.einsum("i,i...->...", factors, leaf) / len(norms), grads
    )


# In Gram form 4 eps of what is summed are added, in these models 9 |G|^2 at most.
MARGIN = 9 * 4 * EPS / 2


def close(found, expected, tolerance=1e-6):
    """Every leaf within a millionth of its norm."""
    for got, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(np.asarray(got, np.float64) - want)
        assert error <= tolerance * np.linalg.norm(want)


@cache
def ghost(name, microbatch=None):
    model = MODELS[name]
    limit = float(np.median(norms_of(examples(name)[1])))
    grad = clipped_grad(model.loss, limit, method="ghost", microbatch=microbatch)
    return limit, jax.jit(grad)(model.params, model.batch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_norms_are_those_of_the_examples(name):
    norms, found = norms_of(examples(name)[1]), ghost(name)[1].norms
    assert np.all(found >= norms * (1 - 1e-6))
    assert np.all(found <= norms * (1 + 1e-6 + MARGIN))


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_mean_of_clipped_ones(name):
    limit, result = ghost(name)
    close(result.grads, mean_of_clipped(examples(name)[1], limit), 1e-6 + MARGIN)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_values_are_those_of_the_loss(name):
    np.testing.assert_allclose(ghost(name)[1].values, examples(name)[0], rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_is_explained(name):
    model = MODELS[name]
    explain = explain_clipped_grad(model.loss, method="ghost")
    leaves = explain(model.params, model.batch).leaves
    assert {leaf.name: leaf.way for leaf in leaves} == model.ways


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_microbatches_need_not_divide_the_batch(name):
    limit, result = ghost(name, microbatch=4)
    close(result.grads, mean_of_clipped(examples(name)[1], limit), 1e-6 + MARGIN)
