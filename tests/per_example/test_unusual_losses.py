"""Losses that mix loops, constants, frozen parameters, scales, values without a
derivative and rules of their own, by the gradients of examples that were really made.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from optaxclip import clip_cotangent
from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import mean_of_clipped, near, normal, norms_of
from tests.sharded import mesh_of


def layer_by_number(w, x):
    """Stacked layers, taken out by the number of the turn."""

    def body(h, i):
        return jnp.tanh(w[i] @ h), None

    return jnp.sum(lax.scan(body, x, jnp.arange(6))[0])


def long_chain(w, x):
    """Many operations on parameters alone."""
    scale = w[0]
    for _ in range(200):
        scale = scale * w[1] + w[2]
    return jnp.sum(jnp.tanh(w @ x) @ w * scale)


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
    z = jax.pure_callback(np.tanh, kind, h, vmap_method="expand_dims")
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


def test_a_long_chain_of_operations_on_parameters_takes_one_pass():
    found = clipped_grad(long_chain, 1.0)(SQUARE, BATCH)
    with jax.enable_x64(True):
        exact = np.float64(SQUARE), np.float64(BATCH)
        each = np.asarray(jax.vmap(jax.grad(long_chain), (None, 0))(*exact))
    near(found.grads, mean_of_clipped(each, 1.0), 1e-4)
    with pytest.raises(ValueError, match="100 operations on them in a row"):
        clipped_grad(long_chain, 1.0, method="ghost")(SQUARE, BATCH)


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
    table = jax.pure_callback(np.tanh, kind, keys, vmap_method="expand_dims")
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
PAIRS = [(name, "ghost") for name in CASES]
PAIRS += [(name, method) for name in BEHIND_RULES for method in ("auto", "one_pass")]


def gradients(loss, params, *batch):
    """The gradients of the examples, as they are made one by one."""
    run = jax.jit(jax.vmap(jax.grad(loss), (None, *[0] * len(batch))))
    return jax.tree.map(np.float64, run(params, *batch))


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_each_example_is_clipped_by_itself(name, method):
    loss, params, batch = CASES[name]
    each = gradients(loss, params, batch)
    limit = float(np.median(norms_of(each))) or 1.0
    result = jax.jit(clipped_grad(loss, limit, method=method))(params, batch)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    near(result.grads, mean_of_clipped(each, limit))


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
    near(result.grads, mean_of_clipped(each, 0.5))
    np.testing.assert_allclose(
        result.values, jax.vmap(in_refs, (None, 0))(SQUARE, BATCH)
    )
    with pytest.raises(ValueError, match=r'for a loss with refs .*, got "ghost"'):
        clipped_grad(in_refs, 0.5, method="ghost")(SQUARE, BATCH)


def products(w, x, c):
    return jnp.sum((x @ w) * c)


def test_positions_may_differ_in_scale():
    """x is large where c is small: all positions count alike in the norm."""
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
    each = np.float64(jax.vmap(jax.grad(loss), (None, 0))(w, ROWS))
    result = clipped_grad(loss, 0.5, method="ghost")(w, ROWS)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    near(result.grads, mean_of_clipped(each, 0.5))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_an_aux_of_parameters_has_no_part_in_the_gradient(wrap):
    each, _ = jax.vmap(jax.grad(logged, has_aux=True), (None, 0))(PARAMS, ROWS)
    each = jax.tree.map(np.float64, each)
    result = clipped_grad(wrap(logged), 0.5, has_aux=True)(PARAMS, ROWS)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    near(result.grads, mean_of_clipped(each, 0.5))


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
    each = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, ROWS)
    each = jax.tree.map(np.float64, each)
    result = jax.jit(clipped_grad(loss, 0.5))(PARAMS, ROWS)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    np.testing.assert_allclose(
        result.values, [loss(PARAMS, x) for x in ROWS], rtol=1e-6
    )
    with pytest.raises(ValueError, match=r'must be "one_pass" or .*, got "ghost"'):
        clipped_grad(loss, 0.5, method="ghost")(PARAMS, ROWS)


@pytest.mark.parametrize("microbatch", [1, 3, None])
def test_masked_and_broken_examples_have_no_part(microbatch):
    broken = XS.copy()
    broken[2] = np.nan
    mask = np.arange(7) != 4
    grad = clipped_grad(of_the_parameter, 0.5, method="ghost", microbatch=microbatch)
    found = jax.jit(grad)(WEIGHTS, broken, mask=mask)
    kept = gradients(of_the_parameter, WEIGHTS, XS[[0, 1, 3, 5, 6]])
    # Of six that are not masked one is broken, and counts.
    expected = jax.tree.map(lambda x: x * 5 / 6, mean_of_clipped(kept, 0.5))
    near(found.grads, expected)
    assert found.nonfinite == 1


def test_only_gradients_behind_the_rule_are_made_for_the_sum():
    def loss(p, x):
        return jnp.sum(jnp.sin(x @ clipped(p["w"]))) + jnp.sum(jnp.sin(x @ p["v"]))

    params = {"w": WEIGHTS["w"], "v": np.ones((4, 5), np.float32)}
    grad = clipped_grad(loss, 0.5, method="ghost")
    text = str(jax.make_jaxpr(lambda p, x: grad(p, x).grads)(params, XS))
    assert "f32[7,4,3]" in text and "f32[7,4,5]" not in text


def test_beside_a_rule_in_each_turn_norms_come_from_factors():
    def loss(p, x):
        def turn(total, row):
            w, v, x = row
            behind, beside = jnp.sin(x @ clipped(w)), jnp.sin(x @ v)
            return total + jnp.sum(behind) + jnp.sum(beside), None

        return lax.scan(turn, 0.0, (p["w"], p["v"], x))[0]

    params = {"w": np.ones((2, 4, 3), np.float32), "v": np.ones((2, 4, 5), np.float32)}
    explain = explain_clipped_grad(loss, method="ghost")
    ways = {
        leaf.name: leaf.way for leaf in explain(params, XS[:6].reshape(3, 2, 4)).leaves
    }
    assert ways == {"w": "gradient", "v": "product"}


def test_examples_stay_apart_on_each_device():
    """The only parameter is behind a rule, and the batch is split over devices."""

    def loss(w, x):
        return jnp.sum(jnp.sin(product(w, x)))

    def of_shard(w, x):
        grad = clipped_grad(loss, 0.5, method="ghost", mean=False)
        return lax.psum(grad(w, x).grads, "x")

    mesh = mesh_of((3,), ("x",))
    split = jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    whole = clipped_grad(loss, 0.5, method="one_pass", mean=False)
    expected = whole(WEIGHTS["w"], XS[:6]).grads
    found = jax.jit(split)(WEIGHTS["w"], XS[:6])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
