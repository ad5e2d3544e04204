"""Ghost clipping of losses that compute in 16 bits, whose sums are in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optaxclip.per_example import clipped_grad, explain_clipped_grad

EPS = float(np.finfo(np.float32).eps)


def cast(dtype, seed, *shape):
    """Numbers that 16 bits hold."""
    numbers = np.random.default_rng(seed).integers(-8, 9, shape) / 8
    return jnp.asarray(numbers, dtype)


def layers(p, x):
    return lax.scan(lambda carry, layer: (carry, x @ layer), 0.0, p)[1]


def steps(p, x):
    return lax.scan(lambda carry, now: (carry, now @ p), 0.0, x)[1]


def steps_of_layers(p, x):
    """A scan over layers around one over time, which slices the input alone."""
    return lax.scan(lambda carry, layer: (carry, steps(layer, x)), 0.0, p)[1]


# p, x and out of one example, the equation of its gradient, and out as a function.
USES = {
    "x @ p": ("rc", "tr", "tc", lambda p, x: x @ p),
    "p @ x": ("cr", "rt", "ct", lambda p, x: p @ x),
    "heads": ("rhd", "tr", "thd", lambda p, x: jnp.einsum("tr,rhd->thd", x, p)),
    "from heads": ("dhr", "thd", "tr", lambda p, x: jnp.einsum("thd,dhr->tr", x, p)),
    "experts": ("erc", "etr", "etc", lambda p, x: jnp.einsum("etr,erc->etc", x, p)),
    "transposed": ("cr", "tr", "tc", lambda p, x: x @ p.T),
    "in scan": ("rc", "tr", "tc", steps),
    "layers": ("lrc", "tr", "ltc", layers),
    "both": ("lrc", "tr", "ltc", steps_of_layers),
    "bias": ("c", "tc", "tc", lambda p, x: x + p[None]),
    "scale": ("c", "tc", "tc", lambda p, x: x * p[None]),
    "returned": ("rc", "rc", "rc", lambda p, x: p),
    "halved": ("rc", "tr", "tc", lambda p, x: x @ (2.0 * p / 2)),
    "sliced": (
        "rc",
        "tr",
        "tc",
        lambda p, x: jnp.concatenate([x @ p[:, :1], x @ p[:, 1:]], 1),
    ),
}
SIZES = dict(zip("rcthdel", (3, 4, 5, 2, 3, 2, 2)))


def shape_of(axes):
    return tuple(SIZES[axis] for axis in axes)


def case(name, dtype, count):
    """(loss, parameter, batch, gradients of the examples in float64)."""
    p, x, out, use = USES[name]

    def loss(p, x, c):
        return jnp.sum((use(p.astype(dtype), x) * c).astype(jnp.float32))

    shapes = [(count, *shape_of(axes)) for axes in (x, out)]
    batch = [cast(dtype, seed, *shape) for seed, shape in enumerate(shapes)]
    inputs, cotangents = map(np.float64, batch)
    # The gradient of a sum and of the parameter itself has no input.
    if name in ("bias", "returned"):
        grads = np.einsum(f"B{out}->B{p}", cotangents)
    else:
        grads = np.einsum(f"B{x},B{out}->B{p}", inputs, cotangents)
    return loss, np.zeros(shape_of(p), np.float32), batch, grads


def table(p, x):
    return jnp.sum(p.astype(jnp.bfloat16)[x].astype(jnp.float32))


def convolution(p, x):
    image, kernel = x.astype(jnp.bfloat16)[None], p.astype(jnp.bfloat16)
    numbers = ("NWC", "WIO", "NWC")
    out = lax.conv_general_dilated(
        image, kernel, (1,), "VALID", dimension_numbers=numbers
    )
    return jnp.sum(out.astype(jnp.float32))


def clipped_sum(grads, limit):
    norms = np.linalg.norm(grads.reshape(len(grads), -1), axis=1)
    factors = np.minimum(1, limit / norms)
    return norms, np.einsum("B...,B->...", grads, factors)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", USES)
def test_sums_of_16_bits_are_those_of_the_equation(name, dtype):
    loss, p, batch, grads = case(name, dtype, 20)
    limit = np.median(np.linalg.norm(grads.reshape(20, -1), axis=1))
    result = jax.jit(clipped_grad(loss, limit, method="ghost", mean=False))(p, *batch)
    norms, total = clipped_sum(grads, limit)
    np.testing.assert_allclose(result.norms, norms, rtol=32 * EPS)
    # Cotangents in two parts of bfloat16 are right to 2^-16.
    error = np.linalg.norm(result.grads - total)
    assert error <= 2.0**-16 * np.sum(np.minimum(norms, limit))
    assert result.grads.dtype == np.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", USES)
def test_long_sums_of_16_bits_do_not_stop_growing(name, dtype):
    """A thousand equal examples, whose factor no number of 16 bits is near."""
    loss, p, batch, grads = case(name, dtype, 1)
    batch = [jnp.repeat(x, 1000, 0) for x in batch]
    limit = np.linalg.norm(grads) / 3
    result = jax.jit(clipped_grad(loss, limit, method="ghost", mean=False))(p, *batch)
    error = np.linalg.norm(result.grads - 1000 * grads[0] / 3)
    # Two parts of bfloat16 are right to 2^-16, and 5,000 additions to half an eps each.
    assert error <= (2.0**-16 + 5000 * EPS / 2) * 1000 * limit


def test_a_table_of_16_bits_counts_every_lookup():
    x = np.concatenate([np.zeros((900, 4), int), np.ones((100, 4), int)])
    run = jax.jit(clipped_grad(table, 2.0, method="ghost", mean=False))
    result = run(np.zeros((3, 5), np.float32), x)
    # Four lookups of one row make a gradient of 4 in five columns.
    expected = np.outer([900, 100, 0], np.full(5, 2 / np.sqrt(5)))
    np.testing.assert_allclose(result.grads, expected, rtol=1000 * EPS / 2)


def test_a_convolution_of_16_bits_is_summed_in_float32():
    x = np.float64(cast(jnp.bfloat16, 0, 1, 6, 3))
    # Each of two taps sums the pixels that it meets, for each of four channels.
    grad = np.stack([x[0, :-1].sum(0), x[0, 1:].sum(0)])[:, :, None]
    grad = np.repeat(grad, 4, 2)
    limit = np.linalg.norm(grad) / 3
    run = jax.jit(clipped_grad(convolution, limit, method="ghost", mean=False))
    result = run(np.zeros((2, 3, 4), np.float32), np.repeat(np.float32(x), 1000, 0))
    error = np.linalg.norm(result.grads - 1000 * grad / 3)
    assert error <= 5000 * EPS / 2 * 1000 * limit


@jax.custom_jvp
def twice(x):
    return x + x


twice.defjvp(lambda primals, tangents: (twice(*primals), 2 * tangents[0]))


def through_a_function(p, x):
    return jnp.sum((x @ jnp.tanh(p.astype(jnp.bfloat16))).astype(jnp.float32))


def in_a_branch(p, x):
    branches = [lambda p: x @ p, lambda p: x @ p + x[0]]
    out = lax.cond(x[0] > 0, *branches, p.astype(jnp.bfloat16))
    return jnp.sum(out.astype(jnp.float32))


def by_a_rule(p, x):
    return jnp.sum((x @ twice(p.astype(jnp.bfloat16))).astype(jnp.float32))


def of_two(p, x):
    narrow = p.astype(jnp.bfloat16)
    return jnp.sum((x @ (narrow @ narrow.T)).astype(jnp.float32))


def cast_in_a_branch(p, x):
    def product(p):
        return jnp.sum((x @ p.astype(jnp.bfloat16)).astype(jnp.float32))

    # The same branch for all examples, so that it sums over them.
    return lax.cond(p[0, 0] > 0, product, lambda p: product(p) / 2, p)


def of_fewer_bits(p, x):
    return jnp.sum(jnp.float32(x) @ lax.reduce_precision(p, 8, 7))


ROUNDING = [
    *(through_a_function, in_a_branch, by_a_rule, of_two),
    *(cast_in_a_branch, of_fewer_bits),
]


@pytest.mark.parametrize("loss", ROUNDING)
def test_ways_that_round_to_16_bits_are_gone_by_each_example(loss):
    x = cast(jnp.bfloat16, 0, 20, 4)
    p = np.float32(cast(jnp.bfloat16, 1, 4, 3))
    each = np.float64(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(p, x))
    limit = np.median(np.linalg.norm(each.reshape(20, -1), axis=1))
    result = jax.jit(clipped_grad(loss, limit, method="ghost", mean=False))(p, x)
    norms, total = clipped_sum(each, limit)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(result.norms, norms, rtol=2 * eps)
    error = np.linalg.norm(result.grads - total)
    assert error <= 2 * eps * np.sum(np.minimum(norms, limit))
    # One example changes the sum by its clipped gradient, and by no rounding of it.
    run = jax.jit(clipped_grad(loss, limit, method="ghost", mean=False))
    many = jnp.concatenate([x[:1], jnp.repeat(x[1:2], 1000, 0)])
    whole, rest = run(p, many), run(p, many, mask=np.arange(1001) > 0)
    change = np.linalg.norm(whole.grads - rest.grads)
    expected = whole.norms[0] * whole.factors[0]
    np.testing.assert_allclose(change, expected, atol=1000 * 1000 * EPS * limit)


def test_factors_are_not_rounded_to_inputs_of_16_bits():
    """The product of a bfloat16 input and a float32 matrix."""

    def loss(p, x):
        wide = jnp.dtype("float32")
        out = lax.dot(x, p, preferred_element_type=wide)
        return jnp.sum(out)

    x = cast(jnp.bfloat16, 0, 20, 4)
    each = np.repeat(np.float64(x)[:, :, None], 3, 2)
    limit = np.median(np.linalg.norm(each.reshape(20, -1), axis=1))
    run = jax.jit(clipped_grad(loss, limit, method="ghost", mean=False))
    result = run(np.zeros((4, 3), np.float32), x)
    norms, total = clipped_sum(each, limit)
    error = np.linalg.norm(result.grads - total)
    # Root, factor, product and sum of 20: fewer than 32 roundings of each example.
    assert error <= 32 * EPS * np.sum(np.minimum(norms, limit))


def network(p, x):
    hidden = x.astype(jnp.bfloat16)
    for layer in p:
        kernel, bias = (leaf.astype(jnp.bfloat16) for leaf in layer)
        hidden = jax.nn.relu(hidden @ kernel + bias)
    return jnp.sum(hidden.astype(jnp.float32))


def test_auto_takes_ghosts_for_wide_networks_in_bfloat16():
    p = [(np.full((64, 64), 0.1, np.float32), np.zeros(64, np.float32))] * 2
    x = np.ones((8, 64), np.float32)
    assert explain_clipped_grad(network)(p, x).method == "ghost"
    program = jax.jit(clipped_grad(network, 1.0)).lower(p, x).as_text()
    # Of both kernels there is a product for each part of their cotangents.
    narrow = "tensor<8x1x1x64xbf16>"  # [example, stack, position, ...]
    types = f"({narrow}, {narrow}) -> tensor<1x64x64xf32>"
    assert program.count(types) == 4


def test_auto_takes_ghosts_where_only_what_is_kept_still_is_narrow():
    """What has no derivative is not gone back through, so it may round."""

    def loss(p, x):
        seen = [jnp.tanh(kernel.astype(jnp.bfloat16))[0] for kernel, _ in p]
        scale = lax.stop_gradient(seen[0][0].astype(jnp.float32))
        hidden = jax.nn.relu(x @ p[0][0] + p[0][1])
        return scale * jnp.sum(hidden @ p[1][0] + p[1][1]), seen[1] * x[0]

    p = [(np.full((64, 64), 0.1, np.float32), np.zeros(64, np.float32))] * 2
    x = np.ones((8, 64), np.float32)
    assert explain_clipped_grad(loss, has_aux=True)(p, x).method == "ghost"
