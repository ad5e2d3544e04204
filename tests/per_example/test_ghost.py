"""Clipped gradients of many kinds of models, by each method, against gradients of
examples that were really made.
"""

from functools import cache

import jax
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad, explain_clipped_grad

from .batches import EPS, mean_of_clipped, near, norms_of
from .models import MODELS

every_model = pytest.mark.parametrize("name", MODELS)


@cache
def examples(name):
    """The loss of each example, and its gradient in float64."""
    model = MODELS[name]
    run = jax.jit(jax.vmap(jax.value_and_grad(model.loss), (None, 0)))
    values, grads = run(model.params, model.batch)
    return values, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)


# In Gram form 4 eps of what is summed are added, in these models 9 |G|^2 at most.
MARGIN = 9 * 4 * EPS / 2


def clipped(name, method, limits=None, microbatch=None):
    """By one limit, or by one for each parameter."""
    model = MODELS[name]
    limits = limits or float(np.median(norms_of(examples(name)[1])))
    grad = clipped_grad(model.loss, limits, method=method, microbatch=microbatch)
    return limits, jax.jit(grad)(model.params, model.batch)


def close_norms(found, norms, method):
    assert np.all(found >= norms * (1 - 1e-6))
    assert np.all(found <= norms * (1 + 1e-6 + MARGIN * (method == "ghost")))


def check(name, method, microbatch=None):
    """Norms, values and the mean of gradients clipped by one limit."""
    limit, result = clipped(name, method, microbatch=microbatch)
    values, grads = examples(name)
    close_norms(result.norms, norms_of(grads), method)
    near(result.grads, mean_of_clipped(grads, limit), 1e-6 + MARGIN)
    np.testing.assert_allclose(result.values, values, rtol=1e-5)


def test_ghost_clipping_knows_the_norm_by_each_parameter():
    for name, model in MODELS.items():
        explain = explain_clipped_grad(model.loss, method="ghost")
        leaves = explain(model.params, model.batch).leaves
        assert {leaf.name: leaf.norm_by for leaf in leaves} == model.ways
        grads = examples(name)[1]
        norms = {leaf: norms_of([x]) for leaf, x in grads.items()}
        limits = {leaf: float(np.median(x)) for leaf, x in norms.items()}
        _, result = clipped(name, "ghost", limits)
        wanted = {leaf: mean_of_clipped([x], limits[leaf]) for leaf, x in grads.items()}
        for leaf, exact in norms.items():
            close_norms(result.norms[leaf], exact, "ghost")
            near(result.grads[leaf], wanted[leaf][0], 1e-6 + MARGIN)


@every_model
def test_a_gradient_by_ghost_is_the_mean_of_clipped_ones(name):
    check(name, "ghost")


@every_model
def test_a_gradient_in_one_pass_is_the_mean_of_clipped_ones(name):
    check(name, "one_pass")


@every_model
@pytest.mark.slow
def test_microbatches_need_not_divide_the_batch(name):
    check(name, "ghost", microbatch=4)
