"""Losses that mix loops, constants, frozen parameters, values without a derivative and
rules of their own, each with its parameters and a batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optaxclip import clip_cotangent
from tests.per_example.batches import normal


def layer_by_number(w, x):
    """Stacked layers, taken out by the number of the turn."""

    def body(h, i):
        return jnp.tanh(w[i] @ h), None

    return jnp.sum(lax.scan(body, x, jnp.arange(6))[0])


def long_chain(w, x):
    """Many operations on parameters alone."""
    scale, factor, shift = w[0], w[1], w[2]
    for _ in range(500):
        scale = scale * factor + shift
    return jnp.sum(jnp.tanh(w @ x) @ w * scale)


def long_chain_of_constants(w, x):
    scale = jnp.arange(6.0)[None]
    for _ in range(500):
        scale = jnp.sin(scale) + 1.0
    return jnp.sum(jnp.tanh((w * scale) @ x) @ w)


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
    jax.debug.callback(np.tanh, w)
    h = lax.stop_gradient(w) @ x
    z = jax.pure_callback(np.tanh, kind, h, vmap_method="sequential")
    return jnp.sum(jnp.tanh(w @ z) ** 2)


SQUARE, BATCH = normal(0, 6, 6) * 0.4, normal(1, 5, 6)
OF_A_MATRIX = [
    decay_by_time,
    map_over_numbers,
    rule_in_each_turn,
    rule_in_a_call_of_each_turn,
    rule_in_inner_turns,
    loop_behind_frozen_parameters,
    call_behind_frozen_parameters,
]
CASES = {loss.__name__: (loss, SQUARE, BATCH) for loss in OF_A_MATRIX}
CASES["layer_by_number"] = layer_by_number, np.stack([SQUARE] * 6), BATCH


# Uses of a parameter with nothing in them, such as the rest of a short sequence.


def empty_product(w, x):
    return jnp.sum(x[:-1] @ w)


def empty_scan(w, x):
    def turn(total, row):
        return total + jnp.sum(row @ w), None

    return jax.lax.scan(turn, 0.0, x[:-1])[0]


def empty_convolution(w, x):
    # A window of 3 does not fit into 1 position.
    image, kernel = x[None, :, 0], w.T[:, None]
    return jnp.sum(jax.lax.conv_general_dilated(image[None], kernel, (1,), "VALID"))


SHORT = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 1, 3)
NARROW = np.arange(6, dtype=np.float32).reshape(3, 2)


def beside_another(empty):
    return lambda w, x: empty(w, x) + jnp.sum(x[-1] @ w)


for empty in (empty_product, empty_scan, empty_convolution):
    CASES[empty.__name__] = empty, NARROW, SHORT
    CASES[f"{empty.__name__}, and another"] = beside_another(empty), NARROW, SHORT


# Values that no backward pass comes by, such as a norm that is only logged: their
# derivative may be NaN, or not exist. A bias of 0 has a norm without a derivative.


def layer(p, h):
    return jnp.tanh(p["w"] @ h + p["b"])


def norm_of_bias(p):
    return jnp.linalg.norm(p["b"])


def logged(p, x):
    return jnp.sum(layer(p, x) ** 2), norm_of_bias(p)


def in_a_scan(p, x):
    def turn(h, own):
        return layer(own, h), norm_of_bias(own)

    return jnp.sum(lax.scan(turn, x, p)[0] ** 2)


def carried_for_nothing(p, x):
    def turn(carry, own):
        h, product = carry
        return (layer(own, h), product * norm_of_bias(own) * h[0]), None

    return jnp.sum(lax.scan(turn, (x, 1.0), p)[0][0] ** 2)


@jax.custom_vjp
def kept_whole(w):
    return w * 1


kept_whole.defvjp(lambda w: (w, None), lambda _, cotangent: (cotangent,))


def handed_on(p, x):
    """What is made in one turn is needed in the next but one."""

    def turn(carry, _):
        return (carry[1], carry[2], layer(p, carry[0])), None

    return jnp.sum(lax.scan(turn, (x, x, x), None, length=4)[0][0] ** 2)


def whole_scan(p, x):
    def turn(carry, _):
        made = jnp.tanh(kept_whole(p["w"]) @ carry[0] + p["b"])
        return (carry[1], carry[2], made), None

    return jnp.sum(lax.scan(turn, (x, x, x), None, length=4)[0][0] ** 2)


def rounded_value(p, x):
    return jnp.sum(layer(p, x)) + jnp.round(jnp.sum(x) * norm_of_bias(p))


def in_a_branch(p, x):
    def branch(p, x):
        return jnp.sum(layer(p, x)), norm_of_bias(p)

    return lax.cond(x[0] > 0, branch, branch, p, x)[0]


def made_again_in_a_branch(p, x):
    again = jax.checkpoint(layer)
    return jnp.sum(lax.cond(x[0] > 0, again, lambda p, x: layer(p, -x), p, x))


def settled(p, x):
    """Of `while_loop` there is no backward pass."""

    def loss(p, x):
        last = lax.while_loop(
            lambda c: c[1] < 3, lambda c: (layer(p, c[0]), c[1] + 1), (x, 0)
        )
        return jnp.sum(layer(p, x) ** 2), last[0]

    return jax.jit(loss)(p, x)[0]


def sorted_beside(p, x):
    keys, values = lax.sort((x, layer(p, x)), num_keys=1)
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    table = jax.pure_callback(np.tanh, kind, keys, vmap_method="sequential")
    return jnp.sum(values * table)


PARAMS = {"w": normal(0, 4, 4) * np.float32(0.5), "b": np.zeros(4, np.float32)}
STACKED = jax.tree.map(lambda leaf: np.stack([leaf] * 3), PARAMS)
ROWS = normal(1, 5, 4)
OF_A_LAYER = [
    handed_on,
    whole_scan,
    rounded_value,
    in_a_branch,
    made_again_in_a_branch,
    settled,
    sorted_beside,
]
CASES |= {loss.__name__: (loss, PARAMS, ROWS) for loss in OF_A_LAYER}
CASES |= {
    loss.__name__: (loss, STACKED, ROWS) for loss in (in_a_scan, carried_for_nothing)
}


# Losses whose backward pass is not linear, since a rule of their own makes it.


@jax.custom_vjp
def product(w, x):
    """x @ w, whose gradient by w has norm 1."""
    return x @ w


def backward_of_product(inputs, cotangent):
    w, x = inputs
    slope = jnp.outer(x, cotangent)
    return slope / jnp.linalg.norm(slope), w @ cotangent


product.defvjp(lambda w, x: (product(w, x), (w, x)), backward_of_product)


def clipped(w):
    return clip_cotangent(w, max_norm=1.0)


def of_the_parameter(p, x):
    return jnp.sum(jnp.sin(x @ clipped(p["w"]) + p["b"]))


def of_the_parameter_in_jit(p, x):
    return jnp.sum(jnp.sin(x @ jax.jit(clipped)(p["w"]) + p["b"]))


def where_parameter_and_data_meet(p, x):
    return jnp.sum(jnp.sin(product(p["w"], x) + p["b"]))


def rule_in_a_branch(p, x):
    branches = product, lambda w, x: x @ w
    return jnp.sum(jnp.sin(lax.cond(x[0] > 0, *branches, p["w"], x) + p["b"]))


def in_each_turn_of_a_scan(p, x):
    def turn(total, row):
        w, x = row
        return total + jnp.sin(x * clipped(w)), None

    total, _ = lax.scan(turn, jnp.zeros(p["w"].shape[1]), (p["w"], x))
    return jnp.sum(total * p["b"])


def of_a_parameter_that_is_used_twice(p, x):
    return of_the_parameter(p, x) + jnp.sum(x @ p["w"])


WEIGHTS = {
    "w": np.linspace(-0.4, 0.5, 12, dtype=np.float32).reshape(4, 3),
    "b": np.linspace(0.1, 0.3, 3, dtype=np.float32),
}
# From small to large, so that some are clipped and some are not.
XS = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
XS *= np.geomspace(0.01, 100, 7, dtype=np.float32)[:, None]


BEHIND_RULES = {
    loss.__name__: (loss, WEIGHTS, XS)
    for loss in (
        of_the_parameter,
        of_the_parameter_in_jit,
        where_parameter_and_data_meet,
        rule_in_a_branch,
        in_each_turn_of_a_scan,
        of_a_parameter_that_is_used_twice,
    )
}
CASES |= BEHIND_RULES


def carry_that_is_a_constant_too(p, x):
    """A recurrent network whose first state is learned, and restored on the way."""

    def turn(state, number):
        state = jnp.where(number > 0, p["b"], state)
        return jnp.tanh(state + number * p["b"] + jnp.sum(p["w"], 0)), None

    state, _ = lax.scan(turn, p["b"], x)
    return jnp.sum(state**2)


def carry_of_a_scan_in_a_scan(p, x):
    """Each turn of the outer scan begins with the same learned state."""

    def outer(total, number):
        def inner(state, row):
            return jnp.tanh(state * number + row), None

        state, _ = lax.scan(inner, p["b"], p["w"])
        return total + state, None

    total, _ = lax.scan(outer, jnp.zeros(3), x)
    return jnp.sum(total**2)


def penalty_in_each_turn(p, x):
    def turn(state, number):
        return jnp.tanh(state + number * p["b"]), jnp.sum(p["w"] ** 2)

    state, penalties = lax.scan(turn, jnp.zeros(3), x)
    return jnp.sum(state**2) + 0.1 * jnp.sum(penalties)


CASES |= {
    loss.__name__: (loss, WEIGHTS, XS)
    for loss in (
        carry_that_is_a_constant_too,
        carry_of_a_scan_in_a_scan,
        penalty_in_each_turn,
    )
}
