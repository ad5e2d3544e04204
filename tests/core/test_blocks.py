"""Blocks of the state: norms of one shape and one rule are the rows of one array."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.sharded import mesh_of

SHAPES = {"a": (5, 3), "b": (2, 4), "c": (7, 3), "d": (6,), "e": ()}


def tree(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    pairs = zip(SHAPES.items(), keys)
    return {name: jax.random.normal(key, shape) for (name, shape), key in pairs}


def names_of(state):
    """The names of the norms in each block."""
    return tuple(map(tuple, state.names))


def units(x):
    """The norm of each unit in float64 NumPy."""
    x = np.asarray(x, np.float64)
    axes = tuple(range(max(x.ndim - 1, 1))) if x.ndim else ()
    return np.sqrt(np.sum(x**2, axes, keepdims=x.ndim > 1))


def test_units_of_one_number_are_the_rows_of_one_array():
    state = optaxclip.clip_by_unitwise_norm(1.0).init(tree(0))
    assert names_of(state) == (("a", "c"), ("b",), ("d", "e"))
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


@pytest.mark.slow
def test_rules_of_their_own_are_blocks_of_their_own():
    rule = optaxclip.rules.growth(2.0)
    limits = {"a": rule, "b": 1.0, "c": 1.0, "d": 1.0, "e": rule}
    clipper = optaxclip.clip_by_unitwise_norm(limits)
    begin = clipper.init(tree(0))
    _, state = clipper.update(tree(0), begin)
    assert (
        names_of(state) == names_of(begin) == (("a",), ("b",), ("c",), ("d",), ("e",))
    )
    # A number is a row, and an array is none.
    for norms in (begin.norm, state.norm):
        assert [x.shape for x in norms] == [(1, 3), (1, 4), (1, 3), (1,), (1,)]


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


@pytest.mark.slow
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
    assert names_of(begin) == (("a", "c"), ("b",))
    of_blocks = (P(None, None, "x"), P())
    fields = dict.fromkeys({*begin._fields} - {"names", "step", "memory"}, of_blocks)
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
def test_more_than_two_leaves_of_a_shape_are_several_blocks():
    names = "abcde"
    grads = {name: jnp.full((2, 3), i + 1.0) for i, name in enumerate(names)}
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    updates, state = clipper.update(grads, clipper.init(grads))
    assert names_of(state) == (tuple("ab"), tuple("cd"), ("e",))
    for name in names:
        np.testing.assert_allclose(np.linalg.norm(updates[name], axis=0), 1, 1e-6)
        norm = state.by_name()[name].norm
        np.testing.assert_allclose(norm, units(grads[name]), rtol=1e-6)


def test_limits_of_a_block_may_have_any_dtype():
    limits = {"a": 10**12, "b": jnp.bfloat16(2), "c": np.float64(0.5)}
    clipper = optaxclip.clip_by_tensor_norm(limits)
    grads = {name: tree(5)[name] for name in limits}
    with jax.numpy_dtype_promotion("strict"):
        _, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_array_equal(state.limit, np.float32([1e12, 2, 0.5]))


def test_an_array_in_joined_rules_is_checked_by_init():
    rule = optaxclip.rules.minimum(jnp.ones(7), 2.0)
    for limit in (rule, optaxclip.rules.minimum(1.0, rule)):
        with pytest.raises(ValueError, match=r"max_norm must be .* shape \(7,\)"):
            optaxclip.clip_by_unitwise_norm(limit).init({"a": jnp.ones((2, 3))})


@pytest.mark.slow
@pytest.mark.parametrize("own_rules", [False, True])
def test_blocks_of_an_explicit_mesh_are_split_as_their_norms(own_rules):
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    if own_rules:
        limits = {name: optaxclip.rules.growth(2.0) for name in "ab"}
        clipper = optaxclip.clip_by_unitwise_norm(limits)
    mesh = mesh_of((2,), ("x",), kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        grads = dict.fromkeys("ab", jnp.ones((3, 4)))
        grads = sharded.place(grads, mesh, dict.fromkeys("ab", P(None, "x")))
        begin = clipper.init(grads)
        _, state = clipper.update(grads, begin)
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(begin.norm)]
    assert specs == ([P(None, "x")] * 2 if own_rules else [P(None, None, "x")])
    assert jax.tree.map(jax.typeof, begin) == jax.tree.map(jax.typeof, state)


def test_rules_take_their_own_rows_of_a_block_of_norms():
    grads = {name: tree(6)["a"] * (number + 1) for number, name in enumerate("abcd")}
    schedule = optax.constant_schedule(0.5)
    limits = {"a": schedule, "b": 1.0, "c": schedule, "d": 2.0}
    clipper = optaxclip.clip_by_tensor_norm(limits)
    updates, state = clipper.update(grads, clipper.init(grads))
    assert names_of(state) == (("a",), ("b", "d"), ("c",))
    for name, limit in {"a": 0.5, "b": 1.0, "c": 0.5, "d": 2.0}.items():
        norm = np.linalg.norm(np.float64(grads[name]))
        np.testing.assert_allclose(state.by_name()[name].norm, norm, rtol=1e-6)
        expected = np.float64(grads[name]) * limit / norm
        np.testing.assert_allclose(updates[name], expected, rtol=1e-6)


def test_limits_stay_with_their_leaves_where_one_is_missing():
    clipper = optaxclip.clip_by_tensor_norm({"a": 0.5, "b": 1.0, "c": 2.0})
    grads = {name: tree(7)[name] for name in "abc"}
    state = clipper.init(grads)
    updates, state = clipper.update({**grads, "b": None}, state)
    for name, limit in {"a": 0.5, "c": 2.0}.items():
        np.testing.assert_allclose(np.linalg.norm(updates[name]), limit, rtol=1e-6)
    np.testing.assert_array_equal(state.limit, [0.5, np.inf, 2.0])


def test_a_first_state_has_the_dtype_of_its_norms():
    clipper = optaxclip.clip_by_tensor_norm(optaxclip.rules.growth(2.0))
    with jax.enable_x64(True):
        for dtype in ("float32", "float64"):
            state = clipper.init({"a": jnp.ones(3, dtype), "b": jnp.ones((), dtype)})
            for x in (state.norm, state.limit, state.factor, state.memory):
                assert x.dtype == dtype
            counted = state.clipped, state.nonfinite, state.clipped_recently
            assert [x.dtype for x in counted] == ["int32", "int32", "float32"]
