"""Limits of every kind, and what becomes of a step that is NaN or inf."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

from tests.core.steps import apply, every_clipper, same_bits, zeros
from tests.helpers import CLIPPERS, exact, random_tree, with_value

every_clipper_with_rules = pytest.mark.parametrize(
    "name", [name for name, case in CLIPPERS.items() if not case.numbers_only]
)


def falling(step):
    return 0.5 - 0.125 * step


LIMITS = [
    0.5,
    np.float32(0.5),
    np.float64(0.5),
    np.asarray(0.5),
    jnp.float32(0.5),
    jnp.bfloat16(0.5),
    jnp.float16(0.5),
    falling,
    optax.constant_schedule(0.5),
]
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
    wanted, _ = apply(CLIPPERS[name].build(0.5), updates, params)
    for limit in KINDS[name]:
        clipped, _ = apply(CLIPPERS[name].build(limit), updates, params)
        same_bits(clipped, wanted)


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
        later = state._replace(step=jnp.asarray(step, jnp.int32))
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
        r"the norm of order \w+ of the updates is not finite.*block/conv': 2 of 24 "
        r"values are NaN or inf"
    )
    with pytest.raises(FloatingPointError, match=text):
        apply(clipper, bad, params)
    with pytest.raises(FloatingPointError):
        apply(build(math.inf, nonfinite="raise"), bad, params)
    checked, start = checkify.checkify(jax.jit(clipper.update)), clipper.init(good)
    assert "not finite" in checked(bad, start, params)[0].get()
    assert checked(good, start, params)[0].get() is None
