"""The entries of a vector as scalars, in the ways of all platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip._norms import _unstack
from optaxclip._norms._unstack import MERGED, unstacked
from tests.helpers import only_by_a_cpu

WAYS = {
    "cpu": _unstack._by_reduction,
    "gpu": _unstack._by_maxima,
    "tpu": _unstack._by_slices,
}


@pytest.mark.parametrize("size", [1, MERGED, 2 * MERGED + 3])
@pytest.mark.parametrize("way", WAYS)
def test_all_entries_come_back_as_they_are(way, size):
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    found = jax.jit(WAYS[way])(values)
    assert [x.shape for x in found] == [()] * size
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("way", ["gpu", "tpu"])
def test_special_values_come_back_as_they_are(way):
    values = np.float32([np.nan, np.inf, -np.inf, -0.0, 3e38, -1.2e-38])
    found = np.stack(jax.jit(WAYS[way])(values))
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(np.signbit(found[1:]), np.signbit(values[1:]))


def test_a_gpu_takes_all_entries_in_few_parts():
    program = str(jax.make_jaxpr(_unstack._by_maxima)(jnp.ones(65)))
    # One for each 32 of them.
    assert program.count("optimization_barrier") == 3


def test_entries_have_derivatives_of_any_order():
    def total(x):
        return sum(number**3 * place for place, number in enumerate(unstacked(x)))

    x = jnp.array([2.0, 3.0, 5.0])
    np.testing.assert_allclose(jax.jit(jax.grad(total))(x), [0, 27, 150])
    np.testing.assert_allclose(jax.hessian(total)(x), np.diag([0, 18, 60]))
    np.testing.assert_allclose(jax.jvp(total, (x,), (x,))[1], 81 + 750)


def test_entries_of_64_bits_keep_them():
    with jax.enable_x64(True):
        first, second = jax.jit(lambda x: unstacked(x))(np.array([1 / 3, 1e200]))
        assert (float(first), float(second)) == (1 / 3, 1e200)


@only_by_a_cpu
@pytest.mark.parametrize("count", [1, 2, 40])
def test_no_tensor_norm_that_a_program_returns_is_a_slice(count):
    tree = {str(i): jnp.full((3,), float(i)) for i in range(count)}
    tree["matrix"] = jnp.ones((2, 8))
    program = jax.jit(lambda tree: optaxclip.tensor_norm(tree))
    found = program(tree)
    for name, leaf in tree.items():
        np.testing.assert_allclose(found[name], np.linalg.norm(leaf), rtol=1e-6)
    text = program.lower(tree).compile().as_text()
    assert " slice(" not in text and "dynamic-slice(" not in text


def test_norms_that_a_clipper_stacks_again_are_slices():
    tree = {str(i): jnp.ones(3) for i in range(4)}
    clipper = optaxclip.record_norm(lambda tree: optaxclip.tensor_norm(tree))
    state = clipper.init(tree)
    program = str(jax.make_jaxpr(clipper.update)(tree, state))
    assert "unstacked" not in program
    assert "unstacked" in str(jax.make_jaxpr(lambda x: optaxclip.tensor_norm(x))(tree))
