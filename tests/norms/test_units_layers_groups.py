"""The options that say what is measured together: axes of units, stacks of layers,
labels of groups. Each may be one value, a tree of them, or a function.
"""

import dataclasses
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optaxclip
from optaxclip import rules
from tests import oracles
from tests.helpers import apply
from tests.norms.leaves import EVERY_RANK, at_every_order, random_leaves, tolerance


@cache
def unit_norms():
    leaves = random_leaves("mixed", 3, shapes=EVERY_RANK)
    return leaves, at_every_order(optaxclip.unitwise_norm, leaves)


def test_unit_norm_measures_what_feeds_one_output():
    leaves, norms = unit_norms()
    for ord, norms_of_leaves in norms.items():
        for ours, leaf in zip(norms_of_leaves, leaves, strict=True):
            wanted = oracles.unitwise_norm(leaf, ord)
            assert ours.shape == (wanted.shape if leaf.ndim > 1 else ())
            wanted = wanted.reshape(ours.shape)
            np.testing.assert_allclose(ours, wanted, tolerance(ord))


@pytest.mark.parametrize("stacked", [0, 1])
def test_unit_norm_sums_over_the_axes_that_are_named(stacked):
    """Those of a stacked leaf count within one layer."""
    shape = (4, 3, 2, 5)[1 - stacked :]
    leaf = random_leaves("float32", 4, shapes=[shape])[0]
    for axis in (0, 1, -1, (0, 2), (-1, 1)):
        named = axis if isinstance(axis, tuple) else (axis,)
        over = tuple(each % 3 + stacked for each in named)
        found = optaxclip.unitwise_norm(leaf, axis=axis, stacked=stacked)
        np.testing.assert_allclose(found, oracles.unitwise_norm(leaf, 2, over), 1e-6)


STACKED_LAYERS = {
    "layers": {
        "kernel": jnp.ones((4, 3, 5)),
        "bias": jnp.ones((4, 5)),
        "scale": jnp.ones((4, 3)),
    },
    "head": jnp.ones((3, 7)),
}


@pytest.mark.parametrize("call", ["adaptive_grad_clip", "clip_by_unitwise_norm"])
def test_layers_that_look_stacked_are_warned_of(call):
    build = getattr(optaxclip, call)
    text = rf"^{call}: the leaves below 'layers' look like 4 layers.*stacked=1"
    with pytest.warns(UserWarning, match=text) as warned:
        build(0.1).init(STACKED_LAYERS)
    assert warned[0].filename == __file__
    # Warnings are errors in these tests.
    build(0.1, stacked={"layers": 1, "head": None}).init(STACKED_LAYERS)
    build(0.1, axis=0).init(STACKED_LAYERS)


def test_leaves_that_do_not_look_stacked_are_not_warned_of():
    attention = {"kernel": jnp.ones((8, 8, 4)), "bias": jnp.ones((8, 4))}
    convolution = {"kernel": jnp.ones((3, 3, 3, 8)), "bias": jnp.ones(5)}
    layers = {"kernel": jnp.ones((4, 3, 5)), "bias": jnp.ones((4, 5))}
    dense = [{"kernel": jnp.ones((5, 5)), "bias": jnp.ones(5)}] * 3
    tree = {"a": attention, "b": convolution, "c": layers, "d": dense}
    optaxclip.adaptive_grad_clip(0.1).init(tree)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("broken", [(0, 0), (3, 5), (7, 15)])
def test_a_state_tells_a_broken_unit_on_a_mesh(kind, broken):
    """A maximum of floats would drop NaN there."""
    grads = np.ones((8, 16), np.float32)
    grads[broken] = np.nan
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    devices = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(devices):
        split = jax.device_put(grads, NamedSharding(devices, PartitionSpec("x", "y")))
        state = jax.jit(clipper.update)(split, clipper.init(split))[1]
    assert np.isnan(state.norm)
    assert np.isnan(state.factor)
    assert state.limit == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_broken_units_the_norm_that_is_nan_is_told(order):
    grads = jnp.array([[3.0, jnp.nan], [4.0, 0.0]])[:, order]
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    # The limit of the other unit is NaN.
    limit = jnp.array([[jnp.nan, 1.0]])[:, order]
    state = clipper.update(grads, clipper.init(grads), limit=limit)[1]
    assert np.isnan(state.norm)


def test_a_layer_that_squeezes_to_a_vector_is_one_unit():
    for shape in ((4, 1, 5), (4, 5)):
        rows = np.arange(1.0, 21.0, dtype=np.float32).reshape(shape)
        norms = optaxclip.unitwise_norm(rows, stacked=1)
        every = tuple(range(1, rows.ndim))
        np.testing.assert_allclose(norms, oracles.norm_over(rows, every), 1e-6)


def test_integers_in_a_group_do_not_count():
    tree = {"w": jnp.array([3.0, 4.0]), "n": jnp.arange(9), "m": jnp.arange(2)}
    norms = optaxclip.group_norm(tree, {"w": "first", "n": "first", "m": "second"})
    assert norms == {"first": 5.0, "second": 0.0}


def test_axes_may_differ_from_leaf_to_leaf_of_a_tuple():
    x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    whole, rows = optaxclip.unitwise_norm((x, x), axis=((0, 1), 1))
    np.testing.assert_allclose(whole, [[125**0.5]], rtol=1e-6)
    np.testing.assert_allclose(rows, [[5.0], [10.0]], rtol=1e-6)


L, E, F = 3, 4, 5
# As MaxText and T5X stack: inputs, layers, outputs.
MAXTEXT = {"wi": (E, L, F), "wo": (F, L, E), "scale": (E, L)}
TREE = {
    name: np.random.default_rng(place).standard_normal(shape).astype(np.float32)
    for place, (name, shape) in enumerate(MAXTEXT.items())
}


def root_of_squares(x, axes):
    return np.sqrt(np.sum(np.float64(x) ** 2, axes, keepdims=True))


def assert_norms_of_axis_1(norms):
    for name, x in TREE.items():
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        np.testing.assert_allclose(norms[name], root_of_squares(x, axes), 1e-6)


STACKS = {
    "tuple": (1,),
    "by path, from the end": {"wi": (-2,), "wo": (1,), "scale": (-1,)},
    "function": lambda path, leaf: (1,),
}


def test_layers_are_on_the_axes_that_a_tuple_names():
    for stacked in STACKS.values():
        assert_norms_of_axis_1(optaxclip.tensor_norm(TREE, stacked=stacked))


def test_an_int_counts_leading_axes():
    x = TREE["wi"]
    for count, axes in ((1, (1, 2)), (2, (2,))):
        norms = optaxclip.tensor_norm(x, stacked=count)
        np.testing.assert_allclose(norms, root_of_squares(x, axes), 1e-6)


def test_experts_lie_on_two_axes_in_any_order():
    x = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    for axes in ((0, 2), (2, 0), (-2, 0)):
        norms = optaxclip.tensor_norm(x, stacked=axes)
        np.testing.assert_allclose(norms, root_of_squares(x, (1, 3)), 1e-6)


def test_every_order_measures_layers_on_axis_1():
    leaf = TREE["wi"]
    norms = at_every_order(partial(optaxclip.tensor_norm, stacked=(1,)), leaf)
    for ord, norms_of_layers in norms.items():
        wanted = [oracles.norm([leaf[:, i]], ord) for i in range(L)]
        np.testing.assert_allclose(norms_of_layers[0, :, 0], wanted, tolerance(ord))


def test_units_lie_within_the_layers_of_axis_1():
    norms = optaxclip.unitwise_norm(TREE, stacked=(1,))
    np.testing.assert_allclose(norms["wi"], root_of_squares(TREE["wi"], 0), 1e-6)
    np.testing.assert_allclose(norms["scale"], root_of_squares(TREE["scale"], 0), 1e-6)
    norms = optaxclip.unitwise_norm(TREE["wi"], axis=-1, stacked=(1,))
    np.testing.assert_allclose(norms, root_of_squares(TREE["wi"], 2), 1e-6)


def test_a_leaf_that_is_not_stacked_raises_by_name():
    tree = {"blocks": TREE, "table": jnp.ones((7, E))}
    with pytest.raises(ValueError, match=r"count 3 in 'blocks/scale' and 4 in 'table'"):
        optaxclip.tensor_norm(tree, stacked=(1,))
    norms = optaxclip.tensor_norm(tree, stacked={"blocks": (1,), "table": None})
    assert_norms_of_axis_1(norms["blocks"])
    assert norms["table"].shape == ()


def test_an_axis_that_a_layer_does_not_have_is_refused_with_its_rank():
    layers = {"w": jnp.ones((3, 4, 5))}
    text = r"axis=2 does not fit a layer of the leaf 'w', a tensor of rank 2"
    with pytest.raises(ValueError, match=text):
        optaxclip.unitwise_norm(layers, axis=2, stacked=1)
    deep = {"w": jnp.ones((2, 2, 2, 2, 2, 2, 2))}
    with pytest.raises(ValueError, match=r"for a layer of the leaf 'w' of rank 6"):
        optaxclip.unitwise_norm(deep, stacked=1)


def test_a_size_that_only_a_run_knows_is_compared_as_a_symbol():
    (n,) = jax.export.symbolic_shape("n")
    args = {"a": jax.ShapeDtypeStruct((2, n), np.float32)}
    args["b"] = jax.ShapeDtypeStruct((3, n), np.float32)
    measure = jax.jit(lambda tree: optaxclip.tensor_norm(tree, stacked=(1,)))
    norms = jax.export.export(measure)(args).call(
        {"a": jnp.ones((2, 5)), "b": jnp.ones((3, 5))}
    )
    np.testing.assert_allclose(norms["b"], np.full((1, 5), np.sqrt(3)), 1e-6)


@pytest.mark.parametrize("shape", ["n, 4, 3", "4, n, 3", "n, m, 3"])
def test_units_over_axes_of_unknown_size_are_exported_for_a_gpu(shape):
    sizes = jax.export.symbolic_shape(shape)
    leaf = jax.ShapeDtypeStruct(sizes, np.float32)
    norms = jax.jit(partial(optaxclip.unitwise_norm, axis=(0, 1)))
    exported = jax.export.export(norms, platforms=["cuda"])(leaf)
    assert exported.out_avals[0].shape == (1, 1, 3)


def test_units_whose_number_only_a_run_knows_are_clipped_beside_others():
    def clipped(tree):
        clipper = optaxclip.adaptive_grad_clip(0.01)
        return clipper.update(tree, clipper.init(tree), tree)[0]

    (n,) = jax.export.symbolic_shape("n")
    forms = {
        "a": jax.ShapeDtypeStruct((4, n), np.float32),
        "b": jax.ShapeDtypeStruct((4, 3), np.float32),
    }
    exported = jax.export.export(jax.jit(clipped))(forms)
    tree = {"a": 3 * jnp.ones((4, 5)), "b": jnp.ones((4, 3))}
    chex.assert_trees_all_close(exported.call(tree), clipped(tree), rtol=1e-6)


@partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=[])
@dataclasses.dataclass
class Model:
    w: Any
    b: Any

    def __call__(self, x: Any) -> Any:
        return self.w * x + self.b


GRADS = Model(3 * jnp.ones((2, 2)), jnp.array([3.0, 4.0]))  # norms 6 and 5


def clipped(clipper, grads=GRADS):
    return clipper.update(grads, clipper.init(grads))[0]


LIMITS = {
    "numbers": Model(3.0, 0.5),
    "schedule": Model(lambda step: 3.0, 0.5),
    "schedule alone": Model(lambda step: 3.0, None),
    "rule": Model(rules.minimum(3.0, 9.0), np.float32(0.5)),
}


def test_limits_in_a_callable_tree_are_its_leaves():
    for name, limits in LIMITS.items():
        found = clipped(optaxclip.clip_by_tensor_norm(limits))
        b = GRADS.b if limits.b is None else [0.3, 0.4]
        np.testing.assert_allclose(found.w, np.full((2, 2), 1.5), rtol=1e-6)
        np.testing.assert_allclose(found.b, b, rtol=1e-6, err_msg=name)


def test_a_callable_tree_of_limits_for_one_norm_is_no_schedule():
    with pytest.raises(TypeError, match=r"clip_grads: max_norm must be a real number"):
        optaxclip.clip_grads(GRADS, LIMITS["numbers"])


@pytest.mark.slow
def test_labels_in_a_callable_tree_are_its_leaves():
    labels = Model("matrix", "vector")
    norms = optaxclip.group_norm(GRADS, labels)
    assert {key: float(x) for key, x in norms.items()} == {"matrix": 6, "vector": 5}
    clipper = optaxclip.clip_by_group_norm({"matrix": 3.0, "vector": 0.5}, labels)
    np.testing.assert_allclose(clipped(clipper).b, [0.3, 0.4], rtol=1e-6)


@pytest.mark.slow
def test_axes_and_layers_in_callable_trees_are_their_leaves():
    norms = optaxclip.unitwise_norm(GRADS, axis=Model(1, None))
    np.testing.assert_allclose(norms.w, np.full((2, 1), np.sqrt(18)), rtol=1e-6)
    norms = optaxclip.tensor_norm(GRADS, stacked=Model(1, None))
    np.testing.assert_allclose(norms.w, np.full((2, 1), np.sqrt(18)), rtol=1e-6)
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked=Model(1, None))
    np.testing.assert_allclose(clipped(clipper).w, np.full((2, 2), 0.5**0.5), rtol=1e-6)


@pytest.mark.slow
def test_functions_that_are_nodes_to_jax_stay_functions():
    schedule = jax.tree_util.Partial(lambda share, step: share * 6.0, 0.5)
    found = clipped(optaxclip.clip_by_tensor_norm(schedule))
    np.testing.assert_allclose(found.w, np.full((2, 2), 1.5), rtol=1e-6)


@pytest.mark.slow
def test_bounds_in_a_callable_tree_are_its_leaves():
    found = clipped(optaxclip.clip_by_value(Model(2.0, lambda step: 3.5)))
    np.testing.assert_array_equal(found.w, np.full((2, 2), 2.0))
    np.testing.assert_array_equal(found.b, [3.0, 3.5])


NUMBERED = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([30.0, 40.0])}
NUMBERS = {"a": 2, "b": 10}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_norms_of_numbered_groups_are_their_own(wrap):
    found = wrap(lambda grads: optaxclip.group_norm(grads, NUMBERS))(NUMBERED)
    assert {label: float(norm) for label, norm in found.items()} == {2: 5.0, 10: 50.0}


def test_limits_of_numbered_groups_are_their_own():
    clipper = optaxclip.clip_by_group_norm({2: 1.0, 10: 100.0}, NUMBERS)
    clipped, state = clipper.update(NUMBERED, clipper.init(NUMBERED))
    np.testing.assert_allclose(clipped["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(clipped["b"], NUMBERED["b"])
    found = {name: float(entry.norm) for name, entry in state.by_name().items()}
    assert found == {"2": 5.0, "10": 50.0}


def test_norms_and_limits_given_to_numbered_groups_are_their_own():
    given = {"grad_norm": {2: 10.0, 10: 50.0}, "limit": {2: 5.0, 10: 100.0}}
    clipped, _ = apply(optaxclip.clip_by_group_norm(None, NUMBERS), NUMBERED, **given)
    np.testing.assert_allclose(clipped["a"], [1.5, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(clipped["b"], NUMBERED["b"])


def by_rank(path, leaf, /):
    return "matrix" if leaf.ndim == 2 else "vector"


def whole_tree(tree, /):
    return {"w": "matrix", "b": "vector"}


def test_label_functions_may_take_arguments_by_position_only():
    tree = {"w": 3 * jnp.ones((2, 2)), "b": jnp.array([3.0, 4.0])}
    for labels in (by_rank, whole_tree):
        norms = optaxclip.group_norm(tree, labels)
        assert {key: float(x) for key, x in norms.items()} == {"matrix": 6, "vector": 5}


# Groups that have no leaf in this model.

# One configuration of a dense model and of one with a mixture of experts.
OF_KINDS = {"dense": 3.0, "experts": 0.5}
KINDS = {"mlp": "dense", "router": "experts", "experts": "experts"}
DENSE = {"mlp": {"w": 3 * jnp.ones((2, 2))}}  # norm 6
MIXTURE = DENSE | {"router": jnp.array([3.0]), "experts": jnp.array([[0.0, 4.0]])}


def by_path(path, leaf):
    return KINDS[path.partition("/")[0]]


@pytest.mark.parametrize("labels", [KINDS, by_path], ids=["tree", "function"])
@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_one_configuration_serves_a_dense_model_and_a_mixture(labels, call):
    clipper = optaxclip.clip_by_group_norm(OF_KINDS, labels, allow_missing=True)
    for model in (DENSE, MIXTURE):
        updates, _ = call(clipper.update)(model, clipper.init(model))
        np.testing.assert_allclose(updates["mlp"]["w"], np.full((2, 2), 1.5), 1e-6)
    # 3 and 4 together have the norm 5, ten times their limit.
    np.testing.assert_allclose(updates["router"], [0.3], 1e-6)
    np.testing.assert_allclose(updates["experts"], [[0.0, 0.4]], 1e-6)


def test_a_function_of_labels_may_leave_out_what_does_not_count():
    tree = {"w": jnp.array([3.0, 4.0]), "i": jnp.arange(3), "none": None}
    norms = optaxclip.group_norm(tree, lambda tree: jax.tree.map(lambda _: "all", tree))
    assert norms == {"all": 5.0}
    clipper = optaxclip.clip_by_group_norm(
        1.0, lambda tree: jax.tree.map(lambda _: "all", tree)
    )
    assert [*clipper.init(tree).names.layer_names_of_norm] == ["all"]
