"""`stacked`: which axes count layers, told by number, by position, or by path."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

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


@pytest.mark.parametrize(
    "stacked",
    [
        (1,),
        {"wi": (-2,), "wo": (1,), "scale": (-1,)},
        lambda path, leaf: (1,),
    ],
    ids=["tuple", "by path, from the end", "function"],
)
def test_layers_are_on_the_axes_that_a_tuple_names(stacked):
    assert_norms_of_axis_1(optaxclip.tensor_norm(TREE, stacked=stacked))


def test_an_int_counts_leading_axes():
    x = TREE["wi"]
    for count, axes in ((1, (1, 2)), (2, (2,)), (True, (1, 2))):
        norms = optaxclip.tensor_norm(x, stacked=count)
        np.testing.assert_allclose(norms, root_of_squares(x, axes), 1e-6)


def test_experts_lie_on_two_axes_in_any_order():
    x = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    for axes in ((0, 2), (2, 0), (-2, 0)):
        norms = optaxclip.tensor_norm(x, stacked=axes)
        np.testing.assert_allclose(norms, root_of_squares(x, (1, 3)), 1e-6)


@pytest.mark.parametrize("ord", [1, 3, np.inf, "rms", "average"])
def test_every_order_measures_layers_on_axis_1(ord):
    norms = optaxclip.tensor_norm(TREE["wi"], ord=ord, stacked=(1,))
    for layer in range(L):
        alone = optaxclip.tensor_norm(TREE["wi"][:, layer], ord=ord)
        np.testing.assert_allclose(norms[0, layer, 0], alone, 1e-6)


def test_units_lie_within_the_layers_of_axis_1():
    norms = optaxclip.unitwise_norm(TREE, stacked=(1,))
    np.testing.assert_allclose(norms["wi"], root_of_squares(TREE["wi"], 0), 1e-6)
    np.testing.assert_allclose(norms["scale"], root_of_squares(TREE["scale"], 0), 1e-6)
    norms = optaxclip.unitwise_norm(TREE["wi"], axis=-1, stacked=(1,))
    np.testing.assert_allclose(norms, root_of_squares(TREE["wi"], 2), 1e-6)


def test_a_count_for_layers_on_axis_1_raises_and_names_leaves():
    with pytest.raises(ValueError) as caught:
        optaxclip.clip_by_tensor_norm(1.0, stacked=1).init(TREE)
    assert str(caught.value) == (
        "clip_by_tensor_norm: stacked=1 would count 4 in 'scale' and 5 in 'wo', but "
        "leaves of one stack have the same number of layers. Axes other than the "
        "leading ones are a tuple, such as (1,) for axis 1. A leaf that is not stacked "
        "takes None. Several stacks take a value each, as in {'encoder': 1, "
        "'decoder': 1}."
    )


def test_a_function_that_cannot_be_meant_raises():
    with pytest.raises(ValueError, match=r"stacked=True would count 4 in 'scale'"):
        optaxclip.tensor_norm(TREE, stacked=lambda path, leaf: True)


def test_a_leaf_that_is_not_stacked_raises_by_name():
    tree = {"blocks": TREE, "table": jnp.ones((7, E))}
    with pytest.raises(ValueError, match=r"count 3 in 'blocks/scale' and 4 in 'table'"):
        optaxclip.tensor_norm(tree, stacked=(1,))
    norms = optaxclip.tensor_norm(tree, stacked={"blocks": (1,), "table": None})
    assert_norms_of_axis_1(norms["blocks"])
    assert norms["table"].shape == ()


def test_stacks_with_values_of_their_own_may_differ():
    tree = {"encoder": jnp.ones((2, 3)), "decoder": jnp.ones((4, 3))}
    norms = optaxclip.tensor_norm(tree, stacked={"encoder": 1, "decoder": 1})
    assert norms["encoder"].shape == (2, 1) and norms["decoder"].shape == (4, 1)


class Weights(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


def test_a_named_tuple_of_counts_is_a_tree_of_counts():
    tree = Weights(jnp.ones((2, 3)), jnp.ones(3))
    norms = optaxclip.tensor_norm(tree, stacked=Weights(1, 0))
    assert norms.kernel.shape == (2, 1) and norms.bias.shape == ()


@pytest.mark.parametrize("axes", [(3,), (-4,), (1, 1), (1, -2)])
def test_axes_that_a_leaf_does_not_have_are_refused(axes):
    with pytest.raises(ValueError, match=r"or a tuple of its axes, got \("):
        optaxclip.tensor_norm({"w": TREE["wi"]}, stacked=axes)


def test_a_size_that_only_a_run_knows_is_compared_as_a_symbol():
    (n,) = jax.export.symbolic_shape("n")
    args = {"a": jax.ShapeDtypeStruct((2, n), np.float32)}
    args["b"] = jax.ShapeDtypeStruct((3, n), np.float32)
    measure = jax.jit(lambda tree: optaxclip.tensor_norm(tree, stacked=(1,)))
    norms = jax.export.export(measure)(args).call(
        {"a": jnp.ones((2, 5)), "b": jnp.ones((3, 5))}
    )
    np.testing.assert_allclose(norms["b"], np.full((1, 5), np.sqrt(3)), 1e-6)
