"""A skip behind a clipper, and recorders that are set up so that they say nothing."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.doctor import diagnose, examine


@partial(jax.jit, static_argnums=0)
def columns_of(optimizer, norms, losses):
    """What `metrics` shows of a run whose gradients have these norms."""
    params = {"a": jnp.float32(1), "b": jnp.float32(1)}

    def step(state, numbers):
        norm, loss = numbers
        grads = {"a": 0.6 * norm, "b": 0.8 * norm}
        _, state = optimizer.update(grads, state, params, value=loss)
        return state, optaxclip.metrics(state)

    return jax.lax.scan(step, optimizer.init(params), (norms, losses))[1]


def skip_log(optimizer, norms, losses=None):
    losses = np.zeros(len(norms)) if losses is None else losses
    columns = columns_of(optimizer, np.float32(norms), np.float32(losses))
    found = {name: np.float64(x).tolist() for name, x in columns.items()}
    return [dict(zip(found, line)) for line in zip(*found.values())]


def spiky(size=200):
    """Norms of about 0.8, of which a few are above 1. Two are broken batches."""
    norms = 0.8 * np.exp(0.1 * np.random.default_rng(0).normal(size=size))
    norms[[90, 150]] = 1000.0, 300.0
    norms[[99, 104]] = 2.0, 1.0
    return norms


CLIP, DESCENT = optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1)
SKIP = optaxclip.skip_step(DESCENT)
CLIP_FIRST = {
    "skip_step": optax.chain(CLIP, SKIP),
    "skip_spikes": optax.chain(CLIP, optaxclip.skip_spikes(DESCENT, 20.0)),
    "record_spikes": optax.chain(CLIP, optaxclip.record_spikes(window=16), DESCENT),
    "names": optax.named_chain(("limit", CLIP), ("skip", optax.chain(SKIP))),
    "two clips": optax.chain(optaxclip.clip_by_tensor_norm(2e3), CLIP, SKIP),
}
SKIP_FIRST = {
    "around": optaxclip.skip_step(optax.chain(CLIP, DESCENT)),
    "behind": optax.chain(optaxclip.record_spikes(window=16), CLIP, DESCENT),
    # NaN and inf are seen behind a clip too.
    "nonfinite": optax.chain(CLIP, optaxclip.skip_nonfinite(DESCENT)),
    # A skip that works, since its limit is below that of the clip.
    "lower": optax.chain(
        optaxclip.clip_by_global_norm(100.0), optaxclip.skip_spikes(DESCENT, 10.0)
    ),
    # Another clipper, of other leaves.
    "two groups": optax.partition(
        {
            "a": optax.chain(optax.clip(0.5), optaxclip.skip_step(DESCENT)),
            "b": optax.chain(CLIP, DESCENT),
        },
        {"a": "a", "b": "b"},
    ),
}


@pytest.mark.parametrize("name", CLIP_FIRST)
def test_a_skip_that_sees_clipped_norms_is_named(name):
    norms = spiky()
    rows = skip_log(CLIP_FIRST[name], norms)
    (found,) = of_setup(rows)
    # No limit is known before, and of the rule of skip_step not for half a window.
    start = {"skip_spikes": 0, "record_spikes": 16}.get(name, 63)
    step = start + np.flatnonzero(norms[start:] > 1.01)[0]
    assert (found.cause, found.step) == ("skip behind clip", step)
    largest = max(norms[start:])
    assert found.value == pytest.approx(largest, rel=1e-5) and found.limit == 1
    assert found.worst == start + np.argmax(norms[start:])
    assert ("'spike" if name == "record_spikes" else "'skip") in found.evidence
    named = [{f"train/{key}": x for key, x in row.items()} for row in rows]
    assert [each.step for each in of_setup(named)] == [found.step]
    # A step that was clipped is needed.
    assert of_setup(rows[:step]) == []
    assert [finding.step for finding in of_setup(rows[: step + 1])] == [step]
    assert of_setup(skip_log(CLIP_FIRST[name], np.minimum(norms, 0.99))) == []


def test_a_skip_that_sees_raw_norms_is_not_named():
    losses = np.zeros(200)
    # Steps that are skipped by the loss, in which a clipper keeps its last numbers. The
    # norm of one of them is the limit.
    losses[100:110] = np.nan
    # With the broken batches, which are skipped by their norm, and without them.
    # Norms that are hardly above the limit are seen as it, too.
    all_norms = [np.minimum(spiky(), largest) for largest in (np.inf, 1.2, 1.005)]
    histories = product(all_norms, (np.zeros(200), losses))
    for norms, given in histories:
        for name, optimizer in SKIP_FIRST.items():
            assert of_setup(skip_log(optimizer, norms, given)) == [], name


def of_setup(rows):
    """Without the broken batches, which are found as well."""
    return [finding for finding in diagnose(rows) if finding.cause in SETUP]


SETUP = {"skip behind clip", "norm after clip", "clipped always"}


def test_a_recorder_behind_a_clip_is_named():
    """A third of the norms is at the limit."""
    optimizer = optax.named_chain(
        ("clip", CLIP), ("gradients", optaxclip.record_health(weights=False))
    )
    norms = np.exp(np.random.default_rng(0).normal(size=200))
    (found,) = of_setup(skip_log(optimizer, norms))
    assert found.cause == "norm after clip" and "'health/gradients'" in found.evidence
    assert found.value == pytest.approx(np.mean(norms > 1), abs=0.01)
    assert found.evidence.endswith("are within 0.1 % of the largest")


def test_recorders_without_names_are_noted():
    record = optaxclip.record_health(weights=False, values=False)
    norms = np.exp(0.3 * np.random.default_rng(0).normal(size=60))
    rows = skip_log(optax.chain(record, DESCENT, record), norms)
    sentence = "'health', 'health_2' do not say which of them sees updates"
    assert [sentence in note for note in examine(rows).notes].count(True) == 1
    named = optax.named_chain(("a", record), ("b", DESCENT), ("update", record))
    notes = examine(skip_log(named, norms)).notes
    assert not any("do not say" in note for note in notes)


def test_a_limit_far_below_all_norms_is_named():
    norms = 50 * np.exp(0.3 * np.random.default_rng(0).normal(size=60))
    (found,) = of_setup(skip_log(optax.chain(CLIP, DESCENT), norms))
    assert found.cause == "clipped always" and found.rows == 60
    assert found.value == pytest.approx(np.median(norms), rel=1e-4)
    # Hints on the set-up come last.
    norms[40] = 5000.0
    causes = [x.cause for x in diagnose(skip_log(optax.chain(CLIP, DESCENT), norms))]
    assert causes == ["bad batch", "clipped always"]
    norms = np.where(np.arange(60) % 3 == 0, 50.0, 5.0)
    assert of_setup(skip_log(optax.chain(CLIP, DESCENT), norms)) == []
    # Norms of twice the limit are clipped always too, and that is usual.
    norms = 2.5 * np.exp(0.3 * np.random.default_rng(0).normal(size=60))
    assert of_setup(skip_log(optax.chain(CLIP, DESCENT), norms)) == []
