"""Limits: numbers and arrays of every kind, also large integers, trees of them, shares
of the weights, rules that are joined, numbers that one update is given, and what
becomes of a step that is NaN or inf.
"""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optaxclip
from optaxclip import clip_by, rules
from tests.core.steps import apply, compiled, every_clipper, same_bits, zeros
from tests.helpers import (
    CLIPPERS,
    exact,
    limits_of,
    random_tree,
    smallest,
    with_rows,
    with_value,
)

growth, minimum, warm_up = rules.growth, rules.minimum, rules.warm_up
INF = np.inf
JOINED = {
    "none": (None, [INF, INF, INF, INF]),
    "schedule": (lambda step: 1.0 + step, [1, 2, 3, 4]),
    "least": (minimum(None, 3.0, lambda step: 4.0 - step), [3, 3, 2, 1]),
    "least of two that learn": (minimum(growth(2.0), growth(3.0)), [INF, 2, 4, 8]),
    "least of two kinds": (minimum(growth(2.0), rules.ema_ratio(99.0)), [INF, 2, 4, 8]),
    "floored": (rules.maximum(lambda step: 1.0 * step, 1.5), [1.5, 1.5, 2, 3]),
    "floor that rises": (rules.maximum(1.0, lambda step: 1.0 * step), [1, 1, 2, 3]),
    "then growth": (warm_up(2, 5.0, growth(2.0)), [5, 5, 4, 8]),
    "growth first": (warm_up(2, growth(2.0), 9.0), [INF, 2, 9, 9]),
    "longer": (warm_up(3, growth(2.0), 9.0), [INF, 2, 4, 9]),
    "at once": (warm_up(0, 5.0, 9.0), [9, 9, 9, 9]),
}


@pytest.mark.parametrize(("rule", "limits"), JOINED.values(), ids=JOINED)
def test_rules_are_joined_as_they_say_whatever_norm_comes(rule, limits):
    found = limits_of(rule, [1.0, 3.0, 10.0, 10.0])
    np.testing.assert_array_equal(found, np.float32(limits))


def nan_at_step_1(step):
    return jnp.where(step == 1, jnp.nan, 0.5)


def test_a_limit_of_nan_that_does_not_count_yet_is_not_remembered():
    """The second rule has a limit of NaN while the first one counts."""
    found = limits_of(warm_up(2, 5.0, rules.ema(nan_at_step_1)), [1.0, 3.0, 3.0, 3.0])
    without = limits_of(rules.ema(0.5), [1.0, 3.0, 3.0])
    np.testing.assert_array_equal(found[:2], [5, 5])
    np.testing.assert_array_equal(found[2:], without[1:])


@pytest.mark.parametrize("share", [0.5, lambda step: 0.5 + step])
def test_a_share_of_the_weights_follows_schedule_and_floor(share):
    grads, rule = jnp.array([30.0, 40.0]), rules.share_of_params(share, 2.0)
    clipper = clip_by(optaxclip.global_norm, rule)
    for weight, limit in {1.0: 1.0, 5.0: 2.5}.items():
        state, params = clipper.init(grads), jnp.array([weight, 0.0])
        for factor in (1, 3 if callable(share) else 1):
            _, state = clipper.update(grads, state, params)
            assert state.limit == factor * limit


def test_a_share_may_have_another_dtype_under_strict_promotion():
    rule = optaxclip.rules.share_of_params(jnp.float16(0.5), jnp.float16(0.25))
    clipper = clip_by(optaxclip.global_norm, rule)
    grads, weights = jnp.ones(2), jnp.array([3.0, 4.0])
    with jax.numpy_dtype_promotion("strict"):
        _, state = clipper.update(grads, clipper.init(grads), weights)
    assert state.limit == 2.5


LARGEST = np.finfo(np.float32).max
FAR = {
    "float": lambda step: 1e39,
    "float64": lambda step: jnp.asarray(1e39),
    "NumPy": lambda step: np.float64(1e39),
    "int": lambda step: 10**39,
    "least": minimum(None, lambda step: 1e39),
    "at_least": rules.maximum(1.0, lambda step: 1e39),
    "warm_up": warm_up(3, lambda step: 1e39, 1.0),
}


@pytest.mark.parametrize("name", FAR)
def test_a_limit_beyond_the_norms_dtype_is_not_without_limit(name):
    with jax.enable_x64(True):
        clipper = optaxclip.clip_by_global_norm(FAR[name])
        grads = jnp.array([3.0, np.inf], jnp.float32)
        updates, state = jax.jit(clipper.update)(grads, clipper.init(grads))
    assert state.limit == LARGEST and state.limit.dtype == np.float32
    assert np.isnan(updates).all() and state.nonfinite == 1


def test_a_traced_limit_beyond_the_norms_dtype_is_its_largest():
    def limits(limit):
        clippers = map(optaxclip.clip_by_global_norm, (limit, limit * np.inf))
        return [
            apply(clipper, jnp.ones(2, jnp.float32))[1].limit for clipper in clippers
        ]

    with jax.enable_x64(True):
        assert jax.jit(limits)(np.float64(1e39)) == [LARGEST, np.inf]


def test_a_64_bit_norm_has_limits_beyond_float32():
    with jax.enable_x64(True):
        grads = np.array([3e39, 4e39])
        updates, state = apply(optaxclip.clip_by_global_norm(1e39), grads)
    assert np.float64(state.limit) == 1e39
    np.testing.assert_allclose(updates, [6e38, 8e38], rtol=1e-14)


def test_schedules_of_every_kind_are_taken():
    for schedule in (jax.jit(lambda step: 1.0), optax.constant_schedule(1.0), abs):
        apply(optaxclip.clip_by_global_norm(schedule), jnp.ones(3))


def test_limits_are_matched_to_a_leaf_from_its_last_axis():
    grads, by_unit = jnp.ones((2, 3)), optaxclip.clip_by_unitwise_norm
    for limit in ([0.1, 0.2, 0.3], [[0.1]]):
        updates, _ = apply(by_unit(np.float32(limit)), grads)
        wanted = np.broadcast_to(limit, (2, 3)) / np.sqrt(2)
        np.testing.assert_allclose(updates, wanted, rtol=1e-6)
    for shape in (2, (1, 1, 3), (2, 3)):
        with pytest.raises(ValueError, match=r"max_norm must be a number for each nor"):
            apply(by_unit(np.ones(shape, np.float32)), grads)


@pytest.mark.parametrize("of_b", [2.0, {"c": 2.0}], ids=["as deep", "deeper"])
def test_limits_may_have_a_value_for_what_is_masked(of_b):
    grads = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([3.0, 4.0])}}
    clipper = optaxclip.clip_by_tensor_norm({"a": 1.0, "b": of_b})
    updates, _ = apply(optax.masked(clipper, {"a": True, "b": False}), grads)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(updates["b"]["c"], [3.0, 4.0])


def test_limits_of_groups_follow_their_weights():
    share = rules.share_of_params(0.5)
    clipper = optaxclip.clip_by_group_norm(share, {"a": "z", "b": "y"})
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([8.0])}
    params = {"a": jnp.array([0.0, 2.0]), "b": jnp.array([4.0])}
    updates, _ = apply(clipper, grads, params)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [2.0], rtol=1e-6)


def test_a_share_of_the_weights_has_no_floor_by_default():
    clipper = clip_by(optaxclip.global_norm, optaxclip.rules.share_of_params(0.5))
    grads, weights = jnp.ones(2), jnp.array([0.25, 0.0])
    _, state = clipper.update(grads, clipper.init(grads), weights)
    assert state.limit == 0.125


FIVE = jnp.array([3.0, 4.0])  # norm 5
# Beyond int32, which ends at 2^31 - 1.
LARGE = [2**31, 2**33, np.int64(2**31), np.array(2**33), np.uint32(2**32 - 1)]


def last_limit(limit, **options):
    clipper = optaxclip.clip_by_global_norm(limit, **options)
    _, state = clipper.update(FIVE, clipper.init(FIVE), FIVE)
    updates, state = clipper.update(FIVE, state, FIVE)
    return updates, state.limit


def test_a_large_integer_as_a_limit_keeps_its_value():
    for large in LARGE:
        np.testing.assert_array_equal(last_limit(large)[1], np.float32(large))


@pytest.mark.slow
@pytest.mark.parametrize("large", LARGE, ids=lambda x: type(x).__name__)
def test_a_large_integer_in_a_rule_keeps_its_value(large):
    expected = {
        rules.growth(1.0, floor=large): np.float32(large),
        rules.share_of_params(large): 5 * np.float32(large),
        rules.ema_ratio(warmup=large): np.inf,
        rules.warm_up(large, 1.0, 2.0): 1.0,
        rules.minimum(large, np.inf): np.float32(large),
    }
    for rule, wanted in expected.items():
        np.testing.assert_array_equal(last_limit(rule)[1], np.float32(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("number", LARGE)
def test_norms_and_losses_that_are_given_may_be_large(number):
    wanted = np.float32(number)
    skipping = optaxclip.skip_spikes(optax.sgd(1.0), rules.windowed_mean())
    _, state = skipping.update(FIVE, skipping.init(FIVE), grad_norm=number)
    assert state.norm == wanted
    recorder, given = optaxclip.record_spikes(), {"grad_norm": number, "value": number}
    _, state = recorder.update(FIVE, recorder.init(FIVE), **given)
    assert (state.norm, state.loss) == (wanted, wanted)


def updated(**given):
    clipper = optaxclip.clip_by_global_norm(1.0)
    return clipper.update(FIVE, clipper.init(FIVE), **given)


def test_a_given_negative_limit_on_a_device_counts_as_0():
    for update in (updated, jax.jit(updated)):
        updates, state = update(limit=jnp.float32(-1.0))
        np.testing.assert_array_equal(updates, [0.0, 0.0])
        np.testing.assert_array_equal(state.limit, 0.0)


def test_a_limit_is_given_to_a_clipper_without_one():
    clipper = optaxclip.clip_by_global_norm(None)
    grads = jnp.array([3.0, 4.0])
    state = clipper.init(grads)
    updates, _ = clipper.update(grads, state, limit=1.0)
    np.testing.assert_allclose(updates, [0.6, 0.8], 1e-6)
    # A given norm alone changes nothing, not even what is subnormal.
    least = jnp.float32(smallest("float32"))
    updates, _ = clipper.update(least, state, grad_norm=jnp.float32(5.0))
    same_bits(updates, least)


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node of a user's without an `==` of its own."""

    def __init__(self, first, second):
        self.children = first, second

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_norms_and_limits_of_one_step_may_be_in_a_node():
    grads = Pair(jnp.array([3.0, 4.0]), jnp.array([6.0, 8.0]))
    clipper = optaxclip.clip_by_tensor_norm(9.0)
    state = clipper.init(grads)
    for norms in (None, optaxclip.tensor_norm(grads)):
        _, new = clipper.update(grads, state, grad_norm=norms, limit=Pair(2.0, 3.0))
        np.testing.assert_allclose(new.norm, [5.0, 10.0])
        np.testing.assert_allclose(new.limit, [2.0, 3.0])
    with pytest.raises(ValueError, match="structure and shapes of the norms"):
        clipper.update(grads, state, limit=Pair(2.0, jnp.ones(2)))


every_clipper_with_rules = pytest.mark.parametrize(
    "name", [name for name, case in CLIPPERS.items() if not case.numbers_only]
)


def falling(step):
    return 0.5 - 0.125 * step


NUMBERS = [2.0, 2, np.float32(2), np.int8(2), np.float64(2), np.array(2.0)]
NUMBERS += [jnp.float32(2), jnp.bfloat16(2), jnp.float16(2), jnp.array(2)]
LIMITS = [*NUMBERS, lambda step: 2.0 - step, optax.constant_schedule(2.0)]
# Each with two clippers at least: the global one, and one of those that measure several
# parts.
KINDS = {
    "clip_by_global_norm": LIMITS,
    "clip_by_unitwise_norm": LIMITS[1::2],
    "adaptive_grad_clip per tensor": LIMITS[0::2],
}


@pytest.mark.parametrize("name", KINDS)
def test_a_limit_of_any_kind_gives_the_same_updates(name):
    updates, params = random_tree("mixed", scale=10.0), random_tree("mixed", 3)
    wanted, _ = apply(CLIPPERS[name].build(2.0), updates, params)
    for limit in KINDS[name]:
        clipped, _ = apply(CLIPPERS[name].build(limit), updates, params)
        same_bits(clipped, wanted)


@pytest.mark.slow
def test_a_traced_limit_of_any_kind_gives_the_same_updates():
    updates, name = random_tree("mixed", scale=10.0), "clip_by_global_norm"
    wanted, _ = apply(CLIPPERS[name].build(2.0), updates)
    for limit in NUMBERS:
        same_bits(compiled(name)(limit, updates, updates)[0], wanted)


@every_clipper_with_rules
def test_a_schedule_follows_the_steps(name):
    updates, params = random_tree("float32", scale=10.0), random_tree("float32", 3)
    clipper = CLIPPERS[name].build(falling)
    state = clipper.init(updates)
    for step in range(3):
        clipped, state = clipper.update(updates, state, params)
        wanted, _ = apply(CLIPPERS[name].build(falling(step)), updates, params)
        chex.assert_trees_all_close(clipped, wanted, rtol=1e-6)


@every_clipper_with_rules
def test_a_traced_negative_limit_counts_as_zero(name):
    clipper, updates = CLIPPERS[name].build(falling), random_tree("float32")
    state = clipper.init(updates)
    for step in (5, 12):
        later = with_rows(state, step=step)
        clipped, found = clipper.update(updates, later, updates)
        assert falling(step) < 0
        # AGC's state has norms as multiples of their limits.
        if name != "adaptive_grad_clip":
            assert not any(np.any(limit) for limit in jax.tree.leaves(found.limit))
        chex.assert_trees_all_equal(clipped, zeros(updates))


@every_clipper
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_norm_makes_the_measured_part_nan(name, bad):
    updates = random_tree("mixed")
    updates["bias"] = with_value(updates["bias"], 1, bad)
    clipped, state = apply(CLIPPERS[name].build(0.5), updates, random_tree("mixed"))
    parts = CLIPPERS[name].parts(exact(clipped))
    hit = [all(np.isnan(x).all() for x in part) for part in parts]
    whole = [all(np.isfinite(x).all() for x in part) for part in parts]
    assert sum(hit) == 1 and sum(whole) == len(parts) - 1
    assert sum(int(np.sum(x)) for x in jax.tree.leaves(state.nonfinite)) == 1


@every_clipper
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_zero_policy_makes_the_measured_part_zero(name, bad):
    updates = random_tree("float32")
    updates["bias"] = with_value(updates["bias"], 1, bad)
    clipped, state = apply(
        CLIPPERS[name].build(0.5, nonfinite="zero"), updates, random_tree("float32")
    )
    good, _ = apply(CLIPPERS[name].build(0.5), random_tree("float32"))
    assert not np.asarray(clipped["bias"]).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clipped))
    if "global" not in name:
        chex.assert_trees_all_equal(clipped["kernel"], good["kernel"])
    assert sum(int(np.sum(x)) for x in jax.tree.leaves(state.nonfinite)) == 1


@every_clipper
def test_the_raise_policy_names_order_and_leaves(name):
    build, keys = CLIPPERS[name].build, ("bias", "block", "kernel")
    keys = keys if "group" in name else ("block",)
    good, params = (
        {key: tree[key] for key in keys}
        for tree in (random_tree("float32"), random_tree("float32", 2))
    )
    clipper = build(0.5, nonfinite="raise")
    apply(clipper, good, params)
    conv = with_value(good["block"]["conv"], (0, 0, slice(2)), np.nan)
    bad = good | {"block": good["block"] | {"conv": conv}}
    text = (
        r"the norm (of order \w+ )?of the updates is not finite.*block/conv': 2 of 24 "
        r"values are NaN or inf"
    )
    with pytest.raises(FloatingPointError, match=text):
        apply(clipper, bad, params)
    with pytest.raises(FloatingPointError):
        apply(build(math.inf, nonfinite="raise"), bad, params)
    checked, start = checkify.checkify(jax.jit(clipper.update)), clipper.init(good)
    assert "not finite" in checked(bad, start, params)[0].get()
    assert checked(good, start, params)[0].get() is None


class HalfOfWeights(rules.Rule):
    # A flag with a type is a field, and must not be traced.
    needs_params: bool = True

    def update(self, norm, memory, step, params_norm):
        return params_norm / 2, memory


def test_a_flag_of_a_rule_may_have_a_type():
    clipper = optaxclip.clip_by_global_norm(HalfOfWeights())
    params, grads = jnp.array([0.0, 2.0]), jnp.array([3.0, 4.0])
    updates, _ = jax.jit(clipper.update)(grads, clipper.init(params), params)
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)


def test_a_broken_limit_is_named_and_else_a_broken_leaf():
    limits = {"a": lambda step: jnp.nan, "b": 1.0}
    clipper = optaxclip.clip_by_tensor_norm(limits, nonfinite="raise")
    grads = {"a": jnp.array([3.0]), "b": jnp.array([jnp.nan, 1.0])}
    text = r"the limit of the norm 3\.0 is NaN\.$"
    with pytest.raises(FloatingPointError, match=text):
        clipper.update(grads, clipper.init(grads))
    clipper = optaxclip.clip_by_tensor_norm(1.0, nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"not finite\. 'b': 1 of 2 values"):
        clipper.update(grads, clipper.init(grads))
