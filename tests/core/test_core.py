"""What the kernel does with any measure, rule and shrink: its state, a norm that is
handed in, missing and broken parts, and how updates are rounded.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import (
    clip_by,
    clip_by_global_norm,
    clip_by_unitwise_norm,
    rules,
    shrinks,
)
from optaxclip.rules import constant
from tests import oracles
from tests.helpers import apply, own_rule
from tests.methods import ALONE, METHODS

STATE = {
    "norm": (0, "float32"),
    "limit": (np.inf, "float32"),
    "factor": (1, "float32"),
    "clipped": (0, "int32"),
    "nonfinite": (0, "int32"),
    "clipped_recently": (0, "float32"),
}


def test_a_fresh_state_has_seen_nothing_and_has_no_limit():
    tree = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    state = optaxclip.clip_by_tensor_norm(1.0).init(tree)
    for name, (value, dtype) in STATE.items():
        field = getattr(state, name)
        assert field.shape == (2,) and field.dtype == dtype, name
        np.testing.assert_array_equal(field, value)
    assert state.step == 0 and state.step.dtype == "int32"


def test_the_zero_policy_leaves_parts_without_a_norm_alone():
    def measure(updates):
        return {"a": optaxclip.global_norm(updates["a"]), "b": None}

    updates = {"a": jnp.array([jnp.inf]), "b": jnp.array([3.0])}
    zeroed, _ = apply(clip_by(measure, 1.0, nonfinite="zero"), updates)
    assert zeroed["a"] == 0.0 and zeroed["b"] == 3.0


def test_a_limit_has_no_derivative_by_the_updates():
    half = own_rule(lambda norm: (), lambda norm, memory, step: (0.5 * norm, memory))
    grads = jnp.array([3.0, 4.0])
    clipper = clip_by(optaxclip.global_norm, half)
    along = jax.jvp(lambda g: apply(clipper, g)[0], (grads,), (grads,))[1]
    # A longer gradient comes out as long as before.
    np.testing.assert_allclose(along, [0.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_rule_without_a_limit_yet_lets_no_broken_step_through(nonfinite):
    grads = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(3)}
    updates, _ = apply(
        optaxclip.clip_by_global_norm(optaxclip.rules.growth(), nonfinite=nonfinite),
        grads,
    )
    for leaf in updates.values():
        np.testing.assert_array_equal(
            leaf, jnp.full_like(leaf, jnp.nan if nonfinite == "propagate" else 0.0)
        )


def test_eps_is_added_before_the_norm_is_compared_and_divided_by():
    grads = jnp.array([3.0, 4.0])
    for limit, factor in ((1.0, 1.0 / 5.5), (5.25, 5.25 / 5.5), (5.75, 1.0)):
        updates, state = apply(
            clip_by(optaxclip.global_norm, constant(limit), eps=0.5), grads
        )
        np.testing.assert_allclose(updates, factor * np.array([3.0, 4.0]), rtol=1e-6)
        assert state.norm == 5.0


def test_a_memory_keeps_its_dtype_whatever_the_rule_returns():
    counting = own_rule(
        lambda norm: jnp.zeros(norm.shape, jnp.int32),
        lambda norm, memory, step: (norm, memory + 1.0),
    )
    _, state = apply(clip_by(optaxclip.global_norm, counting), jnp.ones(3))
    (memory,) = state.memory
    assert memory.dtype == jnp.int32 and memory == 1


def test_a_rule_begins_with_norms_of_0():
    last = own_rule(lambda norm: norm, lambda norm, memory, step: (jnp.inf, norm))
    state = clip_by(optaxclip.tensor_norm, last).init({"a": 1.0, "b": jnp.ones(3)})
    np.testing.assert_array_equal(state.memory[0], [0.0, 0.0])


def test_a_broken_unit_leaves_its_own_memory_alone_and_no_other():
    last_two = own_rule(
        lambda norm: jnp.zeros((*norm.shape, 2), norm.dtype),
        lambda norm, memory, step: (
            jnp.full_like(norm, jnp.inf),
            jnp.stack([memory[..., 1], norm], -1),
        ),
    )
    _, state = apply(
        clip_by(optaxclip.unitwise_norm, last_two),
        jnp.array([[3.0, jnp.nan, 6.0], [4.0, 1.0, 8.0]]),
    )
    (memory,) = state.memory
    np.testing.assert_array_equal(memory, [[0.0, 5.0], [0.0, 0.0], [0.0, 10.0]])


def test_a_step_whose_limit_is_nan_is_not_remembered():
    unsure = own_rule(
        lambda norm: jnp.ones_like(norm),
        lambda norm, memory, step: (jnp.where(norm > 10, jnp.nan, 1.0), memory + norm),
    )
    for grads, memory in ((jnp.array([3.0, 4.0]), 6.0), (jnp.array([30.0, 40.0]), 1.0)):
        _, state = apply(clip_by(optaxclip.global_norm, unsure), grads)
        assert state.memory == (memory,)


@pytest.mark.parametrize("factory", [shrinks.smooth, shrinks.auto_s, shrinks.psac])
def test_equal_shrinks_share_a_compilation(factory):
    assert factory(1) == factory(1.0) != factory(2)
    assert hash(factory(1)) == hash(factory(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("shrink", [shrinks.hard, shrinks.smooth()])
def test_without_a_limit_the_derivative_is_1(shrink):
    clipper = optaxclip.clip_by_global_norm(np.inf, shrink=shrink)
    x, along = jnp.full(4, 3e38), jnp.arange(4.0)

    def clipped(grads):
        return apply(clipper, grads)[0]

    for found in jax.jvp(clipped, (x,), (along,))[1], *jax.vjp(clipped, x)[1](along):
        np.testing.assert_array_equal(found, along)


@pytest.mark.parametrize(("ord", "order"), [(None, "2"), (3, "3"), ("rms", "rms")])
def test_a_norm_that_is_not_finite_says_its_order(ord, order):
    clipper = optaxclip.clip_by_global_norm(1.0, ord=ord, nonfinite="raise")
    text = rf"^clip_by_global_norm: the norm of order {order} of the updates is not fin"
    with pytest.raises(FloatingPointError, match=text):
        apply(clipper, jnp.array([1.0, jnp.inf]))


def test_a_limit_that_is_nan_raises_by_its_name():
    clipper = optaxclip.clip_by_global_norm(1.0, nonfinite="raise")
    grads = jnp.array([3.0, 4.0])
    text = "^clip_by_global_norm: the limit of the norm 5.0 is NaN"
    with pytest.raises(FloatingPointError, match=text):
        clipper.update(grads, clipper.init(grads), limit=jnp.asarray(jnp.nan))


def test_warnings_show_the_line_of_the_user():
    integers = {"w": jnp.arange(3)}
    stack = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 2)), "c": jnp.ones((4, 2, 3))}
    clipper = clip_by_global_norm(1.0)
    chain = optax.chain(clipper, optax.sgd(0.1))
    with pytest.warns(UserWarning) as record:
        clipper.update(integers, clipper.init(integers))
        optaxclip.clip_grads(integers, 1.0)
        chain.update(integers, chain.init(integers))
        jax.jit(chain.update)(integers, chain.init(integers))
        clip_by_unitwise_norm(1.0).init(stack)
        optax.chain(clip_by_unitwise_norm(1.0)).init(stack)
    assert [warning.filename for warning in record] == [__file__] * 6


def below_the_limit_nan(norm, limit):
    # Right for norms above the limit only.
    return limit - jnp.sqrt(norm - limit)


NOT_NORMS = {
    "nan": below_the_limit_nan,
    "below 0": lambda norm, limit: limit - 2 * norm,
    "inf": lambda norm, limit: norm / 0,
}


@pytest.mark.parametrize("shrink", NOT_NORMS.values(), ids=NOT_NORMS)
@pytest.mark.parametrize("make", [clip_by_unitwise_norm, clip_by_global_norm])
def test_a_shrink_that_returns_no_norm_is_counted(make, shrink):
    grads = {"w": jnp.array([[3.0, 0.0], [4.0, 0.0]])}
    for nonfinite, expected in (("zero", 0.0), ("propagate", np.nan)):
        clipper = make(9.0, shrink=shrink, nonfinite=nonfinite)
        clipped, state = apply(clipper, grads)
        # A unit of zeros stays zeros.
        np.testing.assert_array_equal(clipped["w"][:, 0], [expected, expected])
        assert (state.nonfinite, state.clipped) == (1, 0)


def test_a_shrink_that_returns_no_norm_raises_by_its_name():
    clipper = clip_by_global_norm(9.0, shrink=below_the_limit_nan, nonfinite="raise")
    text = "^clip_by_global_norm: shrink must return .* the norm 5.0 and the limit 9.0"
    with pytest.raises(FloatingPointError, match=text):
        apply(clipper, jnp.array([3.0, 4.0]))


def test_a_leaf_that_is_missing_raises_no_more():
    clipper = optaxclip.clip_by_tensor_norm(1.0, nonfinite="raise")
    grads = {"a": jnp.array([jnp.nan]), "b": jnp.ones(2)}
    # Before the clipper raises, the state is lost. So it comes from one that does not.
    state = apply(optaxclip.clip_by_tensor_norm(1.0), grads)[1]
    clipped, _ = clipper.update(grads | {"a": None}, state)
    np.testing.assert_allclose(np.linalg.norm(clipped["b"]), 1, rtol=1e-6)


def test_a_norm_of_the_users_has_no_order_in_errors():
    clipper = optaxclip.clip_by_spectral_norm(1.0, nonfinite="raise")
    with pytest.raises(FloatingPointError, match="the norm of the updates is not fin"):
        apply(clipper, jnp.full((2, 2), jnp.inf))


def test_no_limit_and_limits_for_parts_are_rules_too():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
    assert apply(clip_by(optaxclip.global_norm, None), grads)[1].limit == np.inf
    updates, _ = apply(clip_by(optaxclip.tensor_norm, {"a": 1.0, "b": None}), grads)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(updates["b"], grads["b"])
    with pytest.raises(ValueError, match=r"^clip_by: limit must be at least 0, got -1"):
        clip_by(optaxclip.global_norm, -1.0)


def test_each_of_many_tensors_has_its_own_limit_and_factor():
    # More than are added up at once, and more than a CPU takes out of one vector.
    random = np.random.default_rng(2)
    grads = list(random.normal(size=(35, 2)).astype(np.float32))
    limits = list(np.exp(random.normal(size=35)).astype(np.float32))
    updates, state = apply(optaxclip.clip_by_tensor_norm(limits), grads)
    norms = np.linalg.norm(np.float64(grads), axis=1)
    factors = np.minimum(1, limits / norms)
    np.testing.assert_allclose(updates, grads * factors[:, None], rtol=1e-6)
    np.testing.assert_allclose(state.norm, norms, rtol=1e-6)
    np.testing.assert_allclose(state.factor, factors, rtol=1e-6)
    np.testing.assert_array_equal(state.clipped, factors < 1)
    for ord in (2, 3, np.inf):
        norm = jax.jit(partial(optaxclip.global_norm, ord=ord))(grads)
        np.testing.assert_allclose(norm, oracles.norm(grads, ord), rtol=1e-6)


by_tensor, by_unit = optaxclip.clip_by_tensor_norm, optaxclip.clip_by_unitwise_norm
by_labels = partial(optaxclip.clip_by_group_norm, labels={"a": "x", "b": "y"})
share, growth = optaxclip.rules.share_of_params(0.1), optaxclip.rules.growth()
# Clippers that do not measure all leaves together, with more of their kinds.
MISSING = {
    name: method.make
    for name, method in METHODS.items()
    if method.norm != "all" and method.leaves != ALONE and not method.wraps
}
MISSING |= {
    "tensors with a memory": lambda: by_tensor(growth),
    "units with a memory": lambda: by_unit(growth),
    "shares of weights": lambda: by_labels(share),
    "carry": lambda: optaxclip.carry_clipped(by_tensor(1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSING)
def test_a_leaf_may_be_missing_in_a_step_whatever_is_kept_for_it(name):
    """The other leaves come out as if it were there, and its own part is taken up again
    afterwards.
    """
    clipper = MISSING[name]()
    params = {"a": jnp.full((2, 3), 0.5), "b": jnp.full(3, 0.25)}
    whole = {"a": jnp.full((2, 3), 3.0), "b": jnp.full(3, 4.0)}
    longer = whole | {"b": 9 * whole["b"]}
    _, state = clipper.update(whole, clipper.init(params), params)
    updates, after = clipper.update({**longer, "a": None}, state, params)
    assert updates["a"] is None
    assert jax.tree.structure(after) == jax.tree.structure(state)
    if isinstance(state, optaxclip.ClipState) and "a" in state.by_name():
        kept, known = after.by_name()["a"], state.by_name()["a"]
        # A step without the leaf is one that did not clip it.
        assert np.all(kept.clipped_recently <= known.clipped_recently)
        known = known._replace(clipped_recently=kept.clipped_recently)
        jax.tree.map(np.testing.assert_array_equal, kept, known)
    together, _ = clipper.update(longer, state, params)
    np.testing.assert_array_equal(updates["b"], together["b"])
    again, _ = clipper.update(whole, after, params)
    assert np.isfinite(again["a"]).all() and np.abs(again["a"]).max() > 0


def test_an_own_norm_gets_clipped_leaves_only():
    tree = {"n": jnp.arange(3), "w": jnp.array([3.0, -4.0]), "z": jnp.zeros((0, 2))}
    clipper = clip_by(
        lambda tree: jax.tree.map(lambda x: jnp.max(jnp.abs(x)), tree), constant(2.0)
    )
    start = clipper.init(tree)
    updates, state = clipper.update(tree, start)
    assert jax.tree.structure(start) == jax.tree.structure(state)
    assert list(state.by_name()) == ["w"] and state.norm == 4.0
    np.testing.assert_allclose(updates["w"], [1.5, -2.0], rtol=1e-6)
    assert (updates["n"] == tree["n"]).all()


@pytest.mark.parametrize(
    "clipper",
    [
        optaxclip.adaptive_grad_clip(0.5),
        optaxclip.clip_by_global_norm(optaxclip.rules.share_of_params(0.5)),
        optaxclip.clip_by_group_norm(optaxclip.rules.share_of_params(0.5), "all"),
    ],
    ids=["unit", "global", "group"],
)
def test_weights_whose_updates_are_missing_are_not_compared(clipper):
    updates = {"a": None, "w": jnp.array([3.0, 4.0])}
    params = {"a": jnp.array([1000.0]), "w": jnp.array([0.0, 2.0])}
    clipped, state = apply(clipper, updates, params)
    assert jax.tree.leaves(state.limit) == [1.0]
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("number", [{"limit": 2.0}, {"grad_norm": 10}])
def test_a_python_number_overrides_what_a_schedule_says_under_jit(number):
    clipper = optaxclip.clip_by_global_norm(optax.constant_schedule(4.0))
    grads = jnp.array([3.0, 4.0])
    update = jax.jit(lambda state: clipper.update(grads, state, **number))
    clipped, _ = update(clipper.init(grads))
    np.testing.assert_allclose(np.linalg.norm(clipped), 2, rtol=1e-6)


class NotYet(rules.Rule):
    """Remembers nothing, and has no limit in the first step."""

    def update(self, norm, memory, step):
        return jnp.where(step == 0, jnp.inf, 1.0), memory


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_rule_without_memory_lets_no_broken_step_through(nonfinite):
    wanted = 0.0 if nonfinite == "zero" else np.nan
    broken, rule = jnp.array([jnp.nan, 1.0]), NotYet()
    for limit in (rule, rules.minimum(rule, None), rules.warm_up(2, None, 1.0)):
        clipper = optaxclip.clip_by_global_norm(limit, nonfinite=nonfinite)
        np.testing.assert_array_equal(apply(clipper, broken)[0], np.full(2, wanted))
    # Finite updates keep their bits.
    grads = jnp.array([3.0, 0.1])
    clipper = optaxclip.clip_by_global_norm(rule)
    np.testing.assert_array_equal(apply(clipper, grads)[0], grads)


@pytest.mark.parametrize("limit", [1.0, rules.minimum(1.0, None), rules.growth(2.0)])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_limit_of_inf_for_one_step_touches_nothing(limit, nonfinite):
    clipper = optaxclip.clip_by_global_norm(limit, nonfinite=nonfinite)
    grads = jnp.array([jnp.nan, 1.0])
    updates, state = apply(clipper, grads, limit=jnp.inf)
    np.testing.assert_array_equal(updates, grads)
    assert state.nonfinite == 1


def test_a_limit_of_none_for_one_step_is_the_limit_of_the_clipper():
    updates, state = apply(
        optaxclip.clip_by_global_norm(1.0), jnp.array([3.0, 4.0]), limit=None
    )
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)
    assert state.limit == 1.0


@pytest.mark.parametrize("limit", [None, np.inf, rules.minimum(None, np.inf)])
def test_a_limit_that_is_none_in_any_form_touches_nothing(limit):
    clipper = optaxclip.clip_by_global_norm(limit, nonfinite="zero")
    grads = jnp.array([jnp.nan, 1.0])
    np.testing.assert_array_equal(apply(clipper, grads)[0], grads)


def test_a_python_number_that_is_broken_raises_by_its_name():
    error = r"'w': 1 of 1 values are NaN or inf"
    for clip in (
        lambda grads: optaxclip.clip_grads(grads, 1.0, nonfinite="raise"),
        lambda grads: apply(
            optaxclip.clip_by_global_norm(1.0, nonfinite="raise"), grads
        ),
    ):
        with pytest.raises(FloatingPointError, match=error):
            clip({"w": float("inf")})


def test_labels_may_be_integers_of_numpy():
    labels = {"a": np.int64(1), "b": np.int64(2)}
    clipper = optaxclip.clip_by_group_norm({1: 1.0, 2: 2.0}, labels)
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
    updates, state = apply(clipper, grads)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [1.2, 1.6], rtol=1e-6)
    assert list(state.by_name()) == ["1", "2"]


def test_norms_may_differ_in_dtype():
    def norms(tree):
        return jax.tree.map(jnp.linalg.norm, tree)

    with jax.enable_x64(True):
        grads = {"a": jnp.ones(4, jnp.float32), "b": jnp.ones(4, jnp.float64)}
        updates, _ = apply(clip_by(norms, 1.0), grads)
    for name, update in updates.items():
        assert update.dtype == grads[name].dtype
        np.testing.assert_allclose(update, np.full(4, 0.5), rtol=1e-6)
