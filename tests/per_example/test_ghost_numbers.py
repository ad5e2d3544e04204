"""Ghost clipping where numbers are narrow, huge, tiny or broken."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip.per_example import _passes, clipped_grad, explain_clipped_grad
from tests.per_example.batches import EPS, mean_of_clipped, near, normal, norms_of


def linear(w, x, c):
    """Whose gradient is x' c, with x and c of several positions."""
    return jnp.sum((x @ w) * c)


def gradients(x, c):
    """The gradient of each example, and its norm, in float64."""
    grads = np.einsum("btr,btc->brc", np.float64(x), np.float64(c))
    return grads, np.linalg.norm(grads.reshape(len(grads), -1), axis=1)


def way(loss, *args):
    return explain_clipped_grad(loss, method="ghost")(*args).leaves[0].norm_by


def by_ghost(loss, limit, *args):
    return jax.jit(clipped_grad(loss, limit, method="ghost"))(*args)


# The number of positions for each way, of a matrix of 6 rows and 8 columns.
POSITIONS = {"product": 1, "gram": 3, "matrix": 5}


def stacked(w, x, c):
    """Whose gradient is x' c for each matrix of a stack."""
    return jnp.sum(jnp.einsum("ltr,lrc->ltc", x, w) * c)


def test_norms_hold_over_the_range_of_float32():
    """Of one matrix and of a stack of three, by each way. Products of numbers of one
    sign add up, and others may be inf - inf.
    """
    sizes = np.array([1e-30, 1e-15, 1.0, 1e15, 1e30])
    roots = np.sqrt(sizes).astype(np.float32)[:, None, None, None]
    params, batch, norms = {}, {}, {}
    cases = product(POSITIONS.items(), (1, 3), (np.positive, np.abs))
    for (name, count), stack, sign in cases:
        key = f"{name} of {stack}, {sign.__name__}"
        x = sign(normal(0, 5, stack, count, 6)) * roots
        c = sign(normal(1, 5, stack, count, 8)) * roots
        params[key], batch[key] = np.zeros((stack, 6, 8), np.float32), (x, c)
        assert way(stacked, params[key], x, c) == name
        each = np.einsum("bltr,bltc->blrc", np.float64(x), np.float64(c))
        norms[key] = np.linalg.norm(each.reshape(5, -1), axis=1)
        if name == "gram":
            # Squares leave the range of float32 at both ends. What cannot be exceeded
            # stands in.
            terms = [np.linalg.norm(np.float64(each), axis=3) for each in (x, c)]
            bounds = np.linalg.norm(np.sum(terms[0] * terms[1], 2), axis=1)
            norms[key][[0, -1]] = bounds[[0, -1]]

    def loss(params, batch):
        return sum(stacked(params[key], *batch[key]) for key in params)

    found = by_ghost(loss, dict.fromkeys(params), params, batch).norms
    for key, wanted in norms.items():
        np.testing.assert_allclose(found[key], wanted, 16 * EPS, err_msg=key)


@pytest.mark.parametrize("name", POSITIONS)
def test_a_zero_gradient_has_norm_0(name):
    x, c = np.zeros((4, POSITIONS[name], 6)), normal(1, 4, POSITIONS[name], 8)
    result = by_ghost(linear, 1.0, np.zeros((6, 8), np.float32), x, c)
    assert not np.any(result.norms) and not np.any(result.grads)


@pytest.mark.parametrize("name", ["gram", "matrix"])
def test_products_with_one_matrix_are_one_gradient(name):
    def loss(w, x, c):
        return sum(linear(w, x[k], c[k]) for k in range(len(x)))

    x, c = normal(0, 4, POSITIONS[name], 6), normal(1, 4, POSITIONS[name], 8)
    w = np.zeros((6, 8), np.float32)
    assert way(loss, w, x, c) == name
    norms = gradients(x, c)[1]
    np.testing.assert_allclose(by_ghost(loss, None, w, x, c).norms, norms, 16 * EPS)
    # Forward, for the norms, and for the sum. In Gram form they were once all pairs.
    program = jax.make_jaxpr(clipped_grad(loss, None, method="ghost"))(w, x, c)
    assert str(program).count("dot_general[") <= 3 * POSITIONS[name] + 1


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_broken_example_leaves_the_others_alone(name, bad, place):
    data = [normal(0, 4, POSITIONS[name], 6), normal(1, 4, POSITIONS[name], 8)]
    grads = np.einsum("btr,btc->brc", *map(np.float64, data))
    data[place][2, 0, 1] = bad
    result = by_ghost(linear, None, np.zeros((6, 8), np.float32), *data)
    expected = (grads[0] + grads[1] + grads[3]) / 4
    error = np.linalg.norm(np.float64(result.grads) - expected)
    assert error <= 16 * EPS * np.linalg.norm(expected)
    assert result.nonfinite == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_factors_of_16_bits_are_measured_in_32(dtype):
    x, c = (jnp.asarray(normal(seed, 4, 3, 8), dtype) for seed in (0, 1))
    w = jnp.zeros((8, 8), dtype)
    assert way(linear, w, x, c) == "gram"
    norms = gradients(x, c)[1]
    found = by_ghost(linear, None, w, x, c).norms
    assert np.all(found >= norms * (1 - 16 * EPS))
    # What rounding may take is added: 4 eps of the sizes of all products.
    sizes = [np.linalg.norm(np.float64(z), axis=-1) for z in (x, c)]
    one, other = (np.einsum("bt,bs->bts", size, size) for size in sizes)
    gram = [np.abs(np.einsum("btn,bsn->bts", z, z)) for z in map(np.float64, (x, c))]
    lost = np.sum(one * gram[1] + gram[0] * other, axis=(1, 2))
    assert np.all(found <= np.sqrt(norms**2 + 4 * EPS * lost) * (1 + 16 * EPS))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_float64_norms_are_float64(dtype):
    """Also of inputs whose squares float32 could not hold."""

    def loss(w, x, c):
        return jnp.sum(jnp.dot(x, w, preferred_element_type=jnp.float64) * c)

    x, c = normal(0, 4, 3, 8) * np.float32(1e-25), normal(1, 4, 3, 8) * 1e25
    with jax.enable_x64(True):
        args = np.zeros((8, 8), dtype), x.astype(dtype), np.float64(c)
        assert way(loss, *args) == "gram"
        result = by_ghost(loss, None, *args)
    np.testing.assert_allclose(result.norms, gradients(x, c)[1], rtol=1e-14)


def test_many_positions_by_gram_keep_their_norm_in_a_mean():
    """1024 positions that have nothing in common cancel to 1/32."""
    x, c = normal(0, 2, 1024, 2048), normal(1, 2, 1024, 2048)
    w = np.zeros((2048, 2048), np.float32)
    assert way(linear, w, x, c) == "gram"
    grads = jax.jit(jax.vmap(jax.grad(linear), (None, 0, 0)))(w, x, c)
    norms = np.linalg.norm(np.float64(grads).reshape(2, -1), axis=1)
    np.testing.assert_allclose(by_ghost(linear, None, w, x, c).norms, norms, rtol=1e-5)


def test_an_outlier_that_cancels_is_clipped_in_a_mean():
    """The square of its norm is lost in the rounding of its terms."""
    half = normal(0, 20, 1, 64), normal(1, 20, 1, 64)
    x = np.tile(half[0] * np.float32(1e5), (1, 8, 1))
    signs = np.resize([1, -1 + 2e-5], 8)[None, :, None]
    c = np.float32(half[1] * np.float32(1e5) * signs)
    w = np.zeros((64, 64), np.float32)
    assert way(linear, w, x, c) == "gram"
    assert np.min(gradients(x, c)[1]) > 1e6
    grad = jax.jit(clipped_grad(linear, 1.0, method="ghost"))
    for k in range(20):
        mean = grad(w, x[k : k + 1], c[k : k + 1]).grads
        assert np.linalg.norm(mean) <= 1.01


@pytest.mark.parametrize("empty", [0, 1])
def test_positions_without_a_part_do_not_lengthen_a_norm(empty):
    data = normal(0, 4, 8, 64), normal(1, 4, 8, 64) * np.float32(1e-4)
    data[empty][:, 6:], data[1 - empty][:, 6], data[1 - empty][:, 7] = 0, -1e9, 1e25
    norms = by_ghost(linear, None, np.zeros((64, 64), np.float32), *data).norms
    np.testing.assert_allclose(norms, gradients(*data)[1], rtol=16 * EPS)


@pytest.mark.parametrize("large", [2.0**104, 3e37])
def test_a_large_input_without_a_cotangent_has_no_part(large):
    x, c = normal(0, 4, 8, 64), normal(1, 4, 8, 64)
    x[0, 3], c[0, 3] = large, 0
    assert way(linear, np.zeros((64, 64), np.float32), x, c) == "gram"
    result = by_ghost(linear, None, np.zeros((64, 64), np.float32), x, c)
    grads, norms = gradients(x, c)
    np.testing.assert_allclose(result.norms, norms, rtol=16 * EPS)
    np.testing.assert_allclose(result.grads, grads.mean(0), rtol=0, atol=64 * EPS)
    # With a cotangent it counts as inf, since its product may be flushed to 0.
    c[0, 3] = 1e-30
    assert by_ghost(linear, None, np.zeros((64, 64), np.float32), x, c).nonfinite == 1


@pytest.mark.parametrize("large", [2.0**104, 3e37])
def test_a_large_input_of_one_position_counts_as_inf(large):
    x, c = normal(0, 4, 1, 64), normal(1, 4, 1, 64)
    x[0, 0, 3], c[0] = large, 0
    x[1, 0, 3], c[1] = large, 1e-37
    w = np.zeros((64, 64), np.float32)
    assert way(linear, w, x, c) == "product"
    result = by_ghost(linear, 1e-6, w, x, c)
    assert np.isinf(result.norms[1])
    assert np.isfinite(result.norms[0]) and result.nonfinite == 1


def test_the_sum_of_an_unused_parameter_of_16_bits_is_float32(monkeypatch):
    dtypes = []
    plus = _passes._plus

    def recorded(total, term):
        dtypes.append(term.dtype)
        return plus(total, term)

    monkeypatch.setattr(_passes, "_plus", recorded)
    params = {"used": jnp.ones(3), "unused": jnp.ones(3, jnp.bfloat16)}
    by_ghost(
        lambda params, x: jnp.sum(params["used"] * x), 1.0, params, np.ones((2, 3))
    )
    assert dtypes == [jnp.float32, jnp.float32]


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrower_parameters_where_jax_has_64_bits(dtype, count):
    def loss(p, x, index):
        hidden = jnp.tanh(x @ p["w"] + p["table"][index] + p["wide"][None])
        return jnp.sum((hidden @ p["wide"][:, None]) ** 2)

    params = {
        "w": jnp.asarray(normal(0, 6, 8), dtype),
        "table": jnp.asarray(normal(1, 5, 8), dtype),
        "wide": np.float64(normal(2, 8)),
    }
    batch = normal(3, 4, count, 6), np.arange(4 * count).reshape(4, count) % 5
    with jax.enable_x64(True):
        found = jax.jit(clipped_grad(loss, 0.5, method="ghost"))(params, *batch)
        kinds = [jax.tree.map(jnp.result_type, x) for x in (found.grads, params)]
        assert kinds[0] == kinds[1]
        exact = jax.tree.map(np.float64, params)
        each = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(exact, *batch)
        each = jax.tree.map(np.asarray, each)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found.norms, norms_of(each), rtol=tolerance)
    near(found.grads, mean_of_clipped(each, 0.5), tolerance)


@pytest.mark.slow
def test_a_batch_split_over_devices_is_not_moved():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = normal(0, 8, 3, 6), normal(1, 8, 3, 8)
    split = jax.device_put(data, NamedSharding(mesh, P("data")))
    run = jax.jit(clipped_grad(linear, 0.5, method="ghost"))
    text = run.lower(np.zeros((6, 8), np.float32), *split).compile().as_text()
    for word in ("all-gather(", "all-to-all(", "collective-permute("):
        assert word not in text
    assert "all-reduce" in text


@pytest.mark.slow
def test_gradients_of_gradients_exist():
    """As for weights of a loss that are learned."""

    def outer(scale, x, c):
        grad = clipped_grad(linear, 1.0, method="ghost")
        return jnp.sum(grad(jnp.ones((6, 8)), scale * x, c).grads)

    x, c = normal(0, 4, 3, 6), normal(1, 4, 3, 8)
    x[3] *= 1e-30  # The root of 0 has no derivative.
    grads, norms = gradients(x, c)
    # Below the limit the sum is linear in the scale, above it it does not change.
    scale = 1 / np.median(norms)
    inside = norms * scale < 1
    assert np.any(inside) and not np.all(inside)
    found = jax.grad(outer)(jnp.float32(scale), x, c)
    np.testing.assert_allclose(found, np.sum(grads[inside]) / 4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bfloat16_products_of_float64_parameters_have_their_gradient(dtype):
    """The norms are float64 if one parameter is, and so are the weights of examples."""

    def loss(params, x):
        y = x.astype(jnp.bfloat16)[None] @ params["w"].astype(jnp.bfloat16)
        return jnp.sum(jnp.tanh(y.astype(jnp.float64)) * params["scale"])

    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        w = jnp.asarray(random.normal(size=(4, 3)), dtype)
        params = {"w": w, "scale": jnp.ones((1, 3))}
        x = jnp.asarray(random.normal(size=(6, 4)))
        results = []
        for method in ("ghost", "one_pass"):
            clip = jax.jit(clipped_grad(loss, 0.5, mean=False, method=method))
            results.append(clip(params, x).grads["w"])
        ghost, one_pass = results
        assert ghost.dtype == dtype
        np.testing.assert_allclose(ghost, one_pass, rtol=2.0**-7, atol=2.0**-9)
