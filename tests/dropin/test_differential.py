"""Beside optax 0.2.8: where it is right, the numbers are its own.

Ours lie within 8 float32 eps, about 1e-6, of the equation (`rescale` takes 5 of them
off on purpose).
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracles

SHAPES = {
    "vector": (7,),
    "matrix": (5, 3),
    "stack": (2, 3, 4),
    "filters": (3, 2, 4, 5),
    "volume": (2, 3, 2, 2, 4),
}


def tree(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes.items():
        size = np.exp(random.standard_normal(shape))
        found[name] = jnp.asarray(random.standard_normal(shape) * size, jnp.float32)
    return found


def one_step(transformation, grads, params=None):
    return transformation.update(
        grads, transformation.init(grads if params is None else params), params
    )[0]


def assert_equal(ours, theirs, rtol=1e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol)


@pytest.mark.parametrize("clipping", [(1e-3,), (0.3,), (1e4,), (0.1, 5.0)])
@pytest.mark.parametrize("name", SHAPES)
def test_adaptive_grad_clip_equals_that_of_optax(name, clipping):
    grads, params = tree(2, {name: SHAPES[name]}), tree(3, {name: SHAPES[name]})
    ours, theirs = (
        one_step(make(*clipping), grads, params)
        for make in (optaxclip.adaptive_grad_clip, optax.adaptive_grad_clip)
    )
    assert_equal(ours, theirs)


WITH_ONES = [
    shape for rank in range(5) for shape in itertools.product((1, 3), repeat=rank)
]
WITH_ONES += [(1, 3, 1, 1, 1), (1, 3, 1, 2, 1), (1, 1, 1, 1, 1, 3)]


@pytest.mark.slow
def test_axes_of_size_1_make_the_units_of_optax():
    shapes = {str(shape): shape for shape in WITH_ONES}
    grads, params = tree(5, shapes), tree(6, shapes)
    ours, theirs = (
        jax.jit(partial(one_step, make(0.3)))(grads, params)
        for make in (optaxclip.adaptive_grad_clip, optax.adaptive_grad_clip)
    )
    assert_equal(ours, theirs)
    clipped = jax.jit(partial(one_step, optaxclip.clip_by_unitwise_norm(1.0)))(grads)
    for name, leaf in grads.items():
        wanted = oracles.clip_units([leaf], 1.0)[0]
        np.testing.assert_allclose(clipped[name], wanted, 1e-6)
