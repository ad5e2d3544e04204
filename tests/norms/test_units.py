"""Norms of units: which axes they sum, for leaves of every rank and stacked ones."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.norms.leaves import (
    EVERY_RANK,
    at_every_order,
    every_order,
    random_leaves,
    tolerance,
)


@cache
def unit_norms():
    leaves = random_leaves("mixed", 3, shapes=EVERY_RANK)
    return leaves, at_every_order(optaxclip.unitwise_norm, leaves)


@every_order
def test_unit_norm_measures_what_feeds_one_output(ord):
    leaves, norms = unit_norms()
    for ours, leaf in zip(norms[ord], leaves, strict=True):
        expected = oracles.unitwise_norm(leaf, ord)
        assert ours.shape == (expected.shape if leaf.ndim > 1 else ())
        np.testing.assert_allclose(ours, expected.reshape(ours.shape), tolerance(ord))


def test_unit_norm_sums_over_the_axes_that_are_named():
    leaf = random_leaves("float32", 4, shapes=[(3, 4, 5)])[0]
    wanted = {0: (0,), 1: (1,), -1: (2,), (0, 2): (0, 2), (-1, 1): (1, 2)}
    for norm, axes in zip(
        jax.jit(lambda x: [optaxclip.unitwise_norm(x, axis=axis) for axis in wanted])(
            leaf
        ),
        wanted.values(),
        strict=True,
    ):
        np.testing.assert_allclose(norm, oracles.unitwise_norm(leaf, 2, axes), 1e-6)


def test_axes_of_stacked_units_count_within_one_layer():
    leaf = random_leaves("float32", 5, shapes=[(4, 3, 5)])[0]
    first, last = jax.jit(
        lambda x: [
            optaxclip.unitwise_norm(x, stacked=1),
            optaxclip.unitwise_norm(x, axis=-1, stacked=1),
        ]
    )(leaf)
    np.testing.assert_allclose(first, oracles.unitwise_norm(leaf, 2, (1,)), 1e-6)
    np.testing.assert_allclose(last, oracles.unitwise_norm(leaf, 2, (2,)), 1e-6)


UNITS = {
    (): (),
    (4,): (0,),
    (4, 3): (0,),
    (4, 3, 2): (0,),
    (2, 3, 4, 5): (0, 1, 2),
    (2, 3, 2, 4, 5): (0, 1, 2, 3),
}


@cache
def norms_of_units():
    leaves = {
        str(shape): np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        for shape in UNITS
    }
    return leaves, jax.jit(optaxclip.unitwise_norm)(leaves)


@pytest.mark.parametrize(("shape", "over"), UNITS.items(), ids=str)
def test_a_unit_of_each_rank_sums_the_axes_of_the_paper(shape, over):
    leaves, norms = norms_of_units()
    x, norm = leaves[str(shape)], norms[str(shape)]
    wanted = np.sqrt(
        np.sum(np.asarray(x, np.float64) ** 2, over, keepdims=len(shape) > 1)
    )
    assert norm.shape == wanted.shape
    np.testing.assert_allclose(norm, wanted, rtol=1e-6)


def test_a_rank_without_a_rule_wants_an_axis():
    with pytest.raises(
        ValueError,
        match=(
            r"unitwise_norm: axis must be given for the leaf 'w' of rank 6: there is "
            r"no rule above rank 5\."
        ),
    ):
        optaxclip.unitwise_norm({"w": jnp.ones((2, 2, 1, 1, 1, 1))})
    assert optaxclip.unitwise_norm({"w": jnp.ones((1,) * 6)}, axis=-1)["w"] == 1.0


def test_a_layer_that_squeezes_to_a_vector_is_one_unit():
    rows = np.arange(1.0, 21.0, dtype=np.float32).reshape(4, 1, 5)
    tree, stacked = {"stack": rows, "leaf": rows[:1]}, {"stack": 1, "leaf": 1}
    norms = optaxclip.unitwise_norm(tree, stacked=stacked)
    wanted = np.sqrt(np.sum(np.float64(rows) ** 2, (1, 2), keepdims=True))
    np.testing.assert_allclose(norms["stack"], wanted, 1e-6)
    np.testing.assert_allclose(norms["leaf"], wanted[:1], 1e-6)
    one_by_one = optaxclip.unitwise_norm(rows[:1], axis=0)
    np.testing.assert_array_equal(one_by_one, rows[:1])


@pytest.mark.parametrize("count", [-1, 3, 1.0, "1"])
def test_more_stacked_axes_than_a_leaf_has_are_refused(count):
    with pytest.raises(
        ValueError,
        match=(
            r"tensor_norm: stacked must be a number of leading axes, from 0 to 2 for "
            r"the leaf 'w' of shape \(2, 3\), or a tuple of its axes, got "
        ),
    ):
        optaxclip.tensor_norm({"w": jnp.ones((2, 3))}, stacked=count)


def test_integers_in_a_group_do_not_count():
    tree = {"w": jnp.array([3.0, 4.0]), "n": jnp.arange(9), "m": jnp.arange(2)}
    norms = optaxclip.group_norm(tree, {"w": "first", "n": "first", "m": "second"})
    assert norms == {"first": 5.0, "second": 0.0}


def test_axes_of_units_count_from_the_front_and_from_the_end():
    x = jnp.array([[3.0, 1.0], [4.0, 1.0]])
    for axis in (0, -2):
        np.testing.assert_allclose(
            optaxclip.unitwise_norm(x, axis=axis), [[5.0, 2**0.5]], rtol=1e-6
        )
    for axis in (2, -3, 0.0):
        with pytest.raises(
            ValueError, match=rf"unitwise_norm: axis={axis} does not fit the leaf"
        ):
            optaxclip.unitwise_norm(x, axis=axis)


def test_axes_may_differ_from_leaf_to_leaf_of_a_tuple():
    x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    whole, rows = optaxclip.unitwise_norm((x, x), axis=((0, 1), 1))
    np.testing.assert_allclose(whole, [[125**0.5]], rtol=1e-6)
    np.testing.assert_allclose(rows, [[5.0], [10.0]], rtol=1e-6)


def test_the_vector_of_each_stacked_layer_is_a_unit():
    x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    np.testing.assert_allclose(
        optaxclip.unitwise_norm(x, stacked=1), [[5.0], [10.0]], rtol=1e-6
    )
