"""Clippers of papers are their rules, at every scope, beside the float64 oracle."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from tests import oracle_rules as oracle
from tests.helpers import apply
from tests.rules.histories import EPS, f, gradients, lengths, run, spiked


def test_adagc_is_global_in_its_warm_up_and_per_tensor_after():
    names = ["lognormal", "spikes", "broken", "zeros"]
    grads = gradients(names, steps=200)
    norms = {name: lengths(grads, name) for name in names}
    limits = oracle.adagc(norms, max_norm=1.0, ratio=f(1.05), decay=f(0.98), warmup=30)
    clipped, _ = run(optaxclip.adagc(warmup=30), grads)
    for name in names:
        limit = np.asarray(limits[name])
        scale = np.where(
            np.isfinite(norms[name]),
            np.minimum(1, limit / np.where(norms[name] > 0, norms[name], 1)),
            np.nan,
        )
        scale = np.where(norms[name] == 0, np.where(np.isnan(limit), np.nan, 1), scale)
        np.testing.assert_allclose(
            clipped[name],
            grads[name] * scale[:, None, None],
            rtol=128 * EPS,
            atol=1e-30,
        )


@pytest.mark.parametrize("raise_small", [False, True])
def test_aggc_holds_each_group_in_its_band(raise_small):
    names, labels = (
        ["lognormal", "spikes", "growing"],
        {"lognormal": "a", "spikes": "b", "growing": "b"},
    )
    grads = gradients(names, steps=200)
    equation = oracle.ema_band(
        0.5, 1.5, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=raise_small
    )
    clipped, _ = run(
        optaxclip.aggc(0.5, 1.5, scope=labels, raise_small=raise_small), grads
    )
    for group in (["lognormal"], ["spikes", "growing"]):
        norms = lengths(grads, *group)
        scale = np.asarray(oracle.limits(equation, norms)) / norms
        for name in group:
            np.testing.assert_allclose(
                clipped[name], grads[name] * scale[:, None, None], rtol=128 * EPS
            )


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


@pytest.mark.slow
def test_adagc_takes_norms_from_elsewhere_and_limits_from_step_0():
    clipper = optaxclip.adagc(max_norm=lambda step: 1.0 + step)
    grads = {"a": jnp.array([3.0, 4.0])}
    updates, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    updates, _ = clipper.update(grads, state, grad_norm={"a": jnp.float32(20.0)})
    np.testing.assert_allclose(updates["a"], [0.3, 0.4], rtol=1e-6)


@pytest.mark.slow
def test_adaclip_takes_stacked_grad_norm_and_nonfinite():
    grads = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    _, state = apply(optaxclip.adaclip(stacked=1), grads)
    np.testing.assert_array_equal(state.norm, [2.0, 4.0])
    _, state = apply(optaxclip.adaclip(), grads, grad_norm=jnp.float32(8.0))
    assert state.norm == 8.0
    updates, _ = apply(optaxclip.adaclip(nonfinite="zero"), grads.at[0, 0].set(jnp.nan))
    assert not updates.any()


def test_adagc_does_not_remember_a_tensor_that_its_warm_up_made_0():
    clipper = optaxclip.adagc(max_norm=lambda step: 1.0 * step, warmup=2)
    grads, lengths = jnp.array([3.0, 4.0]), []
    state = clipper.init(grads)
    for _ in range(4):
        updates, state = clipper.update(grads, state)
        lengths.append(np.linalg.norm(updates))
    # 0 is no norm of the warm-up. The smallest of 1 and 2 is the first average.
    np.testing.assert_allclose(lengths, [0.0, 1.0, 2.0, 1.05], rtol=1e-6)


def test_adagc_forgets_a_norm_that_another_tensors_spike_shortened_to_0():
    clipper = optaxclip.adagc(warmup=2)
    grads = {"small": jnp.array([1e-10]), "large": jnp.array([1e-10])}
    spike = grads | {"large": jnp.array([1e30])}
    state = clipper.init(grads)
    for step in (spike, grads, grads, grads):
        updates, state = clipper.update(step, state)
    np.testing.assert_allclose(updates["small"], grads["small"], rtol=1e-6)


# What is measured together of four tensors.
SCOPES = {
    "global": [["lognormal", "spikes", "broken", "falling"]],
    "tensor": [["lognormal"], ["spikes"], ["broken"], ["falling"]],
    "group": [["lognormal", "falling"], ["spikes"], ["broken"]],
}


def assert_clipped_together(grads, clipped, parts, equation, tolerance):
    for names in parts:
        norms = lengths(grads, *names)
        limits = np.asarray(oracle.limits(equation, norms))
        scale = np.where(
            np.isfinite(norms),
            np.minimum(1, limits / np.where(norms > 0, norms, 1)),
            np.nan,
        )
        for name in names:
            np.testing.assert_allclose(
                clipped[name],
                grads[name].astype(np.float64) * scale[:, None, None],
                rtol=tolerance,
                atol=1e-30,
            )


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
    assert_clipped_together(grads, clipped, SCOPES[scope], equation, 256 * EPS)


def run_of(clipper, norms, **extra):
    updates = jnp.zeros(1)
    state = clipper.init(updates)
    for norm in norms:
        updates, state = clipper.update(jnp.array([norm]), state, **extra)
    return float(updates[0]), state


normalize = optaxclip.shrinks.normalize
OF_BAND = {"decay": 0.5, "floor": 0.2, "up": 1.5, "down": 0.3, "raise_small": True}
SAME = {
    "zclip": (
        optaxclip.zclip(0.5, 0.8, target="max", warmup=2, eps=0.5),
        rules.z_score(0.5, 0.8, target="max", warmup=2, eps=0.5),
        None,
    ),
    "adagn": (
        optaxclip.adagn(0.5, 0.6, eps=0.3),
        rules.moments_ratio(0.5, 0.6, eps=0.3),
        normalize,
    ),
    "adagn, global": (
        optaxclip.adagn(scope="global"),
        rules.moments_ratio(),
        normalize,
    ),
    "adagn, groups": (
        optaxclip.adagn(scope=lambda tree: "all"),
        rules.moments_ratio(),
        normalize,
    ),
    "autoclip": (
        optaxclip.autoclip(30, 3),
        rules.windowed_quantile(0.3, 3, current=True),
        None,
    ),
    "aggc": (
        optaxclip.aggc(0.9, 0.8, scope="global", **OF_BAND),
        rules.ema_band(0.9, 0.8, **OF_BAND),
        normalize,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_named_clipper_hands_all_its_arguments_to_its_rule(name):
    clipper, rule, shrink = SAME[name]
    norms = [1.0, 1.4, 0.7, 3.0, 0.1]
    one, state = run_of(clipper, norms)
    other, wanted = run_of(optaxclip.clip_by_global_norm(rule, shrink=shrink), norms)
    np.testing.assert_allclose(one, other, rtol=1e-6)
    (limit,) = (entry.limit for entry in state.by_name().values())
    np.testing.assert_allclose(limit, wanted.limit, rtol=1e-6)


@pytest.mark.parametrize(
    "scope",
    ["global", "tensor", lambda tree: "all"],
    ids=["global", "tensor", "groups"],
)
def test_a_scope_hands_on_nonfinite_and_mesh_axes(scope):
    assert (
        run_of(optaxclip.zclip(scope=scope, nonfinite="zero"), [1.0, np.nan])[0] == 0.0
    )
    clipper = optaxclip.zclip(scope=scope, mesh_axes="nowhere")
    state = clipper.init(jnp.zeros(1))
    with pytest.raises(
        ValueError, match=r"mesh_axes='nowhere': there is no such axis here"
    ):
        clipper.update(jnp.ones(1), state)
