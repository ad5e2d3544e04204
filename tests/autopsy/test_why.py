"""Each cause is named by its replay, what cannot be told is said, and the numbers are
those of float64 NumPy.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.autopsy import save, why

EXAMPLES = 12
# Of these examples none stands out.
RANDOM = np.random.default_rng(6)
PARAMS = {
    "first": np.float32(RANDOM.normal(size=(4, 6)) / 2),
    "last": np.float32(RANDOM.normal(size=6) / 2),
}
INPUTS = np.float32(RANDOM.normal(size=(EXAMPLES, 4)))
TARGETS = INPUTS.sum(axis=1)


class Batch(NamedTuple):
    x: Any
    y: Any


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2)


def gradients(params, x, y):
    """Of each example, in float64 NumPy: [examples, 4, 6] and [examples, 6]."""
    first, last, x, y = (np.float64(array) for array in (*params.values(), x, y))
    hidden = np.tanh(x @ first)
    errors = 2 * (hidden @ last - y)
    of_hidden = errors[:, None] * last * (1 - hidden**2)
    return x[:, :, None] * of_hidden[:, None], errors[:, None] * hidden


def norm_of(params, x, y):
    return np.sqrt(sum(np.sum(g.mean(0) ** 2) for g in gradients(params, x, y)))


USUAL_GRADIENTS = gradients(PARAMS, INPUTS, TARGETS)
LIMIT = 3 * norm_of(PARAMS, INPUTS, TARGETS)
ADAM = optax.adam(1e-2)
SKIP = optaxclip.skip_spikes(ADAM, LIMIT)
WITHOUT_MOMENTS = (
    "layer: without second moments of Adam only gradients that are not finite stand out"
)
WITHOUT_EXAMPLES = "data: the arrays of the batch share no first axis with rows"
WITHOUT_NORM = (
    "chip: no norm of the whole gradient under skip/norm, spike/norm, "
    "clip/norm_before or record/norm"
)


@cache
def value_and_grad(loss):
    return jax.jit(jax.value_and_grad(loss))


@cache
def trained(optimizer):
    """The state after some steps whose updates are not applied."""
    state = optimizer.init(PARAMS)
    _, grads = value_and_grad(loss)(PARAMS, INPUTS, TARGETS)
    for _ in range(3):
        _, state = jax.jit(optimizer.update)(grads, state, PARAMS, value=1.0)
    return state


@pytest.fixture
def saved(tmp_path):
    """Saves a step, with the gradient that the optimizer is shown."""

    def saved(params, batch, grads=None, optimizer=SKIP, loss=loss):
        value, true_grads = value_and_grad(loss)(params, *batch)
        grads = true_grads if grads is None else grads
        update = jax.jit(optimizer.update)
        _, state = update(grads, trained(optimizer), params, value=value)
        return save(tmp_path / "step.npz", params, batch, state)

    return saved


def outlier(size=1e3, places=(5,)):
    y = np.array(TARGETS)
    y[list(places)] = size
    return INPUTS, y


def test_a_step_within_its_limits_has_no_cause(saved):
    verdict = why(loss, saved(PARAMS, (INPUTS, TARGETS)))
    assert (verdict.cause, verdict.examples, verdict.not_told) == ("none", [], [])
    wanted = norm_of(PARAMS, INPUTS, TARGETS)
    for name in (
        "recorded norm",
        "lowest norm of three replays",
        "highest norm of three replays",
        "norm in float32",
    ):
        assert verdict.numbers[name] == pytest.approx(wanted, rel=1e-5)
    assert verdict.numbers["limit"] == pytest.approx(LIMIT, rel=1e-6)
    of_each = [g.reshape(EXAMPLES, -1) for g in gradients(PARAMS, INPUTS, TARGETS)]
    norms = np.sort(np.linalg.norm(np.concatenate(of_each, axis=1), axis=1))
    usual = verdict.numbers["median nonzero norm of examples"]
    assert usual == pytest.approx(norms[EXAMPLES // 2 - 1], rel=1e-5)


def test_what_was_compared_is_printed(saved):
    verdict = why(loss, saved(PARAMS, outlier()))
    lines = str(verdict).splitlines()
    assert lines[0].startswith("data: ") and lines[1].startswith("examples [5]")
    wanted = norm_of(PARAMS, *outlier())
    assert f"{'recorded norm':40} {wanted:10.4g}" in lines
    others = np.arange(EXAMPLES) != 5
    wanted = norm_of(PARAMS, INPUTS[others], TARGETS[others])
    assert f"{'norm without far examples':40} {wanted:10.4g}" in lines


# ---------------------------------------------------------------------------- the chip


@pytest.mark.parametrize("wrong", [1e4, np.nan])
def test_a_norm_that_no_replay_gives_is_of_the_chip(saved, wrong):
    grads = jax.grad(loss)(PARAMS, INPUTS, TARGETS)
    grads["first"] = grads["first"].at[2, 3].set(wrong)
    verdict = why(loss, saved(PARAMS, (INPUTS, TARGETS), grads))
    assert verdict.cause == "chip"
    assert verdict.numbers["recorded norm"] > 1e3
    highest = verdict.numbers["highest norm of three replays"]
    assert highest == pytest.approx(norm_of(PARAMS, INPUTS, TARGETS), rel=1e-5)


def erring(factors):
    """A loss that a chip multiplies by something, run by run."""
    factors = iter(factors)

    def of_run(_):
        return np.float32(next(factors))

    def loss_on_chip(params, x, y):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        factor = jax.pure_callback(of_run, shape, x[0, 0])
        return loss(params, x, y) * factor

    return loss_on_chip


def test_one_run_of_three_that_differs_is_of_the_chip(saved):
    path = saved(PARAMS, outlier())
    for run in range(3):
        factors = np.ones(100)
        factors[run] = 2
        verdict = why(erring(factors), path)
        assert verdict.cause == "chip"
        lowest = verdict.numbers["lowest norm of three replays"]
        highest = verdict.numbers["highest norm of three replays"]
        assert highest == pytest.approx(2 * lowest, rel=1e-5)


def test_runs_that_all_differ_are_of_the_chip_or_random(saved):
    path = saved(PARAMS, outlier())
    verdict = why(erring(np.arange(1, 100)), path)
    assert verdict.cause == "chip" and "or the loss is random" in str(verdict)


def test_last_bits_that_differ_are_not_the_cause(saved):
    # As atomic sums of a GPU do.
    verdict = why(erring(1 + 1e-6 * np.arange(100)), saved(PARAMS, outlier()))
    assert (verdict.cause, verdict.examples) == ("data", [5])


# --------------------------------------------------------------------------- the dtype


def in_float16(params, x, y, dtype=jnp.float16):
    """Its hidden numbers are too large for float16 on the way."""
    hidden = jnp.tanh(x @ params["first"]).astype(dtype)
    hidden = hidden * 1000 * 1000 / 1000 / 1000
    return jnp.mean((hidden.astype(jnp.float32) @ params["last"] - y) ** 2)


def in_float32(params, x, y):
    return in_float16(params, x, y, jnp.float32)


def test_what_is_harmless_in_float32_is_of_the_dtype(saved):
    path = saved(PARAMS, (INPUTS, TARGETS), loss=in_float16)
    verdict = why(in_float16, path, wide=in_float32)
    assert verdict.cause == "dtype" and verdict.not_told == []
    # Without it, the replay in float32 has float16 in it.
    verdict = why(in_float16, path)
    assert verdict.cause == "model"
    assert verdict.not_told == [
        "dtype: the loss still computes in 16 bits, wide= takes one of float32"
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_of_16_bits_are_replayed_in_float32(saved, dtype):
    def cancelling(params, x, y):
        # E x^2 - (E x)^2 is 0 or wrong in 16 bits.
        x = x.astype(params["first"].dtype)
        variance = (x * x).mean(axis=1) - x.mean(axis=1) ** 2
        x = (x - x.mean(axis=1, keepdims=True)) / jnp.sqrt(variance)[:, None]
        return loss(params, x, y)

    params = jax.tree.map(lambda w: jnp.asarray(w, dtype), PARAMS)
    optimizer = optaxclip.skip_nonfinite(ADAM)
    path = saved(params, (INPUTS + 100, TARGETS), None, optimizer, cancelling)
    verdict = why(cancelling, path)
    assert verdict.cause == "dtype" and verdict.not_told == []
    assert not np.isfinite(verdict.numbers["lowest norm of three replays"])


# ---------------------------------------------------------------------------- the data


@pytest.mark.parametrize("places", [(5,), (0, 7, 11)])
@pytest.mark.parametrize("size", [1e3, np.nan, np.inf])
def test_examples_without_which_all_is_well_are_named(saved, places, size):
    verdict = why(loss, saved(PARAMS, outlier(size, places)))
    assert verdict.cause == "data"
    assert sorted(verdict.examples) == list(places)


def test_examples_stand_in_the_order_of_their_norms(saved):
    x, y = outlier(500.0, (3,))
    y[8] = 900.0
    assert why(loss, saved(PARAMS, (x, y))).examples == [8, 3]


def test_examples_that_the_limit_allows_are_not_named(saved):
    """In a trained network most examples have tiny norms, and others stand out."""
    x, y = outlier(np.nan, (5,))
    outputs = np.tanh(x @ PARAMS["first"]) @ PARAMS["last"]
    y[6:] = outputs[6:] + 0.01
    verdict = why(loss, saved(PARAMS, (x, y)))
    assert (verdict.cause, verdict.examples) == ("data", [5])


def test_parts_of_a_batch_are_named_together(saved):
    path = saved(PARAMS, outlier())
    assert why(loss, path, microbatch=4).examples == [4, 5, 6, 7]
    assert why(loss, path, microbatch=4.0).examples == [4, 5, 6, 7]
    # The last part is smaller.
    assert why(loss, path, microbatch=5).examples == [5, 6, 7, 8, 9]
    assert why(loss, saved(PARAMS, outlier(1e3, (11,))), microbatch=5).examples == [
        10,
        11,
    ]


def test_one_example_is_differentiated_at_a_time(saved):
    sizes = []

    def seen(params, x, y):
        sizes.append(len(x))
        return loss(params, x, y)

    why(seen, saved(PARAMS, outlier()))
    # Traced once for the batch, one example and the batch without the outlier.
    assert set(sizes) == {EXAMPLES, 1, EXAMPLES - 1}


def test_numbers_that_equal_their_limits_are_within_them(tmp_path):
    """As the skip has it, which let the step pass."""

    def linear(params, x):
        return jnp.mean(x @ params)

    params, x = np.ones(2, np.float32), np.array([[3.0, 4.0]], np.float32)
    optimizer = optaxclip.skip_spikes(ADAM, 5.0, loss_rule=7.0)
    value, grads = value_and_grad(linear)(params, x)
    _, state = optimizer.update(grads, optimizer.init(params), params, value=value)
    assert state.norm == 5.0 and state.loss == 7.0 and not state.skipped
    assert why(linear, save(tmp_path / "step.npz", params, (x,), state)).cause == "none"


def test_a_loss_that_breaks_only_its_own_limit(saved):
    optimizer = optaxclip.skip_spikes(ADAM, 1e9, loss_rule=30.0)
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    # A squared error stands out sooner than its gradient.
    assert (verdict.cause, verdict.examples[0]) == ("data", 5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("loss_rule", [30.0, np.inf])
def test_a_loss_that_is_not_finite_breaks_any_limit(saved, wrong, loss_rule):
    def shifted(params, x, y, shifts):
        return loss(params, x, y) + jax.lax.stop_gradient(shifts).mean()

    shifts = np.zeros(EXAMPLES, np.float32)
    shifts[5] = wrong
    optimizer = optaxclip.skip_spikes(ADAM, 1e9, loss_rule=loss_rule)
    batch = (INPUTS, TARGETS, shifts)
    grads = jax.grad(loss)(PARAMS, INPUTS, TARGETS)
    verdict = why(shifted, saved(PARAMS, batch, grads, optimizer, shifted))
    assert (verdict.cause, verdict.examples[0]) == ("data", 5)
    assert verdict.numbers["recorded loss"] == np.inf


def test_a_loss_below_zero_is_compared_by_its_size(saved):
    def shifted(params, x, y):
        return loss(params, x, y) - 1000

    optimizer = optaxclip.skip_spikes(ADAM, 1e9, loss_rule=1e3)
    verdict = why(shifted, saved(PARAMS, outlier(), None, optimizer, shifted))
    assert (verdict.cause, verdict.examples) == ("data", [5])


def test_a_step_without_a_limit_is_held_against_its_examples(saved):
    optimizer = optaxclip.skip_nonfinite(ADAM)
    verdict = why(loss, saved(PARAMS, outlier(np.inf), None, optimizer))
    assert (verdict.cause, verdict.examples) == ("data", [5])
    usual = verdict.numbers["median nonzero norm of examples"]
    assert verdict.numbers["limit"] == 10 * usual


def test_masked_examples_are_no_measure_of_the_others(saved):
    def masked(params, x, y, mask):
        y = jnp.where(mask, y, jnp.tanh(x @ params["first"]) @ params["last"])
        return loss(params, x, jax.lax.stop_gradient(y))

    batch = (*outlier(np.inf), np.arange(EXAMPLES) < 6)
    path = saved(PARAMS, batch, None, optaxclip.skip_nonfinite(ADAM), masked)
    verdict = why(masked, path)
    assert verdict.cause == "data" and verdict.examples[0] == 5
    assert verdict.numbers["limit"] > 0


@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize("size", [1e3, np.nan])
def test_padding_does_not_stand_out(saved, size, microbatch):
    """A mean over weights is 0 / 0 where all examples have the weight 0."""

    def weighted(params, x, y, weights):
        errors = (jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2
        return jnp.sum(weights * errors) / jnp.sum(weights)

    weights = np.ones(EXAMPLES, np.float32)
    weights[[2, 3, 10, 11]] = 0
    batch = (*outlier(size), weights)
    verdict = why(weighted, saved(PARAMS, batch, loss=weighted), microbatch=microbatch)
    wanted = {1: [5], 2: [4, 5]}
    assert (verdict.cause, verdict.examples) == ("data", wanted[microbatch])


def test_padding_takes_no_replay_of_its_own(saved):
    """The whole batch in float32 shows that no example of the padding is at fault."""
    runs = []

    def weighted(params, x, y, weights):
        jax.debug.callback(lambda size: runs.append(int(size)), jnp.int32(len(x)))
        errors = (jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2
        return jnp.sum(weights * errors) / jnp.sum(weights)

    weights = np.float32(np.arange(EXAMPLES) < 7)
    path = saved(PARAMS, (*outlier(), weights), loss=weighted)
    jax.effects_barrier()
    runs.clear()
    assert why(weighted, path).examples == [5]
    jax.effects_barrier()
    # The step three times and in float32, each example, and the batch without the
    # outlier.
    assert sorted(runs) == [1] * EXAMPLES + [EXAMPLES - 1] + [EXAMPLES] * 4


def test_keys_of_examples_and_keys_of_all_are_told_apart(saved):
    def noisy(params, x, y, keys, key):
        noise = jax.vmap(jax.random.normal)(keys) + jax.random.normal(key)
        return loss(params, x, y + 1e-3 * noise)

    keys = jax.random.split(jax.random.key(0), EXAMPLES)
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        batch = (*outlier(), keys, key)
        verdict = why(noisy, saved(PARAMS, batch, loss=noisy))
        assert (verdict.cause, verdict.examples) == ("data", [5])


def test_a_batch_whose_axes_differ_is_said(saved):
    def weighted(params, x, y, weights):
        return loss(params, x * weights.sum(), y)

    batch = (*outlier(), np.ones(3, np.float32) / 3)
    verdict = why(weighted, saved(PARAMS, batch, loss=weighted))
    assert verdict.cause == "model"
    assert verdict.not_told == [WITHOUT_EXAMPLES]


def test_a_batch_without_a_first_axis_is_said(saved):
    def scaled(params, factor):
        return factor * loss(params, INPUTS, TARGETS)

    verdict = why(scaled, saved(PARAMS, (np.float32(1e3),), loss=scaled))
    assert (verdict.cause, verdict.examples) == ("model", [])
    assert verdict.not_told == [WITHOUT_EXAMPLES]


def test_a_batch_without_rows_is_said(saved):
    batch = (INPUTS[:0], TARGETS[:0])
    assert why(loss, saved(PARAMS, batch)).not_told == [WITHOUT_EXAMPLES]


def test_a_step_without_limit_and_examples_is_held_against_inf(saved):
    def weighted(params, x, y, weights):
        return loss(params, x * weights.sum(), y)

    batch = (INPUTS, TARGETS, np.ones(3, np.float32) / 3)
    path = saved(PARAMS, batch, None, optaxclip.skip_nonfinite(ADAM), weighted)
    assert why(weighted, path).cause == "none"


def test_a_batch_without_a_gradient_sets_no_limit(saved):
    def flat(params, x, y):
        return 0 * loss(params, x, y)

    optimizer = optaxclip.skip_nonfinite(ADAM)
    verdict = why(flat, saved(PARAMS, (INPUTS, TARGETS), None, optimizer, flat))
    assert (verdict.cause, verdict.numbers["limit"]) == ("none", np.inf)


def test_a_batch_may_be_one_argument(tmp_path, saved):
    def of_named(params, batch):
        return loss(params, batch.x, batch.y), "aux"

    saved(PARAMS, outlier())
    batch = Batch(*outlier())
    grads = jax.grad(of_named, has_aux=True)(PARAMS, batch)[0]
    _, state = SKIP.update(grads, trained(SKIP), PARAMS)
    path = save(tmp_path / "named.npz", PARAMS, batch, state)
    verdict = why(of_named, path, like=(PARAMS, batch))
    assert (verdict.cause, verdict.examples) == ("data", [5])


# --------------------------------------------------------------- the layer, the model


def slipping(factor):
    """A loss whose backward pass is wrong for one tensor."""

    def loss_with_slip(params, x, y):
        last = optaxclip.scale_cotangent(params["last"], factor)
        return loss({"first": params["first"], "last": last}, x, y)

    return loss_with_slip


@pytest.mark.parametrize("factor", [1e3, np.inf])
def test_a_tensor_without_which_all_is_well_is_named(saved, factor):
    wrong = slipping(jnp.float32(factor))
    verdict = why(wrong, saved(PARAMS, (INPUTS, TARGETS), loss=wrong))
    assert (verdict.cause, verdict.tensors) == ("layer", ["last"])


def test_a_tensor_of_nnx_is_named(tmp_path):
    """Its second moments stand under `last/value`, and its norm under `last`."""
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.State({name: nnx.Param(jnp.asarray(PARAMS[name])) for name in PARAMS})

    def of_state(params, x, y, loss=loss):
        return loss({name: params[name][...] for name in PARAMS}, x, y)

    def wrong(params, x, y):
        return of_state(params, x, y, loss=slipping(jnp.float32(1e3)))

    state = SKIP.init(params)
    for slip in (of_state, of_state, wrong):
        grads = jax.grad(slip)(params, INPUTS, TARGETS)
        _, state = jax.jit(SKIP.update)(grads, state, params)
    path = save(tmp_path / "step.npz", params, (INPUTS, TARGETS), state)
    verdict = why(wrong, path, like=(params, (0, 0)))
    assert (verdict.cause, verdict.tensors) == ("layer", ["last/value"])


def test_tensors_without_a_gradient_are_no_measure_of_the_others(saved):
    def frozen(params, x, y):
        rest = [jax.lax.stop_gradient(params[name]).sum() for name in "abc"]
        return slipping(1e3)(params, x, y + 0 * sum(rest))

    params = PARAMS | dict.fromkeys("abc", np.ones(2, np.float32))
    optimizer = optaxclip.skip_spikes(ADAM, LIMIT)
    state = optimizer.init(params)
    for _ in range(3):
        grads = jax.grad(loss)(params, INPUTS, TARGETS)
        _, state = jax.jit(optimizer.update)(grads, state, params)
    path = saved(PARAMS, (INPUTS, TARGETS))
    grads = jax.grad(frozen)(params, INPUTS, TARGETS)
    _, state = optimizer.update(grads, state, params)
    verdict = why(frozen, save(path, params, (INPUTS, TARGETS), state))
    assert (verdict.cause, verdict.tensors) == ("layer", ["last"])


def test_weights_without_a_gradient_are_passed_over(tmp_path, saved):
    """A counter, and a weight of no numbers. The grads of the step have neither."""
    saved(PARAMS, outlier())
    grads = jax.grad(loss)(PARAMS, *outlier())
    _, state = SKIP.update(grads, trained(SKIP), PARAMS)
    params = {"count": np.int32(7), "empty": np.zeros((0, 3), np.float32), **PARAMS}
    path = save(tmp_path / "counted.npz", params, outlier(), state)
    verdict = why(loss, path)
    assert (verdict.cause, verdict.examples) == ("data", [5])
    wanted = norm_of(PARAMS, *outlier())
    assert verdict.numbers["norm in float32"] == pytest.approx(wanted, rel=1e-5)
    assert set(verdict.tensors) <= set(PARAMS)


def test_a_loss_blames_no_layer(saved):
    def shifted(params, x, y):
        return loss(params, x, y) + 1000

    optimizer = optaxclip.skip_spikes(ADAM, 1e9, loss_rule=30.0)
    path = saved(PARAMS, (INPUTS, TARGETS), None, optimizer, shifted)
    verdict = why(shifted, path)
    assert verdict.cause == "model"
    # Norms are below the limit of the loss.
    assert verdict.numbers["norm without far tensors"] < verdict.numbers["limit"] == 30


def test_without_moments_a_long_tensor_is_not_told(saved):
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), LIMIT)
    wrong = slipping(1e3)
    path = saved(PARAMS, (INPUTS, TARGETS), None, optimizer, wrong)
    verdict = why(wrong, path)
    assert (verdict.cause, verdict.tensors) == ("model", [])
    assert verdict.not_told == [WITHOUT_MOMENTS]


def test_a_tensor_that_is_inf_is_named_without_moments(saved):
    wrong = slipping(jnp.float32(np.inf))
    optimizer = optaxclip.skip_nonfinite(optax.sgd(0.1))
    path = saved(PARAMS, (INPUTS, TARGETS), None, optimizer, wrong)
    verdict = why(wrong, path)
    assert (verdict.cause, verdict.tensors) == ("layer", ["last"])
    assert verdict.not_told == [WITHOUT_MOMENTS]


def test_weights_that_grew_are_of_the_model(saved):
    params = {name: 30 * w for name, w in PARAMS.items()}
    verdict = why(loss, saved(params, (INPUTS, TARGETS)))
    assert verdict.cause == "model" and verdict.not_told == []
    # Against the usual gradient, which the state has seen three times.
    growths = []
    for new, old in zip(gradients(params, INPUTS, TARGETS), USUAL_GRADIENTS):
        growths.append(np.linalg.norm(new.mean(0)) / np.linalg.norm(old.mean(0)))
    assert verdict.tensors == [list(PARAMS)[np.argmax(growths)]]


def test_weights_that_are_not_finite_are_named(saved):
    params = {**PARAMS, "last": np.full(6, np.nan, np.float32)}
    verdict = why(loss, saved(params, (INPUTS, TARGETS)))
    assert verdict.cause == "model"
    assert verdict.tensors == ["last"]


def test_weights_that_are_not_finite_are_no_backward_pass(saved):
    def penalized(params, x, y):
        finite = {"first": params["first"], "last": PARAMS["last"]}
        return loss(finite, x, y) + params["last"].sum() ** 2

    # The gradient of the other tensor is finite.
    params = {**PARAMS, "last": np.full(6, np.nan, np.float32)}
    path = saved(params, (INPUTS, TARGETS), loss=penalized)
    verdict = why(penalized, path)
    assert (verdict.cause, verdict.tensors) == ("model", ["last"])


# ------------------------------------------------------------------- what was recorded


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optaxclip.record_norm(), ADAM),
        optax.chain(optaxclip.clip_by_global_norm(LIMIT), ADAM),
        optax.chain(optaxclip.record_spikes(LIMIT), ADAM),
        optaxclip.skip_step(optax.chain(optaxclip.clip_by_global_norm(1.0), ADAM)),
    ],
    ids=["record_norm", "clip", "record_spikes", "skip_step"],
)
def test_the_norm_of_each_wrapper_is_found(saved, optimizer):
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    wanted = norm_of(PARAMS, *outlier())
    assert verdict.numbers["recorded norm"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("is_outside", [True, False])
def test_of_two_wrappers_the_one_that_skipped_is_asked(saved, is_outside):
    if is_outside:
        optimizer = optaxclip.skip_nonfinite(SKIP)
    else:
        optimizer = optaxclip.skip_spikes(optaxclip.skip_nonfinite(ADAM), LIMIT)
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    assert verdict.numbers["limit"] == pytest.approx(LIMIT, rel=1e-6)


def test_a_skip_inside_a_skipped_step_is_not_asked(tmp_path):
    """Its state is that of the step before, which it had skipped by itself."""
    optimizer = optaxclip.skip_nonfinite(SKIP)
    state = trained(optimizer)
    for size in (1e3, np.nan):
        batch = outlier(size)
        grads = jax.grad(loss)(PARAMS, *batch)
        _, state = optimizer.update(grads, state, PARAMS)
    verdict = why(loss, save(tmp_path / "step.npz", PARAMS, batch, state))
    assert verdict.numbers["recorded norm"] == np.inf
    assert (verdict.cause, verdict.examples) == ("data", [5])


def test_norms_of_parts_are_not_those_of_the_step(saved):
    optimizer = optax.chain(optaxclip.clip_by_tensor_norm(LIMIT), ADAM)
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    assert (verdict.cause, verdict.examples) == ("data", [5])
    assert verdict.not_told == [WITHOUT_NORM]


def test_without_a_recorded_norm_the_replays_are_compared(saved):
    optimizer = optax.chain(optaxclip.clip_by_tensor_norm(LIMIT), ADAM)
    verdict = why(loss, saved(PARAMS, (INPUTS, TARGETS), None, optimizer))
    assert verdict.cause == "none"
    assert verdict.not_told == [WITHOUT_NORM]


def test_a_norm_under_a_name_of_your_own_is_not_taken(saved):
    clip = optaxclip.clip_by_global_norm(LIMIT)
    optimizer = optax.named_chain(("outer", clip), ("adam", ADAM))
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    assert (verdict.cause, verdict.examples) == ("data", [5])
    assert verdict.not_told == [WITHOUT_NORM]
    usual = verdict.numbers["median nonzero norm of examples"]
    assert verdict.numbers["limit"] == 10 * usual


def test_the_norm_of_a_skip_in_a_partition_is_not_taken(saved):
    skip = optaxclip.skip_spikes(ADAM, LIMIT)
    labels = {"first": "skipped", "last": "rest"}
    optimizer = optax.partition({"skipped": skip, "rest": ADAM}, labels)
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    assert (verdict.cause, verdict.examples) == ("data", [5])
    assert verdict.not_told == [WITHOUT_NORM]


@pytest.mark.parametrize(
    "recorder", [optaxclip.record_norm(), optaxclip.record_spikes()]
)
def test_the_norm_behind_a_clipper_is_not_taken(saved, recorder):
    clip = optaxclip.clip_by_global_norm(LIMIT)
    optimizer = optax.chain(clip, recorder, ADAM)
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    assert (verdict.cause, verdict.examples) == ("data", [5])
    wanted = norm_of(PARAMS, *outlier())
    assert verdict.numbers["recorded norm"] == pytest.approx(wanted, rel=1e-5)


def test_the_limit_of_a_clipper_behind_a_recorder_is_not_taken(saved):
    """A clipper may clip every step. Here `record_spikes` has no limit yet."""
    clip = optaxclip.clip_by_global_norm(LIMIT)
    optimizer = optax.chain(optaxclip.record_spikes(), clip, ADAM)
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    usual = verdict.numbers["median nonzero norm of examples"]
    assert verdict.numbers["limit"] == 10 * usual


def test_the_limit_of_a_clipper_alone_is_not_taken(saved):
    """This one clips every step."""
    clip = optaxclip.clip_by_global_norm(LIMIT / 100)
    optimizer = optax.chain(clip, ADAM)
    verdict = why(loss, saved(PARAMS, (INPUTS, TARGETS), None, optimizer))
    assert verdict.cause == "none"
    verdict = why(loss, saved(PARAMS, outlier(), None, optimizer))
    assert (verdict.cause, verdict.examples) == ("data", [5])

    def scaled(params, factor):
        return factor * loss(params, INPUTS, TARGETS)

    path = saved(PARAMS, (np.float32(1e3),), None, optimizer, scaled)
    verdict = why(scaled, path)
    assert verdict.cause == "none"
    assert verdict.not_told[-1].startswith("any finite step counts as none, since")


def test_wrong_arguments_are_refused(saved):
    path = saved(PARAMS, outlier())
    with pytest.raises(TypeError, match="why: loss must be a function, got 'loss'"):
        why("loss", path)
    with pytest.raises(TypeError, match="why: wide must be a function, got 'loss'"):
        why(loss, path, wide="loss")
    with pytest.raises(ValueError, match="why: microbatch must be at least 1, got 0"):
        why(loss, path, microbatch=0)
    with pytest.raises(FileNotFoundError, match=r"why: .*nothing\.npz"):
        why(loss, path.with_name("nothing.npz"))
    for like in (5, PARAMS, (PARAMS,)):
        with pytest.raises(ValueError, match=r"why: like=\(params, batch\) must show"):
            why(loss, path, like=like)
