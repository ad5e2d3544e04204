"""Rules for everything, tensors, units and groups, and clippers named after them."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from tests import oracle_rules as oracle
from tests.rules.histories import EPS, f, gradients, lengths, run

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
