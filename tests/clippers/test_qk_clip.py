"""`qk_clip` against attention logits and weights in float64 NumPy, on several devices,
and in `lax.scan`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import Heads, qk_clip
from tests import attention

LIMIT = 20.0
CLIPPER = qk_clip(LIMIT, **attention.PATTERNS)
LAYOUTS = {"multi-head": (4, 4), "grouped": (6, 2), "multi-query": (4, 1)}
HEADS = attention.weights(4, 4)


def after(clipper, params, updates, max_logits):
    """The weights after one step, and the state."""
    state = clipper.init(params)
    updates, state = clipper.update(updates, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), state


def step_like(params, seed=3):
    """An update of about a tenth of the weights."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: np.float32(0.1 * random.standard_normal(w.shape)), params
    )


def clipped_layer(heads, key_heads):
    """Logits before and after a step of QK-Clip, of multi-head or grouped heads."""
    params, x = attention.weights(heads, key_heads), attention.inputs()
    updates = step_like(params)
    plain = attention.logits(optax.apply_updates(params, updates), x)
    new, _ = after(CLIPPER, params, updates, attention.largest(plain))
    return plain, attention.logits(new, x)


def test_no_logit_of_mla_is_above_the_limit():
    params, x = attention.mla_weights(4), attention.inputs()
    updates = step_like(params)
    plain = attention.mla_logits(optax.apply_updates(params, updates), x)
    assert (attention.largest(plain) > LIMIT).all()
    clipper = qk_clip(LIMIT, **attention.MLA)
    new, _ = after(clipper, params, updates, attention.largest(plain))
    clipped = attention.mla_logits(new, x).max((1, 2))
    np.testing.assert_allclose(clipped, LIMIT, rtol=1e-5)


def test_all_logits_of_a_key_head_have_one_factor():
    for heads, key_heads in LAYOUTS.values():
        plain, clipped = clipped_layer(heads, key_heads)
        assert (plain.max((1, 2)) > LIMIT).any()
        most = attention.largest(plain).reshape(key_heads, -1).max(1)
        factor = np.repeat(np.minimum(1, LIMIT / most), heads // key_heads)
        np.testing.assert_allclose(clipped, factor[:, None, None] * plain, atol=2e-5)
        assert clipped.max() <= LIMIT * (1 + 1e-5)


def test_weights_are_those_of_the_equation():
    updates = step_like(HEADS)
    max_logits = np.float32([10.0, 25.0, 80.0, 20.0])
    factor = np.minimum(1, LIMIT / max_logits.astype(np.float64))[:, None]
    for options in ({}, {"alpha": 0.2}, {"alpha": 0.0}, {"alpha": 1.0}):
        clipper = qk_clip(LIMIT, **options, **attention.PATTERNS)
        new, _ = after(clipper, HEADS, updates, max_logits)
        alpha = options.get("alpha", 0.5)
        for name, power in {"query": alpha, "key": 1 - alpha}.items():
            for part in ("kernel", "bias"):
                plain = HEADS[name][part].astype(np.float64) + updates[name][part]
                wanted = factor**power * plain
                np.testing.assert_allclose(new[name][part], wanted, 2e-6, 1e-6)
        np.testing.assert_array_equal(new["value"], HEADS["value"] + updates["value"])


@pytest.mark.parametrize("broken", (np.nan, np.inf))
def test_a_weight_that_is_not_clipped_may_be_anything(broken):
    """The update is all that reaches the weight: beside a weight of NaN it is whole."""
    params = jax.tree.map(np.array, HEADS)
    for name in ("query", "key"):
        params[name]["kernel"][3, 0, 2] = broken
    updates, state = step_like(HEADS), CLIPPER.init(params)
    given = {"max_logits": jnp.array([20.0, 50.0, 10.0, 0.0])}
    found, _ = CLIPPER.update(updates, state, params, **given)
    for name in ("query", "key"):
        kept = found[name]["kernel"][:, [0, 2, 3]]
        np.testing.assert_array_equal(kept, updates[name]["kernel"][:, [0, 2, 3]])


def test_with_alpha_one_keys_stay_at_a_limit_of_zero():
    # factor^(1 - alpha) = 0^0 = 1
    weights = {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}
    clipper = qk_clip(0.0, queries={"q": 1}, keys={"k": 1}, alpha=1.0)
    new, _ = after(clipper, weights, weights, jnp.ones(2))
    assert new["q"].tolist() == [[0.0, 0.0]] and new["k"].tolist() == [[2.0, 2.0]]


def test_a_head_within_its_limit_keeps_its_bits():
    updates = step_like(HEADS)
    max_logits = jnp.array([20.0, 50.0, -3.0, 0.0])
    state = CLIPPER.init(HEADS)
    found, _ = CLIPPER.update(updates, state, HEADS, max_logits=max_logits)
    for name in ("query", "key"):
        same = (found[name]["kernel"] == updates[name]["kernel"]).all((0, 2))
        np.testing.assert_array_equal(same, [True, False, True, True])
    np.testing.assert_array_equal(found["value"], updates["value"])


def test_without_a_limit_it_only_measures():
    updates = step_like(HEADS)
    clipper = qk_clip(None, **attention.PATTERNS)
    max_logits = jnp.array([20.0, 50.0, -3.0, jnp.nan])
    state = clipper.init(HEADS)
    found, state = clipper.update(updates, state, HEADS, max_logits=max_logits)
    jax.tree.map(np.testing.assert_array_equal, found, updates)
    np.testing.assert_array_equal(state.norm, [20.0, 50.0, 0.0, np.nan])
    np.testing.assert_array_equal(state.clipped, [0, 0, 0, 0])


def test_logits_of_nan_break_the_head_of_many_queries():
    """XLA on a CPU drops NaN from a maximum of floats, if there are many of them."""
    params = {"q": jnp.ones((1, 40_000)), "k": jnp.ones((1, 2))}
    clipper = qk_clip(20.0, queries={"q": 1}, keys={"k": 1})
    max_logits = jnp.ones(40_000).at[3].set(jnp.nan)
    zero = jax.tree.map(jnp.zeros_like, params)
    _, state = after(clipper, params, zero, max_logits)
    np.testing.assert_array_equal(state.norm, [np.nan, 1.0])


def test_a_head_whose_logits_broke_becomes_nan():
    for broken in (np.nan, np.inf):
        max_logits = jnp.array([20.0, broken, 30.0, -np.inf])
        new, state = after(CLIPPER, HEADS, step_like(HEADS), max_logits)
        for name in ("query", "key"):
            lost = np.isnan(new[name]["kernel"])
            np.testing.assert_array_equal(lost.all((0, 2)), [False, True, False, False])
            np.testing.assert_array_equal(lost.any((0, 2)), [False, True, False, False])
        np.testing.assert_array_equal(state.nonfinite, [0, 1, 0, 0])


def test_narrow_weights_hold_it_to_their_rounding():
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), HEADS)
    plain = attention.logits(params, attention.inputs())
    zero = jax.tree.map(jnp.zeros_like, params)
    new, _ = after(CLIPPER, params, zero, attention.largest(plain))
    assert all(w.dtype == jnp.bfloat16 for w in jax.tree.leaves(new))
    factor = np.minimum(1, LIMIT / attention.largest(plain))
    exact = np.sqrt(factor)[:, None] * np.float64(params["query"]["kernel"])
    # Half an ulp of the update, which is at most as large as the weight, and half of
    # the sum.
    wide = np.float64(params["query"]["kernel"])
    error = np.abs(np.float64(new["query"]["kernel"]) - exact)
    assert (error <= 2**-8 * np.abs(wide)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", (("float64", "float32"), ("bfloat16", "float64")))
def test_leaves_of_two_dtypes_under_strict_promotion(dtypes):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        params = {
            name: jax.tree.map(partial(jnp.asarray, dtype=dtype), HEADS[name])
            for name, dtype in zip(("query", "key"), dtypes)
        }
        zero = jax.tree.map(jnp.zeros_like, params)
        given = {"max_logits": jnp.full(4, 80.0, jnp.float32)}
        first = CLIPPER.init(params)
        updates, state = CLIPPER.update(zero, first, params, **given)
        assert first.norm.dtype == state.norm.dtype
        for name, dtype in zip(("query", "key"), dtypes):
            kernel, weight = updates[name]["kernel"], params[name]["kernel"]
            assert kernel.dtype == dtype
            wanted = -0.5 * np.float64(weight)
            np.testing.assert_allclose(np.float64(kernel), wanted, rtol=2**-20)


def test_norms_are_float32_for_float32_weights():
    with jax.enable_x64(True):
        state = CLIPPER.init(HEADS)
        assert state.norm.dtype == state.limit.dtype == jnp.float32


PARAMS = attention.weights(8, 4)
DENSE = {"kernel": P("data", "heads"), "bias": P("heads")}
SPECS = {"query": DENSE, "key": DENSE, "value": P(None, "heads")}
# Split over heads alone, as tensor parallelism does.
OF_HEADS = {"kernel": P(None, "heads"), "bias": P("heads")}
WHOLE = {"query": OF_HEADS, "key": OF_HEADS, "value": P(None, "heads")}
LOGITS = np.float32([5, 50, 20, 10, 90, 30, 20, 21])


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)


def steps(params, state, max_logits, count=3):
    """Some steps of halving the weights, in a scan."""

    def step(carried, _):
        params, state = carried
        updates = jax.tree.map(lambda w: -0.5 * w, params)
        given = {"max_logits": max_logits}
        updates, state = CLIPPER.update(updates, state, params, **given)
        return (optax.apply_updates(params, updates), state), state.factor

    return lax.scan(step, (params, state), length=count)[0]


def test_a_scan_takes_its_state():
    params, state = jax.jit(steps)(PARAMS, CLIPPER.init(PARAMS), LOGITS)
    np.testing.assert_array_equal(state.step, 3)
    np.testing.assert_array_equal(state.clipped, [3, 0, 3, 3])
    factor = np.minimum(1, 20 / LOGITS.astype(np.float64)).reshape(4, 2).min(1)
    wanted = PARAMS["key"]["bias"] * (0.5 * np.sqrt(factor)[:, None]) ** 3
    np.testing.assert_allclose(params["key"]["bias"], wanted, rtol=2e-6)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_split_weights_get_the_same_steps(kind):
    wanted = jax.jit(steps)(PARAMS, CLIPPER.init(PARAMS), LOGITS)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(partial(NamedSharding, mesh), SPECS)
        params = jax.device_put(PARAMS, shardings)
        max_logits = jax.device_put(LOGITS, NamedSharding(mesh, P("heads")))
        found = jax.jit(steps)(params, CLIPPER.init(params), max_logits)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)
    spec = found[0]["query"]["kernel"].sharding.spec
    assert tuple(spec[:2]) == ("data", "heads")


def in_shard_map():
    """The steps, in which each device has heads of its own."""
    start = CLIPPER.init(PARAMS)
    # Rows of counts and numbers, of one column for each head.
    of_state = jax.tree.map(lambda _: P(None, "heads"), start)
    split = jax.shard_map(
        lambda params, logits: steps(params, CLIPPER.init(params), logits),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(WHOLE, P("heads")),
        out_specs=(WHOLE, of_state),
    )
    return jax.jit(split)


def test_each_device_clips_its_own_heads():
    wanted = jax.jit(steps)(PARAMS, CLIPPER.init(PARAMS), LOGITS)
    found = in_shard_map()(PARAMS, LOGITS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)


def test_no_collective_is_needed_where_heads_are_split():
    text = in_shard_map().lower(PARAMS, LOGITS).compile().as_text()
    assert "all-reduce" not in text and "all-gather" not in text


@pytest.mark.slow
def test_layers_in_a_scanned_model_are_split_too():
    # MaxText's layout: layers on axis 1, heads split over devices.
    params = {"q": jnp.ones((8, 3, 4, 2)), "k": jnp.ones((8, 3, 4, 2))}
    where = Heads((1, 2))
    clipper = qk_clip(20.0, queries={"q": where}, keys={"k": where})
    max_logits = jnp.linspace(1, 90, 12).reshape(3, 4)
    zero = jax.tree.map(jnp.zeros_like, params)
    given = {"max_logits": max_logits}
    wanted, _ = clipper.update(zero, clipper.init(params), params, **given)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", None, "heads"))
        params, zero = jax.device_put((params, zero), sharding)
        found, _ = clipper.update(zero, clipper.init(params), params, **given)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)
    assert tuple(found["q"].sharding.spec[:3]) == ("data", None, "heads")


@pytest.mark.slow
def test_vmap_over_runs_gives_each_its_own():
    runs = jnp.stack([LOGITS, LOGITS / 10])
    state, zero = CLIPPER.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)

    def one(max_logits):
        return CLIPPER.update(zero, state, PARAMS, max_logits=max_logits)[0]

    found = jax.vmap(one)(runs)
    wanted = one(runs[0])["key"]["kernel"]
    np.testing.assert_allclose(found["key"]["kernel"][0], wanted, rtol=1e-6)
    np.testing.assert_array_equal(found["key"]["kernel"][1], zero["key"]["kernel"])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_broken_head_breaks_queries_and_keys_at_any_alpha(alpha):
    params = {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    clipper = qk_clip(20.0, queries={"q": 1}, keys={"k": 1}, alpha=alpha)
    logits = jnp.array([jnp.nan, 1.0])
    updates, _ = clipper.update(zeros, clipper.init(params), params, max_logits=logits)
    for update in updates.values():
        np.testing.assert_array_equal(update, [[np.nan, 0.0]])
