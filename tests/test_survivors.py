"""Promises that deliberate faults in the library once broke unseen."""

import inspect
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import Threshold, clip_by, constant
from optaxclip.dropin import keras, tensorflow_style, torch_style
from optaxclip.replay.__main__ import main as replay_command
from optaxclip.replay.plot import plot_history


def apply(clipper, updates, params=None, **extra):
    return clipper.update(updates, clipper.init(updates), params, **extra)


STEPS = 9


def limits_of(rule, norms):
    """The limits of a rule over a short history, which goes on as it ends: replays of one length share what they compile around their scan."""
    longer = np.pad(np.float32(norms), (0, STEPS - len(norms)), mode="edge")
    return np.asarray(optaxclip.replay(rule, longer).limits)[: len(norms)]


def test_a_fresh_state_has_seen_nothing_and_has_no_limit():
    state = optaxclip.clip_by_tensor_norm(1.0).init({"w": jnp.ones((3, 2)), "b": jnp.ones(2)})
    for name, value, dtype in (
        ("norm", 0, "float32"),
        ("limit", np.inf, "float32"),
        ("scale", 1, "float32"),
        ("clipped", 0, "int32"),
        ("nonfinite", 0, "int32"),
    ):
        for leaf in getattr(state, name).values():
            assert leaf == value and leaf.dtype == dtype, name
    assert state.step == 0


def test_a_measure_of_ones_own_is_never_shown_what_is_not_measured():
    tree = {"n": jnp.arange(3), "w": jnp.array([3.0, -4.0]), "z": jnp.zeros((0, 2))}
    clipper = clip_by(lambda tree: jax.tree.map(lambda x: jnp.max(jnp.abs(x)), tree), constant(2.0))
    start = clipper.init(tree)
    updates, state = clipper.update(tree, start)
    assert jax.tree.structure(start) == jax.tree.structure(state)
    assert state.norm == {"n": None, "w": 4.0, "z": None}
    np.testing.assert_allclose(updates["w"], [1.5, -2.0], rtol=1e-6)
    assert (updates["n"] == tree["n"]).all()


def test_weights_whose_updates_are_missing_are_not_compared():
    updates = {"a": None, "w": jnp.array([3.0, 4.0])}
    params = {"a": jnp.array([1000.0]), "w": jnp.array([0.0, 2.0])}
    clipped, state = apply(optaxclip.adaptive_grad_clip(0.5), updates, params)
    assert state.limit["w"] == 1.0
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)


def test_a_limit_has_no_derivative_by_the_updates():
    half = Threshold(lambda norm: (), lambda norm, memory, step, params_norm: (0.5 * norm, memory))
    grads = jnp.array([3.0, 4.0])
    clipper = clip_by(optaxclip.global_norm, half)
    along = jax.jvp(lambda g: apply(clipper, g)[0], (grads,), (grads,))[1]
    np.testing.assert_allclose(along, [0.0, 0.0], atol=1e-5)  # a longer gradient comes out as long as before


def test_a_part_that_is_missing_in_a_step_keeps_what_is_known_of_it():
    clipper = optaxclip.clip_by_tensor_norm(optaxclip.growth(1.5))
    first, second = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones(2)}, {"a": None, "b": jnp.ones(2)}
    _, before = clipper.update(first, clipper.init(first))
    _, after = clipper.update(second, before)
    for field in ("norm", "limit", "scale", "clipped", "nonfinite", "memory"):
        assert getattr(after, field)["a"] == getattr(before, field)["a"], field
    assert after.memory["a"] == 5.0 and after.step == 2


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_rule_without_a_limit_yet_lets_no_broken_step_through(nonfinite):
    grads = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(3)}
    updates, _ = apply(optaxclip.clip_by_global_norm(optaxclip.growth(), nonfinite=nonfinite), grads)
    for leaf in updates.values():
        np.testing.assert_array_equal(leaf, jnp.full_like(leaf, jnp.nan if nonfinite == "propagate" else 0.0))


def test_eps_is_added_before_the_norm_is_compared_and_divided_by():
    grads = jnp.array([3.0, 4.0])
    for limit, factor in ((1.0, 1.0 / 5.5), (5.25, 5.25 / 5.5), (5.75, 1.0)):
        updates, state = apply(clip_by(optaxclip.global_norm, constant(limit), eps=0.5), grads)
        np.testing.assert_allclose(updates, factor * np.array([3.0, 4.0]), rtol=1e-6)
        assert state.norm == 5.0


def test_a_memory_keeps_its_dtype_whatever_the_rule_returns():
    counting = Threshold(lambda norm: jnp.zeros(norm.shape, jnp.int32), lambda norm, memory, step, params_norm: (norm, memory + 1.0))
    _, state = apply(clip_by(optaxclip.global_norm, counting), jnp.ones(3))
    assert state.memory.dtype == jnp.int32 and state.memory == 1


def test_a_broken_unit_leaves_its_own_memory_alone_and_no_other():
    last_two = Threshold(
        lambda norm: jnp.zeros((*norm.shape, 2), norm.dtype),
        lambda norm, memory, step, params_norm: (jnp.full_like(norm, jnp.inf), jnp.stack([memory[..., 1], norm], -1)),
    )
    _, state = apply(clip_by(optaxclip.unit_norm, last_two), jnp.array([[3.0, jnp.nan, 6.0], [4.0, 1.0, 8.0]]))
    np.testing.assert_array_equal(state.memory, [[[0.0, 5.0], [0.0, 0.0], [0.0, 10.0]]])


def test_sixteen_bit_updates_are_rounded_once():
    grads = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.bfloat16)
    exact = np.asarray(grads).astype(np.float64)
    updates, _ = apply(optaxclip.clip_by_global_norm(1.0), grads)
    error = np.abs(np.asarray(updates).astype(np.float64) - exact / np.linalg.norm(exact)) / np.abs(exact / np.linalg.norm(exact))
    assert error.max() <= 2.0**-8 * (1 + 1e-3)  # half the spacing of bfloat16, and a little for float32


@pytest.mark.parametrize("given", [[5.0], {"all": 5.0}, jnp.array([5.0]), (5.0, 5.0)], ids=str)
def test_a_given_norm_of_another_structure_is_refused(given):
    with pytest.raises(ValueError, match=r"clip_by_global_norm: grad_norm must have the structure and shapes of the norms that it measures"):
        apply(optaxclip.clip_by_global_norm(1.0), jnp.array([3.0, 4.0]), grad_norm=given)


def test_a_given_norm_of_any_dtype_leaves_the_state_in_its_own():
    for given in (5, np.float16(5), jnp.bfloat16(5)):
        updates, state = apply(optaxclip.clip_by_global_norm(1.0), jnp.array([3.0, 4.0]), grad_norm=given)
        assert state.norm.dtype == jnp.float32 and updates.dtype == jnp.float32
        np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)


NUMBERS = {  # of each rule and clipper: its parameters, the least and the greatest number that each may be
    optaxclip.windowed_quantile: {"quantile": (0, 1), "factor": (0, None), "window": (1, None), "warmup": (0, None)},
    optaxclip.windowed_mean: {"sigmas": (0, None), "window": (1, None), "ddof": (0, None), "floor": (0, None), "warmup": (0, None)},
    optaxclip.z_score: {"z": (0, None), "decay": (0, 1), "warmup": (1, None), "eps": (0, None)},
    optaxclip.log_z_score: {"z": (0, None), "decay": (0, 1), "floor": (0, None), "spread": (0, None), "warmup": (1, None)},
    optaxclip.ema_ratio: {"ratio": (0, None), "decay": (0, 1), "target": (0, None), "target_decay": (0, 1), "warmup": (0, None)},
    optaxclip.growth: {"rate": (0, None), "floor": (0, None)},
    optaxclip.quantile_tracker: {"quantile": (0, 1), "rate": (0, None), "start": (0, None)},
    optaxclip.ema: {"decay": (0, 1)},
    optaxclip.moments_ratio: {"decay1": (0, 1), "decay2": (0, 1), "eps": (0, None)},
    optaxclip.ema_band: {"low": (0, None), "high": (0, None), "decay": (0, 1), "floor": (0, None), "up": (1, None), "down": (0, 1)},
    optaxclip.adagc: {"ratio": (0, None), "decay": (0, 1), "max_norm": (0, None), "warmup": (1, None)},
    optaxclip.autoclip: {"percentile": (0, 100)},
    optaxclip.spam: {"threshold": (0, None), "decay": (0, 1), "warmup": (0, None), "every": (1, None)},
    optaxclip.larc: {"learning_rate": (0, None), "trust": (0, None), "weight_decay": (0, None)},
    optaxclip.clippy: {"relative": (0, None), "absolute": (0, None)},
}


@pytest.mark.parametrize(("build", "name"), [(build, name) for build, names in NUMBERS.items() for name in names], ids=lambda x: getattr(x, "__name__", x))
def test_every_number_is_checked_under_its_own_name(build, name):
    lowest, highest = NUMBERS[build][name]
    others = {"learning_rate": 0.1} if build is optaxclip.larc else {}
    call = build.__name__
    with pytest.raises(ValueError, match=rf"^{call}: {name} must be at least {lowest}, got {lowest - 0.5}"):
        build(**others | {name: lowest - 0.5})
    if highest is not None:
        with pytest.raises(ValueError, match=rf"^{call}: {name} must be at most {highest}, got {highest + 0.5}"):
            build(**others | {name: highest + 0.5})
    for edge in (lowest, highest):
        if edge is not None and (build, name, edge) != (optaxclip.ema_band, "up", None):
            build(**others | {name: edge})


@pytest.mark.parametrize("build", [optaxclip.windowed_quantile, optaxclip.windowed_mean])
def test_a_window_is_one_whole_number(build):
    for wrong in (2.5, np.array([3, 4])):
        with pytest.raises(ValueError, match=rf"{build.__name__}: window must be a whole number"):
            build(window=wrong)


DEFAULTS = {  # those of the papers and of their public code
    optaxclip.adaptive_grad_clip: {"clipping": 0.01, "eps": 1e-3},
    optaxclip.autoclip: {"percentile": 10.0, "window": 10_000, "scope": "global"},
    optaxclip.windowed_mean: {"sigmas": 3.0, "window": 128, "ddof": 0, "floor": 0.0, "current": False, "remember": "raw", "warmup": 2},
    optaxclip.windowed_quantile: {"quantile": 0.5, "window": 100, "factor": 1.0, "current": False, "remember": "raw", "warmup": 1},
    optaxclip.zclip: {"z": 2.5, "decay": 0.97, "cap": None, "target": "adaptive", "warmup": 25, "eps": 1e-6, "scope": "global"},
    optaxclip.z_score: {"z": 2.5, "decay": 0.97, "target": "adaptive", "warmup": 25, "eps": 1e-6},
    optaxclip.log_z_score: {"z": 4.0, "decay": 0.995, "floor": 0.01, "spread": 1e-3, "warmup": 277},
    optaxclip.ema_ratio: {"ratio": 2.0, "decay": 0.99, "corrected": False, "remember": "clipped", "warmup": 1},
    optaxclip.growth: {"rate": 1.01, "floor": 0.0},
    optaxclip.quantile_tracker: {"quantile": 0.5, "rate": 0.2, "start": 0.1},
    optaxclip.adagc: {"ratio": 1.05, "decay": 0.98, "max_norm": 1.0, "warmup": 100, "scope": "tensor"},
    optaxclip.aggc: {"low": 0.95, "high": 0.6, "decay": 0.95, "floor": 0.01, "up": 1.1, "down": 0.9, "raise_small": False},
    optaxclip.ema_band: {"low": 0.95, "high": 0.6, "decay": 0.95, "floor": 0.01, "up": 1.1, "down": 0.9, "raise_small": False},
    optaxclip.spam: {"threshold": 5000.0, "decay": 0.999, "warmup": 20, "every": 500},
    optaxclip.reset_momentum: {"every": 500, "warmup": 150},
    optaxclip.adaclip: {"decay": 0.999},
    optaxclip.ema: {"decay": 0.999},
    optaxclip.adagn: {"decay1": 0.7, "decay2": 0.9, "eps": 1e-8, "scope": "tensor"},
    optaxclip.moments_ratio: {"decay1": 0.7, "decay2": 0.9, "eps": 1e-8},
    optaxclip.skip_step: {"sigmas": 6.0, "window": 128, "on_loss": True},
    optaxclip.skip_nonfinite: {"max_consecutive": 100},
    optaxclip.clippy: {"relative": 0.1, "absolute": 1e-7},
    optaxclip.larc: {"trust": 0.02, "weight_decay": 0.0, "eps": 1e-8},
    optaxclip.clip_by_spectral_norm: {"method": "svd", "steps": None, "columns": None},
    optaxclip.smooth: {"power": 1.0},
    optaxclip.auto_s: {"gamma": 0.01},
    optaxclip.psac: {"r": 0.1},
    optaxclip.clipped_grad: {"argnums": 0, "batch_argnums": 1, "has_aux": False, "two_pass": False, "mean": True},
    optaxclip.clip_by_global_norm: {"ord": None, "eps": 0.0, "nonfinite": "propagate", "axes": "auto"},
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__name__)
def test_defaults_are_those_of_the_papers(function):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in DEFAULTS[function]} == DEFAULTS[function]


@pytest.mark.parametrize("module", [optaxclip, optaxclip.adaptive, optaxclip.per_example], ids=lambda module: module.__name__)
def test_public_names_are_those_of_what_they_name(module):
    public = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "").startswith("optaxclip")}
    assert len(public) > 5
    assert {name: value.__name__ for name, value in public.items()} == {name: name for name in public}


def test_modules_of_the_dropins_are_those_of_their_names():
    modules = {name: value.__name__ for name, value in vars(optaxclip.dropin).items() if inspect.ismodule(value)}
    assert modules == {name: f"optaxclip.dropin.{name}" for name in ("keras", "tensorflow_style", "torch_style")}


def test_a_state_can_be_made_outside_shard_map_whatever_axes_says():
    state = optaxclip.clip_by_global_norm(1.0, axes=("x", "y")).init(jnp.ones(3))
    assert state.norm.shape == ()


def test_a_step_without_a_limit_that_is_a_number_is_not_remembered():
    unsure = Threshold(lambda norm: jnp.ones_like(norm), lambda norm, memory, step, params_norm: (jnp.where(norm > 10, jnp.nan, 1.0), memory + norm))
    for grads, memory in ((jnp.array([3.0, 4.0]), 6.0), (jnp.array([30.0, 40.0]), 1.0)):
        assert apply(clip_by(optaxclip.global_norm, unsure), grads)[1].memory == memory


@pytest.mark.parametrize("norm", [0.0, np.nan, np.inf])
def test_a_norm_that_is_no_length_is_not_remembered(norm):
    last = Threshold(lambda norm: jnp.ones_like(norm), lambda norm, memory, step, params_norm: (memory, norm))
    _, state = apply(clip_by(optaxclip.global_norm, last), jnp.array([norm, 0.0]))
    assert state.memory == 1.0


SCHEDULED = [  # (rule, parameter, up to step 5, afterwards, does it act on the limit of its own step, or of the next?, others)
    (optaxclip.windowed_quantile, "quantile", 0.3, 0.8, "own", {}),
    (optaxclip.windowed_quantile, "factor", 1.5, 0.5, "own", {}),
    (optaxclip.windowed_mean, "sigmas", 1.0, 2.0, "own", {}),
    (optaxclip.windowed_mean, "floor", 5.0, 1.0, "own", {}),
    (optaxclip.z_score, "z", 0.1, 2.0, "own", {"warmup": 2}),
    (optaxclip.log_z_score, "z", 0.5, 2.0, "own", {"warmup": 2}),
    (optaxclip.log_z_score, "spread", 1.0, 2.0, "own", {"warmup": 2}),
    (optaxclip.ema_ratio, "ratio", 1.1, 2.0, "own", {}),
    (optaxclip.ema_ratio, "decay", 0.9, 0.5, "next", {"ratio": 4.0}),
    (optaxclip.growth, "rate", 1.1, 2.0, "own", {}),
    (optaxclip.growth, "floor", 9.0, 10.0, "own", {}),
    (optaxclip.quantile_tracker, "quantile", 0.9, 0.1, "next", {}),
    (optaxclip.quantile_tracker, "rate", 0.2, 0.7, "next", {}),
    (optaxclip.ema_band, "high", 0.8, 0.7, "own", {"down": 0.0}),
    (optaxclip.ema_band, "down", 0.99, 0.9, "own", {"high": 0.1}),
    (optaxclip.ema, "decay", 0.9, 0.2, "own", {}),
    (optaxclip.moments_ratio, "decay1", 0.9, 0.2, "own", {}),
]


@pytest.mark.parametrize(("build", "name", "before", "after", "acts", "others"), SCHEDULED, ids=[f"{case[0].__name__} {case[1]}" for case in SCHEDULED])
def test_a_schedule_counts_steps_from_0(build, name, before, after, acts, others):
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(STEPS)).astype(np.float32)
    same = 6 if acts == "own" else 7  # as many limits can not know of the change
    values = before, lambda step: jnp.where(step < 6, before, after)
    both = jax.jit(lambda norms: [optaxclip.replay(build(**others, **{name: value}), norms).limits for value in values])
    constant_limits, limits = map(np.asarray, both(norms))
    np.testing.assert_allclose(limits[:same], constant_limits[:same], rtol=1e-6)
    assert abs(limits[same] - constant_limits[same]) > 1e-3 * constant_limits[same]


UNITS = {(): (), (4,): (0,), (4, 3): (0,), (4, 3, 2): (0,), (2, 3, 4, 5): (0, 1, 2), (2, 3, 2, 4, 5): (0, 1, 2, 3)}


@cache
def norms_of_units():
    leaves = {str(shape): np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in UNITS}
    return leaves, jax.jit(optaxclip.unit_norm)(leaves)


@pytest.mark.parametrize(("shape", "over"), UNITS.items(), ids=str)
def test_a_unit_of_each_rank_is_summed_over_the_axes_of_the_paper(shape, over):
    leaves, norms = norms_of_units()
    x, norm = leaves[str(shape)], norms[str(shape)]
    wanted = np.sqrt(np.sum(np.asarray(x, np.float64) ** 2, over, keepdims=len(shape) > 1))
    assert norm.shape == wanted.shape
    np.testing.assert_allclose(norm, wanted, rtol=1e-6)


def test_a_rank_without_a_rule_wants_an_axis():
    with pytest.raises(ValueError, match=r"unit_norm: axis must be given for the leaf 'w' of rank 6: there is no rule above rank 5\."):
        optaxclip.unit_norm({"w": jnp.ones((1,) * 6)})
    assert optaxclip.unit_norm({"w": jnp.ones((1,) * 6)}, axis=-1)["w"] == 1.0


@pytest.mark.parametrize("count", [-1, 3, 1.0, "1"])
def test_a_number_of_stacked_axes_that_a_leaf_does_not_have_is_refused(count):
    with pytest.raises(ValueError, match=r"tensor_norm: stacked must be a number of leading axes, from 0 to 2 for the leaf 'w' of shape \(2, 3\), got "):
        optaxclip.tensor_norm({"w": jnp.ones((2, 3))}, stacked=count)


@pytest.mark.parametrize("norm", [optaxclip.global_norm, optaxclip.tensor_norm, optaxclip.unit_norm], ids=lambda norm: norm.__name__)
def test_an_order_that_is_none_is_named_by_the_norm(norm):
    with pytest.raises(ValueError, match=rf"^{norm.__name__}: ord must be a number above 0"):
        norm(jnp.ones(2), ord="l2")


@pytest.mark.parametrize("ord", [np.int64(1), np.float32(1.0), 1, 1.0], ids=lambda ord: type(ord).__name__)
def test_an_order_may_be_a_number_of_any_kind(ord):
    assert optaxclip.global_norm(jnp.array([3.0, -4.0]), ord=ord) == 7.0


def test_one_leaf_of_64_bits_makes_the_norm_of_all_64_bits():
    with jax.enable_x64(True):
        norm = optaxclip.global_norm([np.ones(2, np.float32), np.full(2, 1e200), np.ones(1, np.float16)])
        assert norm.dtype == jnp.float64
        np.testing.assert_allclose(norm, np.sqrt(2) * 1e200, rtol=1e-14)


TWICE = (0.5, 1, 2, 3, np.inf)


@cache
def second_derivatives(twice):
    """{order: those at zero, and where one coordinate is not}, of all orders by one program."""
    program = jax.jit(lambda x: [twice(partial(optaxclip.global_norm, ord=ord))(x) for ord in TWICE])
    return dict(zip(TWICE, zip(*(program(np.float32(x)) for x in ([0, 0, 0], [0, 2, 0]))), strict=True))


def reverse_twice(function):
    return jax.jacrev(jax.jacrev(function))


@pytest.mark.parametrize("ord", TWICE)
def test_second_derivatives_are_finite_at_zero(ord):
    assert all(np.isfinite(x).all() for x in second_derivatives(jax.hessian)[ord])


@pytest.mark.parametrize(
    ("rule", "limits"),
    [
        (None, [np.inf, np.inf, np.inf, np.inf]),
        (lambda step: 1.0 + step, [1, 2, 3, 4]),
        (optaxclip.least(None, 3.0, lambda step: 4.0 - step), [3, 3, 2, 1]),
        (optaxclip.least(optaxclip.growth(2.0), optaxclip.growth(3.0)), [np.inf, 2, 4, 8]),
        (optaxclip.least(optaxclip.growth(2.0), optaxclip.ema_ratio(100.0)), [np.inf, 2, 4, 8]),
        (optaxclip.at_least(lambda step: 1.0 * step, 1.5), [1.5, 1.5, 2, 3]),
        (optaxclip.at_least(1.0, lambda step: 1.0 * step), [1, 1, 2, 3]),
        (optaxclip.warm_up(2, 5.0, optaxclip.growth(2.0)), [5, 5, 4, 8]),
        (optaxclip.warm_up(2, optaxclip.growth(2.0), 9.0), [np.inf, 2, 9, 9]),
        (optaxclip.warm_up(3, optaxclip.growth(2.0), 9.0), [np.inf, 2, 4, 9]),
        (optaxclip.warm_up(0, 5.0, 9.0), [9, 9, 9, 9]),
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
    np.testing.assert_array_equal(limits_of(rule, [1.0, 3.0, 10.0, 10.0]), np.float32(limits))


def test_a_share_of_the_weights_follows_schedule_and_floor():
    grads = jnp.array([30.0, 40.0])
    for share, limits in ((0.5, {1.0: 1.0, 5.0: 2.5}), (lambda step: 0.5 + step, {1.0: 1.0, 5.0: 2.5})):
        clipper = clip_by(optaxclip.global_norm, optaxclip.share_of_params(share, 2.0))
        for weight, limit in limits.items():
            _, state = clipper.update(grads, clipper.init(grads), jnp.array([weight, 0.0]))
            assert state.limit == limit
            _, state = clipper.update(grads, state, jnp.array([weight, 0.0]))
            assert state.limit == (3 * limit if callable(share) else limit)


def test_a_share_of_the_weights_is_named_as_the_call_names_it():
    for text, build in {
        "adaptive_grad_clip: clipping": lambda: optaxclip.adaptive_grad_clip(-1.0),
        "adaptive_grad_clip: eps": lambda: optaxclip.adaptive_grad_clip(0.1, -1.0),
        "constant: limit": lambda: constant(-1.0),
        "share_of_params: share": lambda: optaxclip.share_of_params(-1.0),
        "share_of_params: eps": lambda: optaxclip.share_of_params(lambda step: 1.0, -1.0),
        "at_least: floor": lambda: optaxclip.at_least(1.0, -1.0),
        "warm_up: after": lambda: optaxclip.warm_up(1, 1.0, -1.0),
        "clip_by_tensor_rms: max_rms": lambda: optaxclip.clip_by_tensor_rms(-1.0),
        "clip_by_block_rms: threshold": lambda: optaxclip.clip_by_block_rms(-1.0),
        "clip_by: eps": lambda: clip_by(optaxclip.global_norm, constant(1.0), eps=-1.0),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text} must be at least 0, got -1.0"):
            build()


OPTIONS = {  # name: (clipper, what is left of 3, -4 in two rows by 6, 8 when the limit is 1)
    "tensor, order 1": (lambda: optaxclip.clip_by_tensor_norm(1.0, ord=1), lambda x: x / 21),
    "tensor, zero": (lambda: optaxclip.clip_by_tensor_norm(1.0, nonfinite="zero"), lambda x: x / np.sqrt(125)),
    "tensor, drop": (lambda: optaxclip.clip_by_tensor_norm(1.0, shrink=optaxclip.drop), lambda x: 0 * x),
    "tensor, eps": (lambda: optaxclip.clip_by_tensor_norm(1.0, eps=1.0), lambda x: x / (1 + np.sqrt(125))),
    "tensor, stacked": (lambda: optaxclip.clip_by_tensor_norm(1.0, stacked=1), lambda x: x / np.array([[5], [10]])),
    "rms, stacked": (lambda: optaxclip.clip_by_tensor_rms(1.0, stacked=1), lambda x: x / (np.array([[5], [10]]) / np.sqrt(2))),
    "average, stacked": (lambda: optaxclip.clip_by_average_norm(1.0, stacked=1), lambda x: x / np.array([[2.5], [5]])),
    "unit, axis": (lambda: optaxclip.clip_by_unit_norm(1.0, axis=1), lambda x: x / np.array([[5], [10]])),
    "unit, order": (lambda: optaxclip.clip_by_unit_norm(1.0, ord=1), lambda x: x / np.array([[9, 12]])),
    "unit, stacked": (lambda: optaxclip.clip_by_unit_norm(1.0, stacked=1), lambda x: x / np.array([[5], [10]])),
    "group, eps": (lambda: optaxclip.clip_by_group_norm(1.0, "all", eps=1.0), lambda x: x / (1 + np.sqrt(125))),
    "group, order 1": (lambda: optaxclip.clip_by_group_norm(1.0, "all", ord=1), lambda x: x / 21),
    "global, drop": (lambda: optaxclip.clip_by_global_norm(1.0, shrink=optaxclip.drop), lambda x: 0 * x),
    "block rms": (lambda: optaxclip.clip_by_block_rms(1.0), lambda x: x / np.sqrt(125 / 4)),
    "agc, stacked": (lambda: optaxclip.adaptive_grad_clip(1.0, stacked=1), lambda x: x / np.array([[5], [10]])),
    "agc, axis": (lambda: optaxclip.adaptive_grad_clip(1.0, axis=1), lambda x: x / np.array([[5], [10]])),
    "agc, per tensor": (lambda: optaxclip.adaptive_grad_clip(1.0, per_tensor=True), lambda x: x * np.sqrt(2 / 125)),
    "agc, per tensor, stacked": (lambda: optaxclip.adaptive_grad_clip(1.0, per_tensor=True, stacked=1), lambda x: x / np.array([[5], [10]])),
    "agc, eps": (lambda: optaxclip.adaptive_grad_clip(1.0, 10.0, ord=1, per_tensor=True), lambda x: x * 10 / 21),
}


ROWS = np.array([[3.0, -4.0], [6.0, 8.0]])


@cache
def clipped_with_options():
    """{name: clipped updates}, by one program."""
    weights = {"w": np.float32([[0.6, -0.8], [0.6, 0.8]])}
    return jax.jit(lambda grads: {name: apply(build(), grads, weights)[0]["w"] for name, (build, _) in OPTIONS.items()})({"w": np.float32(ROWS)})


@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_reach_what_they_are_for(name):
    np.testing.assert_allclose(clipped_with_options()[name], OPTIONS[name][1](ROWS), rtol=1e-6)


def test_the_zero_policy_reaches_tensor_clippers_and_leaves_other_tensors():
    updates, _ = apply(optaxclip.clip_by_tensor_norm(1.0, nonfinite="zero"), {"a": jnp.array([jnp.inf, 1.0]), "b": jnp.array([0.3, 0.4])})
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])
    np.testing.assert_array_equal(updates["b"], jnp.array([0.3, 0.4]))


def test_measure_keeps_the_norms_that_it_is_given():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones(4)}
    updates, state = apply(optaxclip.measure(optaxclip.tensor_norm), grads)
    assert state.norm == {"a": 5.0, "b": 2.0} and updates["a"][0] == 3.0


def test_both_bounds_of_a_clip_by_value_follow_schedules_from_step_0():
    clipper = optaxclip.clip_by_value(lambda step: 1.0 + step, lambda step: -3.0 - step)
    grads = jnp.array([-9.0, 9.0])
    state = clipper.init(grads)
    for step in range(3):
        updates, state = clipper.update(grads, state)
        np.testing.assert_array_equal(updates, [-3.0 - step, 1.0 + step])
        assert state.step == step + 1


def test_clip_by_value_rounds_bounds_of_integers_inwards_and_keeps_their_range():
    whole = jnp.array([-128, -3, -2, 2, 3, 127], jnp.int8)
    for bounds, wanted in (((2.5,), [-2, -2, -2, 2, 2, 2]), ((2.5, -3.5), [-3, -3, -2, 2, 2, 2]), ((1e9,), [-128, -3, -2, 2, 3, 127])):
        updates, _ = apply(optaxclip.clip_by_value(*bounds), whole)
        assert updates.dtype == jnp.int8
        np.testing.assert_array_equal(updates, wanted)


def test_clip_by_value_leaves_bools_alone_and_takes_bounds_of_one_point():
    flags = np.array([True, False])
    updates, _ = apply(optaxclip.clip_by_value(0.5, 0.5), {"flags": flags, "x": jnp.array([0.1, 0.9])})
    assert updates["flags"] is flags
    np.testing.assert_array_equal(updates["x"], [0.5, 0.5])


def test_clip_by_value_limits_complex_numbers_by_modulus_in_their_precision():
    with jax.enable_x64(True):
        z = np.array([3 + 4j, 0.3 - 0.4j, 0j])
        updates, _ = apply(optaxclip.clip_by_value(1.0 / 3.0), jnp.asarray(z))
        np.testing.assert_allclose(updates, [(3 + 4j) / 15, (0.3 - 0.4j) / 1.5, 0], rtol=1e-15)
        np.testing.assert_array_equal(apply(optaxclip.clip_by_value(2.0), jnp.asarray(z))[0][1:], z[1:])


def test_normalize_leaves_zero_alone_and_does_not_count_it():
    assert optaxclip.normalize(jnp.zeros(()), jnp.ones(())) == 0
    updates, state = apply(optaxclip.clip_by_global_norm(1.0, shrink=optaxclip.normalize), jnp.zeros(3))
    assert not updates.any() and state.scale == 1 and state.clipped == 0


def test_shrinks_of_equal_numbers_are_one_so_that_nothing_is_compiled_anew():
    assert optaxclip.smooth(2) is optaxclip.smooth(2.0)
    assert optaxclip.auto_s(1) is optaxclip.auto_s(1.0)
    assert optaxclip.psac(1) is optaxclip.psac(1.0)


@pytest.mark.parametrize("shrink", [optaxclip.hard, optaxclip.smooth()], ids=["hard", "smooth"])
def test_the_derivative_without_a_limit_is_1_even_where_the_norm_overflows(shrink):
    clipper = optaxclip.clip_by_global_norm(np.inf, shrink=shrink)
    derivative = jax.jvp(lambda grads: apply(clipper, grads)[0], (jnp.full(4, 3e38),), (jnp.arange(4.0),))[1]
    np.testing.assert_array_equal(derivative, jnp.arange(4.0))
    backwards = jax.vjp(lambda grads: apply(clipper, grads)[0], jnp.full(4, 3e38))[1](jnp.arange(4.0))
    np.testing.assert_array_equal(backwards[0], jnp.arange(4.0))


def test_metrics_number_clippers_within_each_title():
    twice = optax.chain(optaxclip.clip_by_global_norm(1.0), optaxclip.clip_by_global_norm(2.0))
    state = optax.partition({"a": twice, "b": twice}, {"x": "a", "y": "b"}).init({"x": jnp.ones(2), "y": jnp.ones(2)})
    assert {name for name in optaxclip.metrics(state) if "limit" in name} == {f"clip_{number}/{title}/limit" for number in (0, 1) for title in ("a", "b")}


def test_metrics_name_the_whole_way_through_a_skipping_optimizer():
    inner = optax.named_chain(("inner", optaxclip.clip_by_global_norm(1.0)))
    state = optax.named_chain(("outer", optaxclip.skip_nonfinite(inner))).init(jnp.ones(2))
    assert {"skip/outer/norm", "clip/outer/inner/norm_before"} <= optaxclip.metrics(state).keys()
    twice = optax.named_chain(("first", optaxclip.skip_nonfinite(optax.named_chain(("second", optaxclip.skip_nonfinite(inner))))))
    assert "clip/first/second/inner/norm_before" in optaxclip.metrics(twice.init(jnp.ones(2)))


def clip_state(**fields):
    units = {"norm": [1.0, 8.0, 4.0], "limit": [np.inf] * 3, "scale": [1.0] * 3, "clipped": [0] * 3, "nonfinite": [0] * 3} | fields
    return optaxclip.ClipState(jnp.int32(8), *({"w": jnp.asarray([values])} for values in units.values()), {"w": ()})


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, {"norm_before": 8, "limit": np.inf, "clipped": 0}),
        ({"norm": [0.0, 1.0, 8.0], "limit": [0.0] * 3}, {"norm_before": 8, "limit": 0}),
        ({"limit": [0.1, 4.0, np.inf], "scale": [0.25, 0.5, 1.0]}, {"norm_before": 1, "scale": 0.25, "norm_after": 0.25, "clipped": 1}),
        ({"scale": [1.0, 1.5, 1.0]}, {"scale": 1.5, "norm_after": 12, "clipped": 1}),
        ({"clipped": [2, 3, 7]}, {"clipped_share": 0.5, "clipped_count": 7}),
        ({"nonfinite": [1, 5, 2]}, {"nonfinite_count": 5}),
    ],
    ids=["no limits", "limits of 0", "over its limit", "lifted", "clipped", "not finite"],
)
def test_metrics_show_of_units_the_one_furthest_over_its_limit_and_count_over_all(fields, shown):
    numbers = optaxclip.metrics(clip_state(**fields))
    assert {name: float(numbers[f"clip/{name}/w"]) for name in shown} == shown


@pytest.mark.parametrize("consecutive", [0, 7])
def test_metrics_show_each_number_of_a_skipping_optimizer(consecutive):
    state = optaxclip.SkipState(*(jnp.float32(x) for x in (10, 1, 2, 3, 4, 5, 6, consecutive)), (), (), ())
    wanted = {"norm": 1, "limit": 2, "value": 3, "value_limit": 4, "skipped": int(consecutive > 0), "skipped_share": 0.5, "skipped_count": 5}
    wanted |= {"consecutive_count": consecutive, "nonfinite_count": 6}
    assert {name: float(value) for name, value in optaxclip.metrics(state).items()} == {f"skip/{name}": value for name, value in wanted.items()}


def test_a_real_number_of_any_kind_is_a_limit():
    grads = jnp.array([3.0, 4.0])
    limits = (2, 2.0, np.int8(2), np.float16(2), np.array(2), np.array(2.0), jnp.array(2), jnp.bfloat16(2))

    def clipped(given):  # by limits that are constants of the program, and by its arguments
        return [apply(optaxclip.clip_by_global_norm(limit), grads)[0] for limit in (*limits, *given)]

    for updates in jax.jit(clipped)(limits):
        np.testing.assert_allclose(updates, [1.2, 1.6], rtol=1e-6)


@pytest.mark.parametrize("limit", [True, np.array(True), np.array([1.0, np.nan]), np.array([1.0, -1.0]), 1j, np.array(1j), np.array("1"), "1"], ids=str)
def test_what_is_not_a_real_number_is_no_limit_given_as_an_array_either(limit):
    with pytest.raises((TypeError, ValueError), match=r"^clip_by_unit_norm: max_norm must "):
        optaxclip.clip_by_unit_norm(limit)
    if not isinstance(limit, str) and np.asarray(limit).dtype.kind in "bc":
        with pytest.raises(TypeError, match=r"^clip_by_unit_norm: max_norm must be a real number, got an array of "):
            jax.jit(lambda limit: apply(optaxclip.clip_by_unit_norm(limit), jnp.ones(2))[0])(limit)


def test_limits_are_matched_to_a_leaf_from_its_last_axis():
    grads = jnp.ones((2, 3))
    units = optaxclip.clip_by_unit_norm(np.float32([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(apply(units, grads)[0], np.broadcast_to([0.1, 0.2, 0.3], (2, 3)) / np.sqrt(2), rtol=1e-6)
    for wrong in (np.ones(2), np.ones((1, 1, 3)), np.ones((2, 3))):
        with pytest.raises(ValueError, match=r"max_norm must be a number for each norm"):
            apply(optaxclip.clip_by_unit_norm(np.float32(wrong)), grads)


@pytest.mark.parametrize("limits", [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": {"c": 2.0}}], ids=["as deep", "deeper"])
def test_limits_may_have_a_value_for_what_is_masked(limits):
    grads = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([3.0, 4.0])}}
    clipper = optax.masked(optaxclip.clip_by_tensor_norm(limits), {"a": True, "b": False})
    updates, _ = apply(clipper, grads)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(updates["b"]["c"], [3.0, 4.0])


def test_limits_without_any_value_say_so():
    with pytest.raises(ValueError, match=r"^clip_by_tensor_norm: max_norm has no value for the leaf 'w': it has none at all.$"):
        optaxclip.clip_by_tensor_norm({}).init({"w": jnp.ones(2)})


def test_the_carry_is_wide_and_only_for_what_is_measured():
    clipper = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
    with jax.enable_x64(True):
        grads = {"double": jnp.full(2, 1.5, jnp.float64), "half": jnp.full(2, 1.5, jnp.bfloat16), "index": jnp.arange(2), "none": None}
        state = clipper.init(grads)
        dtypes = {name: leaf if leaf is None else str(leaf.dtype) for name, leaf in state.carry.items()}
        assert dtypes == {"double": "float64", "half": "float32", "index": None, "none": None}
        updates, state = clipper.update(grads, state)
        assert updates["half"].dtype == jnp.bfloat16 and updates["index"] is grads["index"] and updates["none"] is None
        assert state.clip_state.step == 1


def test_the_carry_hands_params_and_extra_arguments_to_any_clipper():
    grads, params = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
    of_weights = optaxclip.carry_clipped(optaxclip.adaptive_grad_clip(0.5))
    np.testing.assert_allclose(of_weights.update(grads, of_weights.init(params), params)[0], [0.6, 0.8], rtol=1e-6)
    by_norm = optaxclip.carry_clipped(optaxclip.clip_by_global_norm(1.0))
    np.testing.assert_allclose(by_norm.update(grads, by_norm.init(params), grad_norm=10.0)[0], [0.3, 0.4], rtol=1e-6)
    by_value = optaxclip.carry_clipped(optaxclip.clip_by_value(1.0))
    np.testing.assert_allclose(by_value.update(grads, by_value.init(params), params, value=1.0)[0], [1.0, 1.0])


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


def test_the_state_tells_what_was_done_in_each_step():
    clipper = optaxclip.clip_by_global_norm(1.0)
    state = clipper.init(jnp.zeros(2))
    for grads, norm, scale, clipped, nonfinite in (
        ([3.0, 4.0], 5, 0.2, 1, 0),
        ([0.3, 0.4], 0.5, 1, 1, 0),
        ([jnp.nan, 0.0], np.nan, np.nan, 1, 1),
        ([0.0, 2.0], 2, 0.5, 2, 1),
    ):
        _, state = clipper.update(jnp.array(grads), state)
        np.testing.assert_allclose([state.norm, state.limit, state.scale], [norm, 1, scale], rtol=1e-6)
        assert (state.clipped, state.nonfinite) == (clipped, nonfinite)


@pytest.mark.parametrize(("ord", "order"), [(None, "2"), (3, "3"), ("rms", "rms")])
def test_a_norm_that_is_not_finite_says_its_order(ord, order):
    with pytest.raises(FloatingPointError, match=rf"^clip_by_global_norm: the norm of order {order} of the updates is not finite"):
        apply(optaxclip.clip_by_global_norm(1.0, ord=ord, nonfinite="raise"), jnp.array([1.0, jnp.inf]))


def test_weakly_typed_extremes_come_to_their_limit_too():
    grads = jnp.asarray(1e38)
    assert grads.weak_type
    updates, _ = apply(optaxclip.clip_by_global_norm(1.0), grads)
    assert updates.weak_type
    np.testing.assert_allclose(updates, 1.0, rtol=1e-6)


def test_integers_in_a_group_do_not_count():
    tree = {"w": jnp.array([3.0, 4.0]), "n": jnp.arange(9), "m": jnp.arange(2)}
    norms = optaxclip.group_norm(tree, {"w": "first", "n": "first", "m": "second"})
    assert norms == {"first": 5.0, "second": 0.0}


def test_axes_of_units_count_from_the_front_and_from_the_end():
    x = jnp.array([[3.0, 1.0], [4.0, 1.0]])
    for axis in (0, -2):
        np.testing.assert_allclose(optaxclip.unit_norm(x, axis=axis), [[5.0, 2**0.5]], rtol=1e-6)
    for axis in (2, -3, 0.0):
        with pytest.raises(ValueError, match=rf"unit_norm: axis={axis} does not fit the leaf"):
            optaxclip.unit_norm(x, axis=axis)


def test_the_vector_of_each_layer_is_a_unit_where_layers_are_stacked():
    x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    np.testing.assert_allclose(optaxclip.unit_norm(x, stacked=1), [[5.0], [10.0]], rtol=1e-6)


def test_the_largest_share_their_derivative():
    x = jnp.array([2.0, 1.0, -2.0, 0.0])
    np.testing.assert_allclose(jax.grad(lambda x: optaxclip.global_norm(x, ord=np.inf))(x), [0.5, 0.0, -0.5, 0.0])


@pytest.mark.parametrize("ord", TWICE)
def test_second_derivatives_by_reverse_mode_are_finite_at_zero(ord):
    assert all(np.isfinite(x).all() for x in second_derivatives(reverse_twice)[ord])


def on_two_devices(function, in_specs, out_specs, *args, **options):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))(*args)


@pytest.mark.parametrize("ord", ["rms", "average"])
def test_a_mean_over_devices_counts_the_elements_of_all(ord):
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    length = np.linalg.norm(np.asarray(x, np.float64))
    norm = on_two_devices(lambda x: optaxclip.global_norm(x, ord=ord), P("x"), P(), x)
    np.testing.assert_allclose(norm, length / (np.sqrt(12) if ord == "rms" else 12), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"check_vma": False}], ids=["typed", "untyped"])
def test_a_group_over_devices_has_one_norm(options):
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    grads = {"a": np.float32([3, 0]), "b": np.float32([4]), "c": np.float32([6, 8])}
    clipper = optaxclip.clip_by_group_norm(1.0, {"a": "z", "b": "z", "c": "y"}, axes=specs if options else "auto")
    updates = on_two_devices(lambda g: clipper.update(g, clipper.init(g))[0], (specs,), specs, grads, **options)
    for name, wanted in (("a", [0.6, 0]), ("b", [0.8]), ("c", [0.6, 0.8])):
        np.testing.assert_allclose(updates[name], wanted, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"check_vma": False}], ids=["typed", "untyped"])
def test_clippy_over_devices_scales_all_of_a_tensor_alike(options):
    clipper = optaxclip.clippy(0.5, 0.0, axes=P("x") if options else "auto")
    grads, params = np.float32([1.0, 4.0]), np.float32([2.0, 2.0])
    updates = on_two_devices(lambda g, p: clipper.update(g, clipper.init(p), p)[0], (P("x"), P("x")), P("x"), grads, params, **options)
    np.testing.assert_allclose(updates, [0.25, 1.0], rtol=1e-6)


def test_limits_of_groups_follow_their_weights():
    clipper = optaxclip.clip_by_group_norm(optaxclip.share_of_params(0.5), {"a": "z", "b": "y"})
    grads, params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([8.0])}, {"a": jnp.array([0.0, 2.0]), "b": jnp.array([4.0])}
    updates, _ = apply(clipper, grads, params)
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [2.0], rtol=1e-6)


def test_larc_adds_eps_to_the_norm_that_it_divides_by():
    grads, params = jnp.array([3.0, 4.0]), jnp.array([1.0, 0.0])
    updates, state = apply(optaxclip.larc(0.1, 0.1, eps=5.0), grads, params)
    assert state.limit == 1.0
    np.testing.assert_allclose(updates, [0.3, 0.4], rtol=1e-6)


@pytest.mark.parametrize("build", [lambda **options: optaxclip.larc(0.1, **options), optaxclip.clippy], ids=["larc", "clippy"])
def test_the_zero_policy_reaches_larc_and_clippy(build):
    updates, _ = apply(build(nonfinite="zero"), {"a": jnp.array([1.0, jnp.nan]), "b": jnp.zeros(2)}, {"a": jnp.ones(2), "b": jnp.ones(2)})
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])


@pytest.mark.parametrize(("weight", "decay"), [(0.0, 0.5), (1.0, 0.0)], ids=["no weights", "no decay"])
def test_larc_keeps_the_sign_of_zero_where_nothing_decays(weight, decay):
    grads = jnp.array([-0.0, 1e-3])
    updates, _ = apply(optaxclip.larc(0.1, weight_decay=decay), grads, jnp.array([0.0, weight]))
    assert np.asarray(updates).tobytes() == np.asarray(grads).tobytes()


def test_larc_rounds_a_decayed_gradient_of_16_bits_once():
    random = np.random.default_rng(0)
    grads, params = (jnp.asarray(random.standard_normal(1000), jnp.bfloat16) for _ in range(2))
    exact = np.asarray(grads).astype(np.float64) + float(np.float32(0.3)) * np.asarray(params).astype(np.float64)
    updates, _ = apply(optaxclip.larc(1e-6, weight_decay=0.3), grads, params)
    assert (np.abs(np.asarray(updates).astype(np.float64) - exact) <= 2.0**-8 * np.abs(exact) * (1 + 1e-3) + 1e-6).all()


def test_clippy_compares_64_bit_updates_in_64_bits():
    with jax.enable_x64(True):
        updates, params = jnp.array([1.0, 3.0]), jnp.array([1.0, 1.0])
        clipped, _ = apply(optaxclip.clippy(0.7, 0.0), updates, params)
        np.testing.assert_allclose(clipped, [0.7 / 3, 0.7], rtol=1e-14)


def skipping(optimizer, norms, **extra):
    """The states after each step of a run over gradients of these norms."""
    state, states = optimizer.init(jnp.zeros(1)), []
    for norm in norms:
        _, state = optimizer.update(jnp.array([norm]), state, jnp.zeros(1), **extra)
        states.append(state)
    return states


def test_skip_step_can_skip_from_half_a_window_on_and_takes_the_deviation_of_a_sample():
    norms = [1.0, 1.5, 0.5, 2.0, 1e6]
    optimizer = optaxclip.skip_step(optax.sgd(0.1), window=8, on_loss=False)
    assert [int(state.skipped) for state in skipping(optimizer, norms)] == [0, 0, 0, 0, 1]
    assert int(skipping(optimizer, [1.0, 1.5, 0.5, 1e6])[-1].skipped) == 1  # number 4 is the first that can be skipped
    assert int(skipping(optimizer, [1.0, 1.5, 1e6])[-1].skipped) == 0
    limit = skipping(optimizer, norms)[-1].limit
    np.testing.assert_allclose(limit, np.mean(norms[:4]) + 6 * np.std(norms[:4], ddof=1), rtol=1e-6)


def test_skipping_names_its_rules():
    for text, build in {
        "skip_spikes: rule must be at least 0": lambda: optaxclip.skip_spikes(optax.sgd(0.1), -1.0),
        "skip_spikes: loss_rule must be at least 0": lambda: optaxclip.skip_spikes(optax.sgd(0.1), 1.0, -1.0),
        "skip_spikes: max_consecutive must be at least 0": lambda: optaxclip.skip_spikes(optax.sgd(0.1), 1.0, max_consecutive=-1),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text}"):
            build()
    assert int(skipping(optaxclip.skip_spikes(optax.sgd(0.1), 1.0, max_consecutive=0), [5.0])[0].skipped) == 0


def test_skipping_measures_64_bits_in_64_bits():
    with jax.enable_x64(True):
        optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 1.0)
        params = {"w": jnp.ones(2)}
        state = optimizer.init(params)
        _, after = optimizer.update(params, state, params, grad_norm=np.float32(3.0))
        assert state.norm.dtype == after.norm.dtype == after.limit.dtype == jnp.float64

        narrow = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        state = optimizer.init(narrow)
        _, after = optimizer.update(narrow, state, narrow)
        assert state.norm.dtype == after.norm.dtype == after.limit.dtype == jnp.float32


def test_skipping_measures_over_the_axes_that_it_is_given():
    optimizer = optaxclip.skip_spikes(optax.sgd(1.0), 3.0, axes="x")
    grads = np.float32([2.5, 2.5])  # one on each device: too long together only
    updates, state = on_two_devices(optimizer.update, (P("x"), P()), (P("x"), P()), grads, optimizer.init(grads), check_vma=False)
    assert state.skipped == 1 and not updates.any()


def test_skipping_shows_no_limit_before_the_first_step_and_both_limits_after_it():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 10.0, 3.0)
    state = optimizer.init(jnp.zeros(1))
    assert state.limit == state.value_limit == np.inf
    (state,) = skipping(optimizer, [1.0], value=2.0)
    assert (state.limit, state.value_limit, state.value, state.step) == (10.0, 3.0, 2.0, 1)


def test_skipping_lets_through_what_is_exactly_at_its_limits():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 2.0, 3.0)
    assert int(skipping(optimizer, [2.0], value=3.0)[0].skipped) == 0
    assert int(skipping(optimizer, [2.1], value=3.0)[0].skipped) == 1
    assert int(skipping(optimizer, [2.0], value=3.1)[0].skipped) == 1


def test_skipping_counts_steps_in_a_row_anew_after_one_that_passed():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 2.0, max_consecutive=2)
    states = skipping(optimizer, [5.0, 5.0, 5.0, 5.0, 1.0, 5.0, np.nan, np.nan])
    assert [int(state.consecutive) for state in states] == [1, 2, 0, 1, 0, 1, 2, 0]
    assert [int(state.skipped) for state in states] == [1, 2, 2, 3, 3, 4, 5, 5]
    assert [int(state.nonfinite) for state in states] == [0, 0, 0, 0, 0, 0, 1, 2]


def test_skipping_learns_from_losses_of_any_sign_but_not_from_broken_ones():
    last = Threshold(lambda norm: jnp.full_like(norm, 9.0), lambda norm, memory, step, params_norm: (jnp.full_like(norm, np.inf), norm))
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), None, last)
    for value, remembered in ((-2.0, -2.0), (0.0, 0.0), (np.nan, 9.0), (np.inf, 9.0)):
        (state,) = skipping(optimizer, [1.0], value=value)
        assert state.value_memory == remembered
        assert int(state.skipped) == int(not np.isfinite(value))


def test_a_rule_of_the_loss_needs_no_loss_where_there_is_none():
    optimizer = optaxclip.skip_step(optax.sgd(0.1), on_loss=False)
    assert skipping(optimizer, [1.0])[0].value_limit == np.inf


def test_the_first_value_is_the_average_whatever_the_decay():
    for rule in (optaxclip.ema(1.0), optaxclip.ema(0.0)):
        assert limits_of(rule, [2.0]) == 2.0
    np.testing.assert_array_equal(limits_of(optaxclip.ema_ratio(1.5, 1.0), [2.0, 3.0, 3.0]), [np.inf, 3.0, 3.0])


@pytest.mark.parametrize("build", [optaxclip.windowed_quantile, optaxclip.ema_ratio])
def test_without_a_warmup_there_is_no_limit_before_the_first_norm_either(build):
    limits = limits_of(build(warmup=0), [2.0, 2.0])
    assert np.isinf(limits[0]) and np.isfinite(limits[1])


def test_a_deviation_of_a_sample_wants_two_norms():
    limits = limits_of(optaxclip.windowed_mean(ddof=1, warmup=0), [2.0, 4.0, 4.0])
    assert np.isinf(limits[:2]).all()
    np.testing.assert_allclose(limits[2], 3 + 3 * 2**0.5, rtol=1e-6)


def test_norms_that_differ_by_little_keep_their_deviation():
    norms = 8192 + np.array([0, 3, 1, 5, 2, 4, 0]) * 2.0**-9
    limit = limits_of(optaxclip.windowed_mean(1e6, 16), norms)[-1]
    np.testing.assert_allclose(limit, np.mean(norms[:-1]) + 1e6 * np.std(norms[:-1]), rtol=1e-5)


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("quantile", [0.0, 0.3, 1.0])
def test_norms_that_tie_keep_their_order_in_the_window(quantile, current):
    norms = np.random.default_rng(0).integers(1, 4, 60).astype(np.float32)
    limits = optaxclip.replay(optaxclip.windowed_quantile(quantile, 5, current=current), norms).limits
    wanted = [np.quantile(held, quantile) if (held := norms[max(0, i - 5 + current) : i + current]).size else np.inf for i in range(60)]
    np.testing.assert_allclose(limits, wanted, rtol=1e-6)


def test_the_percentile_of_autoclip_follows_its_schedule_from_step_0():
    clipper = optaxclip.autoclip(lambda step: 100.0 * (step < 2))
    state = clipper.init(jnp.zeros(1))
    limits = []
    for norm in (1.0, 2.0, 3.0):
        _, state = clipper.update(jnp.array([norm]), state)
        limits.append(float(state.limit))
    assert limits == [1.0, 2.0, 1.0]


def test_the_tracker_counts_the_limit_itself_as_within_and_stays_in_the_range_of_its_dtype():
    limits = limits_of(optaxclip.quantile_tracker(0.5, 0.2, start=1.0), [1.0, 1.0])
    np.testing.assert_allclose(limits, [1.0, np.exp(-0.1)], rtol=1e-6)
    down = limits_of(optaxclip.quantile_tracker(0.0, 50.0, start=1e-20), [1e-38, 1e-38, 1e-38])
    assert down[-1] >= np.finfo(np.float32).tiny
    up = limits_of(optaxclip.quantile_tracker(1.0, 1.0, start=1e38), [3e38, 3e38, 3e38])
    assert np.isfinite(up).all()
    far = limits_of(optaxclip.quantile_tracker(0.5, 200.0, start=1.0), [2.0, 2.0])
    assert np.isfinite(far).all() and far[1] > 1e38


def run_of(clipper, norms, **extra):
    state = clipper.init(jnp.zeros(1))
    for norm in norms:
        updates, state = clipper.update(jnp.array([norm]), state, **extra)
    return float(updates[0]), state


SAME = {
    "zclip": (lambda: optaxclip.zclip(0.5, 0.8, target="max", warmup=2, eps=0.5), lambda: optaxclip.z_score(0.5, 0.8, target="max", warmup=2, eps=0.5), None),
    "adagn": (lambda: optaxclip.adagn(0.5, 0.6, eps=0.3), lambda: optaxclip.moments_ratio(0.5, 0.6, eps=0.3), optaxclip.normalize),
    "adagn, global": (lambda: optaxclip.adagn(scope="global"), optaxclip.moments_ratio, optaxclip.normalize),
    "adagn, groups": (lambda: optaxclip.adagn(scope=lambda tree: "all"), optaxclip.moments_ratio, optaxclip.normalize),
    "autoclip": (lambda: optaxclip.autoclip(30, 3), lambda: optaxclip.windowed_quantile(0.3, 3, current=True), None),
    "aggc": (
        lambda: optaxclip.aggc(0.9, 0.8, scope="global", decay=0.5, floor=0.2, up=1.5, down=0.3, raise_small=True),
        lambda: optaxclip.ema_band(0.9, 0.8, 0.5, floor=0.2, up=1.5, down=0.3, raise_small=True),
        optaxclip.normalize,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_named_clipper_hands_all_its_arguments_to_its_rule(name):
    build, rule, shrink = SAME[name]
    norms = [1.0, 1.4, 0.7, 3.0, 0.1]
    one, state = run_of(build(), norms)
    other, wanted = run_of(optaxclip.clip_by_global_norm(rule(), shrink=shrink), norms)
    np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(state.limit), jax.tree.leaves(wanted.limit), rtol=1e-6)


@pytest.mark.parametrize("scope", ["global", "tensor", lambda tree: "all"], ids=["global", "tensor", "groups"])
def test_a_scope_hands_on_what_is_to_become_of_broken_steps_and_over_which_axes(scope):
    assert run_of(optaxclip.zclip(scope=scope, nonfinite="zero"), [1.0, np.nan])[0] == 0.0
    clipper = optaxclip.zclip(scope=scope, axes="nowhere")
    state = clipper.init(jnp.zeros(1))
    with pytest.raises(ValueError, match=r"axes='nowhere': there is no such axis here"):
        clipper.update(jnp.ones(1), state)


def test_adagc_takes_norms_from_elsewhere_and_its_first_limit_from_step_0():
    clipper = optaxclip.adagc(max_norm=lambda step: 1.0 + step)
    grads = {"a": jnp.array([3.0, 4.0])}
    updates, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    updates, _ = clipper.update(grads, state, grad_norm={"a": jnp.float32(20.0)})
    np.testing.assert_allclose(updates["a"], [0.3, 0.4], rtol=1e-6)


def test_adaclip_measures_layers_takes_norms_from_elsewhere_and_keeps_its_policy():
    grads = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    _, state = apply(optaxclip.adaclip(stacked=1), grads)
    np.testing.assert_array_equal(state.norm, [[2.0], [4.0]])
    _, state = apply(optaxclip.adaclip(), grads, grad_norm=jnp.float32(8.0))
    assert state.norm == 8.0
    updates, _ = apply(optaxclip.adaclip(nonfinite="zero"), grads.at[0, 0].set(jnp.nan))
    assert not updates.any()


def test_adaclip_makes_a_broken_tensor_nan_and_leaves_a_coordinate_at_its_limit():
    clipper = optaxclip.adaclip(0.5)
    _, first = clipper.update(jnp.array([1.0, 0.5]), clipper.init(jnp.zeros(2)))
    for bad in (jnp.nan, jnp.inf):
        updates, _ = clipper.update(jnp.array([bad, 0.5]), first)
        assert np.isnan(updates).all()
    _, second = clipper.update(jnp.array([3.0, 0.5]), first)
    updates, _ = clipper.update(jnp.array([3.0, second.limit]), first)
    assert updates[1] == second.limit and updates[0] < 3.0


def test_spam_keeps_squares_wide_and_starts_its_schedules_at_step_0():
    with jax.enable_x64(True):
        params = {"h": jnp.ones(1, jnp.bfloat16), "s": jnp.ones(1, jnp.complex64), "d": jnp.ones(1, jnp.float64), "z": jnp.ones(1, jnp.complex128)}
        moments = optaxclip.spam().init(params).second_moment
        assert {name: str(leaf.dtype) for name, leaf in moments.items()} == {"h": "float32", "s": "float32", "d": "float64", "z": "float64"}
    clipper = optaxclip.spam(lambda step: 4.0 + 5.0 * step, decay=lambda step: 0.75 * (step == 0), warmup=0)
    grads = jnp.array([-8.0, 1.0])
    _, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(state.second_moment, [16.0, 0.25])
    updates, state = clipper.update(4 * grads, state)  # the limit is 9 times the usual square
    np.testing.assert_allclose(updates, [-12.0, 1.5], rtol=1e-6)
    np.testing.assert_allclose(state.second_moment, [144.0, 2.25], rtol=1e-6)


def test_spam_does_not_learn_from_broken_coordinates():
    clipper = optaxclip.spam(warmup=0)
    _, state = clipper.update(jnp.array([2.0, 2.0, 2.0]), clipper.init(jnp.zeros(3)))
    updates, after = clipper.update(jnp.array([jnp.nan, jnp.inf, 2.0]), state)
    np.testing.assert_array_equal(after.second_moment[:2], state.second_moment[:2])
    assert after.second_moment[2] > state.second_moment[2] and np.isnan(updates[0]) and np.isfinite(updates[1])


def test_spam_leaves_its_own_average_alone_where_another_is_handed_in():
    clipper = optaxclip.spam(every=1, warmup=0)
    _, state = clipper.update(jnp.array([2.0]), clipper.init(jnp.zeros(1)))
    _, after = clipper.update(jnp.array([2.0]), state, second_moment=jnp.array([1.0]))
    assert after.second_moment == state.second_moment > 0


def test_spam_clips_from_step_warmup_on_where_it_never_starts_anew():
    clipper = optaxclip.spam(1.0, warmup=3, every=None)
    state = clipper.init(jnp.zeros(1))
    through = []
    for norm in (1.0, 1.0, 5.0):
        updates, state = clipper.update(jnp.array([norm]), state)
        through.append(float(updates[0]))
    assert through[:2] == [1.0, 1.0] and through[2] < 1.0


def test_reset_momentum_names_itself_and_starts_anew_from_the_weights():
    for text, build in {
        "reset_momentum: every must be at least 1": lambda: optaxclip.reset_momentum(optax.identity(), every=0),
        "reset_momentum: every must be a whole number": lambda: optaxclip.reset_momentum(optax.identity(), every=1.5),
        "spam: every must be a whole number": lambda: optaxclip.spam(every=1.5),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text}"):
            build()
    keeps = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    optimizer = optaxclip.reset_momentum(keeps, every=1)
    _, state = optimizer.update(jnp.array([5.0]), optimizer.init(jnp.array([0.0])), jnp.array([7.0]))
    assert state.inner_state == 7.0


def test_without_axes_each_device_measures_what_it_has():
    norms = on_two_devices(lambda x: optaxclip.global_norm(x, axes=None)[None], P("x"), P("x"), np.float32([3.0, 4.0]))
    np.testing.assert_array_equal(norms, [3.0, 4.0])


@pytest.mark.parametrize(
    ("axes", "text"),
    [(("x", "model"), "axes='model': there is no such axis here"), (("x", "x"), r"axes=\('x', 'x'\) names a mesh axis twice")],
    ids=["absent", "twice"],
)
def test_each_of_several_axes_is_looked_at(axes, text):
    with pytest.raises(ValueError, match=text):
        on_two_devices(lambda x: optaxclip.global_norm(x, axes=axes), P("x"), P(), np.ones(2, np.float32), check_vma=False)


def on_four_devices(function, in_specs, out_specs):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def test_a_norm_differs_only_along_the_axes_that_split_its_units():
    specs = {"a": P("x", "y"), "b": P("x", None)}
    tree = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 3), np.float32)}
    norms = jax.jit(on_four_devices(lambda x: optaxclip.unit_norm(x, axes=specs), (specs,), {"a": P(None, "y"), "b": P()}))(tree)
    for leaf in norms.values():
        np.testing.assert_array_equal(leaf, np.full_like(leaf, 2.0))


def test_units_that_are_summed_over_different_axes_share_one_collective():
    specs = {"a": P("x", None), "b": P("y", None)}
    tree = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 3), np.float32)}
    text = jax.jit(on_four_devices(lambda x: optaxclip.unit_norm(x, axes=specs), (specs,), {"a": P(), "b": P()})).lower(tree).as_text()
    assert text.count("stablehlo.all_reduce") == 1


def test_what_every_device_holds_is_not_asked_for():
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    tree = {name: np.ones(4, np.float32) for name in specs}
    text = jax.jit(on_four_devices(optaxclip.tensor_norm, (specs,), {"a": P(), "b": P(), "c": P()})).lower(tree).as_text()
    assert text.count("stablehlo.all_reduce") == 1 and "tensor<2xf64>" in text and "tensor<3xf64>" not in text


def test_a_cotangent_by_value_takes_no_order_and_a_scale_is_rounded_once():
    with pytest.raises(ValueError, match=r"clip_cotangent: axis=None and ord=2 belong to max_norm"):
        optaxclip.clip_cotangent(jnp.ones(2), max_value=1.0, ord=2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.bfloat16)
    (grad,) = jax.vjp(lambda x: optaxclip.scale_cotangent(x, 0.1), x)[1](x)
    exact = np.asarray(x).astype(np.float64) * float(np.float32(0.1))
    assert (np.abs(np.asarray(grad).astype(np.float64) - exact) <= 2.0**-8 * np.abs(exact) * (1 + 1e-3)).all()


def test_an_integer_limit_of_a_cotangent_works_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        grad = jax.grad(lambda x: jnp.sum(optaxclip.clip_cotangent(x, max_norm=np.int32(1))))(jnp.zeros(4))
    np.testing.assert_allclose(grad, np.full(4, 0.5), rtol=1e-6)


def test_what_torch_adds_to_the_norm_counts_for_short_gradients():
    grads, factor = jnp.array([3e-7, 4e-7]), 1e-7 / (5e-7 + 1e-6)
    for clipped in (torch_style.clip_grad_norm(grads, 1e-7)[0], torch_style.clip_grads_with_norm(grads, 1e-7, 5e-7)):
        np.testing.assert_allclose(clipped, factor * np.array([3e-7, 4e-7]), rtol=1e-5)


def test_keras_says_of_a_negative_limit_what_keras_would_do():
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        for value in (-1.0, 0, np.float32(0)):
            with pytest.raises(ValueError, match=rf"^clip_gradients: {name} must be above 0, got .*: Keras does not clip then"):
                keras.clip_gradients(**{name: value})


def test_tensorflow_takes_bounds_below_zero_and_of_one_point_and_clips_each_tensor():
    t = jnp.array([-5.0, -2.0, 5.0])
    np.testing.assert_array_equal(tensorflow_style.clip_by_value(t, -3, -1), [-3, -2, -1])
    np.testing.assert_array_equal(tensorflow_style.clip_by_value(t, 1, 1), [1, 1, 1])
    clipped = tensorflow_style.clip_by_norm([jnp.array([3.0, 4.0]), jnp.array([6.0, 8.0])], 1.0)
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.6, 0.8]], rtol=1e-6)


def test_per_example_limits_are_named_by_their_function():
    for text, call in {
        "per_example_global_norm_clip: l2_norm_clip": lambda: optaxclip.per_example_global_norm_clip(jnp.ones((2, 3)), -1.0),
        "per_example_layer_norm_clip: global_l2_norm_clip": lambda: optaxclip.per_example_layer_norm_clip(jnp.ones((2, 3)), -1.0),
        "clipped_grad: max_norm": lambda: optaxclip.clipped_grad(lambda w, x: w * x, -1.0),
        "clipped_grad: max_norm for 'w'": lambda: optaxclip.clipped_grad(lambda w, x: w * x, {"w": -1.0}),
        "auto_s: gamma": lambda: optaxclip.auto_s(-1.0),
        "psac: r": lambda: optaxclip.psac(-1.0),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text} must be at least 0, got -1.0"):
            call()


def test_an_argument_in_two_roles_is_seen_however_it_is_counted():
    grad = optaxclip.clipped_grad(lambda w, x: w * x, 1.0, argnums=-2, batch_argnums=0)
    with pytest.raises(ValueError, match=r"clipped_grad: argnums=-2 and batch_argnums=0 must be different arguments"):
        grad(jnp.ones(2), jnp.ones(2))


def test_factors_are_1_for_zero_gradients_and_where_there_is_no_limit():
    batch = jnp.array([0.0, 2.0])
    for shrink in (optaxclip.hard, optaxclip.normalize):
        result = optaxclip.clipped_grad(lambda w, x: w * x, None, shrink=shrink)(jnp.ones(()), batch)
        np.testing.assert_array_equal(result.factors, [1.0, 1.0])
    result = optaxclip.clipped_grad(lambda w, x: w * x, 1.0)(jnp.ones(()), batch)
    np.testing.assert_array_equal(result.factors, [1.0, 0.5])


def test_sums_of_sixteen_bit_gradients_keep_small_terms():
    grads = jnp.array([[1.0], [2.0**-10], [2.0**-10]], jnp.bfloat16)
    total, _ = optaxclip.per_example_global_norm_clip(grads, np.inf)
    assert total.dtype == jnp.float32 and total[0] == 1 + 2.0**-9


def test_replay_keeps_64_bits_and_names_its_rule():
    with jax.enable_x64(True):
        assert optaxclip.replay(1.0, np.array([1.0, 2.0])).limits.dtype == jnp.float64
        assert optaxclip.replay(1.0, np.array([1.0, 2.0], np.float16)).limits.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"^replay: rule must be at least 0, got -1.0"):
        optaxclip.replay(-1.0, [1.0])
    with pytest.raises(ValueError, match=r"^suggest: norms must hold at least two finite norms above 0, got 1"):
        optaxclip.suggest([1.0, 0.0, np.nan, np.inf])


def test_suggestions_are_quantiles_five_medians_and_rules():
    good = np.concatenate([np.arange(1.0, 64.0), [300.0]])
    rows = {row.rule: row for row in optaxclip.suggest(np.concatenate([good[:-1], [np.nan, 0.0, 300.0]]))}
    fixed = sorted({float(f"{limit:.3g}") for limit in (*np.quantile(good, (0.5, 0.9, 0.95, 0.99)), 5 * np.median(good))})
    assert fixed == [32.5, 57.7, 60.8, 151, 162]
    assert [row.limit for row in list(rows.values())[: len(fixed)]] == np.float32(fixed).tolist()
    assert rows["clip_by_global_norm(162)"].clip_rate == pytest.approx(1 / 64)
    assert rows["clip_by_global_norm(162)"].mean_scale == pytest.approx(162 / 300)
    assert rows["autoclip(10)"].limit == pytest.approx(np.quantile(good, 0.1))
    assert rows["clip_by_global_norm(windowed_quantile(0.9, 1000))"].limit == pytest.approx(np.quantile(good[:-1], 0.9))
    alone = optaxclip.suggest(np.ones(64))  # the 64th norm is the first that skip_step can judge
    by_name = {row.rule: row for row in alone}
    assert by_name["skip_step(...)"].limit == 1.0 and by_name["skip_step(...)"].mean_scale == 1.0


def log_of(path, norms, column="norm"):
    path.write_text("\n".join([f"step,{column}", *(f"{step},{norm}" for step, norm in enumerate(norms))]) + "\n")
    return path


def test_the_command_takes_column_and_picture_and_prints_what_it_found(tmp_path, capsys):
    norms = [*np.linspace(1, 9, 9), 1000.0, np.nan, np.inf]
    log, picture = log_of(tmp_path / "run.csv", norms, "length of the gradient"), tmp_path / "drawn.png"
    replay_command(["--column", "length of the gradient", "--picture", str(picture), str(log)])
    printed = capsys.readouterr().out
    assert "12 steps, 2 of them NaN or inf; norms from 1 to 1000, median 5.5" in printed
    assert f"{'clip_by_global_norm(5.5)':48}"[:24] in printed and " 50.0% " in printed
    row = next(line for line in printed.splitlines() if line.startswith("clip_by_global_norm(5.5)"))
    assert row.split()[1:3] == ["5.5", "50.0%"]
    assert picture.exists() and not (tmp_path / "run.png").exists() and f"Picture: {picture}" in printed


def test_the_command_ends_with_one_line_where_a_log_is_of_no_use(tmp_path):
    with pytest.raises(SystemExit, match=r"read_history: column=None is not in"):
        replay_command([str(log_of(tmp_path / "run.csv", [1.0, 2.0], "loss"))])
    with pytest.raises(SystemExit, match=r"suggest: norms must hold at least two"):
        replay_command([str(log_of(tmp_path / "run.csv", [1.0]))])


def test_the_command_does_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    replay_command([str(log_of(tmp_path / "run.csv", [*range(1, 11), np.nan, np.inf]))])
    assert "No picture: matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "run.png").exists()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("gnorm", "gnorm"),
        ("norm,gnorm", "norm"),
        ("norm,grad_norm,clip/norm_before", "clip/norm_before"),
        ("normal,norm/w", "norm/w"),
        ("clip/norm_before/w,clip/norm_before/v", "clip/norm_before/w"),
    ],
)
def test_the_column_of_the_norm_is_found_by_what_loggers_write(tmp_path, names, found):
    path = tmp_path / "log.csv"
    path.write_text(f"{names}\n{','.join(str(place) for place, _ in enumerate(names.split(',')))}\n")
    assert optaxclip.read_history(path) == [names.split(",").index(found)]


def test_lines_without_a_norm_are_left_out_and_signs_are_kept(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,norm\n0,1.5\n1,\n2,-2.5\n3\n4,3.5,surplus\n")
    np.testing.assert_array_equal(optaxclip.read_history(path), [1.5, -2.5, 3.5])
    with pytest.raises(ValueError, match=r"which has 'step', 'norm'. Name"):
        optaxclip.read_history(path, "loss")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "ndjson"])
def test_lines_of_json_are_read_under_each_of_their_names(tmp_path, suffix):
    path = tmp_path / f"log.{suffix}"
    path.write_text('{"norm": 1.5}\n\n{"loss": 1.0}\n{"norm": null}\n{"norm": 2.5}\n')
    np.testing.assert_array_equal(optaxclip.read_history(path), [1.5, 2.5])
    path.write_text('{"norm": 1.5}\n[2.5]\n')
    with pytest.raises(ValueError, match=r"read_history: line 2 of .* must be a JSON object, got '\[2\.5\]'"):
        optaxclip.read_history(path)
    path.write_text('{"norm": [1.5]}\n')
    with pytest.raises(ValueError, match=r"the column 'norm' of .* must hold numbers"):
        optaxclip.read_history(path)


def lines_of(axis):
    return {str(line.get_label()): (np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)) for line in axis.lines}


def test_a_picture_of_bare_norms_marks_those_above_their_limits():
    norms = [1.0, 5.0, np.nan, 2.0]
    drawn = lines_of(plot_history(norms, [2.0, 2.0, 2.0, np.inf], word="skipped"))
    np.testing.assert_array_equal(drawn["norm before clipping"][1], [1, 5, np.nan, 2])
    np.testing.assert_array_equal(drawn["limit"][1], [2, 2, 2, np.nan])
    np.testing.assert_array_equal(drawn["skipped (25.0%)"], [[1], [5]])
    np.testing.assert_array_equal(drawn["NaN or inf"], [[2], [1]])
    assert np.isnan(lines_of(plot_history([1.0, np.inf]))["norm before clipping"][1][1])
    assert lines_of(plot_history([1.0, 2.0]))["clipped (0.0%)"][0].size == 0
    assert "clipped (0.0%)" in lines_of(plot_history([]))


def test_a_picture_of_a_replay_may_be_given_other_limits_and_marks():
    axis = plot_history(optaxclip.replay(2.0, [1.0, 3.0]), [4.0, 5.0], [True, False])
    drawn = lines_of(axis)
    np.testing.assert_array_equal(drawn["limit"][1], [4, 5])
    np.testing.assert_array_equal(drawn["clipped (50.0%)"], [[0], [1]])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "gradient norm")


@pytest.mark.parametrize("wrong", [(np.ones((2, 2)),), (np.ones(2), np.ones(3)), (np.ones(2), np.ones(2), [True])], ids=["norms", "limits", "marks"])
def test_a_picture_wants_norms_limits_and_marks_of_one_length(wrong):
    with pytest.raises(ValueError, match=r"plot_history: norms, limits and clipped must be \[steps\] of one length"):
        plot_history(*wrong)


def test_newton_schulz_wants_a_step_and_a_shrink_that_it_knows():
    with pytest.raises(ValueError, match=r"^clip_by_spectral_norm: steps must be at least 1, got 0"):
        optaxclip.clip_by_spectral_norm(1.0, steps=0)
    for shrink in (optaxclip.smooth(1), optaxclip.drop):
        with pytest.raises(ValueError, match=r"knows the shrinks hard and smooth"):
            optaxclip.clip_by_spectral_norm(1.0, method="newton_schulz", shrink=shrink)
