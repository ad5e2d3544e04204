"""Values of a loss that no backward pass comes by, such as a norm that is only logged:
their derivative may be NaN, or not exist. Gradients of examples are the oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

from optaxclip.per_example import clipped_grad

from .models import normal
from .test_ghost import close, mean_of_clipped, norms_of

# Layers begin with a bias of 0, where its norm has no derivative.
PARAMS = {"w": normal(0, 4, 4) * np.float32(0.5), "b": np.zeros(4, np.float32)}
STACKED = jax.tree.map(lambda leaf: np.stack([leaf] * 3), PARAMS)
BATCH = normal(1, 5, 4)


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


def rounded(p, x):
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
    table = jax.pure_callback(np.tanh, kind, keys, vmap_method="expand_dims")
    return jnp.sum(values * table)


LOSSES = {
    "scan": (in_a_scan, STACKED),
    "dead carry": (carried_for_nothing, STACKED),
    "carried late": (handed_on, PARAMS),
    "carried late as a whole": (whole_scan, PARAMS),
    "round": (rounded, PARAMS),
    "cond": (in_a_branch, PARAMS),
    "checkpoint of a branch": (made_again_in_a_branch, PARAMS),
    "while": (settled, PARAMS),
    "keys of a sort": (sorted_beside, PARAMS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_ghost_goes_back_through_what_jax_does(name):
    loss, params = LOSSES[name]
    each = jax.vmap(jax.grad(loss), (None, 0))(params, BATCH)
    each = jax.tree.map(np.float64, each)
    result = jax.jit(clipped_grad(loss, 0.5, method="ghost"))(params, BATCH)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    close(result.grads, mean_of_clipped(each, 0.5))


@jax.custom_jvp
def seven_times(a, b):
    """a * b, with a rule that is another one where b has a derivative."""
    return a * b


def seven_times_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    return a * b, da * b if type(db) is SymbolicZero else 7 * da * b + a * db


seven_times.defjvp(seven_times_jvp, symbolic_zeros=True)


def test_what_a_scan_carries_beside_parameters_has_no_derivative():
    def loss(w, x):
        def turn(carry, _):
            return (carry[0] + kept_whole(w), carry[1] * 2), None

        return jnp.sum(seven_times(*lax.scan(turn, (x, x), None, length=2)[0]))

    w = np.ones(4, np.float32)
    each = np.float64(jax.vmap(jax.grad(loss), (None, 0))(w, BATCH))
    result = clipped_grad(loss, 0.5, method="ghost")(w, BATCH)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    close(result.grads, mean_of_clipped(each, 0.5))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_an_aux_of_parameters_has_no_part_in_the_gradient(wrap):
    each, _ = jax.vmap(jax.grad(logged, has_aux=True), (None, 0))(PARAMS, BATCH)
    each = jax.tree.map(np.float64, each)
    result = clipped_grad(wrap(logged), 0.5, has_aux=True)(PARAMS, BATCH)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    close(result.grads, mean_of_clipped(each, 0.5))


@jax.custom_jvp
def only_if_learned(w, h):
    return h


def only_if_learned_jvp(primals, tangents):
    frozen = [type(x) is SymbolicZero for x in tangents]
    return primals[1], jnp.zeros_like(primals[1]) if any(frozen) else tangents[1]


only_if_learned.defjvp(only_if_learned_jvp, symbolic_zeros=True)


def asking(p, x):
    return jnp.sum(only_if_learned(p["w"], layer(p, x)) ** 2)


def with_noise(p, x):
    """Random bits that are others where JAX makes those of all turns at once."""

    def turn(h, key):
        mask = jax.random.bernoulli(key, 0.5, p["w"].shape)
        return jnp.tanh((p["w"] * mask) @ h + x), None

    keys = jax.random.split(jax.random.key(3, impl="rbg"), 3)
    return jnp.sum(lax.scan(turn, x, keys)[0] ** 2)


@pytest.mark.parametrize("loss", [asking, with_noise])
def test_a_loss_that_is_another_in_parts_takes_one_pass(loss):
    each = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, BATCH)
    each = jax.tree.map(np.float64, each)
    result = jax.jit(clipped_grad(loss, 0.5))(PARAMS, BATCH)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    np.testing.assert_allclose(
        result.values, [loss(PARAMS, x) for x in BATCH], rtol=1e-6
    )
    with pytest.raises(ValueError, match=r'must be "one_pass", .*, got "ghost"'):
        clipped_grad(loss, 0.5, method="ghost")(PARAMS, BATCH)
