"""Losses that mix loops, constants, frozen parameters, scales, values without a
derivative and rules of their own, by the gradients of examples that were really made.
"""

import inspect
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import mean_of_clipped, near, normal, norms_of
from tests.per_example.unusual_losses import (
    BATCH,
    BEHIND_RULES,
    CASES,
    PARAMS,
    ROWS,
    SQUARE,
    WEIGHTS,
    XS,
    clipped,
    kept_whole,
    layer,
    logged,
    long_chain,
    long_chain_of_constants,
    of_the_parameter,
    product,
)
from tests.sharded import mesh_of

PAIRS = [(name, method) for name in BEHIND_RULES for method in ("auto", "one_pass")]


@pytest.mark.parametrize("loss", [long_chain, long_chain_of_constants])
def test_ghost_clipping_takes_long_chains_without_data(loss):
    """Python lets no thousand functions call one another."""
    found = clipped_grad(loss, 1.0, method="ghost")(SQUARE, BATCH)
    with jax.enable_x64(True):
        exact = np.float64(SQUARE), np.float64(BATCH)
        each = np.asarray(jax.vmap(jax.grad(loss), (None, 0))(*exact))
    near(found.grads, mean_of_clipped(each, 1.0), 1e-4)


def gradients(loss, params, *batch):
    """The gradients of the examples, as they are made one by one."""
    run = jax.jit(jax.vmap(jax.grad(loss), (None, *[0] * len(batch))))
    return jax.tree.map(np.float64, run(params, *batch))


@cache
def gradients_of_case(name):
    return gradients(*CASES[name])


def check(name, method):
    loss, params, batch = CASES[name]
    each = gradients_of_case(name)
    limit = float(np.median(norms_of(each))) or 1.0
    result = jax.jit(clipped_grad(loss, limit, method=method))(params, batch)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6, err_msg=name)
    near(result.grads, mean_of_clipped(each, limit))


def test_each_example_is_clipped_by_itself():
    for name in CASES:
        check(name, "ghost")


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_behind_a_rule_each_method_clips_each_example(name, method):
    check(name, method)


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
    text = r'clipped_grad: .* for a loss with refs .*, got "ghost"'
    with pytest.raises(ValueError, match="^" + text):
        clipped_grad(in_refs, 0.5, method="ghost")(SQUARE, BATCH)
    with pytest.raises(ValueError, match="^explain_" + text):
        explain_clipped_grad(in_refs, method="ghost")(SQUARE, BATCH)


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


def test_an_aux_of_parameters_has_no_part_in_the_gradient():
    each, _ = jax.vmap(jax.grad(logged, has_aux=True), (None, 0))(PARAMS, ROWS)
    each = jax.tree.map(np.float64, each)
    for wrap in (jax.jit, jax.checkpoint):
        grad = clipped_grad(wrap(logged), 0.5, has_aux=True, method="ghost")
        result = jax.jit(grad)(PARAMS, ROWS)
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


def with_noise_without_data(p, x):
    """Random bits in a scan, of which one equation has no parameter."""
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 3)

    def turn(h, key):
        return jnp.tanh(p["w"][0] * h + x + jax.random.uniform(key)), None

    return jnp.sum(lax.scan(turn, x, keys)[0] ** 2)


def with_learned_padding(p, x):
    return jnp.sum(lax.pad(layer(p, x), p["w"][0, 0], [(1, 2, 0)]) ** 2)


def test_a_loss_that_is_another_in_parts_takes_one_pass():
    for loss in (asking, with_noise, with_noise_without_data, with_learned_padding):
        with pytest.raises(ValueError, match=r'must be "one_pass" or .*, got "ghost"'):
            clipped_grad(loss, 0.5, method="ghost")(PARAMS, ROWS)
        each = gradients(loss, PARAMS, ROWS)
        result = jax.jit(clipped_grad(loss, 0.5))(PARAMS, ROWS)
        np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
        values = jax.jit(jax.vmap(loss, (None, 0)))(PARAMS, ROWS)
        np.testing.assert_allclose(result.values, values, rtol=1e-6)


def with_kernel_of_example(p, x):
    kernel = jnp.tanh(p["w"] @ x)[None, None]
    image = x[None, None]
    return jnp.sum(lax.conv_general_dilated(image, kernel, (1,), "SAME"))


OTHER_KEYS = (
    "random numbers from keys other than threefry's, beside parameters or in a scan"
)
OBSTACLES = {
    in_refs: "a loss with refs (jax.new_ref)",
    asking: "symbolic_zeros in a rule for parameters",
    with_noise: OTHER_KEYS,
    with_noise_without_data: OTHER_KEYS,
    with_learned_padding: "a learned value of lax.pad",
    with_kernel_of_example: "a convolution whose kernel depends on the example",
}


@pytest.mark.parametrize("loss", OBSTACLES)
def test_a_refusal_names_the_obstacle_and_its_line(loss):
    args = (SQUARE, BATCH) if loss is in_refs else (PARAMS, ROWS)
    with pytest.raises(ValueError) as caught:
        clipped_grad(loss, 0.5, method="ghost")(*args)
    text = str(caught.value)
    start = f'method must be "one_pass" or "auto" for {OBSTACLES[loss]} ('
    assert start in text
    place, _ = text.split(start)[1].split("), got ")
    file, line = place.rsplit(":", 1)
    lines, first_line = inspect.getsourcelines(loss)
    assert file == inspect.getsourcefile(loss)
    assert first_line < int(line) < first_line + len(lines)


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
        leaf.name: leaf.norm_by
        for leaf in explain(params, XS[:6].reshape(3, 2, 4)).leaves
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
    expected = jax.jit(whole)(WEIGHTS["w"], XS[:6]).grads
    found = jax.jit(split)(WEIGHTS["w"], XS[:6])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
