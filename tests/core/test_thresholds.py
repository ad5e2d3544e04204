"""Limits: numbers and arrays of every kind, trees of them, shares of the weights, and
rules that are joined.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by
from tests.helpers import apply, limits_of


@pytest.mark.parametrize(
    ("rule", "limits"),
    [
        (None, [np.inf, np.inf, np.inf, np.inf]),
        (lambda step: 1.0 + step, [1, 2, 3, 4]),
        (optaxclip.rules.minimum(None, 3.0, lambda step: 4.0 - step), [3, 3, 2, 1]),
        (
            optaxclip.rules.minimum(
                optaxclip.rules.growth(2.0), optaxclip.rules.growth(3.0)
            ),
            [np.inf, 2, 4, 8],
        ),
        (
            optaxclip.rules.minimum(
                optaxclip.rules.growth(2.0), optaxclip.rules.ema_ratio(100.0)
            ),
            [np.inf, 2, 4, 8],
        ),
        (optaxclip.rules.maximum(lambda step: 1.0 * step, 1.5), [1.5, 1.5, 2, 3]),
        (optaxclip.rules.maximum(1.0, lambda step: 1.0 * step), [1, 1, 2, 3]),
        (optaxclip.rules.warm_up(2, 5.0, optaxclip.rules.growth(2.0)), [5, 5, 4, 8]),
        (
            optaxclip.rules.warm_up(2, optaxclip.rules.growth(2.0), 9.0),
            [np.inf, 2, 9, 9],
        ),
        (
            optaxclip.rules.warm_up(3, optaxclip.rules.growth(2.0), 9.0),
            [np.inf, 2, 4, 9],
        ),
        (optaxclip.rules.warm_up(0, 5.0, 9.0), [9, 9, 9, 9]),
    ],
    ids=[
        "none",
        "schedule",
        "least",
        "least of two that learn",
        "least of two kinds",
        "floored",
        "floor that rises",
        "then growth",
        "growth first",
        "longer",
        "at once",
    ],
)
def test_rules_are_joined_as_they_say_whatever_norm_comes(rule, limits):
    np.testing.assert_array_equal(
        limits_of(rule, [1.0, 3.0, 10.0, 10.0]), np.float32(limits)
    )


def test_a_share_of_the_weights_follows_schedule_and_floor():
    grads = jnp.array([30.0, 40.0])
    for share, limits in (
        (0.5, {1.0: 1.0, 5.0: 2.5}),
        (lambda step: 0.5 + step, {1.0: 1.0, 5.0: 2.5}),
    ):
        clipper = clip_by(
            optaxclip.global_norm, optaxclip.rules.share_of_params(share, 2.0)
        )
        for weight, limit in limits.items():
            _, state = clipper.update(
                grads, clipper.init(grads), jnp.array([weight, 0.0])
            )
            assert state.limit == limit
            _, state = clipper.update(grads, state, jnp.array([weight, 0.0]))
            assert state.limit == (3 * limit if callable(share) else limit)


def test_a_share_of_the_weights_has_no_floor_by_default():
    clipper = clip_by(optaxclip.global_norm, optaxclip.rules.share_of_params(0.5))
    grads, weights = jnp.ones(2), jnp.array([0.25, 0.0])
    _, state = clipper.update(grads, clipper.init(grads), weights)
    assert state.limit == 0.125


def test_a_share_may_have_another_dtype_under_strict_promotion():
    rule = optaxclip.rules.share_of_params(jnp.float16(0.5), jnp.float16(0.25))
    clipper = clip_by(optaxclip.global_norm, rule)
    grads, weights = jnp.ones(2), jnp.array([3.0, 4.0])
    with jax.numpy_dtype_promotion("strict"):
        _, state = clipper.update(grads, clipper.init(grads), weights)
    assert state.limit == 2.5


@pytest.mark.slow
def test_a_real_number_of_any_kind_is_a_limit():
    grads = jnp.array([3.0, 4.0])
    limits = (
        2,
        2.0,
        np.int8(2),
        np.float16(2),
        np.array(2),
        np.array(2.0),
        jnp.array(2),
        jnp.bfloat16(2),
    )

    def clipped(
        given,
    ):  # by limits that are constants of the program, and by its arguments
        return [
            apply(optaxclip.clip_by_global_norm(limit), grads)[0]
            for limit in (*limits, *given)
        ]

    for updates in jax.jit(clipped)(limits):
        np.testing.assert_allclose(updates, [1.2, 1.6], rtol=1e-6)


LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize(
    "limit",
    [
        lambda step: 1e39,
        lambda step: jnp.asarray(1e39),
        lambda step: np.float64(1e39),
        lambda step: 10**39,
        optaxclip.rules.minimum(None, lambda step: 1e39),
        optaxclip.rules.maximum(1.0, lambda step: 1e39),
        optaxclip.rules.warm_up(3, lambda step: 1e39, 1.0),
    ],
    ids=["float", "float64", "NumPy", "int", "least", "at_least", "warm_up"],
)
def test_a_limit_beyond_the_norms_dtype_is_not_without_limit(limit):
    with jax.enable_x64(True):
        clipper = optaxclip.clip_by_global_norm(limit)
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


def test_a_limit_may_be_an_int_of_any_size():
    updates = {"w": jnp.array([3e12, 4e12]), "b": jnp.array([3.0, 4.0])}
    clipped, state = apply(optaxclip.clip_by_tensor_norm(10**12), updates)
    np.testing.assert_allclose(clipped["w"], [6e11, 8e11], rtol=1e-6)
    np.testing.assert_array_equal(clipped["b"], updates["b"])
    assert state.by_name()["w"].limit == np.float32(10**12)


@pytest.mark.parametrize(
    "limit",
    [
        True,
        np.array(True),
        np.array([1.0, np.nan]),
        np.array([1.0, -1.0]),
        1j,
        np.array(1j),
        np.array("1"),
        "1",
    ],
    ids=str,
)
def test_arrays_of_no_real_numbers_are_no_limits(limit):
    with pytest.raises(
        (TypeError, ValueError), match=r"^clip_by_unitwise_norm: max_norm must "
    ):
        optaxclip.clip_by_unitwise_norm(limit)
    if not isinstance(limit, str) and np.asarray(limit).dtype.kind in "bc":
        with pytest.raises(
            TypeError,
            match=(
                r"^clip_by_unitwise_norm: max_norm must be a real number, got an "
                r"array of "
            ),
        ):
            jax.jit(
                lambda limit: apply(
                    optaxclip.clip_by_unitwise_norm(limit), jnp.ones(2)
                )[0]
            )(limit)


def test_limits_are_matched_to_a_leaf_from_its_last_axis():
    grads = jnp.ones((2, 3))
    units = optaxclip.clip_by_unitwise_norm(np.float32([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(
        apply(units, grads)[0],
        np.broadcast_to([0.1, 0.2, 0.3], (2, 3)) / np.sqrt(2),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        apply(optaxclip.clip_by_unitwise_norm(np.float32([[0.1]])), grads)[0],
        np.full((2, 3), 0.1) / np.sqrt(2),
        rtol=1e-6,
    )
    for wrong in (np.ones(2), np.ones((1, 1, 3)), np.ones((2, 3))):
        with pytest.raises(
            ValueError, match=r"max_norm must be a number for each norm"
        ):
            apply(optaxclip.clip_by_unitwise_norm(np.float32(wrong)), grads)


@pytest.mark.parametrize(
    "limits",
    [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": {"c": 2.0}}],
    ids=["as deep", "deeper"],
)
def test_limits_may_have_a_value_for_what_is_masked(limits):
    grads = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([3.0, 4.0])}}
    clipper = optax.masked(
        optaxclip.clip_by_tensor_norm(limits), {"a": True, "b": False}
    )
    updates, _ = apply(clipper, grads)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(updates["b"]["c"], [3.0, 4.0])


def test_limits_without_any_value_say_so():
    with pytest.raises(
        ValueError,
        match=(
            r"^clip_by_tensor_norm: max_norm has no value for the leaf 'w': it has "
            r"none at all\. Give one for each leaf, or one for all\.$"
        ),
    ):
        optaxclip.clip_by_tensor_norm({}).init({"w": jnp.ones(2)})


def test_limits_of_groups_follow_their_weights():
    clipper = optaxclip.clip_by_group_norm(
        optaxclip.rules.share_of_params(0.5), {"a": "z", "b": "y"}
    )
    grads, params = (
        {"a": jnp.array([3.0, 4.0]), "b": jnp.array([8.0])},
        {"a": jnp.array([0.0, 2.0]), "b": jnp.array([4.0])},
    )
    updates, _ = apply(clipper, grads, params)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [2.0], rtol=1e-6)
