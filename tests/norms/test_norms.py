"""Every norm of every order against long double: for many leaves and large ones, over
the whole range of each dtype, and with NaN, inf, zeros and nothing to measure.

OPTAXCLIP_PLATFORM=gpu and OPTAXCLIP_PLATFORM=plain run all of it by those ways, and the
files beside it.
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracles
from tests.helpers import SMALL_FLOATS, apply
from tests.norms.leaves import (
    EPS,
    ORDERS,
    SUMMED,
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


@every_dtype
def test_global_norm_is_within_1e_6(dtype):
    leaves, norms = global_norms(dtype)
    for ord, norm in norms.items():
        assert norm.dtype == jnp.float32
        np.testing.assert_allclose(norm, oracles.norm(leaves, ord), tolerance(ord))


@every_order
@every_dtype
def test_global_norm_without_jit_is_within_1e_6(dtype, ord):
    leaves, _ = global_norms(dtype)
    norm = optaxclip.global_norm(leaves, ord=ord)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, oracles.norm(leaves, ord), tolerance(ord))


@cache
def tensor_norms():
    leaves = random_leaves("mixed", 1)
    return leaves, at_every_order(optaxclip.tensor_norm, leaves)


def test_tensor_norm_is_within_1e_6():
    leaves, norms = tensor_norms()
    for ord, norms_of_leaves in norms.items():
        for norm, leaf in zip(norms_of_leaves, leaves, strict=True):
            assert norm.shape == ()
            wanted = oracles.norm([leaf], ord)
            np.testing.assert_allclose(norm, wanted, tolerance(ord))


def test_no_leaf_is_left_out_of_a_norm_of_many():
    # Terms of leaves are added up in blocks, and then those of the blocks.
    counts = (15, 16, 17, 33, 257)
    leaves = [jnp.float32(number) for number in range(1, max(counts) + 1)]

    def norms(leaves, ord):
        return {n: optaxclip.global_norm(leaves[:n], ord=ord) for n in counts}

    found = at_every_order(norms, leaves, orders=(2, math.inf))
    for ord, norms_of_counts in found.items():
        for count, norm in norms_of_counts.items():
            wanted = oracles.norm(leaves[:count], ord)
            np.testing.assert_allclose(norm, wanted, tolerance(ord))


@every_order
def test_group_norm_measures_each_label_by_itself(ord):
    leaves = dict(enumerate(random_leaves("mixed", 6)))
    labels = {i: ("matrix", "vector")[x.ndim < 2] for i, x in leaves.items()}
    ours = optaxclip.group_norm(leaves, labels, ord=ord)
    assert set(ours) == {"matrix", "vector"}
    for label, found in ours.items():
        group = [x for i, x in leaves.items() if labels[i] == label]
        np.testing.assert_allclose(found, oracles.norm(group, ord), tolerance(ord))


@pytest.mark.parametrize("ord", [0.5, 2])
@pytest.mark.slow
def test_one_large_leaf_is_within_1e_6(ord):
    leaf = np.random.default_rng(8).standard_normal((1250, 4001)).astype(np.float32)
    found = optaxclip.global_norm([leaf], ord=ord)
    np.testing.assert_allclose(found, oracles.norm([leaf], ord), tolerance(ord))


def test_one_large_leaf_of_ones_in_bfloat16_does_not_stagnate():
    found = optaxclip.global_norm(jnp.ones(5_000_000, jnp.bfloat16))
    np.testing.assert_allclose(found, math.sqrt(5e6), 1e-6)


@not_in_turn
def test_many_equal_terms_of_any_order_do_not_drift():
    # Added up in float32, one after the other, thirds are wrong by 1e-4. The largest is
    # divided by.
    leaf = np.full(300_000, 0.1, np.float32)
    leaf[0] = 0.3
    for ord in (0.5, 1, 3):
        norm = optaxclip.global_norm(leaf, ord=ord)
        np.testing.assert_allclose(norm, oracles.norm([leaf], ord), tolerance(ord))


@cache
def norms_of_examples():
    random = np.random.default_rng(19)
    tree = {
        "w": np.asarray(random_leaf(random, (6, 3, 4), "float32")),
        "b": np.asarray(random_leaf(random, (6, 5), "bfloat16")),
    }

    def each(tree, ord):
        return jax.vmap(partial(optaxclip.global_norm, ord=ord))(tree)

    return tree, at_every_order(each, tree)


def test_vmap_measures_each_example():
    tree, norms = norms_of_examples()
    for ord, norms_of_each in norms.items():
        wanted = [oracles.norm([w, b], ord) for w, b in zip(tree["w"], tree["b"])]
        np.testing.assert_allclose(norms_of_each, wanted, tolerance(ord))


def nearly_too_large(dtype, ord):
    start = random_leaves(dtype, 9, shapes=[(3,), (2, 2)])
    factor = 3e38 / max(oracles.norm(start, ord), oracles.norm(start, math.inf))
    return [jnp.asarray(oracles.wide(leaf) * factor, leaf.dtype) for leaf in start]


@cache
def norms_nearly_too_large(dtype):
    return at_every_order(
        optaxclip.global_norm, *(nearly_too_large(dtype, ord) for ord in ORDERS)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_norms_just_below_the_largest_float32_are_right(dtype):
    for ord, norm in norms_nearly_too_large(dtype).items():
        wanted = oracles.norm(nearly_too_large(dtype, ord), ord)
        np.testing.assert_allclose(norm, wanted, tolerance(ord))


@every_order
def test_norms_just_below_the_largest_float32_need_no_jit(ord):
    leaves = nearly_too_large("float32", ord)
    norm = optaxclip.global_norm(leaves, ord=ord)
    np.testing.assert_allclose(norm, oracles.norm(leaves, ord), tolerance(ord))


def nearly_too_small(dtype, ord):
    random = np.random.default_rng(10)
    # The average of seven is below what float32 holds normally, so it starts higher.
    smallest = 1.2e-38 * (8 if ord in ("rms", "average") else 1)
    return [
        jnp.asarray(smallest * (1 + random.random(shape)), dtype)
        for shape in [(3,), (2, 2)]
    ]


@cache
def norms_nearly_too_small(dtype):
    return at_every_order(
        optaxclip.global_norm, *(nearly_too_small(dtype, ord) for ord in ORDERS)
    )


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_the_largest_of_small_floats_may_have_no_square(dtype):
    most = jnp.finfo(dtype).max
    leaf = jnp.full(3, most, dtype)
    assert optaxclip.global_norm(leaf, ord=math.inf) == np.float32(most)


@pytest.mark.parametrize("ord", ["rms", "average"])
@pytest.mark.parametrize("tree", [0, [0], [0, 0], {"a": [0, 0]}])
def test_a_mean_is_finite_where_the_norm_is_not(tree, ord):
    tree = jax.tree.map(lambda _: jnp.full((2, 8), 3e38, jnp.float32), tree)
    mean = 3e38 if ord == "rms" else 3e38 / 4
    for norm in jax.tree.leaves(optaxclip.tensor_norm(tree, ord=ord)):
        np.testing.assert_allclose(norm, mean, rtol=1e-6)
    columns = optaxclip.unitwise_norm(tree, ord=ord)
    mean = 3e38 if ord == "rms" else 3e38 / math.sqrt(2)
    for norms in jax.tree.leaves(columns):
        np.testing.assert_allclose(norms, np.full((1, 8), mean), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_just_above_the_smallest_normal_are_not_lost(dtype):
    for ord, norm in norms_nearly_too_small(dtype).items():
        wanted = oracles.norm(nearly_too_small(dtype, ord), ord)
        np.testing.assert_allclose(norm, wanted, tolerance(ord))


PARTS = 1.2e-38 * 8 * (1 + np.random.default_rng(10).random((2, 7)))
AT_THE_ENDS = {
    "small complex": [np.asarray(PARTS[0] - 1j * PARTS[1], np.complex64)],
    "large float16": [
        np.full((3, 2), 65504, np.float16),
        np.asarray([-65504, 60000, 1], np.float16),
    ],
    "small float16": [
        np.asarray([2.0**-24, -(2.0**-23), 3 * 2.0**-24], np.float16),
        np.asarray([[2.0**-20, -(2.0**-24)]], np.float16),
    ],
    # Three orders of magnitude short of the largest, for the orders below 1.
    "both": [
        np.asarray([1e34, -3e33], np.float32),
        np.asarray([[1e-30], [2e-38]], jnp.bfloat16),
        np.asarray([2.0**-24], np.float16),
    ],
}


@cache
def norms_at_the_ends():
    def norms(trees, ord):
        return {
            name: optaxclip.global_norm(leaves, ord=ord)
            for name, leaves in trees.items()
        }

    return at_every_order(norms, AT_THE_ENDS)


def test_a_norm_too_large_for_float32_is_inf():
    leaves = [np.full((50,), 3.3e38, np.float32), np.ones((2, 3), jnp.bfloat16)]
    norms = at_every_order(optaxclip.global_norm, leaves, orders=SUMMED)
    assert norms == dict.fromkeys(SUMMED, math.inf)


@pytest.mark.parametrize("name", AT_THE_ENDS)
def test_norms_at_the_ends_of_a_dtype_are_right(name):
    for ord, norms in norms_at_the_ends().items():
        wanted = oracles.norm(AT_THE_ENDS[name], ord)
        np.testing.assert_allclose(norms[name], wanted, tolerance(ord))


@cache
def norms_of_64_bits():
    """{order: the norms}, and their leaves: next to both ends of float64 and between,
    of one leaf and of several, whose dtypes are mixed.
    """
    random = np.random.default_rng(11)
    trees = []
    for scale in (1e200, 1e300, 1e-300):
        leaves = [
            random.standard_normal((3, 5)) * scale,
            random.standard_normal(4) * scale / 10 * (1 - 2j),
        ]
        trees.append([*leaves, np.full(3, min(scale, 1.0), jnp.bfloat16)])

    def norms(trees, ord):
        return [optaxclip.global_norm(leaves, ord=ord) for leaves in trees]

    return trees, at_every_order(norms, trees)


def test_64_bit_leaves_give_64_bit_norms():
    with jax.enable_x64(True):
        trees, results = norms_of_64_bits()
    for ord, norms in results.items():
        # A quotient, a product, a root and its magnified power of 2 eps, and a sum of
        # 22 terms.
        least = ord if isinstance(ord, float) else 1
        rtol = 24 / min(1, least) * 2.0**-52
        for norm, leaves in zip(norms, trees, strict=True):
            assert norm.dtype == jnp.float64
            np.testing.assert_allclose(norm, oracles.norm(leaves, ord), rtol)


@cache
def global_and_tensor_norms():
    """The program of both norms of every order."""

    def norms(tree):
        measures = optaxclip.global_norm, optaxclip.tensor_norm
        return [[norm(tree, ord=ord) for norm in measures] for ord in ORDERS]

    return jax.jit(norms)


@pytest.mark.parametrize("start", [0, 3, 6])
def test_nan_survives_in_any_position(start):
    for position in range(start, start + 3):
        values = np.random.default_rng(12).standard_normal(9)
        values[position] = math.nan
        leaves = [
            jnp.asarray(values[:4].reshape(2, 2), jnp.float32),
            jnp.asarray(values[4], jnp.bfloat16),
            jnp.asarray(values[5:8], jnp.float16),
            jnp.asarray(values[8:], jnp.complex64),
        ]
        broken = [bool(np.isnan(leaf).any()) for leaf in leaves]
        for everything, each in global_and_tensor_norms()(leaves):
            assert math.isnan(everything)
            assert [math.isnan(norm) for norm in each] == broken


@pytest.mark.parametrize("inf", [math.inf, -math.inf])
def test_nan_wins_over_inf(inf):
    for tree in ([inf, 1.0], [2.0, math.nan]), ([math.nan, 1.0], [2.0, inf]):
        leaves = [np.array(leaf, np.float32) for leaf in tree]
        for everything, _ in global_and_tensor_norms()(leaves):
            assert math.isnan(everything)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_leaf_gives_inf(value):
    leaves = [jnp.array([[1.0, 2.0, 3.0]]), jnp.asarray([4.0, value], jnp.bfloat16)]
    for everything, each in global_and_tensor_norms()(leaves):
        assert everything == math.inf
        assert [math.isinf(norm) for norm in each] == [False, True]


def test_a_broken_unit_does_not_touch_its_neighbours():
    leaf = jnp.asarray([[3.0, math.nan, 1.0], [4.0, 1.0, math.inf]], jnp.float32)
    for ord, length in ((2, 5.0), (math.inf, 4.0)):
        found = optaxclip.unitwise_norm(leaf, ord=ord)
        np.testing.assert_array_equal(found, [[length, math.nan, math.inf]])


NOTHING = {
    "dict": {},
    "None": None,
    "list of None": [None],
    "dict of None": {"a": None, "b": ()},
    "zero-size": np.zeros((0, 3)),
    "int": [np.arange(5)],
    "bool": np.array([True, False]),
    "MaskedNode": optax.MaskedNode(),
    "float0": np.zeros(3, jax.dtypes.float0),
}


@pytest.mark.filterwarnings("ignore:.*no leaf counts")
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_measure_has_norm_0(name):
    for ord in ORDERS:
        norm = optaxclip.global_norm(NOTHING[name], ord=ord)
        assert norm == 0 and norm.dtype == jnp.float32 and norm.shape == ()
        assert jax.tree.leaves(optaxclip.tensor_norm(NOTHING[name], ord=ord)) == []


def test_norms_of_integers_alone_are_warned_of():
    text = "global_norm: no leaf counts, .* The leaf 'b' is int32: make it float32"
    tree = {"a": None, "b": jnp.array([3, 4])}
    with pytest.warns(UserWarning, match=text):
        assert jax.jit(optaxclip.global_norm)(tree) == 0


def test_a_group_without_numbers_has_norm_0_of_its_dtype():
    with jax.enable_x64(True):
        tree = {"w": np.float64([3.0, -4.0]), "n": np.arange(3)}
        labels = {"w": "floats", "n": "ints"}
        for ord in ORDERS:
            norm = optaxclip.group_norm(tree, labels, ord=ord)["ints"]
            assert norm == 0 and norm.dtype == np.float64


@every_order
def test_what_is_not_measured_does_not_count(ord):
    leaves = random_leaves("mixed", 13)
    others = [None, jnp.arange(7), jnp.zeros((3, 0)), optax.MaskedNode()]
    found = optaxclip.global_norm([*others, *leaves, np.bool_(True)], ord=ord)
    np.testing.assert_allclose(found, oracles.norm(leaves, ord), tolerance(ord))


def large(*shape):
    values = np.random.default_rng(26).uniform(0.5, 1, shape)
    return values.astype(np.float32)


WIDE = [(768, 2304), (50257, 16), (3, 3, 64, 128), (24, 33000), (70000, 1)]


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_units_of_large_leaves_are_within_1e_6(shape):
    leaf = large(*shape)
    found = jax.jit(optaxclip.unitwise_norm)(leaf)
    np.testing.assert_allclose(found, oracles.unitwise_norm(leaf), 1e-6)


def test_units_of_all_sizes_in_one_large_leaf_are_right():
    leaf = large(260, 257) * np.geomspace(2e-37, 1e36, 257).astype(np.float32)
    found = optaxclip.unitwise_norm(leaf)
    np.testing.assert_allclose(found, oracles.unitwise_norm(leaf), 1e-6)


GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
TWO = [2, 2.0, np.float64(2), np.int32(2), jnp.int32(2), jnp.bfloat16(2), np.array(2)]


@pytest.mark.parametrize("norm", TWO, ids=lambda x: f"{type(x).__name__}-{x!r}")
def test_a_norm_may_be_any_real_number(norm):
    # g * 1.5 / 2. In the dtype of an integer norm the limit was 1.
    for own in (norm, {"a": norm, "b": norm}):
        updates, state = apply(optaxclip.clip_by(lambda tree, own=own: own, 1.5), GRADS)
        for name in GRADS:
            expected = np.float64(GRADS[name]) * 0.75
            np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
        np.testing.assert_array_equal(state.limit, np.full_like(state.norm, 1.5))
        _, state = apply(optaxclip.record_norm(lambda tree, own=own: own), GRADS)
        np.testing.assert_array_equal(state.norm, np.full_like(state.norm, 2.0))


def test_one_norm_for_everything_is_a_number_in_the_state():
    for norm, shape in ((lambda tree: 2.0, ()), (lambda tree: [2.0, 3.0], (2,))):
        assert optaxclip.record_norm(norm).init([1.0, 2.0]).norm.shape == shape


def test_a_nan_among_thousands_makes_the_norm_nan():
    # Vectorised, a maximum of floats on a CPU drops NaN. With a sign its bits are less
    # than those of any number.
    leaves = [jnp.ones(5000).at[place].set(jnp.nan) for place in (0, 2500, 4999)]
    leaves.append(-leaves[0])
    for ord in (0.5, 1, 2, 3, math.inf, "rms", "average"):
        assert np.isnan(optaxclip.tensor_norm(leaves, ord=ord)).all(), ord


BATCHES = {
    "global": optaxclip.global_norm,
    "tensor, stacked": partial(optaxclip.tensor_norm, stacked=1),
    "unit, columns": partial(optaxclip.unitwise_norm, axis=0),
    "unit, rows": partial(optaxclip.unitwise_norm, axis=-1),
}


@pytest.mark.parametrize("order", [0.15, 0.2, 0.24])
def test_small_orders_count_elements_far_below_the_largest(order):
    small = np.full(10**6, 1e-36, np.float32)
    grads = {"large": jnp.array([1e4]), "small": jnp.asarray(small)}
    terms = np.append(np.float64(1e4), np.float64(small)) ** order
    wanted = np.sum(terms) ** (1 / order)
    # The relative error of a sum is multiplied by 1 / order.
    norm = optaxclip.global_norm(grads, ord=order)
    np.testing.assert_allclose(norm, wanted, rtol=1e-6 / order)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0.0, 3.4e38, 1.2e-38])
def test_small_orders_keep_both_ends_of_the_range(value):
    norm = optaxclip.global_norm(jnp.array([value, 0.0]), ord=0.2)
    np.testing.assert_allclose(norm, np.float32(value), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ord", [None, 5.0, math.inf, "rms", "average"])
def test_norms_can_be_exported_for_batches_of_any_size(ord):
    def norms(x):
        found = [norm({"x": x, "y": x[:, :1]}, ord=ord) for norm in BATCHES.values()]
        return found, jax.grad(partial(optaxclip.global_norm, ord=ord))(x)

    check_exported(norms)


@pytest.mark.slow
def test_units_by_rank_can_be_exported_for_batches_above_1():
    """Of a batch of 1 the leaf is a vector, which no program for any size can know."""
    clipper = optaxclip.clip_by_unitwise_norm(0.1)

    def units(x):
        return optaxclip.unitwise_norm({"x": x, "y": x[:, 0]}), apply(clipper, x)[0]

    check_exported(units, sizes=(2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("ord", [None, "rms", "average"])
@pytest.mark.parametrize("axis", [None, -1])
def test_clip_cotangent_can_be_exported_for_batches_of_any_size(axis, ord):
    clip = partial(optaxclip.clip_cotangent, max_norm=0.1, axis=axis, ord=ord)
    check_exported(jax.grad(lambda x: jnp.sum(clip(x) ** 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("ord", "wanted"), [("rms", 2.0), ("average", 2.0 / 51200.0)])
def test_means_of_any_size_count_more_than_int32_does(ord, wanted):
    (batch,) = jax.export.symbolic_shape("batch")

    def norm(x):
        # Never in memory: 2.6e9 numbers.
        wide = jnp.broadcast_to(x[:, None], (x.shape[0], 65536))
        return optaxclip.global_norm(wide, ord=ord)

    shape = jax.ShapeDtypeStruct((batch,), jnp.float32)
    exported = jax.export.export(jax.jit(norm))(shape)
    np.testing.assert_allclose(exported.call(np.full(40000, 2.0, "f4")), wanted, 1e-6)


def check_exported(function, sizes=(1, 5)):
    """The exported program gives for several sizes what the function itself gives."""
    (batch,) = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    exported = jax.export.export(jax.jit(function))(shape)
    for size in sizes:
        x = np.random.default_rng(size).standard_normal((size, 3), np.float32)
        for found, wanted in zip(
            jax.tree.leaves(exported.call(x)),
            jax.tree.leaves(jax.jit(function)(x)),
            strict=True,
        ):
            np.testing.assert_allclose(found, wanted, rtol=8 * EPS, atol=EPS)
