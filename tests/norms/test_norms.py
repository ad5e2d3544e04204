"""Every norm of every order against long double, for many leaves and large ones.

OPTAXCLIP_PLATFORM=gpu and OPTAXCLIP_PLATFORM=tpu run all of it by those ways, and the
files beside it.
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.norms.leaves import (
    SHAPES,
    at_every_order,
    every_dtype,
    every_order,
    not_in_turn,
    random_leaf,
    random_leaves,
    tolerance,
)


@cache
def global_norms(dtype):
    leaves = random_leaves(dtype)
    return leaves, at_every_order(optaxclip.global_norm, leaves)


@every_order
@every_dtype
def test_global_norm_is_within_1e_6(dtype, ord):
    leaves, results = global_norms(dtype)
    result = results[ord]
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, oracles.norm(leaves, ord), tolerance(ord))


@cache
def tensor_norms():
    leaves = random_leaves("mixed", 1)
    return leaves, at_every_order(optaxclip.tensor_norm, leaves)


@every_order
def test_tensor_norm_is_within_1e_6(ord):
    leaves, norms = tensor_norms()
    for ours, leaf in zip(norms[ord], leaves, strict=True):
        assert ours.shape == ()
        np.testing.assert_allclose(ours, oracles.norm([leaf], ord), tolerance(ord))


@cache
def stacked_norms():
    leaf = random_leaves("bfloat16", 2, shapes=[(4, 3, 5)])[0]
    return leaf, at_every_order(partial(optaxclip.tensor_norm, stacked=1), {"w": leaf})


@every_order
def test_stacked_tensor_norm_measures_each_layer_by_itself(ord):
    leaf, norms = stacked_norms()
    ours = norms[ord]["w"]
    assert ours.shape == (4, 1, 1)
    np.testing.assert_allclose(
        ours.reshape(-1), [oracles.norm([layer], ord) for layer in leaf], tolerance(ord)
    )


@every_order
def test_group_norm_measures_each_label_by_itself(ord):
    names = [f"leaf{i}" for i in range(len(SHAPES))]
    leaves = random_leaves("mixed", 6)
    labels = [("matrix", "vector")[leaf.ndim < 2] for leaf in leaves]
    ours = optaxclip.group_norm(
        dict(zip(names, leaves)), dict(zip(names, labels)), ord=ord
    )
    assert set(ours) == {"matrix", "vector"}
    for label in ours:
        np.testing.assert_allclose(
            ours[label],
            oracles.norm(
                [leaf for leaf, other in zip(leaves, labels) if other == label], ord
            ),
            tolerance(ord),
        )


@not_in_turn
@pytest.mark.slow
def test_ten_thousand_leaves_are_within_1e_6():
    random = np.random.default_rng(7)
    kinds = ("float32", "bfloat16", "float16")
    leaves = [
        jnp.asarray(random.standard_normal(3 + i % 2), kinds[i % 3]) for i in range(12)
    ]
    leaves = [leaves[i] for i in random.integers(0, len(leaves), 10_000)]
    np.testing.assert_allclose(
        optaxclip.global_norm(leaves), oracles.norm(leaves), 1e-6
    )


@pytest.mark.parametrize("ord", [0.5, 2])
@pytest.mark.slow
def test_one_large_leaf_is_within_1e_6(ord):
    leaf = jnp.asarray(
        np.random.default_rng(8).standard_normal((1250, 4001)), jnp.float32
    )
    np.testing.assert_allclose(
        optaxclip.global_norm([leaf], ord=ord),
        oracles.norm([leaf], ord),
        tolerance(ord),
    )


def test_one_large_leaf_of_ones_in_bfloat16_does_not_stagnate():
    np.testing.assert_allclose(
        optaxclip.global_norm(jnp.ones((5_000_000,), jnp.bfloat16)),
        math.sqrt(5e6),
        1e-6,
    )


@pytest.mark.slow
def test_a_leaf_far_below_the_others_still_counts():
    leaves = [
        jnp.full((3,), 1e30, jnp.float32),
        jnp.full((1000, 2000), 1e27, jnp.bfloat16),
    ]
    np.testing.assert_allclose(
        optaxclip.global_norm(leaves), oracles.norm(leaves), 1e-6
    )


@cache
def norms_of_examples():
    random = np.random.default_rng(19)
    tree = {
        "w": np.asarray(random_leaf(random, (6, 3, 4), "float32")),
        "b": np.asarray(random_leaf(random, (6, 5), "bfloat16")),
    }
    return tree, at_every_order(
        lambda tree, ord: jax.vmap(partial(optaxclip.global_norm, ord=ord))(tree), tree
    )


@every_order
def test_vmap_measures_each_example(ord):
    tree, norms = norms_of_examples()
    np.testing.assert_allclose(
        norms[ord],
        [oracles.norm([tree["w"][i], tree["b"][i]], ord) for i in range(6)],
        tolerance(ord),
    )


@every_order
def test_jit_and_eager_agree_with_the_equation(ord):
    leaves, compiled = global_norms("mixed")
    for norm in (compiled[ord], optaxclip.global_norm(leaves, ord=ord)):
        np.testing.assert_allclose(norm, oracles.norm(leaves, ord), tolerance(ord))


@pytest.mark.parametrize(
    "norm",
    [optaxclip.global_norm, optaxclip.tensor_norm, optaxclip.unitwise_norm],
    ids=lambda norm: norm.__name__,
)
def test_an_order_that_is_none_is_named_by_the_norm(norm):
    with pytest.raises(
        ValueError, match=rf"^{norm.__name__}: ord must be a number above 0"
    ):
        norm(jnp.ones(2), ord="l2")


@pytest.mark.parametrize(
    "ord", [np.int64(1), np.float32(1.0), 1, 1.0], ids=lambda ord: type(ord).__name__
)
def test_an_order_may_be_a_number_of_any_kind(ord):
    assert optaxclip.global_norm(jnp.array([3.0, -4.0]), ord=ord) == 7.0
