"""The measures of the clippers: what is measured together, and how its norms lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optaxclip._norms._measures import (
    GlobalNorm,
    GroupNorm,
    TensorNorm,
    UnitwiseNorm,
    check_measure,
    norm_of_norms,
    without_devices,
)
from tests.sharded import on_two_devices

pytestmark = pytest.mark.slow

SHAPES = {"a": (4, 6), "b": (3,), "c": (2, 3)}
TREE = {
    name: jnp.asarray(np.random.default_rng(i).standard_normal(shape), "float32")
    for i, (name, shape) in enumerate(SHAPES.items())
}
LABELS = {"a": "x", "b": "y", "c": "x"}
# The kinds of measures with their options, and which leaves and axes are one norm.
MEASURES = {
    "all": (GlobalNorm, {}, {"": ("abc", None)}),
    "tensors": (TensorNorm, {}, {x: (x, None) for x in "abc"}),
    "layers": (TensorNorm, {"stacked": {"a": 1}}, {"a": ("a", (1,))}),
    "layers on axis 1": (TensorNorm, {"stacked": (1,)}, {"a": ("a", (0,))}),
    "units": (UnitwiseNorm, {}, {"a": ("a", (0,)), "b": ("b", None), "c": ("c", (0,))}),
    "groups": (GroupNorm, {"labels": LABELS}, {"x": ("ac", None), "y": ("b", None)}),
}


def built(name, ord=None):
    kind, options, parts = MEASURES[name]
    # Layers of the leaf that has them, and all leaves else.
    used = "".join(leaves for leaves, _ in parts.values())
    numbers = {"mesh_axes": "auto", **options}
    return kind(**check_measure("f", ord, **numbers)), {x: TREE[x] for x in used}


def expected(leaves, dims, ord=None):
    over = {"axis": dims, "keepdims": dims is not None}
    arrays = [np.float64(TREE[x]) for x in leaves]
    norm = np.sqrt(sum(np.sum(x**2, **over) for x in arrays))
    count = sum(x.size for x in arrays) / np.size(norm)
    return norm / {None: 1, "rms": np.sqrt(count), "average": count}[ord]


@pytest.mark.parametrize("ord", [None, "rms", "average"])
@pytest.mark.parametrize("name", MEASURES)
def test_each_norm_is_found_under_its_name(name, ord):
    measure, tree = built(name, ord)
    norms, parts = measure(tree), MEASURES[name][2]
    paths = ["/".join(str(key.key) for key in path) for path in norms.paths]
    assert sorted(paths) == sorted(parts)
    for number, path in enumerate(paths):
        have, want = norms.pick(norms.blocks, number), expected(*parts[path], ord)
        np.testing.assert_allclose(have, want, 1e-6)
        assert have.shape == np.shape(want)
    # The leaves in the order of JAX, each with the name of its norm.
    for leaf, number in zip(sorted(tree), norms.of_leaf):
        assert leaf in parts[paths[number]][0]
    found = jax.tree.leaves(norms.tree())
    for number, norm in enumerate(found):
        np.testing.assert_array_equal(norm, norms.pick(norms.blocks, number))


def test_a_single_norm_in_a_tree_is_a_row():
    assert TensorNorm()({"b": TREE["b"]}).blocks[0].shape == (1,)
    assert TensorNorm()(TREE["b"]).blocks[0].shape == ()
    group = GroupNorm(**check_measure("f", None, labels="all"))(TREE)
    assert group.blocks[0].shape == (1,) and group.places == [(0, 0)]


@pytest.mark.parametrize("kind", [GlobalNorm, TensorNorm, UnitwiseNorm])
def test_a_measure_is_hashable_whatever_it_was_given(kind):
    for ord, mesh_axes in (
        (np.float32(2), {"a": P("x")}),
        (jnp.float32(2), {"b": "x"}),
    ):
        options = check_measure("f", ord, mesh_axes=mesh_axes)
        measure = kind(**options)
        assert hash(measure) == hash(kind(**options))
        assert measure.ord == 2 and type(measure.ord) is float


@pytest.mark.parametrize("name", MEASURES)
def test_without_devices_names_of_mesh_axes_are_gone(name):
    kind, options, _ = MEASURES[name]
    measure = kind(**check_measure("f", None, mesh_axes="x", **options))
    assert without_devices(measure) == measure._replace(mesh_axes=None)


def test_the_norm_of_norms_has_no_derivative():
    def total(tree):
        return norm_of_norms(UnitwiseNorm()(tree))

    np.testing.assert_allclose(total(TREE), expected("abc", None), 1e-6)
    slopes = jax.grad(total)(TREE)
    assert not any(np.any(x) for x in jax.tree.leaves(slopes))


@pytest.mark.parametrize(
    "options", [{}, {"check_vma": False}], ids=["typed", "untyped"]
)
@pytest.mark.parametrize("split_of_a", [P("x"), P(None, "x")], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", [TensorNorm, UnitwiseNorm])
def test_the_norm_of_norms_is_that_of_all_devices(kind, split_of_a, options):
    specs = {"a": split_of_a, "b": P(), "c": P("x")}
    measure = kind(**check_measure("f", None, mesh_axes=specs))
    found = on_two_devices(
        lambda tree: norm_of_norms(measure(tree)), (specs,), P(), TREE, **options
    )
    np.testing.assert_allclose(found, expected("abc", None), 1e-6)


@pytest.mark.parametrize("ord", ["rms", "average"])
def test_means_of_units_count_the_rows_of_all_devices(ord):
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    measure = UnitwiseNorm(**check_measure("f", ord, mesh_axes=specs))
    found = on_two_devices(lambda tree: measure(tree).tree(), (specs,), P(), TREE)
    for name, dims in (("a", (0,)), ("b", None), ("c", (0,))):
        np.testing.assert_allclose(found[name], expected(name, dims, ord), 1e-6)


def test_a_label_whose_leaves_are_missing_has_norm_0():
    norms = built("groups")[0]({**TREE, "b": None})
    found = norms.tree()
    np.testing.assert_allclose(found["x"], expected("ac", None), 1e-6)
    assert found["y"] == 0


@pytest.mark.parametrize("name", ["all", "groups"])
def test_groups_have_a_norm_of_norms_too(name):
    measure, tree = built(name)
    np.testing.assert_allclose(
        norm_of_norms(measure(tree)), expected("abc", None), 1e-6
    )


def test_errors_about_mesh_axes_name_the_call():
    with pytest.raises(TypeError, match=r"^clip: mesh_axes must be a name or a tuple"):
        check_measure("clip", None, mesh_axes=["x", "y"])
