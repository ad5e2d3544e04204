"""The same decisions as MaxText, Levanter, axlearn and AdaGC's authors make on the same
histories, but for the cases that docs/methods.md lists.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.references import trainers

pytestmark = pytest.mark.slow

STEPS = 400


def histories():
    """{name: (norms, losses)} with spikes of the norm, of the loss, and of both."""
    random = np.random.default_rng(0)
    calm = np.exp(0.2 * random.standard_normal((2, STEPS)))
    spikes = calm.copy()
    spikes[0, [70, 150, 151, 390]] *= 40
    spikes[1, [90, 150, 300]] *= 8
    slope = np.linspace(1, 3, STEPS)
    jump = calm * np.where(np.arange(STEPS) < 200, 1, 5)
    noisy = np.exp(1.2 * random.standard_normal((2, STEPS)))
    found = {"calm": calm, "spikes": spikes, "rising": spikes * slope}
    found |= {"falling": spikes / slope, "jump": jump, "noisy": noisy}
    return {name: np.float32(values) for name, values in found.items()}


HISTORIES = histories()
every_history = pytest.mark.parametrize("name", HISTORIES)


def skips(optimizer, norms, losses):
    """Which steps a skipping optimizer skips."""

    def step(state, each):
        norm, loss = each
        _, state = optimizer.update(norm[None], state, value=loss)
        return state, state.consecutive > 0

    pairs = jnp.float32(norms), jnp.float32(losses)
    run = jax.jit(lambda: jax.lax.scan(step, optimizer.init(jnp.zeros(1)), pairs)[1])
    return np.asarray(run())


def skip_step(interval=128):
    return optaxclip.skip_step(optax.identity(), 6.0, interval)


def levanters_skip():
    rule = rules.windowed_mean(6.0, 128, floor=1e-6, warmup=64)
    return optaxclip.skip_spikes(optax.identity(), rule, rule)


def axlearns_drop():
    rule = rules.ema_ratio(20.0, 0.99, corrected=True)
    return optaxclip.skip_spikes(optax.identity(), rule)


def updates_of(clipper, norms):
    """The updates of all steps, from norms [steps, tensors]."""

    def step(state, norm):
        grads = {str(place): x[None] for place, x in enumerate(norm)}
        updates, state = clipper.update(grads, state)
        return state, jnp.stack([updates[key][0] for key in sorted(updates, key=int)])

    grads = {str(place): jnp.zeros(1) for place in range(norms.shape[1])}
    run = jax.jit(lambda: jax.lax.scan(step, clipper.init(grads), jnp.float32(norms)))
    return np.asarray(run()[1])


@every_history
@pytest.mark.parametrize("interval", [128, 16])
def test_skip_step_decides_as_maxtext(name, interval):
    norms, losses = HISTORIES[name]
    want = trainers.maxtext_skips(norms, losses, interval)
    np.testing.assert_array_equal(skips(skip_step(interval), norms, losses), want)


@every_history
def test_windowed_means_skip_as_levanter(name):
    norms, losses = HISTORIES[name]
    want = trainers.levanter_skips(norms, losses)
    np.testing.assert_array_equal(skips(levanters_skip(), norms, losses), want)


@every_history
def test_windowed_means_clip_updates_as_levanter(name):
    norms = HISTORIES[name][0]
    rule = rules.windowed_mean(3.0, 128, floor=1e-6, warmup=64)
    have = updates_of(optaxclip.clip_by_global_norm(rule), norms[:, None])[:, 0]
    np.testing.assert_allclose(have, trainers.levanter_clipped(norms), 1e-5)


@every_history
def test_a_multiple_of_the_average_drops_as_axlearn(name):
    norms, losses = HISTORIES[name]
    want = trainers.axlearn_drops_by_average(norms)
    np.testing.assert_array_equal(skips(axlearns_drop(), norms, losses), want)


@pytest.mark.parametrize("warmup", [100, 1])
def test_adagc_clips_as_its_authors(warmup):
    names = ["spikes", "rising", "noisy", "jump"]
    norms = np.stack([HISTORIES[name][0] for name in names], 1)
    have = updates_of(optaxclip.adagc(1.04, 0.99, warmup=warmup), norms)
    want = trainers.adagc_clipped(norms, warmup=warmup)
    # Their eps of 1e-6 beside norms of 0.02 and more, once a step in the average.
    np.testing.assert_allclose(have, want, 1e-4)


def test_the_histories_make_them_skip_and_clip():
    norms, losses = HISTORIES["rising"]
    assert 3 <= trainers.maxtext_skips(norms, losses).sum() < 20
    assert 3 <= trainers.levanter_skips(norms, losses).sum() < 20
    assert 3 <= trainers.axlearn_drops_by_average(norms).sum() < 20
    assert (trainers.levanter_clipped(norms) < norms).sum() >= 4


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("trainer", ["maxtext", "levanter"])
def test_a_broken_norm_blocks_a_trainer_for_a_window(trainer, broken):
    norms, losses = HISTORIES["calm"].copy()
    norms[150] = broken
    theirs = {"maxtext": trainers.maxtext_skips, "levanter": trainers.levanter_skips}
    ours = {"maxtext": skip_step, "levanter": levanters_skip}
    assert theirs[trainer](norms, losses)[150:279].all()
    assert skips(ours[trainer](), norms, losses).nonzero()[0].tolist() == [150]


def test_a_nan_in_the_warm_up_is_applied_by_both_trainers():
    norms, losses = HISTORIES["calm"].copy()
    norms[5] = np.nan
    assert not trainers.maxtext_skips(norms, losses)[5]
    assert not trainers.levanter_skips(norms, losses)[5]
    for optimizer in (skip_step(), levanters_skip()):
        assert skips(optimizer, norms, losses)[5]


def test_norms_of_20_at_first_never_start_axlearn():
    norms, losses = 25 * HISTORIES["calm"]
    norms = np.maximum(norms, 20)
    assert trainers.axlearn_drops_by_average(norms).all()
    assert not skips(axlearns_drop(), norms, losses).any()


def test_a_norm_of_0_holds_the_authors_adagc_at_0():
    norms = np.stack([HISTORIES["calm"][0]] * 2, 1)
    norms[50, 1] = 0
    assert not trainers.adagc_clipped(norms)[100:, 1].any()
    assert updates_of(optaxclip.adagc(1.04, 0.99), norms)[100:, 1].all()
