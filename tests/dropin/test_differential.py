"""Beside optax 0.2.8: where it is right, the numbers are its own.

Ours lie within 8 float32 eps, about 1e-6, of the equation (`rescale` takes 5 of them
off on purpose).
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracles
from tests.dropin.recorded import in_torch

SHAPES = {
    "scalar": (),
    "vector": (7,),
    "matrix": (5, 3),
    "stack": (2, 3, 4),
    "filters": (3, 2, 4, 5),
    "volume": (2, 3, 2, 2, 4),
}
FEW_SHAPES = {name: SHAPES[name] for name in ("scalar", "matrix", "stack")}
EPS = float(np.finfo(np.float32).eps)

# Limits that leave nothing, something and everything as it is.
NORMS = [0.01, 3.0, 1e4]


def tree(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(
            random.standard_normal(shape) * np.exp(random.standard_normal(shape)),
            jnp.float32,
        )
        for name, shape in shapes.items()
    }


def one_step(transformation, grads, params=None):
    return transformation.update(
        grads, transformation.init(grads if params is None else params), params
    )[0]


def assert_equal(ours, theirs, rtol=1e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol)


PAIRS = {
    "clip": (optaxclip.clip, optax.clip),
    "clip_by_global_norm": (optaxclip.clip_by_global_norm, optax.clip_by_global_norm),
    "clip_by_block_rms": (optaxclip.clip_by_block_rms, optax.clip_by_block_rms),
}
every_pair = pytest.mark.parametrize("ours, theirs", PAIRS.values(), ids=PAIRS)
AGC_SHAPES = {
    name: SHAPES[name] for name in ("vector", "matrix", "stack", "filters", "volume")
}


@every_pair
@pytest.mark.parametrize("limit", NORMS)
def test_updates_equal_those_of_optax(ours, theirs, limit):
    grads = tree(1, FEW_SHAPES)
    assert_equal(one_step(ours(limit), grads), one_step(theirs(limit), grads))


@pytest.mark.parametrize("clipping", [1e-3, 0.3, 1e4])
@pytest.mark.parametrize("name", AGC_SHAPES)
def test_adaptive_grad_clip_equals_that_of_optax(name, clipping):
    grads, params = tree(2, {name: SHAPES[name]}), tree(3, {name: SHAPES[name]})
    assert_equal(
        one_step(optaxclip.adaptive_grad_clip(clipping), grads, params),
        one_step(optax.adaptive_grad_clip(clipping), grads, params),
    )


WITH_ONES = [
    shape for rank in range(5) for shape in itertools.product((1, 3), repeat=rank)
]
WITH_ONES += [(1, 3, 1, 1, 1), (1, 3, 1, 2, 1), (1, 1, 1, 1, 1, 3)]


@pytest.mark.slow
def test_axes_of_size_1_make_the_units_of_optax():
    shapes = {str(shape): shape for shape in WITH_ONES}
    grads, params = tree(5, shapes), tree(6, shapes)
    ours, theirs = (
        jax.jit(lambda g, p, clipper=clipper: one_step(clipper, g, p))(grads, params)
        for clipper in (
            optaxclip.adaptive_grad_clip(0.3),
            optax.adaptive_grad_clip(0.3),
        )
    )
    assert_equal(ours, theirs)
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    clipped = jax.jit(lambda g: one_step(clipper, g))(grads)
    for name, leaf in grads.items():
        wanted = oracles.clip_units([leaf], 1.0)[0]
        np.testing.assert_allclose(clipped[name], wanted, 1e-6)


@pytest.mark.slow
def test_weights_of_outputs_by_inputs_take_an_axis():
    """Rows of (out, in) are the units then, as columns of (in, out) are."""
    shapes = {"linear": (5, 3), "filters": (4, 2, 3, 3), "bias": (5,), "gain": ()}
    grads, params = tree(7, shapes), tree(8, shapes)

    def transposed(tree):
        return {
            name: jnp.moveaxis(x, 0, -1) if x.ndim else x for name, x in tree.items()
        }

    rows = optaxclip.adaptive_grad_clip(
        0.3, axis=lambda path, x: tuple(range(1, x.ndim)) or None
    )
    columns = optax.adaptive_grad_clip(0.3)
    assert_equal(
        transposed(one_step(rows, grads, params)),
        one_step(columns, transposed(grads), transposed(params)),
    )


@pytest.mark.slow
def test_adaptive_grad_clip_takes_the_same_eps_as_optax():
    grads, params = (
        tree(2, AGC_SHAPES),
        jax.tree.map(lambda w: w * 1e-3, tree(3, AGC_SHAPES)),
    )
    assert_equal(
        one_step(optaxclip.adaptive_grad_clip(0.1, 0.5), grads, params),
        one_step(optax.adaptive_grad_clip(0.1, 0.5), grads, params),
    )


ADAM_SHAPES = {name: SHAPES[name] for name in ("vector", "matrix")}
ADAM_PAIRS = {
    **PAIRS,
    "adaptive_grad_clip": (optaxclip.adaptive_grad_clip, optax.adaptive_grad_clip),
}


@pytest.mark.parametrize("ours, theirs", ADAM_PAIRS.values(), ids=ADAM_PAIRS)
def test_five_steps_of_adam_equal_those_of_optax(ours, theirs):
    learning_rate, limit = 0.1, 0.3
    updates = {}
    for name, clipper in (("ours", ours(limit)), ("theirs", theirs(limit))):
        optimizer = optax.chain(clipper, optax.adam(learning_rate))
        step = jax.jit(optimizer.update)
        params = tree(4, ADAM_SHAPES)
        state = optimizer.init(params)
        for seed in range(5):
            updates[name], state = step(tree(10 + seed, ADAM_SHAPES), state, params)
    # Adam divides a mean by a root mean square: gradients that are off by 1e-6 move it
    # by at most twice that, of a step of at most the learning rate.
    for a, b in zip(
        jax.tree.leaves(updates["ours"]), jax.tree.leaves(updates["theirs"])
    ):
        np.testing.assert_allclose(a, b, 0, atol=(2e-6 + 4 * EPS) * learning_rate)


def test_the_walkthrough_prints_the_digits_of_torch(torch):
    grads = [jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0])]
    leaves = in_torch(torch, [np.asarray(grad) for grad in grads])
    theirs = torch.nn.utils.clip_grad_norm_(leaves, 5.0)
    clipper = optaxclip.clip_by_global_norm(5.0, eps=1e-6)
    updates, state = clipper.update(grads, clipper.init(grads))
    printed = [
        [f"{value:.4f}" for value in np.ravel(x)] for x in (state.norm, *updates)
    ]
    assert printed == [["5.4772"], ["2.7386", "3.6515"], ["0.9129", "1.8257"]]
    assert printed == [
        [f"{value:.4f}" for value in np.ravel(x)]
        for x in (theirs.numpy(), *(leaf.grad.numpy() for leaf in leaves))
    ]
