"""Per-example gradients over the range of float32, and in 16 bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import EPS, METHODS, inner, normal


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_norms_hold_over_the_range_of_float32(size):
    xs = normal(0, 5, 4) * np.float32(size)
    grad = jax.jit(lambda limit, *args: clipped_grad(inner, limit)(*args))
    result = grad(1e-3 * size, np.zeros(4, np.float32), xs)
    norms = np.linalg.norm(np.float64(xs), axis=1)
    np.testing.assert_allclose(result.norms, norms, rtol=4 * EPS)
    assert np.all(np.isfinite(result.grads))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "size, dtype", [(60000.0, jnp.float16), (1e30, jnp.bfloat16), (1e-30, jnp.float32)]
)
def test_the_bound_holds_where_squares_leave_the_range(size, dtype, method):
    grads = np.full((2, 1000), size, dtype)
    grad = clipped_grad(
        lambda w, x: jnp.sum(w * x), 1e-3 * size, mean=False, method=method
    )
    found = jax.jit(grad)(jnp.zeros(1000, dtype), grads)
    length = np.linalg.norm(np.asarray(found.grads, np.float64))
    np.testing.assert_allclose(length, 2e-3 * size, rtol=16 * EPS)
    assert np.sum(found.factors < 1) == 2


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_gradients_are_measured_and_summed_in_float32(method):
    """300 equal bfloat16 gradients: a sum in bfloat16 stops growing at 256 times the
    first.
    """
    xs = np.ones((300, 1000), ml_dtypes.bfloat16)

    def loss(p, x):
        return jnp.sum((p * x).astype(jnp.float32))

    result = jax.jit(clipped_grad(loss, None, mean=False, microbatch=1, method=method))(
        np.zeros(1000, ml_dtypes.bfloat16), xs
    )
    assert result.grads.dtype == jnp.float32
    np.testing.assert_array_equal(result.grads, 300)
    np.testing.assert_allclose(result.norms, np.sqrt(1000), rtol=4 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_gradients_are_rounded_once(dtype):
    rows = np.random.default_rng(0).uniform(0.5, 1.0, (4, 7))
    gradients = jnp.asarray(rows, dtype)
    found = clipped_grad(inner, 0.7)(jnp.zeros(7, dtype), gradients)
    wide = np.asarray(gradients, np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    wanted = np.mean(wide * np.minimum(1, 0.7 / lengths), axis=0)
    half = float(jnp.finfo(dtype).eps) / 2 + 64 * 2.0**-23
    np.testing.assert_allclose(np.asarray(found.grads, np.float64), wanted, rtol=half)


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
def test_rows_of_a_table_in_8_bits_are_added_up_in_float32(method):
    table = jnp.ones((5, 3), jnp.float8_e5m2)
    rows = jnp.array([[0, 0, 4], [1, 2, 3]])
    grad = clipped_grad(
        lambda table, rows: jnp.sum(table[rows].astype(jnp.float32)),
        None,
        mean=False,
        method=method,
    )
    found = jax.jit(grad)(table, rows)
    wanted = np.repeat([[2], [1], [1], [1], [1]], 3, axis=1)
    np.testing.assert_array_equal(found.grads, wanted)
    np.testing.assert_allclose(found.norms, np.sqrt([15, 9]), rtol=4 * EPS)


def in_16_bits(p, x):
    out = jnp.dot(*map(jnp.float16, (x, p)), precision="F16_F16_F16")
    return jnp.sum(out.astype(jnp.float32))


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("loss", "shape"), [(inner, 64), (in_16_bits, (64, 4))])
def test_a_sum_in_16_bits_moves_within_the_limit(loss, shape, dtype, method):
    params = jnp.zeros(shape, dtype)
    batch = jnp.ones((4999, 64)) / np.sqrt(params.size)
    grad = jax.jit(clipped_grad(loss, 1.0, mean=False, method=method))
    # Each gradient has norm 1. At 600 the sum has steps of 0.5 in float16.
    sums = [grad(params, batch, mask=jnp.arange(4999) < n).grads for n in (4998, 4999)]
    change = np.linalg.norm(np.subtract(*map(np.float64, sums)))
    np.testing.assert_allclose(change, 1.0, rtol=1e-4)


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
def test_what_is_rounded_to_16_bits_is_measured_as_it_is_summed(method):
    """XLA may compute a * b - 2 in float32 for one reader, where bfloat16 has 0."""
    values = (1.0078125, 1.9921875, 2.0)
    a, b, two = (jnp.full((4, 3, 64), value, jnp.bfloat16) for value in values)

    def loss(p, x, a, b, two):
        p = p.astype(jnp.bfloat16)
        return jnp.sum((x @ p) * a * b) - jnp.sum((x @ p) * two)

    grad = jax.jit(clipped_grad(loss, 1e-2, mean=False, method=method))
    xs = jnp.ones((4, 3, 32), jnp.bfloat16)
    one = jnp.arange(4) == 1
    result = grad(jnp.zeros((32, 64)), xs, a, b, two, mask=one)
    assert np.linalg.norm(result.grads) <= 1e-2 * (1 + 8 * EPS)


def narrow_site(w, x):
    narrow = x.astype(np.float32) @ w.astype(np.float32)
    return jnp.sum(narrow.astype(np.float64) + x @ w)


def narrow_operand(w, x):
    w = w.astype(np.float32)
    return jnp.sum(jnp.matmul(x, w, preferred_element_type=np.float64) * 2)


def narrow_on_the_way(w, x):
    return jnp.sum(x @ w.astype(np.float32).astype(np.float64) * 2)


@pytest.mark.parametrize("loss", [narrow_site, narrow_operand, narrow_on_the_way])
def test_a_float64_parameter_has_the_bound_of_its_cast_to_float32(loss):
    with jax.enable_x64(True):
        grad = jax.jit(clipped_grad(loss, 1.0, mean=False, method="ghost"))
        changes = []
        bounds = []
        # Gradients are 2 x. The sum passes 256, above which float32 has half as many
        # numbers.
        batch = np.ones((257, 1, 1))
        is_not_last = np.arange(257) < 256
        for number in np.random.default_rng(0).uniform(0, 0.5, 20):
            batch[0] = number
            result = grad(np.zeros((1, 1)), batch, mask=np.ones(257, bool))
            without = grad(np.zeros((1, 1)), batch, mask=is_not_last)
            changes.append((result.grads - without.grads).item())
            bounds.append(result.sensitivity)
        assert 1.00001 < max(changes) <= min(bounds) < 1.01


def test_a_float64_program_has_the_bound_of_float64():
    with jax.enable_x64(True):
        explain = explain_clipped_grad(lambda w, x: jnp.sum(x @ w), method="ghost")
        assert explain(np.zeros((1, 1)), np.ones((257, 1, 1))).change < 1e-9
