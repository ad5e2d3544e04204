"""SPAM, also where its average of squares leaves the range of float32 or comes from
elsewhere, and the momentum that starts anew.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracle_rules as oracle
from tests.helpers import SMALL_FLOATS, scanned
from tests.rules.histories import EPS, f, run, spiked


def test_spam_cuts_spikes_to_a_multiple_of_their_usual_square():
    grads = spiked()
    grads[50, 0, 0], grads[61, 1, 1] = np.nan, np.inf
    clipped, _ = run(
        optaxclip.spam(50.0, decay=0.99, warmup=10, every=40), {"w": grads}
    )
    wanted = np.asarray(oracle.spam(list(grads), 50.0, f(0.99), 10, 40))
    np.testing.assert_allclose(clipped["w"], wanted, rtol=128 * EPS)
    assert np.sum(wanted != grads) > 20


def test_spam_keeps_squares_wide_and_schedules_from_step_0():
    with jax.enable_x64(True):
        params = {
            "h": jnp.ones(1, jnp.bfloat16),
            "s": jnp.ones(1, jnp.complex64),
            "d": jnp.ones(1, jnp.float64),
            "z": jnp.ones(1, jnp.complex128),
        }
        moments = optaxclip.spam().init(params).second_moment
        assert {name: str(leaf.dtype) for name, leaf in moments.items()} == {
            "h": "float32",
            "s": "float32",
            "d": "float64",
            "z": "float64",
        }
    clipper = optaxclip.spam(
        lambda step: 4.0 + 5.0 * step, decay=lambda step: 0.75 * (step == 0), warmup=0
    )
    grads = jnp.array([-8.0, 1.0])
    _, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(state.second_moment, [16.0, 0.25])
    # The limit is 9 times the usual square.
    updates, state = clipper.update(4 * grads, state)
    np.testing.assert_allclose(updates, [-12.0, 1.5], rtol=1e-6)
    np.testing.assert_allclose(state.second_moment, [144.0, 2.25], rtol=1e-6)


def test_spam_keeps_the_average_of_a_leaf_that_is_missing():
    clipper = optaxclip.spam(warmup=0)
    _, state = clipper.update(
        {"a": jnp.array([2.0]), "b": jnp.array([2.0])},
        clipper.init({"a": jnp.zeros(1), "b": jnp.zeros(1)}),
    )
    _, after = clipper.update({"a": None, "b": jnp.array([2.0])}, state)
    assert (
        after.second_moment["a"] == state.second_moment["a"] > 0
        and after.second_moment["b"] > state.second_moment["b"]
    )


def test_spam_that_never_starts_anew_clips_after_its_warmup():
    clipper = optaxclip.spam(1.0, warmup=3, every=None)
    state = clipper.init(jnp.zeros(1))
    through = []
    for norm in (1.0, 1.0, 5.0):
        updates, state = clipper.update(jnp.array([norm]), state)
        through.append(float(updates[0]))
    assert through[:2] == [1.0, 1.0] and through[2] < 1.0


def test_spam_needs_resets_further_apart_than_its_warmup():
    with pytest.raises(ValueError, match=r"spam: warmup \+ 1 must be at most every"):
        optaxclip.spam(every=20)
    # Only the third update is clipped: the resets are before the second and fourth.
    clipper = optaxclip.spam(1.0, warmup=1, every=2)
    grads = np.array([2.0, 4.0, 8.0, 16.0])[:, None]
    clipped, _ = run(clipper, {"w": grads})
    wanted = np.asarray(oracle.spam(list(grads), 1.0, f(0.999), 1, 2))
    np.testing.assert_allclose(clipped["w"], wanted, rtol=128 * EPS)
    assert np.sum(wanted != grads) == 1
    # Of a traced number nothing is known.
    jax.eval_shape(lambda every: optaxclip.spam(every=every).init(jnp.ones(1)), 20)


def test_momentum_starts_anew_and_the_step_rises_along_a_cosine():
    optimizer = optaxclip.reset_momentum(optax.scale_by_adam(), every=10, warmup=4)
    grads = {
        "w": jnp.asarray(np.random.default_rng(0).standard_normal((25, 3)), jnp.float32)
    }
    _, updates = scanned(optimizer, grads)
    for start, end in ((0, 9), (9, 19), (19, 25)):
        _, wanted = scanned(optax.scale_by_adam(), {"w": grads["w"][start:end]})
        k = np.arange(end - start)
        scale = np.where(
            (start > 0) & (k < 4), 1 - 0.99 * (1 + np.cos(np.pi * k / 4)) / 2, 1.0
        )
        np.testing.assert_allclose(
            updates["w"][start:end], wanted["w"] * scale[:, None], rtol=1e-5
        )


def test_reset_momentum_restarts_from_weights():
    keeps = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params=None: (updates, state)
    )
    optimizer = optaxclip.reset_momentum(keeps, every=1)
    _, state = optimizer.update(
        jnp.array([5.0]), optimizer.init(jnp.array([0.0])), jnp.array([7.0])
    )
    assert state.inner_state == 7.0


# After 1 the average of squares is 1/4, so that the next bound is sqrt(16 / 4) = 2.
SPAM_TO_2 = {"threshold": 16.0, "decay": 0.75, "warmup": 0, "every": None}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_spam_cuts_spikes_of_small_floats(dtype):
    clipper = optaxclip.spam(**SPAM_TO_2)
    _, state = clipper.update(jnp.ones(2, dtype), clipper.init(jnp.ones(2, dtype)))
    updates, state = clipper.update(jnp.array([4.0, 1.0], dtype), state)
    np.testing.assert_array_equal(updates.astype(jnp.float32), [2.0, 1.0])
    np.testing.assert_array_equal(state.second_moment, [1.1875, 0.4375])
    assert updates.dtype == dtype and state.second_moment.dtype == jnp.float32


def test_adaclip_ignores_the_norm_that_a_chain_is_given():
    # The chain's norm is for `adagn`. The largest coordinate is 4.
    chain = optax.chain(optaxclip.adaclip(), optaxclip.adagn())
    grads = jnp.array([3.0, -4.0])
    norm = jnp.float32(10.0)
    _, states = chain.update(grads, chain.init(grads), grad_norm=norm)
    assert states[0].norm == 4.0 and states[1].norm == 10.0


def test_one_infinite_coordinate_breaks_its_tensor_by_adaclip():
    for nonfinite, wanted in (("propagate", np.nan), ("zero", 0.0)):
        clipper = optaxclip.adaclip(0.5, nonfinite=nonfinite)
        _, state = clipper.update(jnp.ones(3), clipper.init(jnp.ones(3)))
        for broken in (np.inf, np.nan):
            # The others are within the limit of 1.
            updates, after = clipper.update(jnp.array([0.5, broken, -0.1]), state)
            np.testing.assert_array_equal(updates, wanted)
            assert after.nonfinite == 1


@pytest.mark.slow
def test_spam_cuts_a_python_number():
    clipper = optaxclip.spam(**SPAM_TO_2)
    _, state = clipper.update(1.0, clipper.init(1.0))
    assert clipper.update(4.0, state)[0] == 2.0


def test_reset_momentum_lets_only_floats_rise():
    grads = {
        "float": jnp.ones(2),
        "half": jnp.full(2, 3.0, jnp.bfloat16),
        "integer": jnp.arange(3),
        "bool": jnp.array([True, False]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
    }
    optimizer = optaxclip.reset_momentum(optax.identity(), every=1, warmup=4)
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    for name in ("integer", "bool", "float0", "key"):
        assert updates.pop(name) is grads[name]
    np.testing.assert_allclose(updates["float"], [0.01, 0.01], rtol=1e-5)
    np.testing.assert_array_equal(updates["half"], jnp.full(2, 0.03, jnp.bfloat16))


def test_complex_updates_rise_as_real_ones_do():
    optimizer = optaxclip.reset_momentum(optax.identity(), every=2, warmup=4)
    updates = jnp.array([1 - 2j])
    state = optimizer.init(updates)
    for factor in (1.0, 0.01):
        risen, state = optimizer.update(updates, state)
        assert risen.dtype == updates.dtype
        np.testing.assert_allclose(risen, factor * updates, rtol=1e-5)


@pytest.mark.slow
def test_reset_momentum_takes_strict_promotion():
    optimizer = optaxclip.reset_momentum(optax.trace(0.9), every=2, warmup=4)
    grads = jnp.ones(2)
    with jax.numpy_dtype_promotion("strict"):
        _, state = optimizer.update(grads, optimizer.init(grads))
        updates, _ = optimizer.update(grads, state)
    np.testing.assert_allclose(updates, [0.01, 0.01], rtol=1e-5)


HUGE = jnp.array([2.0**80, 2.0**80], jnp.float32)


def test_a_huge_first_gradient_does_not_end_clipping():
    # Its squares are 2^160. As inf, the average would be inf in all steps that follow.
    clipper = optaxclip.spam(threshold=2.0, decay=0.5, warmup=0)
    _, state = clipper.update(HUGE, clipper.init(HUGE))
    largest = float(jnp.finfo(jnp.float32).max)
    np.testing.assert_array_equal(state.second_moment, [largest, largest])
    updates, _ = clipper.update(HUGE, state)
    np.testing.assert_allclose(updates, np.sqrt([2 * largest] * 2), rtol=1e-6)


def test_an_infinite_average_is_no_nan_for_debug_nans():
    clipper = optaxclip.spam(threshold=2.0, warmup=0)
    grads = jnp.array([1.0, 0.0])
    state = clipper.init(grads)._replace(second_moment=jnp.full(2, jnp.inf))
    with jax.debug_nans(True):
        updates, _ = clipper.update(grads, state)
    np.testing.assert_array_equal(updates, grads)


def test_a_decay_of_1_learns_nothing_from_a_huge_gradient():
    def decay(step):
        return jnp.where(step == 0, 1.0, 0.9)

    clipper = optaxclip.spam(threshold=4.0, decay=decay, warmup=0)
    _, state = clipper.update(HUGE, clipper.init(HUGE))
    np.testing.assert_array_equal(state.second_moment, 0)
    _, state = clipper.update(jnp.ones(2), state)
    np.testing.assert_allclose(state.second_moment, 0.1, rtol=1e-6)


def test_an_infinite_float16_becomes_the_largest_number():
    # The limit, sqrt(5000) * 1000, is beyond float16.
    clipper = optaxclip.spam(5000.0, warmup=0, count=True)
    grads = jnp.array([np.inf, 1000.0], jnp.float16)
    usual = jnp.full(2, 1e6, jnp.float32)
    state = clipper.init(grads)._replace(second_moment=usual)
    updates, state = clipper.update(grads, state)
    np.testing.assert_array_equal(updates, [65504, 1000])
    assert state.elements[0] == 0.5


def test_an_infinite_threshold_is_no_nan_for_debug_nans():
    grads = jnp.array([0.0, 3.0])
    clipper = optaxclip.spam(np.inf, warmup=0)
    with jax.debug_nans(True):
        updates, state = clipper.update(grads, clipper.init(grads))
        updates, _ = clipper.update(updates, state)
    np.testing.assert_array_equal(updates, grads)
