"""The three sums of squares on accelerators, in one compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optaxclip._norms import _pairs, _three_sums
from optaxclip._norms._at_once import sums_on_gpu, sums_on_tpu
from optaxclip._norms._in_blocks import taken_out
from optaxclip._norms._pairs import LARGE, sum_on_gpu
from optaxclip._norms._three_sums import (
    SCALE,
    SMALL,
    Sums,
    root,
    root_on_gpu,
    root_on_tpu,
    sum_on_tpu,
    sums_of_leaf,
)
from tests.sharded import mesh_of

LENGTHS = [0, 1, 1000, 100_000]
MOST, LEAST = float(jnp.finfo("float32").max), float(jnp.finfo("float32").tiny)


def either_sum(sum_whole, sum_units):
    """The sum of a leaf: of all of it, or over some dimensions."""

    def sums(leaf, dims):
        if dims is None:
            return Sums(*map(taken_out, sum_whole([leaf])[0]))
        return sums_of_leaf(sum_units, dims, leaf)

    return sums


WAYS = {
    "gpu": (either_sum(sums_on_gpu, sum_on_gpu), root_on_gpu),
    "tpu": (either_sum(sums_on_tpu, sum_on_tpu), root_on_tpu),
}
every_way = pytest.mark.parametrize("way", WAYS)


def norms_by(way, leaf, dims=None):
    sums, root_of = WAYS[way]
    return jax.jit(lambda x: root_of(sums(x, dims)))(leaf)


def of_sums(way, count):
    """The tolerance: an addition may be wrong by 2^-24, and a root halves the total."""
    # A GPU adds the rows of a large leaf first, and a CPU in its place in turn.
    added = 3.5 * count**0.5 if way == "gpu" and count > SMALL else count
    return max(1e-6, added * 2.0**-25)


def norms_in_float64(leaf, dims):
    squares = np.square(np.abs(np.asarray(leaf).astype(np.complex128)))
    return np.sqrt(np.sum(squares, dims, keepdims=dims is not None))


@every_way
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("edge", [MOST**0.5, MOST**0.5 / SCALE])
def test_norms_on_both_sides_of_an_edge_are_right(edge, count, way):
    for size in (0.99, 1.01):
        leaf = np.full(count + 1, size * edge / np.sqrt(count + 1), np.float32)
        expected = np.sqrt(np.sum(np.square(leaf, dtype=np.float64)))
        found = norms_by(way, leaf)
        tolerance = 1e-6 if way == "tpu" else of_sums(way, count + 1)
        np.testing.assert_allclose(found, expected, tolerance)


@every_way
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("large", [1e-15, 1e-6, 1.0, 1e15, 1e30])
def test_large_and_small_values_add_up(large, count, way):
    leaf = np.float32([large] + [large / 1000] * count + [1e-30] * count)
    expected = np.sqrt(np.sum(np.square(leaf, dtype=np.float64)))
    np.testing.assert_allclose(norms_by(way, leaf), expected, of_sums(way, len(leaf)))


def test_2_to_the_37_squares_fit_and_none_is_lost():
    assert 2.0**37 * (MOST / SCALE) ** 2 <= MOST
    assert (LEAST * SCALE) ** 2 >= LEAST
    # Each sum takes over from the next where all that it may lose is nothing beside it.
    for scale, next_scale in ((1 / SCALE, 1), (1, SCALE)):
        most_lost = 2.0**37 * LEAST / scale**2
        assert most_lost <= 2.0**-50 * MOST / next_scale**2


def test_small_numbers_are_nothing_where_a_gpu_leaves_them_out():
    assert 2.0**37 * LARGE**2 <= 2.0**-50 * MOST
    assert (LARGE / SCALE) ** 2 >= LEAST


@every_way
@pytest.mark.parametrize("edge", [LARGE, 1 / SCALE, MOST / SCALE])
def test_numbers_around_an_edge_add_up_in_any_order(edge, way):
    sizes = np.float32([1e-15, 0.4, 0.999, 1.0, 1.001, 2.5, 1e15])
    for seed in range(5):
        leaf = np.random.default_rng(seed).choice(sizes, 2000) * np.float32(edge)
        expected = norms_in_float64(leaf, None)
        np.testing.assert_allclose(norms_by(way, leaf), expected, of_sums(way, 2000))


@every_way
@pytest.mark.parametrize("large", [1e-30, 1.0, 1e10, 1e30])
def test_the_sums_of_several_leaves_add_up(large, way):
    sums_of, root_of = WAYS[way]
    each = [sums_of(jnp.float32([x, x]), None) for x in (1e-30, 1.0, 1e-6, large)]
    expected = np.sqrt(2 * (1 + float(large) ** 2))
    norm = root_of(Sums(*map(sum, zip(*each))))
    np.testing.assert_allclose(norm, expected, 1e-6)


@every_way
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_value_is_seen_beside_a_large_one(value, way):
    leaf = np.float32([3e38, value, 1.0, 1e-30])
    np.testing.assert_equal(float(norms_by(way, leaf)), value)


@every_way
def test_nan_is_seen_beside_inf(way):
    assert np.isnan(norms_by(way, np.float32([np.inf, np.nan])))


@every_way
@pytest.mark.parametrize("shape", [(3,), (300, 300)])
def test_zeros_have_norm_0_and_not_minus_0(shape, way):
    for zeros in (np.zeros(shape, np.float32), -np.zeros(shape, np.float32)):
        norm = norms_by(way, zeros)
        assert norm == 0 and not np.signbit(norm)


@every_way
@pytest.mark.parametrize("dims", [None, (0,), (2,), (0, 1), (0, 2), ()])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_any_axes_of_a_leaf_are_summed(dtype, dims, way):
    values = np.random.default_rng(1).standard_normal((2, 6, 10, 4)).astype(np.float32)
    leaf = jax.lax.complex(*values) if dtype == "complex64" else jnp.asarray(values[0])
    expected = norms_in_float64(leaf, dims)
    found = norms_by(way, leaf, dims)
    np.testing.assert_allclose(found, expected, 1e-6)
    assert found.shape == expected.shape


def over_devices(leaf):
    mesh = mesh_of((4,), ("x",))
    return jax.device_put(leaf, jax.NamedSharding(mesh, P("x")))


@every_way
@pytest.mark.parametrize("dims", [None, (0,), (1,)])
def test_leaves_of_several_devices_are_summed(monkeypatch, dims, way):
    # Of a large leaf a GPU takes another way on several devices than on one.
    monkeypatch.setattr(_three_sums, "SMALL", 8)
    leaf = np.random.default_rng(2).standard_normal((8, 4)).astype(np.float32)
    spread = over_devices(leaf)
    expected = norms_in_float64(leaf, dims)
    found = norms_by(way, spread, dims)
    np.testing.assert_allclose(found, expected, 1e-6)
    assert found.shape == expected.shape


def test_squares_of_large_leaves_on_a_mesh_are_not_stacked(monkeypatch):
    monkeypatch.setattr(_three_sums, "STACKED", 87)
    random = np.random.default_rng(5)
    # Shapes of no other test, since JAX keeps what it traced.
    for shape, stacks in (((8, 11), 0), ((4, 13), 1)):
        leaf = random.standard_normal(shape).astype(np.float32)
        leaf *= np.geomspace(1e-30, 1e30, len(leaf), dtype=np.float32)[:, None]
        sums = jax.jit(lambda x: WAYS["tpu"][0](x, (1,)))
        text = sums.lower(over_devices(leaf)).as_text()
        assert text.count("stablehlo.concatenate") == stacks
        found = norms_by("tpu", over_devices(leaf), (1,))
        np.testing.assert_allclose(found, norms_in_float64(leaf, (1,)), 1e-6)


@every_way
@pytest.mark.parametrize("shape", [(64, 24), (512, 512)])
def test_a_leaf_that_only_the_compiler_splits_is_summed(shape, way):
    params = jax.device_put(
        jnp.ones(shape), jax.NamedSharding(mesh_of((4,), ("x",)), P("x"))
    )

    @jax.jit
    def add(params, leaf):
        return params + leaf, WAYS[way][1](WAYS[way][0](2 * leaf, None))

    leaf = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    leaf *= np.geomspace(1e-30, 1e30, len(leaf), dtype=np.float32)[:, None]
    split = add.lower(params, leaf).compile().input_shardings[0][1]
    assert split.spec == P("x")
    expected = norms_in_float64(2 * leaf, None)
    np.testing.assert_allclose(add(params, leaf)[1], expected, 1e-6)


# For the dimensions that are summed: of a leaf of one device, of a large one of several
# and of a small one of several.
STACKS = {
    ("gpu", None): (0, 1, 0),
    ("gpu", (1,)): (0, 1, 0),
    ("gpu", (0,)): (1, 1, 1),
    ("tpu", None): (0, 0, 0),
    ("tpu", (1,)): (0, 1, 1),
}


@pytest.mark.parametrize(("way", "dims"), STACKS)
def test_three_squares_are_one_array_only_where_it_pays(monkeypatch, way, dims):
    monkeypatch.setattr(_three_sums, "SMALL", 8)
    leaf, small = jnp.ones((12, 4)), over_devices(jnp.ones((4, 2)))
    sums = jax.jit(lambda x: WAYS[way][0](x, dims))
    texts = [sums.lower(x).as_text() for x in (leaf, over_devices(leaf), small)]
    # One array has the three as a stack, or as squares within bounds.
    arrays = re.compile(r"stablehlo\.(concatenate|clamp)")
    found = [len(arrays.findall(text)) for text in texts]
    assert tuple(found) == STACKS[way, dims]


# way, shape, dimensions that are summed, and the shape of the partial sums
TWICE = [
    ("gpu", (300, 301), None, (105,)),  # of 860 numbers, which fill all rows
    ("gpu", (90_001,), None, (101,)),  # of 900 numbers, the last ones of which are 0
    ("gpu", (3, 40_000), None, (120,)),  # of 1000 numbers
    ("gpu", (2, 300, 301), (1, 2), (2, 300)),
    ("tpu", (300, 301), None, (301,)),  # of columns
    ("tpu", (2, 300, 301), None, (301,)),
    ("tpu", (2, 300, 301), (1, 2), (2, 1, 301)),
    ("tpu", (300, 301), (1, 0), (1, 301)),
]
# What is small, has few numbers to add up first, or has a size that nobody knows.
ONCE = [
    ("gpu", (256, 256), None),
    ("gpu", (2, 300, 255), (1, 2)),
    ("gpu", (2, 90_000), (1,)),
    ("tpu", (256, 256), None),
    ("tpu", (255, 300), None),
    ("tpu", (90_000,), None),
    ("tpu", (300, 301), (1,)),
]


def barred(way, shape, dims):
    """The shapes of sums that a barrier separates from the next sum."""
    leaf = jax.ShapeDtypeStruct(shape, "float32")
    with jax.disable_jit():
        program = jax.make_jaxpr(lambda x: WAYS[way][0](x, dims))(leaf)
    barriers = [e for e in program.eqns if e.primitive.name == "optimization_barrier"]
    shapes = {v.aval.shape for each in barriers for v in each.outvars}
    return shapes - {()}  # the zero of pairs


@pytest.mark.parametrize(("way", "shape", "dims", "partial"), TWICE)
def test_a_large_leaf_takes_two_sums(way, shape, dims, partial):
    assert barred(way, shape, dims) == {partial}
    leaf = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    found, expected = norms_by(way, leaf, dims), norms_in_float64(leaf, dims)
    np.testing.assert_allclose(found, expected, 1e-5)
    assert found.shape == expected.shape


def test_a_gpu_sums_the_sums_of_many_rows_by_rows_too(monkeypatch):
    monkeypatch.setattr(_pairs, "LONGEST_ROW", 64)
    # 90,000 numbers are 1500 rows of 60, whose sums are 25 rows of 60.
    assert barred("gpu", (300, 300), None) == {(1500,), (25,)}
    leaf = np.random.default_rng(3).standard_normal((300, 300)).astype(np.float32)
    with jax.disable_jit():
        sums = Sums(*(taken_out(x) for x in sums_on_gpu([leaf])[0]))
    expected = np.linalg.norm(leaf.ravel().astype(np.float64))
    np.testing.assert_allclose(root_on_gpu(sums), expected, 1e-6)


@pytest.mark.parametrize(("way", "shape", "dims"), ONCE)
def test_other_leaves_take_one_sum(way, shape, dims):
    assert not barred(way, shape, dims)


@every_way
def test_a_leaf_of_unknown_size_takes_one_sum(way):
    (rows,) = jax.export.symbolic_shape("rows")
    assert not barred(way, (rows, 300), None)


def test_leaves_of_several_devices_take_one_sum():
    mesh = mesh_of((4,), ("x",))
    for way in WAYS:
        sums = jax.jit(lambda x, way=way: WAYS[way][0](x, None))
        leaf = jax.device_put(jnp.ones((300, 320)), jax.NamedSharding(mesh, P("x")))
        assert "optimization_barrier" not in sums.lower(leaf).as_text()


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((3, 1000, 5), (3, 8, 125, 5)),
        ((1000, 3, 5), (8, 125, 3, 5)),
        ((1002, 3, 5), (2, 501, 3, 5)),
        ((32_768, 3, 5), (32, 1024, 3, 5)),
        ((128, 3, 5), (4, 32, 3, 5)),
        ((32, 3, 5), (2, 16, 3, 5)),
        ((31, 3, 5), (1, 31, 3, 5)),
    ],
)
def test_a_gpu_sums_parts_of_the_longest_axis_first(shape, parts):
    with jax.disable_jit():
        program = jax.make_jaxpr(lambda x: sum_on_gpu(x, (0, 1)))(jnp.ones(shape))
    assert parts in [v.aval.shape for e in program.eqns for v in e.outvars]


@every_way
def test_a_norm_of_everything_has_no_shape(way):
    each = [jnp.float32(x) for x in (np.inf, np.inf, 9.0)]
    norm = WAYS[way][1](Sums(*each))
    assert norm.shape == ()
    assert norm == 3 * SCALE


@every_way
@pytest.mark.parametrize("size", [1.2e-38, 3e37])
def test_the_smallest_and_the_largest_numbers_have_a_norm(size, way):
    leaf = np.full(9, size, np.float32)
    np.testing.assert_allclose(norms_by(way, leaf, None), 3 * leaf[0], 1e-6)


def test_a_gpu_sums_columns_whose_length_only_a_run_knows():
    (rows,) = jax.export.symbolic_shape("rows")
    sums = jax.jit(lambda x: root(sum_on_gpu(x, (0,))))
    program = jax.export.export(sums)(jax.ShapeDtypeStruct((rows, 3), np.float32))
    np.testing.assert_allclose(program.call(jnp.ones((4, 3))), np.full((1, 3), 2.0))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e37])
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "x64"])
def test_columns_of_any_size_are_summed_in_float32_on_a_gpu(size, wide):
    leaf = np.full((64, 3), size, np.float32)
    with jax.enable_x64(wide):
        found = norms_by("gpu", leaf, (0,))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[8 * size] * 3], 1e-6)
