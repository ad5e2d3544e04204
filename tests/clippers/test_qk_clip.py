"""`qk_clip` against attention logits and weights in float64 NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optaxclip import qk_clip
from tests import attention

LIMIT = 20.0
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
    clipper = qk_clip(LIMIT, **attention.PATTERNS)
    new, _ = after(clipper, params, updates, attention.largest(plain))
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_logits_of_a_key_head_have_one_factor(layout):
    heads, key_heads = LAYOUTS[layout]
    plain, clipped = clipped_layer(heads, key_heads)
    assert (plain.max((1, 2)) > LIMIT).any()
    most = attention.largest(plain).reshape(key_heads, -1).max(1)
    factor = np.repeat(np.minimum(1, LIMIT / most), heads // key_heads)
    np.testing.assert_allclose(clipped, factor[:, None, None] * plain, atol=2e-5)
    assert clipped.max() <= LIMIT * (1 + 1e-5)


@pytest.mark.parametrize("options", [{}, {"alpha": 0.2}], ids=str)
def test_weights_are_those_of_the_equation(options):
    updates = step_like(HEADS)
    max_logits = np.float32([10.0, 25.0, 80.0, 20.0])
    clipper = qk_clip(LIMIT, **options, **attention.PATTERNS)
    new, _ = after(clipper, HEADS, updates, max_logits)
    factor = np.minimum(1, LIMIT / max_logits.astype(np.float64))[:, None]
    alpha = options.get("alpha", 0.5)
    for name, power in {"query": alpha, "key": 1 - alpha}.items():
        for part in ("kernel", "bias"):
            plain = HEADS[name][part].astype(np.float64) + updates[name][part]
            wanted = factor**power * plain
            np.testing.assert_allclose(new[name][part], wanted, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(new["value"], HEADS["value"] + updates["value"])


def test_with_alpha_one_keys_stay_at_a_limit_of_zero():
    # factor^(1 - alpha) = 0^0 = 1
    weights = {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}
    clipper = qk_clip(0.0, queries={"q": 1}, keys={"k": 1}, alpha=1.0)
    new, _ = after(clipper, weights, weights, jnp.ones(2))
    assert new["q"].tolist() == [[0.0, 0.0]] and new["k"].tolist() == [[2.0, 2.0]]


def test_a_head_within_its_limit_keeps_its_bits():
    updates = step_like(HEADS)
    clipper = qk_clip(LIMIT, **attention.PATTERNS)
    max_logits = jnp.array([20.0, 50.0, -3.0, 0.0])
    state = clipper.init(HEADS)
    found, _ = clipper.update(updates, state, HEADS, max_logits=max_logits)
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


@pytest.mark.parametrize("broken", (np.nan, np.inf))
def test_a_head_whose_logits_broke_becomes_nan(broken):
    clipper = qk_clip(LIMIT, **attention.PATTERNS)
    max_logits = jnp.array([20.0, broken, 30.0, -np.inf])
    new, state = after(clipper, HEADS, step_like(HEADS), max_logits)
    for name in ("query", "key"):
        lost = np.isnan(new[name]["kernel"])
        np.testing.assert_array_equal(lost.all((0, 2)), [False, True, False, False])
        np.testing.assert_array_equal(lost.any((0, 2)), [False, True, False, False])
    np.testing.assert_array_equal(state.nonfinite, [0, 1, 0, 0])


def test_narrow_weights_hold_it_to_their_rounding():
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), HEADS)
    plain = attention.logits(params, attention.inputs())
    clipper = qk_clip(LIMIT, **attention.PATTERNS)
    zero = jax.tree.map(jnp.zeros_like, params)
    new, _ = after(clipper, params, zero, attention.largest(plain))
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
        clipper = qk_clip(LIMIT, **attention.PATTERNS)
        given = {"max_logits": jnp.full(4, 80.0, jnp.float32)}
        first = clipper.init(params)
        updates, state = clipper.update(zero, first, params, **given)
        assert first.norm.dtype == state.norm.dtype
        for name, dtype in zip(("query", "key"), dtypes):
            kernel, weight = updates[name]["kernel"], params[name]["kernel"]
            assert kernel.dtype == dtype
            wanted = -0.5 * np.float64(weight)
            np.testing.assert_allclose(np.float64(kernel), wanted, rtol=2**-20)


def test_norms_are_float32_for_float32_weights():
    with jax.enable_x64(True):
        state = qk_clip(LIMIT, **attention.PATTERNS).init(HEADS)
        assert state.norm.dtype == state.limit.dtype == jnp.float32
