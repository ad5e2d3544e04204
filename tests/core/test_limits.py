"""From rules, norms and memories to limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from optaxclip._arguments import check_shape
from optaxclip._core._limits import checked_memory, limit_of
from optaxclip.rules._constant import rule_of
from optaxclip.rules._memory import keep_where
from optaxclip.rules._rule import Number, Rule, number

STEP = jnp.int32(0)


class Last(Rule):
    """The last norm times a rate, which may be negative as a loss may be."""

    rate: Number = number(default=1.0)

    def init(self, norm):
        return jnp.full_like(norm, jnp.inf)

    def update(self, norm, memory, step):
        return self.rate * memory, norm


def limits(limit, norm, memory=(), **options):
    rule = rule_of(limit, "max_norm")
    return limit_of(rule, norm, memory, STEP, argument="max_norm", **options)


def test_a_limit_has_the_type_of_its_norm():
    for limit in (1.5, lambda step: 1.5, lambda step: jnp.bfloat16(1.5)):
        found, memory = limits(limit, jnp.ones(3))
        np.testing.assert_array_equal(found, np.full(3, 1.5))
        assert found.dtype == np.float32 and memory == ()


def test_a_limit_beyond_float32_clips():
    found, _ = limits(lambda step: np.float64(1e39), jnp.ones(()))
    assert found == np.finfo(np.float32).max


def test_only_a_loss_may_have_a_negative_limit():
    norm = jnp.ones(2)
    memory = jnp.array([-3.0, 0.5])
    below, _ = limits(Last(), norm, memory)
    np.testing.assert_array_equal(below, [0.0, 0.5])
    signed, _ = limits(Last(), norm, memory, signed=True)
    np.testing.assert_array_equal(signed, memory)


def test_a_memory_keeps_its_dtype_whatever_a_rule_returns():
    # Under jit a memory in another dtype would compile the next step anew.
    memory = jnp.full(2, 7.0, jnp.float16)
    _, after = limits(Last(), jnp.array([0.5, jnp.inf]), memory)
    np.testing.assert_array_equal(after, np.float16([0.5, 7.0]))
    assert after.dtype == np.float16


def test_only_lengths_are_remembered_and_any_loss():
    norm = jnp.array([0.5, 0.0, -1.0, np.inf, np.nan])
    memory = jnp.full(5, 7.0)
    _, after = limits(Last(), norm, memory)
    np.testing.assert_array_equal(after, [0.5, 7.0, 7.0, 7.0, 7.0])
    _, after = limits(Last(), norm, memory, signed=True)
    np.testing.assert_array_equal(after, [0.5, 0.0, -1.0, 7.0, 7.0])
    _, after = limits(Last(), jnp.ones(2), jnp.array([np.nan, 2.0]))
    np.testing.assert_array_equal(after, [np.nan, 1.0])


def test_what_a_schedule_returns_is_checked():
    with pytest.raises(TypeError, match=r"^max_norm: a schedule, or a rule, must"):
        limits(lambda step: "1", jnp.ones(2))
    with pytest.raises(ValueError, match=r"^max_norm must be .* shape \(3,\)"):
        limits(lambda step: jnp.ones(3), jnp.ones(2))


def test_a_window_is_kept_for_each_norm_by_itself():
    old, new = jnp.zeros((3, 2)), jnp.ones((3, 2), "bfloat16")
    wanted = jnp.array([True, False, True])
    found = keep_where(
        wanted, {"window": new, "last": wanted}, {"window": old, "last": jnp.zeros(3)}
    )
    np.testing.assert_array_equal(found["window"], [[1, 1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(found["last"], [1, 0, 1])
    assert found["window"].dtype == np.float32


@pytest.mark.parametrize("shape", [(), (8,), (1,), (1, 8), (4, 8), (4, 1)])
def test_a_limit_may_broadcast_to_its_norms(shape):
    check_shape(shape, (4, 8), "max_norm")


@pytest.mark.parametrize("shape", [(4,), (8, 4), (1, 4, 8), (2, 8), (0,), (8, 1)])
def test_a_limit_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="max_norm must be a number for each norm"):
        check_shape(shape, (4, 8), "max_norm")


def test_the_memory_of_another_rule_is_refused():
    norm = jnp.ones(2)
    growth, window = rules.growth(1.5), rules.windowed_quantile(0.5, 4)
    memory = window.init(norm)
    checked_memory(window, norm, memory, "f")
    checked_memory(rules.windowed_quantile(0.5, 8), norm, memory, "f")
    checked_memory(rule_of(1.0, "max_norm"), norm, (), "f")
    known = r"f: state was made with another rule. growth remembers "
    with pytest.raises(ValueError, match=known + r"float32\[2\], and .* has nothing"):
        checked_memory(growth, norm, (), "f")
    with pytest.raises(ValueError, match=r"the state has Quantile.*'float32\[2, 4\]'"):
        checked_memory(growth, norm, memory, "f")


def test_a_traced_length_of_a_window_is_not_compared():
    norm = jnp.ones(2)
    memory = rules.windowed_quantile(0.5, 4).init(norm)

    def checked(length):
        checked_memory(rules.windowed_quantile(0.5, length), norm, memory, "f")
        return length

    assert jax.jit(checked)(4) == 4


def test_none_turns_agc_off():
    params, grads = jnp.ones((3, 2)), jnp.full((3, 2), 1e30)
    clipper = optaxclip.adaptive_grad_clip(None)
    updates, state = clipper.update(grads, clipper.init(params), params)
    np.testing.assert_array_equal(updates, grads)
    np.testing.assert_array_equal(state.limit, np.full((1, 2), np.inf))


class Forgetful(Rule):
    """A rule of a user's that remembers nothing, and does not say so with ()."""

    def update(self, norm, memory, step):
        return 1.5, None


def test_what_a_rule_without_a_memory_returns_as_one_is_not_kept():
    found, memory = limits(Forgetful(), jnp.ones(2))
    np.testing.assert_array_equal(found, [1.5, 1.5])
    assert memory == ()


class WithoutMemory(Rule):
    """A rule of a user's that forgot to return its memory."""

    def update(self, norm, memory, step):
        return norm


class Growing(Rule):
    """A rule of a user's whose memory has another structure after each step."""

    def init(self, norm):
        return (norm,)

    def update(self, norm, memory, step):
        return norm, (*memory, norm)


class Empty(Rule):
    """A rule of a user's that is not written yet."""


@pytest.mark.parametrize(
    "kind, error, text",
    [
        (WithoutMemory, TypeError, r"update must return \(limit, memory\), got"),
        (Growing, ValueError, "update must return a memory in the structure of"),
        (Empty, NotImplementedError, "a rule must have a method update"),
    ],
)
def test_a_rule_that_is_not_one_is_named(kind, error, text):
    clipper = optaxclip.clip_by_global_norm(kind())
    state = clipper.init(jnp.ones(2))
    with pytest.raises(error, match=f"^{kind.__name__}: {text}"):
        clipper.update(jnp.ones(2), state)
