"""What is cut off waits for the next step: all of it arrives in the end, in which dtype
it waits, and what is handed on to the clipper.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.core.steps import same_bits
from tests.helpers import SMALL_FLOATS, apply, scanned


def test_what_was_cut_off_arrives_in_the_end():
    """u_1 + ... + u_T = g_1 + ... + g_T - carry, exactly as far as float32 adds; with a
    limit above the mean the carry stays bounded.
    """
    random = np.random.default_rng(0)
    grads = jnp.asarray(0.3 + random.standard_t(2.5, (2000, 4)), jnp.float32)
    for clipper in (optaxclip.clip_by_value(1.0), optaxclip.clip_by_global_norm(1.5)):
        carried = optaxclip.carry_clipped(clipper)
        state, updates = scanned(carried, grads)
        total = np.sum(np.asarray(grads, np.float64), 0)
        np.testing.assert_allclose(
            np.sum(np.asarray(updates, np.float64), 0)
            + np.asarray(state.carry, np.float64),
            total,
            atol=2e-3,
        )
        assert np.abs(state.carry).max() < 100
        plain = scanned(clipper, grads)[1]
        assert (
            np.abs(np.sum(np.asarray(plain, np.float64), 0) - total).max()
            > 5 * np.abs(state.carry).max()
        )


def test_the_carry_takes_rounding_and_no_broken_step():
    carried = optaxclip.carry_clipped(optaxclip.clip_by_global_norm(1.0))
    grads = {"w": jnp.array([3.0, 4.0], jnp.bfloat16), "n": jnp.arange(2)}
    _, state = carried.update(grads, carried.init(grads))
    updates, after = carried.update(
        {**grads, "w": jnp.array([jnp.nan, 1.0], jnp.bfloat16)}, state
    )
    same_bits(after.carry, state.carry)
    assert (
        np.isnan(np.asarray(updates["w"], np.float32)).all()
        and state.carry["w"].dtype == jnp.float32
    )
    updates, last = carried.update(jax.tree.map(jnp.zeros_like, grads), after)
    assert updates["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(updates["w"], np.float32) + np.asarray(last.carry["w"]),
        np.asarray(state.carry["w"]),
    )


def test_the_carry_is_wide_and_only_for_what_is_measured():
    clipper = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
    with jax.enable_x64(True):
        grads = {
            "double": jnp.full(2, 1.5, jnp.float64),
            "half": jnp.full(2, 1.5, jnp.bfloat16),
            "index": jnp.arange(2),
            "none": None,
        }
        state = clipper.init(grads)
        dtypes = {
            name: leaf if leaf is None else str(leaf.dtype)
            for name, leaf in state.carry.items()
        }
        assert dtypes == {
            "double": "float64",
            "half": "float32",
            "index": None,
            "none": None,
        }
        updates, state = clipper.update(grads, state)
        assert (
            updates["half"].dtype == jnp.bfloat16
            and updates["index"] is grads["index"]
            and updates["none"] is None
        )
        assert state.clip_state.step == 1


def test_the_carry_hands_on_params_and_extra_arguments():
    grads, params = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
    of_weights = optaxclip.carry_clipped(optaxclip.adaptive_grad_clip(0.5))
    np.testing.assert_allclose(
        of_weights.update(grads, of_weights.init(params), params)[0],
        [0.6, 0.8],
        rtol=1e-6,
    )
    by_value = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
    np.testing.assert_allclose(
        by_value.update(grads, by_value.init(params), params, value=1.0)[0], [1.0, 1.0]
    )
    by_loss = optax.GradientTransformationExtraArgs(
        optax.init_empty_state,
        lambda updates, state, params=None, *, value: (updates / value, state),
    )
    carried = optaxclip.carry_clipped(by_loss)
    np.testing.assert_array_equal(
        carried.update(grads, carried.init(params), value=2.0)[0], [1.5, 2.0]
    )


def test_a_carry_that_meets_a_broken_coordinate_stays_as_it_is():
    clipper = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
    _, state = clipper.update(jnp.array([3.0, -3.0]), clipper.init(jnp.zeros(2)))
    _, state = clipper.update(jnp.array([jnp.nan, 0.0]), state)
    np.testing.assert_array_equal(state.carry, [2.0, -1.0])


def test_a_small_gradient_is_added_to_a_large_carry_in_float32():
    clipper = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
    state = clipper.init(jnp.zeros((), jnp.bfloat16))
    for grad in (257.0, 0.25):
        _, state = clipper.update(jnp.bfloat16(grad), state)
    assert state.carry == float(jnp.bfloat16(257.0)) + 0.25 - 2


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_what_small_floats_cut_off_waits_in_float32(dtype):
    grads = jnp.array([0.5, 4.0], dtype)
    updates, state = apply(optaxclip.carry_clipped(optaxclip.clip_by_value(1.0)), grads)
    same_bits(updates, jnp.array([0.5, 1.0], dtype))
    same_bits(state.carry, jnp.array([0.0, 3.0]))


def test_the_carry_of_a_python_number():
    updates, state = apply(optaxclip.carry_clipped(optaxclip.clip_by_value(1.0)), 3.0)
    assert (updates, state.carry) == (1.0, 2.0)


def test_what_float16_cannot_hold_waits_too():
    """A sum of 67,744 is within the limit, and beyond 65,504."""
    carried = optaxclip.carry_clipped(optaxclip.clip_by_global_norm(1e5))
    state = carried.init(jnp.zeros(1, jnp.float16))
    state = state._replace(carry=jnp.array([2272.0]))
    updates, state = carried.update(jnp.array([65472], jnp.float16), state)
    assert (updates, state.carry) == (65504, 65472 + 2272 - 65504)
