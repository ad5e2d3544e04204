"""Leaves that are summed at once, and those that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optaxclip._norms import _at_once
from optaxclip._norms._at_once import (
    SMALL_ON_TPU,
    join_small,
    sums_on_gpu,
    sums_on_tpu,
)
from optaxclip._norms._collectives import Split
from optaxclip._norms._in_blocks import taken_out
from optaxclip._norms._three_sums import SMALL, Sums, root
from tests.sharded import mesh_of

pytestmark = pytest.mark.slow

SHAPES = [(2, 3), (), (6,), (2, 3), (4,), (2, 3), (2, 3), (0,)]


def random_leaves(shapes, dtype="float32"):
    random = np.random.default_rng(3)
    leaves = [random.standard_normal(shape) for shape in shapes]
    if dtype == "complex64":
        leaves = [leaf * np.exp(1j * random.standard_normal()) for leaf in leaves]
    return [jnp.asarray(leaf, dtype) for leaf in leaves]


def sizes(leaves):
    return [leaf.size for leaf in leaves]


def norms_by(sums, leaves):
    return [root(Sums(*map(taken_out, each))) for each in sums(leaves)]


def test_small_leaves_of_one_norm_are_one_leaf():
    leaves = random_leaves([(2, 3), (4,), ()])
    (found,), splits = join_small(leaves, [Split()] * 3)
    expected = np.concatenate([np.ravel(leaf) for leaf in leaves])
    np.testing.assert_array_equal(found, expected)
    assert splits == [Split()]


def test_leaves_of_other_kinds_stay_apart():
    wide = jnp.ones((2, SMALL // 2 + 1))
    leaves = [*random_leaves([(3,), (5,)]), jnp.ones(7, "bfloat16"), wide, wide]
    found, splits = join_small(leaves, [Split(("x",)), *[Split()] * 4])
    assert sizes(found) == [3, 5, 7, wide.size, wide.size]
    assert splits == [Split(("x",)), *[Split()] * 4]
    # A leaf that stays alone keeps its shape.
    assert found[3].shape == wide.shape


@pytest.mark.parametrize("size", [SMALL - 1, SMALL])
def test_leaves_up_to_the_bound_are_small(size):
    leaf = jnp.ones(size)
    found, _ = join_small([leaf, leaf], [Split()] * 2)
    assert sizes(found) == [2 * size]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("sums", [sums_on_gpu, sums_on_tpu])
def test_each_of_the_leaves_read_together_has_its_own_norm(sums, dtype):
    leaves = random_leaves(SHAPES, dtype)
    found = norms_by(sums, leaves)
    assert all(norm.shape == () for norm in found)
    expected = [np.linalg.norm(np.ravel(leaf)) for leaf in leaves]
    np.testing.assert_allclose(found, expected, 1e-6)


def program(sums, leaves):
    # Inlined: a text of a program has a function that it calls twice only once.
    with jax.disable_jit():
        return str(jax.make_jaxpr(sums)(leaves))


def reductions(sums, leaves):
    """How many reductions a program for these leaves has."""
    return program(sums, leaves).count("= reduce")


def test_a_gpu_sums_leaves_of_one_size_as_rows():
    leaves = random_leaves([(2, 3), (6,), (3, 2), (4,)])
    assert reductions(sums_on_gpu, leaves) == 2


LARGE = (3, SMALL // 2)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_gpu_sums_the_rows_of_large_leaves_of_one_size_at_once(dtype):
    leaves = random_leaves([LARGE, (3,), LARGE[::-1], (SMALL + 1,), LARGE], dtype)
    # The rows of each large leaf, then those of the first size, the second, and (3,),
    # which has two parts if it is complex.
    small = 1 if dtype == "float32" else 2
    assert reductions(sums_on_gpu, leaves) == 4 + 2 + small
    found = norms_by(sums_on_gpu, leaves)
    expected = [np.linalg.norm(np.ravel(leaf)) for leaf in leaves]
    np.testing.assert_allclose(found, expected, 1e-6)


def test_a_gpu_sums_sixteen_large_leaves_at_once(monkeypatch):
    leaves = random_leaves([LARGE] * 3)
    assert reductions(sums_on_gpu, leaves) == 3 + 1
    monkeypatch.setattr(_at_once, "AT_ONCE", 2)
    # JAX keeps the program of three.
    assert reductions(sums_on_gpu, leaves * 2) == 6 + 3
    small = random_leaves([(2, 3)] * 3)
    assert reductions(sums_on_gpu, small) == 1


def test_leaves_that_jit_splits_over_a_mesh_stay_apart():
    mesh = mesh_of((4,), ("x",))
    shapes = [(4, 3), (4, 3), LARGE[::-1], LARGE[::-1]]
    placed = jax.device_put(random_leaves(shapes), jax.NamedSharding(mesh, P("x")))
    for sums in (sums_on_gpu, sums_on_tpu):
        text = str(jax.make_jaxpr(sums)(placed))
        assert "concatenate" not in text and "optimization_barrier" not in text


def test_a_tpu_sums_eight_leaves_of_one_shape_at_once(monkeypatch):
    leaves = random_leaves([(2, 3)] * 17)
    assert reductions(sums_on_tpu, leaves) == 3
    monkeypatch.setattr(_at_once, "AT_ONCE_ON_TPU", 3)
    assert reductions(sums_on_tpu, leaves[:6]) == 2


def test_the_columns_of_large_leaves_on_a_tpu_are_summed_at_once():
    leaves = random_leaves([(300, 301), (2, 300, 301), (300, 301)])
    # Three sums of columns each, and one of them all for each shape.
    assert reductions(sums_on_tpu, leaves) == 9 + 2
    found = norms_by(sums_on_tpu, leaves)
    expected = [np.linalg.norm(np.ravel(leaf)) for leaf in leaves]
    np.testing.assert_allclose(found, expected, 1e-6)


def test_large_leaves_on_a_tpu_are_summed_by_themselves():
    leaf = jnp.ones(SMALL_ON_TPU + 1)
    assert reductions(sums_on_tpu, [leaf, leaf]) == 6
    assert reductions(sums_on_tpu, [leaf[1:], leaf[1:]]) == 1
