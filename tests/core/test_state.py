"""The state by itself: its blocks, its names, and its form for JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip._core._state import (
    ClipState,
    Entry,
    limits_of,
    names_of_layers,
    pack,
    state_of_placeholder,
    unpack,
)

pytestmark = pytest.mark.slow

EVERYTHING = (("",),), [()]
TENSORS = (("a", "b"),), [(2,)]
ONE_TENSOR = (("a",),), [(1,)]
ONE_ARRAY = (("a",),), [(1, 3)]
SEVERAL = (("a", "b"), ("c",), ("d",)), [(2, 1, 3), (2, 4), (1,)]
BLOCKS = [EVERYTHING, TENSORS, ONE_TENSOR, ONE_ARRAY, SEVERAL]
every_state = pytest.mark.parametrize(
    "blocks", BLOCKS, ids=["everything", "tensors", "tensor", "array", "several"]
)


def filled(shape, first, memory=True):
    """A block whose arrays have different numbers."""
    each = [first + i + jnp.zeros(shape) for i in range(6)]
    # Each row of its own, to be told from the others.
    rows = 10.0 * jnp.arange(int(np.prod(shape))).reshape(shape)
    return Entry(*[x + rows for x in each], {"m": first + rows} if memory else ())


def state_of(blocks, memory=True):
    names, shapes = blocks
    entries = [filled(shape, 100.0 * i, memory) for i, shape in enumerate(shapes)]
    return pack(names, jnp.int32(7), entries), entries


def assert_same(have, want):
    assert jax.tree.structure(have) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, have, want)


@pytest.mark.parametrize("memory", [True, False])
@every_state
def test_a_state_comes_back_in_its_blocks(blocks, memory):
    state, entries = state_of(blocks, memory)
    names, found = state.names, unpack(state)
    assert names == blocks[0] and state.step == 7
    assert_same(found, entries)
    # One block is no tuple of one, and no arrays are no memory.
    assert type(state.norm) is (tuple if len(names) > 1 else type(jnp.ones(1)))
    assert memory or state.memory == ()


def test_a_state_without_norms_has_no_blocks():
    state = pack((), jnp.int32(0), [])
    assert state == ((), 0, *[()] * 7) and unpack(state) == []


@every_state
def test_every_norm_of_a_state_is_found_by_its_name(blocks):
    state, entries = state_of(blocks)
    found = state.by_name()
    assert list(found) == [name for block in blocks[0] for name in block]
    for names, entry, shape in zip(blocks[0], entries, blocks[1]):
        for row, name in enumerate(names):
            rows = len(names) > 1 or (shape == (1,) and name)
            own = jax.tree.map(lambda x, row=row: x[row], entry) if rows else entry
            assert_same(found[name], own)


def test_layers_of_a_state_have_names_of_their_own():
    state, entries = state_of(SEVERAL)
    found = state.by_name(layers=True)
    layers = [f"{x}/{i}" for x in "ab" for i in range(3)]
    experts = [f"c/{i}/{j}" for i in range(2) for j in range(4)]
    assert list(found) == [*layers, *experts, "d"]
    assert_same(found["b/2"], jax.tree.map(lambda x: x[1, 0, 2], entries[0]))
    assert_same(found["c/1/3"], jax.tree.map(lambda x: x[1, 3], entries[1]))


def test_axes_of_size_1_have_no_number_in_names_of_layers():
    assert names_of_layers("w", (2, 1, 2)) == ["w/0/0", "w/0/1", "w/1/0", "w/1/1"]
    assert names_of_layers("w", (1, 1)) == ["w/0"]


@every_state
def test_a_state_is_a_tree_with_keys_of_its_fields(blocks):
    state, _ = state_of(blocks)
    assert_same(jax.tree.map(lambda x: x, state), state)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in leaves:
        assert path[0].name in ClipState._fields
        assert any(leaf is x for x in jax.tree.leaves(getattr(state, path[0].name)))


@every_state
def test_a_placeholder_takes_the_form_of_a_state(blocks):
    # Mapped once before, as wrappers of optax do with a new state.
    open_state = jax.tree.map(lambda x: x, state_of_placeholder())
    state, _ = state_of(blocks)
    mapped = jax.tree.map(lambda _, field: field, open_state, state)
    assert_same(mapped, state)


def test_a_step_counts_what_it_changed_and_what_was_broken():
    norm = jnp.array([5.0, 1.0, np.nan, 3.0])
    limit = jnp.array([2.0, 2.0, 2.0, np.nan])
    grads, limits = (dict(zip("abcd", x)) for x in (norm, limit))
    clipper = optaxclip.clip_by_tensor_norm(1.0)
    state = clipper.init(grads)._replace(
        step=jnp.int32(3), clipped=jnp.full(4, 5), nonfinite=jnp.full(4, 2)
    )
    _, state = clipper.update(grads, state, limit=limits)
    np.testing.assert_array_equal(state.norm, norm)
    np.testing.assert_array_equal(state.limit, limit)
    np.testing.assert_allclose(state.factor, [0.4, 1.0, np.nan, np.nan], 1e-6)
    np.testing.assert_array_equal(state.clipped, [6, 5, 5, 5])
    np.testing.assert_array_equal(state.clipped_recently, [0.25, 0, 0, 0])
    np.testing.assert_array_equal(state.nonfinite, [2, 2, 3, 3])


def test_limits_of_leaves_are_found_by_path():
    state, _ = state_of(((("b", "a"),), [(2,)]))
    found = limits_of(state, {"a": jnp.ones(3), "b": jnp.ones(3)})
    assert found == {"a": state.limit[1], "b": state.limit[0]}


@every_state
def test_a_program_of_a_state_can_be_stored(blocks):
    pytest.importorskip("flatbuffers")
    state, _ = state_of(blocks)
    program = jax.export.export(jax.jit(lambda state: state))(state)
    assert b"optaxclip.ClipState" in program.serialize()
    assert_same(jax.export.deserialize(program.serialize()).call(state), state)


def test_a_gradient_of_0_is_not_counted_as_clipped():
    normalize, grads = optaxclip.shrinks.normalize, jnp.zeros(2)
    for clipper in (
        optaxclip.clip_by_global_norm(1.0, shrink=normalize),
        optaxclip.clip_by_global_norm(1.0, shrink=normalize, eps=1e-6),
        optaxclip.clip_by_global_norm(0.0, eps=1e-6),
        # A shrink of the user's, which gives it a length, where no eps is added.
        optaxclip.adaptive_grad_clip(1.0, shrink=lambda norm, limit: limit),
    ):
        _, state = clipper.update(grads, clipper.init(grads), jnp.ones(2))
        assert (state.factor, state.clipped) == (1, 0)


@pytest.mark.parametrize(
    ("clipper", "grads", "shape", "layers"),
    [
        (optaxclip.clip_by_tensor_norm(1.0), [3.0], (), ["w"]),
        (optaxclip.clip_by_tensor_norm(1.0, stacked=1), [[3.0]], (1, 1), ["w/0"]),
        (optaxclip.clip_by_unitwise_norm(1.0), [[3.0], [4.0]], (1, 1), ["w/0"]),
        (
            optaxclip.clip_by_unitwise_norm(1.0),
            [[3.0, 4.0], [1.0, 1.0]],
            (1, 2),
            ["w/0", "w/1"],
        ),
    ],
)
def test_a_single_norm_keeps_its_shape(clipper, grads, shape, layers):
    tree = {"w": jnp.array(grads)}
    _, state = clipper.update(tree, clipper.init(tree))
    assert state.by_name()["w"].norm.shape == shape
    assert list(state.by_name(layers=True)) == (["w"] if shape == () else layers)
    first = clipper.init(tree)
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize(
    "shrink",
    [
        lambda norm, limit: norm * (limit / norm),
        lambda norm, limit: limit + 1 / norm,
    ],
)
def test_zeros_stay_where_a_shrink_has_no_number_for_them(shrink):
    tree = {"a": jnp.zeros(2), "b": jnp.array([3.0, 4.0])}
    clipper = optaxclip.clip_by_tensor_norm(1.0, shrink=shrink)
    updates, state = clipper.update(tree, clipper.init(tree))
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])
    assert (state.factor[0], state.clipped[0], state.nonfinite[0]) == (1, 0, 0)
    grad = optaxclip.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0, shrink=shrink)
    result = grad(jnp.ones(2), jnp.array([[0.0, 0.0], [3.0, 4.0]]))
    assert jnp.isfinite(result.grads).all() and result.nonfinite == 0


@pytest.mark.parametrize(
    ("shrink", "limit"),
    [
        (lambda norm, limit: jnp.minimum(norm * (limit / norm), norm), 1.0),
        (lambda norm, limit: jnp.sqrt(norm * limit), 1.0),
        (lambda norm, limit: limit * jnp.tanh(norm / limit), 0.0),
    ],
)
def test_derivatives_at_0_by_any_shrink_are_finite(shrink, limit):
    tree = {"a": jnp.zeros(2), "b": jnp.array([3.0, 4.0])}
    clipper = optaxclip.clip_by_tensor_norm(limit, shrink=shrink)
    state, ones = clipper.init(tree), jax.tree.map(jnp.ones_like, tree)
    _, back = jax.vjp(lambda x: clipper.update(x, state)[0], tree)
    _, moved = jax.jvp(lambda x: clipper.update(x, state)[0], (tree,), (ones,))
    # A product of 1 and the derivative, from both sides.
    for name, leaf in back(ones)[0].items():
        assert jnp.isfinite(leaf).all()
        np.testing.assert_allclose(leaf.sum(), moved[name].sum(), rtol=1e-5, atol=1e-6)


def test_a_shrink_that_is_broken_above_0_breaks_the_updates():
    grads = jnp.array([3.0, 4.0])
    clipper = optaxclip.clip_by_global_norm(1.0, shrink=lambda n, c: jnp.sqrt(c - n))
    updates, state = clipper.update(grads, clipper.init(grads))
    assert jnp.isnan(updates).all() and jnp.isnan(state.factor)


def test_a_shrink_that_takes_no_limit_has_its_derivative_at_limit_0():
    grads = jnp.array([3.0, 4.0])
    clipper = optaxclip.clip_by_global_norm(0.0, shrink=lambda n, c: n / 2)
    state = clipper.init(grads)
    slope = jax.jacobian(lambda x: clipper.update(x, state)[0])(grads)
    np.testing.assert_allclose(slope, np.eye(2) / 2, atol=1e-6)


def test_by_name_refuses_the_state_of_several_models():
    clipper = optaxclip.clip_by_tensor_norm(1.0)
    grads = {"actor": jnp.ones((3, 2)), "critic": jnp.ones((3, 4))}
    states = jax.vmap(clipper.init)(grads)
    text = r"by_name: the state must be of one model, .* has the shape \(3,\)"
    with pytest.raises(ValueError, match=text):
        states.by_name()
    mapped = jax.vmap(optaxclip.ClipState.by_name)(states)
    assert mapped["critic"].norm.shape == (3,)
