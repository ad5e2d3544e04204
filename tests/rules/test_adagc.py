"""AdaGC, AGGC, AdaGN and AdaClip, as clippers."""

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracle_rules as oracle
from tests.helpers import apply
from tests.rules.histories import (
    EPS,
    f,
    gradients,
    lengths,
    run,
    spiked,
)


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
