"""Losses that mix loops, constants, frozen parameters and scales, by the gradients of
examples that were really made.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optaxclip.per_example import clipped_grad

from .models import normal
from .test_ghost import close, mean_of_clipped, norms_of

SQUARE, BATCH = normal(0, 6, 6) * 0.4, normal(1, 5, 6)


def layer_by_number(w, x):
    """Stacked layers, taken out by the number of the turn."""

    def body(h, i):
        return jnp.tanh(w[i] @ h), None

    return jnp.sum(lax.scan(body, x, jnp.arange(6))[0])


def decay_by_time(w, x):
    def body(h, i):
        return jnp.tanh(h + w[0] * jnp.exp(-i)), w[1] * (i + 1)

    h, rows = lax.scan(body, x, jnp.arange(4.0))
    return jnp.sum(h) + jnp.sum(jnp.sin(rows * x[None]))


def map_over_numbers(w, x):
    return jnp.sum(lax.map(lambda i: jnp.tanh(w[i] * x), jnp.arange(6)))


@jax.custom_vjp
def rounded(w):
    return jnp.round(w)


# Not linear, so it is another number for a sum of cotangents.
rounded.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def rule_in_each_turn(w, x):
    def body(h, scale):
        return jnp.tanh(rounded(2 * w) @ h + scale * x), None

    return jnp.sum(lax.scan(body, x, jnp.arange(4.0))[0] ** 2)


def rule_in_a_call_of_each_turn(w, x):
    def body(h, scale):
        return jnp.tanh(jax.jit(rounded)(2 * w) @ h + scale * x), None

    return jnp.sum(lax.scan(body, x, jnp.arange(4.0))[0] ** 2)


def rule_in_inner_turns(w, x):
    def body(h, part):
        return rule_in_each_turn(part, h), None

    def turn(h, part):
        return h + body(h, part)[0], None

    return jnp.sum(lax.scan(turn, x, w[None])[0])


def loop_behind_frozen_parameters(w, x):
    """No derivative leads back through a while loop."""
    h = lax.stop_gradient(w) @ x

    def turn(carry):
        z, count = carry
        return jnp.tanh(z + h), count + 1

    z, _ = lax.while_loop(lambda carry: carry[1] < 5, turn, (h, 0))
    return jnp.sum(jnp.tanh(w @ z) ** 2)


def call_behind_frozen_parameters(w, x):
    kind = jax.ShapeDtypeStruct((6,), jnp.float32)
    h = lax.stop_gradient(w) @ x
    z = jax.pure_callback(np.tanh, kind, h, vmap_method="expand_dims")
    return jnp.sum(jnp.tanh(w @ z) ** 2)


def operand_without_numbers(w, x):
    return jnp.sum(jnp.tanh(w @ x)) ** 2 + jnp.sum(jnp.tanh(w[:, :0] @ x[:0] + x))


LOSSES = [
    layer_by_number,
    decay_by_time,
    map_over_numbers,
    rule_in_each_turn,
    rule_in_a_call_of_each_turn,
    rule_in_inner_turns,
    loop_behind_frozen_parameters,
    call_behind_frozen_parameters,
    operand_without_numbers,
]


def gradients(loss, params, *batch):
    """The gradients of the examples, as they are made one by one."""
    run = jax.jit(jax.vmap(jax.grad(loss), (None, *[0] * len(batch))))
    return jax.tree.map(np.float64, run(params, *batch))


@pytest.mark.parametrize("loss", LOSSES)
def test_ghosts_clip_each_example(loss):
    params = np.stack([SQUARE] * 6) if loss is layer_by_number else SQUARE
    each = gradients(loss, params, BATCH)
    limit = float(np.median(norms_of(each)))
    result = jax.jit(clipped_grad(loss, limit, method="ghost"))(params, BATCH)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=2e-6)
    close(result.grads, mean_of_clipped(each, limit), 2e-6)


def in_refs(w, x):
    """A sum that is kept in an array that can be written to."""
    total = jax.new_ref(jnp.zeros(()))

    def body(carry, row):
        total[...] += jnp.tanh(row @ x)
        return carry, None

    lax.scan(body, 0.0, w)
    return total[...]


def test_a_loss_with_refs_takes_one_pass():
    each = gradients(in_refs, SQUARE, BATCH)
    result = jax.jit(clipped_grad(in_refs, 0.5))(SQUARE, BATCH)
    close(result.grads, mean_of_clipped(each, 0.5))
    np.testing.assert_allclose(
        result.values, jax.vmap(in_refs, (None, 0))(SQUARE, BATCH)
    )
    with pytest.raises(ValueError, match=r'for a loss with refs .*, got "ghost"'):
        clipped_grad(in_refs, 0.5, method="ghost")(SQUARE, BATCH)


def products(w, x, c):
    return jnp.sum((x @ w) * c)


@pytest.mark.parametrize("low", [1e-9, 1e-15])
def test_positions_may_differ_in_scale(low):
    """x is large where c is small: all positions count alike in the norm."""
    scale = np.float32([1 / low, low])[:, None]
    x, c = normal(2, 5, 2, 64), normal(3, 5, 2, 64)
    result = jax.jit(clipped_grad(products, 1.0, method="ghost"))(
        np.zeros((64, 64), np.float32), x * scale, c / scale
    )
    each = np.einsum("Btr,Btc->Brc", np.float64(x), np.float64(c))
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=2e-6)


def test_a_tied_table_may_differ_in_scale_as_well():
    scale = np.float32([1e12, 1e-12])[:, None]
    x, c = normal(2, 5, 2, 64), normal(3, 5, 2, 64)
    words = np.random.default_rng(0).integers(0, 64, (5, 2))

    def loss(w, x, c, words):
        return products(w.T, x, c) + jnp.sum(jnp.sin(w[words]))

    batch = x * scale, c / scale, words
    each = gradients(loss, np.zeros((64, 64), np.float32), *batch)
    run = jax.jit(clipped_grad(loss, 1.0, method="ghost"))
    result = run(np.zeros((64, 64), np.float32), *batch)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=2e-6)


def test_a_tied_table_of_16_bits_runs_on_every_platform():
    """XLA on a CPU has no product of bfloat16 matrices under vmap for some shapes."""

    def loss(w, x, words):
        w = w.astype(jnp.bfloat16)
        h = jnp.tanh(w[words] + x.astype(jnp.bfloat16))
        return jnp.sum((h @ w.T).astype(jnp.float32) ** 2)

    params, x = normal(0, 1000, 64) * np.float32(0.1), normal(1, 5, 32, 64)
    batch = x, np.ones((5, 32), int)
    each = gradients(loss, params, *batch)
    result = jax.jit(clipped_grad(loss, 1.0, method="ghost"))(params, *batch)
    # The gradients of the oracle have bfloat16 numbers in them.
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=2.0**-8)
