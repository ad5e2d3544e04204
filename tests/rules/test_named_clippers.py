"""Clippers of papers are their rules, at every scope, beside the float64 oracle."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from tests import oracle_rules as oracle
from tests.helpers import apply, run_of, scanned
from tests.rules.histories import EPS, f, gradients, lengths, run, spiked


def scale_of(norms, limits):
    """What gradients of these norms are multiplied by."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.where(norms > limits, limits / norms, 1.0)
    return np.where(np.isfinite(norms), scale, np.nan)


def assert_scaled(clipped, grads, name, scale, rtol):
    wanted = np.float64(grads[name]) * scale[:, None, None]
    np.testing.assert_allclose(clipped[name], wanted, rtol, atol=1e-30)


def test_adagc_is_global_in_its_warm_up_and_per_tensor_after():
    names = ["lognormal", "spikes", "broken", "zeros"]
    grads = gradients(names, steps=200)
    norms = {name: lengths(grads, name) for name in names}
    limits = oracle.adagc(norms, max_norm=1.0, ratio=f(1.05), decay=f(0.98), warmup=30)
    clipped, _ = run(optaxclip.adagc(warmup=30), grads)
    for name in names:
        limit = np.asarray(limits[name])
        scale = np.where(np.isnan(limit), np.nan, scale_of(norms[name], limit))
        assert_scaled(clipped, grads, name, scale, 128 * EPS)


@pytest.mark.parametrize("raise_small", [False, True])
def test_aggc_holds_each_group_in_its_band(raise_small):
    labels = {"lognormal": "a", "spikes": "b", "growing": "b"}
    grads, options = gradients(labels, steps=200), {"raise_small": raise_small}
    numbers = map(f, (0.5, 1.5, 0.95, 0.01, 1.1, 0.9))
    equation = oracle.ema_band(*numbers, **options)
    clipped, _ = run(optaxclip.aggc(0.5, 1.5, scope=labels, **options), grads)
    for group in (["lognormal"], ["spikes", "growing"]):
        norms = lengths(grads, *group)
        scale = np.asarray(oracle.limits(equation, norms)) / norms
        for name in group:
            assert_scaled(clipped, grads, name, scale, 128 * EPS)


def test_adagn_gives_each_tensor_the_quotient_of_its_moments():
    names = ["lognormal", "spikes", "zeros"]
    grads = gradients(names)
    clipped, _ = run(optaxclip.adagn(), grads)
    for name in names:
        norms = lengths(grads, name)
        wanted = np.where(
            norms > 0, oracle.limits(oracle.adagn(f(0.7), f(0.9), 1e-8), norms), 0
        )
        np.testing.assert_allclose(lengths(clipped, name), wanted, rtol=64 * EPS)


def test_adaclip_shortens_only_the_coordinates_over_the_limit():
    grads = spiked()
    clipped, _ = run(optaxclip.adaclip(0.9), {"w": grads})
    wanted = np.asarray(oracle.adaclip_values(list(grads), f(0.9)))
    np.testing.assert_allclose(clipped["w"], wanted, rtol=64 * EPS)
    untouched = wanted == grads
    assert 0.5 < untouched.mean() < 1
    np.testing.assert_array_equal(np.asarray(clipped["w"])[untouched], grads[untouched])


def test_adagc_takes_norms_from_elsewhere_and_limits_from_step_0():
    clipper = optaxclip.adagc(max_norm=lambda step: 1.0 + step)
    grads = {"a": jnp.array([3.0, 4.0])}
    updates, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    updates, _ = clipper.update(grads, state, grad_norm={"a": jnp.float32(20.0)})
    np.testing.assert_allclose(updates["a"], [0.3, 0.4], rtol=1e-6)


def test_adagc_does_not_remember_a_tensor_that_its_warm_up_made_0():
    clipper = optaxclip.adagc(max_norm=lambda step: 1.0 * step, warmup=2)
    _, updates = scanned(clipper, jnp.array([[3.0, 4.0]] * 4))
    # 0 is no norm of the warm-up. The smallest of 1 and 2 is the first average.
    lengths = np.linalg.norm(updates, axis=1)
    np.testing.assert_allclose(lengths, [0.0, 1.0, 2.0, 1.05], rtol=1e-6)


def test_adagc_forgets_a_norm_that_another_tensors_spike_shortened_to_0():
    grads = {"small": jnp.array([1e-10]), "large": jnp.array([1e-10])}
    spike = grads | {"large": jnp.array([1e30])}
    *_, (updates, _) = run_of(optaxclip.adagc(warmup=2), spike, grads, grads, grads)
    np.testing.assert_allclose(updates["small"], grads["small"], rtol=1e-6)


# What is measured together of four tensors.
SCOPES = {
    "global": [["lognormal", "spikes", "broken", "falling"]],
    "tensor": [["lognormal"], ["spikes"], ["broken"], ["falling"]],
    "group": [["lognormal", "falling"], ["spikes"], ["broken"]],
}


NAMED = {
    "autoclip": (
        partial(optaxclip.autoclip, window=50),
        oracle.windowed_quantile(f(0.1), 50, current=True),
    ),
    "zclip": (optaxclip.zclip, oracle.z_score(decay=f(0.97), eps=f(1e-6))),
    "zclip capped": (
        partial(optaxclip.zclip, cap=1.0),
        oracle.least(oracle.z_score(decay=f(0.97), eps=f(1e-6)), oracle.constant(1.0)),
    ),
}
NAMED_SCOPES = [
    *((scope, "zclip") for scope in SCOPES),
    ("global", "autoclip"),
    ("group", "autoclip"),
    ("tensor", "zclip capped"),
]


@pytest.mark.parametrize(("scope", "name"), NAMED_SCOPES)
def test_a_named_clipper_is_its_rule_at_every_scope(scope, name):
    grads = gradients(["lognormal", "spikes", "broken", "falling"])
    build, equation = NAMED[name]
    labels = {"lognormal": "a", "spikes": "b", "broken": "c", "falling": "a"}
    clipped, _ = run(build(scope=labels if scope == "group" else scope), grads)
    for names in SCOPES[scope]:
        norms = lengths(grads, *names)
        scale = scale_of(norms, np.asarray(oracle.limits(equation, norms)))
        for name in names:
            assert_scaled(clipped, grads, name, scale, 256 * EPS)


normalize, moments = optaxclip.shrinks.normalize, rules.moments_ratio()
OF_SCORE = {"z": 0.5, "decay": 0.8, "target": "max", "warmup": 2, "eps": 0.5}
OF_MOMENTS = {"decay1": 0.5, "decay2": 0.6, "eps": 0.3}
OF_BAND = {"low": 0.9, "high": 0.8, "decay": 0.5, "floor": 0.9, "up": 1.5, "down": 0.3}
OF_BAND |= {"raise_small": True}
OPTIONS = [
    (rules.z_score, OF_SCORE),
    (rules.moments_ratio, OF_MOMENTS),
    (rules.ema_band, OF_BAND),
]
# Each option changes a limit.
NORMS = np.array([1.0, 1.4, 0.7, 3.0, 9.0, 2.0, 1.2, 0.1])
SAME = {
    "zclip": (optaxclip.zclip(**OF_SCORE), rules.z_score(**OF_SCORE), None),
    "adagn": (
        optaxclip.adagn(**OF_MOMENTS),
        rules.moments_ratio(**OF_MOMENTS),
        normalize,
    ),
    "adagn, global": (optaxclip.adagn(scope="global"), moments, normalize),
    "adagn, groups": (optaxclip.adagn(scope=lambda tree: "all"), moments, normalize),
    "autoclip": (
        optaxclip.autoclip(30, 3),
        rules.windowed_quantile(0.3, 3, current=True),
        None,
    ),
    "aggc": (
        optaxclip.aggc(scope="global", **OF_BAND),
        rules.ema_band(**OF_BAND),
        normalize,
    ),
}


def test_a_named_clipper_hands_all_its_arguments_to_its_rule():
    norms = jnp.float32(NORMS)[:, None]
    for name, (clipper, rule, shrink) in SAME.items():
        state, found = scanned(clipper, norms)
        by_rule = optaxclip.clip_by_global_norm(rule, shrink=shrink)
        end, wanted = scanned(by_rule, norms)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)
        (limit,) = (entry.limit for entry in state.by_name().values())
        np.testing.assert_allclose(limit, end.limit, rtol=1e-6, err_msg=name)


def no_number(step):
    return "x"


OF_NO_NUMBER = {
    "zclip: z": optaxclip.zclip(no_number),
    "autoclip: percentile": optaxclip.autoclip(no_number),
    "adagc: ratio": optaxclip.adagc(no_number),
    "aggc: high": optaxclip.aggc(high=no_number, scope="global"),
    "adagn: decay1": optaxclip.adagn(no_number),
    "adaclip: decay": optaxclip.adaclip(no_number),
}


@pytest.mark.parametrize("argument", OF_NO_NUMBER)
def test_the_error_of_a_schedule_names_the_clipper(argument):
    clipper = OF_NO_NUMBER[argument]
    state = clipper.init(jnp.zeros(2))
    with pytest.raises(TypeError, match=rf"^{argument}: what a schedule returns"):
        clipper.update(jnp.ones(2), state)


def test_each_argument_that_is_handed_on_changes_a_limit():
    for rule, options in OPTIONS:
        limits = optaxclip.replay.run(rule(**options), NORMS).limits
        for name in options:
            others = {other: x for other, x in options.items() if other != name}
            found = optaxclip.replay.run(rule(**others), NORMS).limits
            assert not np.allclose(found, limits, rtol=1e-3), (rule, name)


def test_an_error_about_labels_names_the_scope():
    weights = {"w": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"^aggc: scope has no value for the leaf"):
        optaxclip.aggc(scope={"w": "matrix"}).init(weights)


@pytest.mark.parametrize("scope", ["global", "tensor", lambda tree: "all"])
def test_a_scope_hands_on_nonfinite_and_mesh_axes(scope):
    clipper = optaxclip.zclip(scope=scope, nonfinite="zero")
    assert apply(clipper, jnp.array([jnp.nan]))[0] == 0.0
    clipper = optaxclip.zclip(scope=scope, mesh_axes="nowhere")
    text = r"mesh_axes='nowhere': there is no such axis here"
    with pytest.raises(ValueError, match=text):
        apply(clipper, jnp.ones(1))
