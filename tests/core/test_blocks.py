"""Blocks of the state: norms of one shape and one rule are the rows of one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.sharded import mesh_of

SHAPES = {"a": (5, 3), "b": (2, 4), "c": (7, 3), "d": (6,), "e": ()}


def tree(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    pairs = zip(SHAPES.items(), keys)
    return {name: jax.random.normal(key, shape) for (name, shape), key in pairs}


def units(x):
    """The norm of each unit in float64 NumPy."""
    x = np.asarray(x, np.float64)
    axes = tuple(range(max(x.ndim - 1, 1))) if x.ndim else ()
    return np.sqrt(np.sum(x**2, axes, keepdims=x.ndim > 1))


def test_units_of_one_number_are_the_rows_of_one_array():
    state = optaxclip.clip_by_unitwise_norm(1.0).init(tree(0))
    assert state.names == (("a", "c"), ("b",), ("d", "e"))
    assert [x.shape for x in state.norm] == [(2, 1, 3), (1, 4), (2,)]
    # Six fields of three blocks, and the step.
    assert len(jax.tree.leaves(state)) == 19


def test_each_unit_of_a_block_keeps_its_own_limit():
    grads = tree(1)
    limits = {"a": 0.5, "b": 1.0, "c": jnp.array([[0.1, 1.0, 9.0]]), "d": 1.0, "e": 2.0}
    clipper = optaxclip.clip_by_unitwise_norm(limits)
    updates, state = clipper.update(grads, clipper.init(grads))
    for name, grad in grads.items():
        norm, limit = units(grad), np.asarray(limits[name])
        expected = np.asarray(grad) * np.minimum(1, limit / norm)
        np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
        entry = state.by_name()[name]
        np.testing.assert_allclose(entry.norm, norm, rtol=1e-6)
        np.testing.assert_allclose(entry.limit, np.broadcast_to(limit, norm.shape))


def test_rules_of_their_own_are_blocks_of_their_own():
    rule = optaxclip.rules.growth(2.0)
    limits = {"a": rule, "b": 1.0, "c": 1.0, "d": 1.0, "e": rule}
    state = optaxclip.clip_by_unitwise_norm(limits).init(tree(0))
    assert state.names == (("a",), ("b",), ("c",), ("d",), ("e",))


@pytest.mark.slow
def test_a_missing_leaf_keeps_the_row_of_its_units():
    grads = tree(2)
    clipper = optaxclip.clip_by_unitwise_norm(optaxclip.rules.growth(2.0))
    _, first = clipper.update(grads, clipper.init(grads))
    updates, state = clipper.update({**grads, "a": None}, first)
    assert updates["a"] is None
    before, after = first.by_name(), state.by_name()
    for one, other in zip(jax.tree.leaves(before["a"]), jax.tree.leaves(after["a"])):
        np.testing.assert_array_equal(one, other)
    # The rule had no limit at first, and then twice the norm.
    assert np.all(np.isinf(after["a"].limit))
    np.testing.assert_allclose(after["c"].limit, 2 * units(grads["c"]), rtol=1e-6)


def test_metrics_name_each_unit_of_a_block():
    grads = tree(3)
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    _, state = clipper.update(grads, clipper.init(grads))
    report = optaxclip.metrics(state, layers=True)
    for name in ("a", "b", "c"):
        for number, norm in enumerate(units(grads[name])[0]):
            key = f"clip/norm_before/{name}/{number}"
            np.testing.assert_allclose(report[key], norm, rtol=1e-6)


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.slow
def test_units_split_in_different_ways_are_in_different_blocks(typed):
    specs = {"a": P(None, "x"), "b": P("x", None), "c": P(None, "x")}
    grads = sharded.random_tree(4, dict.fromkeys(specs, (8, 8)))
    clipper = optaxclip.clip_by_unitwise_norm(0.5, mesh_axes=specs)
    # Outside shard_map all norms have one shape. Inside, those of a and c have another.
    begin = clipper.init(grads)
    assert begin.names == (("a", "c"), ("b",))
    of_blocks = (P(None, None, "x"), P())
    fields = dict.fromkeys(begin._fields[2:-1], of_blocks)
    of_state = begin._replace(step=P(), **fields)
    step = sharded.on_each_part(
        clipper.update,
        mesh_of((4,), ("x",)),
        (specs, of_state),
        (specs, of_state),
        check_vma=typed,
    )
    have, state = step(grads, begin)
    want, alone = optaxclip.clip_by_unitwise_norm(0.5).update(grads, None)
    for name in specs:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-6)
        norms = state.by_name()[name].norm, alone.by_name()[name].norm
        np.testing.assert_allclose(*norms, rtol=1e-6)


@pytest.mark.slow
def test_the_sixth_leaf_of_a_shape_begins_a_block():
    names = "abcdefgh"
    grads = {name: jnp.full((2, 3), i + 1.0) for i, name in enumerate(names)}
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    updates, state = clipper.update(grads, clipper.init(grads))
    assert state.names == (tuple("abcde"), tuple("fgh"))
    for name in names:
        np.testing.assert_allclose(np.linalg.norm(updates[name], axis=0), 1, 1e-6)
        norm = state.by_name()[name].norm
        np.testing.assert_allclose(norm, units(grads[name]), rtol=1e-6)
