"""Clipped gradients of many kinds of models, by each method, against gradients of
examples that were really made.
"""

from functools import cache

import jax
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad, explain_clipped_grad

from .batches import EPS, METHODS, mean_of_clipped, near, norms_of
from .models import MODELS

every_model = pytest.mark.parametrize("name", MODELS)
every_method = pytest.mark.parametrize("method", METHODS)


@cache
def examples(name):
    """The loss of each example, and its gradient in float64."""
    model = MODELS[name]
    run = jax.jit(jax.vmap(jax.value_and_grad(model.loss), (None, 0)))
    values, grads = run(model.params, model.batch)
    return values, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)


# In Gram form 4 eps of what is summed are added, in these models 9 |G|^2 at most.
MARGIN = 9 * 4 * EPS / 2


@cache
def clipped(name, method, microbatch=None):
    model = MODELS[name]
    limit = float(np.median(norms_of(examples(name)[1])))
    grad = clipped_grad(model.loss, limit, method=method, microbatch=microbatch)
    return limit, jax.jit(grad)(model.params, model.batch)


@every_method
@every_model
@pytest.mark.slow
def test_norms_are_those_of_the_examples(name, method):
    norms, found = norms_of(examples(name)[1]), clipped(name, method)[1].norms
    assert np.all(found >= norms * (1 - 1e-6))
    assert np.all(found <= norms * (1 + 1e-6 + MARGIN * (method == "ghost")))


@every_method
@every_model
def test_the_gradient_is_the_mean_of_clipped_ones(name, method):
    limit, result = clipped(name, method)
    near(result.grads, mean_of_clipped(examples(name)[1], limit), 1e-6 + MARGIN)


@every_method
@every_model
@pytest.mark.slow
def test_values_are_those_of_the_loss(name, method):
    values = clipped(name, method)[1].values
    np.testing.assert_allclose(values, examples(name)[0], rtol=1e-5)


@every_model
def test_each_parameter_is_explained(name):
    model = MODELS[name]
    explain = explain_clipped_grad(model.loss, method="ghost")
    leaves = explain(model.params, model.batch).leaves
    assert {leaf.name: leaf.way for leaf in leaves} == model.ways


@every_model
@pytest.mark.slow
def test_microbatches_need_not_divide_the_batch(name):
    limit, result = clipped(name, "ghost", microbatch=4)
    near(result.grads, mean_of_clipped(examples(name)[1], limit), 1e-6 + MARGIN)
