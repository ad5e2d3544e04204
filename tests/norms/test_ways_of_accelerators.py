"""The ways of a GPU and a TPU on a CPU: right over the whole range, without float64."""

import math
from contextlib import contextmanager
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import oracles, sharded
from tests.helpers import apply, only_by_a_cpu
from tests.norms.leaves import (
    DTYPES,
    EPS,
    EVERY_RANK,
    SHAPES,
    SUMMED,
    at_every_order,
    every_dtype,
    every_order,
    module_for,
    random_leaves,
    tolerance,
)
from tests.sharded import on_two_devices

accelerator = pytest.mark.parametrize("way", ["gpu", "plain"])
on_accelerator = pytest.mark.parametrize("platform", ["cuda", "tpu"])


@on_accelerator
@every_order
def test_a_norm_on_an_accelerator_has_no_float64(ord, platform):
    def norms(leaves):
        units = optaxclip.unitwise_norm(leaves, ord=ord)
        return optaxclip.global_norm(leaves, ord=ord), units

    assert "f64" not in module_for(platform, norms, random_leaves("mixed", 21))


@pytest.mark.slow
@on_accelerator
def test_a_clipper_on_an_accelerator_has_no_float64(platform):
    leaves = random_leaves("mixed", 22)
    for clipper in (
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.adaptive_grad_clip(0.01),
        optaxclip.clip_by_tensor_rms(1.0),
    ):
        arguments = leaves, clipper.init(leaves), leaves
        assert "f64" not in module_for(platform, clipper.update, *arguments)


@on_accelerator
def test_a_derivative_on_an_accelerator_has_no_float64(platform):
    slope = jax.grad(optaxclip.global_norm)
    assert "f64" not in module_for(platform, slope, random_leaves("float32", 23))


@only_by_a_cpu
def test_numbers_are_bounded_before_they_are_squared_on_a_tpu():
    # XLA would square the scales otherwise, which gives 0 and inf.
    leaf = jnp.ones(3)
    text = module_for("tpu", optaxclip.global_norm, leaf)
    assert text.count("stablehlo.clamp") == 3


@only_by_a_cpu
def test_a_program_for_cpu_sums_in_float64():
    # XLA adds up many numbers in small groups, so that no wrong norm shows it.
    leaves = random_leaves("bfloat16", 24)
    for ord in (None, 0.5, 3, "rms"):
        norm = partial(optaxclip.global_norm, ord=ord)
        assert "f64" in module_for("cpu", norm, leaves), ord


@contextmanager
def by_the_way_of(platform):
    """Takes the way of another platform on this CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTAXCLIP_PLATFORM", platform)
        jax.clear_caches()
        yield
    jax.clear_caches()


def test_an_unknown_platform_is_named():
    text = r"^OPTAXCLIP_PLATFORM must be one of .*'plain'\], got 'tpu'"
    with by_the_way_of("tpu"), pytest.raises(ValueError, match=text):
        optaxclip.global_norm(jnp.ones(3))


def of_length(largest, ord):
    start = random_leaves("mixed", 26, shapes=[(3,), (2, 2), (1, 3)])
    factor = largest / oracles.norm(start, ord)
    wide = [oracles.wide(leaf) * factor for leaf in start]
    return [x.astype("complex64" if np.iscomplexobj(x) else "float32") for x in wide]


LENGTHS = (3e38, 1.2e-37)
OF_EACH_DTYPE = {dtype: random_leaves(dtype, 25) for dtype in DTYPES}
UNITS_OF_EACH_KIND = {
    "columns": (random_leaves("float32", 28, shapes=[(40, 3)])[0], 0),
    "rows": (random_leaves("bfloat16", 28, shapes=[(40, 3)])[0], 1),
    "between": (random_leaves("complex64", 28, shapes=[(4, 5, 3)])[0], 1),
}


@cache
def found_by(way):
    """What is right by the way of a CPU too, in few programs."""
    norm, lengths = optaxclip.global_norm, {}
    with by_the_way_of(way):
        norms = {
            dtype: at_every_order(norm, leaves)
            for dtype, leaves in OF_EACH_DTYPE.items()
        }
        for length in LENGTHS:
            trees = [of_length(length, ord) for ord in SUMMED]
            lengths[length] = at_every_order(norm, *trees, orders=SUMMED)
    return norms, lengths


@accelerator
@every_order
@every_dtype
@pytest.mark.slow
def test_norms_by_accelerators_are_within_1e_6(dtype, ord, way):
    norm, leaves = found_by(way)[0][dtype][ord], OF_EACH_DTYPE[dtype]
    np.testing.assert_allclose(norm, oracles.norm(leaves, ord), tolerance(ord))


@accelerator
@pytest.mark.parametrize("ord", SUMMED)
@pytest.mark.parametrize("largest", LENGTHS)
@pytest.mark.slow
def test_norms_by_accelerators_hold_the_whole_range(largest, ord, way):
    found, wanted = found_by(way)[1][largest][ord], of_length(largest, ord)
    # Of values below the smallest normal number each may be flushed to 0.
    lost = 2.0**-126 * 10 ** (1 / min(ord, 1)) if largest < 1 else 0
    wanted = oracles.norm(wanted, ord)
    np.testing.assert_allclose(found, wanted, tolerance(ord), atol=lost)


def test_units_by_accelerators_are_within_1e_6():
    for way in WAYS:
        for leaf, axis in UNITS_OF_EACH_KIND.values():
            wanted = oracles.unitwise_norm(leaf, 2, (axis,))
            with by_the_way_of(way):
                norms = optaxclip.unitwise_norm(leaf, axis=axis)
            np.testing.assert_allclose(norms, wanted, 1e-6, err_msg=way)


WAYS = ("gpu", "plain")


def test_values_of_all_three_sums_add_up_by_accelerators():
    # Next to what two of the sums can hold, to a scale, and to an end.
    trees = [
        np.float32([2.0**power, 1.5 * 2.0 ** (power - 1), -(2.0 ** (power - 12))])
        for power in (127, 83, 65, 64, 63, 1, -18, -19, -20, -83, -110)
    ]
    trees += [-x for x in trees[:3]]
    trees.append(np.geomspace(1e-36, 1e17, 1000).astype(np.float32))
    # Numbers that are scaled up between some that are scaled down.
    trees.append(np.float32([1e30] + [1e-30] * 30 + [-1e30] + [1.0] * 30))
    trees.append(np.zeros(3, np.float32))
    wanted = [oracles.norm([x]) for x in trees]
    for way in WAYS:
        with by_the_way_of(way):
            found = jax.jit(partial(jax.tree.map, optaxclip.global_norm))(trees)
        np.testing.assert_allclose(found, wanted, 1e-6, err_msg=way)
        assert not np.signbit(found).any()


def test_means_and_other_orders_by_accelerators_are_those_of_each_leaf_and_of_all():
    # The first and the last leaf are of one dtype, so a GPU reads them together.
    shapes = [(40, 3), (5,), (2, 3, 4), (), (7,)]
    leaves = random_leaves("mixed", 27, shapes=shapes)
    orders = (0.5, 3, math.inf, "rms", "average")

    def norms_of(leaves, ord):
        each = optaxclip.tensor_norm(leaves, ord=ord)
        return [*each, optaxclip.global_norm(leaves, ord=ord)]

    for way in WAYS:
        with by_the_way_of(way):
            norms = at_every_order(norms_of, leaves, orders=orders)
        for ord in orders:
            wanted = [oracles.norm([leaf], ord) for leaf in leaves]
            wanted.append(oracles.norm(leaves, ord))
            np.testing.assert_allclose(norms[ord], wanted, tolerance(ord), err_msg=way)


def test_a_mean_by_accelerators_is_finite_where_the_norm_is_not():
    leaf = np.full((2, 8), 3e38, np.float32)
    for way in WAYS:
        with by_the_way_of(way):
            norms = at_every_order(optaxclip.global_norm, leaf)
        for ord, mean in {2: math.inf, "rms": 3e38, "average": 3e38 / 4}.items():
            np.testing.assert_allclose(norms[ord], mean, 1e-6, err_msg=way)


def test_leaves_of_a_mesh_are_measured_by_accelerators():
    """Under jit a leaf may be split unseen, along any of its dimensions."""
    specs = {"rows": P("x"), "columns": P(None, "y"), "both": P("x", "y"), "bias": P()}
    scales = {"rows": 1e30, "columns": 1e-30, "both": 1.0, "bias": 1e25}
    shapes = {"rows": (64, 3), "columns": (40, 8), "both": (2, 4), "bias": (7,)}
    tree = sharded.random_tree(7, shapes)
    tree = {name: x * np.float32(scales[name]) for name, x in tree.items()}
    placed = sharded.place(tree, sharded.mesh_of((2, 4)), specs)
    for way in WAYS:
        with by_the_way_of(way):
            norms = jax.jit(optaxclip.tensor_norm)(placed)
            units = jax.jit(optaxclip.unitwise_norm)(placed)
        for name, x in tree.items():
            wanted = (
                oracles.norm([x]),
                oracles.unitwise_norm(x).reshape(units[name].shape),
            )
            np.testing.assert_allclose(norms[name], wanted[0], 1e-6)
            np.testing.assert_allclose(units[name], wanted[1], 1e-6)


@accelerator
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_number_is_seen_by_accelerators(value, way):
    leaf = np.ones((4, 3), np.float32)
    leaf[2, 1] = value
    tree = {"a": leaf, "b": np.full(5, 1e-30, np.float32)}
    with by_the_way_of(way):
        units = np.ravel(optaxclip.unitwise_norm(leaf))
        norm, each = optaxclip.global_norm(tree), optaxclip.tensor_norm(tree)
    np.testing.assert_array_equal(units, [2.0, abs(value), 2.0])
    np.testing.assert_array_equal(norm, abs(value))
    np.testing.assert_array_equal(each["a"], abs(value))
    np.testing.assert_allclose(each["b"], 5**0.5 * 1e-30, 1e-6)


@accelerator
def test_small_leaves_that_are_read_together_keep_their_norms(way):
    # Of several devices only those in shard_map read them together.
    leaves = random_leaves("mixed", 29, shapes=SHAPES * 3)

    def norms(leaves):
        return optaxclip.global_norm(leaves), optaxclip.tensor_norm(leaves)

    with by_the_way_of(way):
        norm, each = on_two_devices(norms, P(), P(), leaves)
    np.testing.assert_allclose(norm, oracles.norm(leaves), 1e-6)
    expected = [oracles.norm([leaf]) for leaf in leaves]
    np.testing.assert_allclose(each, expected, 1e-6)


@accelerator
@pytest.mark.slow
def test_clippers_by_accelerators_are_the_equation(way):
    leaves = random_leaves("float32", 30, shapes=EVERY_RANK)
    pairs = [
        (optaxclip.clip_by_global_norm, oracles.clip_global),
        (optaxclip.clip_by_tensor_norm, oracles.clip_tensors),
        (optaxclip.clip_by_unitwise_norm, oracles.clip_units),
    ]
    for clip, equation in pairs:
        with by_the_way_of(way):
            found = apply(clip(0.5), leaves)[0]
        for ours, right in zip(found, equation(leaves, 0.5), strict=True):
            np.testing.assert_allclose(ours, right, 8 * EPS)


@pytest.mark.slow
@accelerator
def test_64_bit_leaves_keep_64_bits_by_accelerators(way):
    values = np.random.default_rng(21).standard_normal(1000)
    with jax.enable_x64(True), by_the_way_of(way):
        norm = float(optaxclip.global_norm(jnp.asarray(values)))
    assert abs(norm / np.linalg.norm(values) - 1) < 1e-13


# One more than a TPU takes one by one. They are of all sizes that float32 squares lose.
MANY = [np.float32([3, -4]) * np.float32(10.0) ** (n % 61 - 30) for n in range(65)]


@accelerator
def test_each_of_many_norms_is_right_by_accelerators(way):
    limits = [1.0] * 64 + [math.inf]
    with by_the_way_of(way):
        norms = optaxclip.tensor_norm(MANY)
        clipped = apply(optaxclip.clip_by_tensor_norm(limits), MANY)[0]
    np.testing.assert_allclose(norms, [oracles.norm([x]) for x in MANY], 1e-6)
    for result, x, limit in zip(clipped, MANY, limits, strict=True):
        factor = min(1.0, limit / oracles.norm([x]))
        np.testing.assert_allclose(result, oracles.wide(x) * factor, 1e-6)


@only_by_a_cpu
def test_a_tpu_takes_the_roots_of_many_norms_as_a_vector():
    for leaves, roots in {64: 64, 65: 1}.items():
        with by_the_way_of("plain"):
            norms = jax.jit(optaxclip.tensor_norm).lower(MANY[:leaves])
            assert norms.compile().as_text().count(" sqrt(") == roots


def test_tensors_and_units_are_clipped_by_accelerators_as_by_a_cpu():
    # "a", "b" and "d" have as many units, and "e" and "f" one norm each.
    shapes = [(40, 3), (5, 3), (40, 2), (9, 3), (7,), ()]
    grads = dict(zip("abcdef", random_leaves("float32", 29, shapes=shapes)))
    limits = dict(zip("abcdef", [0.5, 1.0, 2.0, 0.25, 0.125, 0.0625]))
    clippers = [
        optaxclip.clip_by_tensor_norm(limits),
        optaxclip.clip_by_unitwise_norm(limits),
        optaxclip.clip_by_tensor_norm(
            optaxclip.rules.share_of_params(0.1), shrink=optaxclip.shrinks.smooth()
        ),
    ]

    weights = {name: jnp.full_like(x, limits[name]) for name, x in grads.items()}

    def updated():
        return [c.update(grads, c.init(grads), weights) for c in clippers]

    wanted = updated()
    for way in WAYS:
        with by_the_way_of(way):
            found = updated()
        for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(one, other, 1e-6, err_msg=way)
