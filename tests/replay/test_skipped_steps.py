"""Logs of a clipper and a wrapper that skips steps, one inside or behind the other."""

import json
from itertools import product

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip

NORMS = [1.0, 2.0, 100.0, 1.5, float("nan"), 0.5]


def read_again(tmp_path, optimizer, column=None, norms=NORMS):
    """The norms that are read from what `metrics` finds in each step."""
    state = optimizer.init(jnp.zeros(1))
    lines = []
    for norm in norms:
        _, state = optimizer.update(jnp.array([norm]), state, jnp.zeros(1))
        found = optaxclip.metrics(state)
        lines.append(json.dumps({name: float(x) for name, x in found.items()}))
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    return optaxclip.replay.read_history(path, column)


def test_norms_of_skipped_steps_are_read(tmp_path):
    sgd = optax.sgd(0.1)
    # A step is skipped for a large norm, and one for NaN. Then only one of both.
    histories = NORMS, NORMS[:4] + NORMS[5:], NORMS[:2] + NORMS[3:]
    for limit, norms in product((1.8, 50.0), histories):
        clip = optaxclip.clip_by_global_norm(limit)
        inside = optaxclip.skip_spikes(optax.chain(clip, sgd), 10.0)
        in_front = optax.chain(clip, optaxclip.skip_spikes(sgd, 10.0))
        for optimizer in (inside, in_front):
            found = read_again(tmp_path, optimizer, norms=norms)
            np.testing.assert_array_equal(found, norms)


@pytest.mark.parametrize("place", ["inside", "in front", "inside by name"])
def test_norms_of_a_recorder_beside_skipped_steps_are_read(tmp_path, place):
    recorder, sgd = optaxclip.record_norm(), optax.sgd(0.1)
    inside = optaxclip.skip_spikes(optax.chain(recorder, sgd), 10.0)
    optimizer = {
        "inside": inside,
        "in front": optax.chain(recorder, optaxclip.skip_spikes(sgd, 10.0)),
        "inside by name": optax.named_chain(("all", inside), ("last", sgd)),
    }[place]
    np.testing.assert_array_equal(read_again(tmp_path, optimizer), NORMS)


def test_a_column_that_is_named_is_read(tmp_path):
    inside = optax.chain(optaxclip.clip_by_global_norm(1.8), optax.sgd(0.1))
    optimizer = optaxclip.skip_spikes(inside, 10.0)
    found = read_again(tmp_path, optimizer, "clip/norm_before")
    np.testing.assert_array_equal(found, [1.0, 2.0, 2.0, 1.5, 1.5, 0.5])


def test_a_step_that_is_skipped_for_its_loss_may_have_the_smallest_norm(tmp_path):
    path = tmp_path / "log.csv"
    head = "clip/a/norm_before,skip/a/norm,skip/a/skipped"
    path.write_text(f"{head}\n1,1,0\n1,0.5,1\n1,9,1\n")
    np.testing.assert_array_equal(optaxclip.replay.read_history(path), [1, 0.5, 9])


def test_norms_of_skipped_steps_are_read_where_every_tenth_is_logged(tmp_path):
    """The norm that the clipper keeps is of a step between."""
    path = tmp_path / "log.csv"
    head = "step,clip/norm_before,skip/norm,skip/skipped"
    for kept, skipped, wanted in ((2, 50, 50), (2, "nan", np.nan), (60, 50, 60)):
        path.write_text(f"{head}\n0,1,1,0\n10,{kept},{skipped},1\n20,3,3,0\n")
        found = optaxclip.replay.read_history(path)
        np.testing.assert_array_equal(found, [1, wanted, 3])


def test_a_wrapper_without_common_steps_is_not_read(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("clip/norm_before,skip/norm,skip/skipped\n1,,\n,2,0\n")
    assert optaxclip.replay.read_history(path) == [1]


def test_of_a_scaled_loss_only_broken_norms_are_read(tmp_path):
    """The wrapper sees scaled gradients, and the clipper those of the loss."""
    clip = optaxclip.clip_by_global_norm(1.8)
    inner = optax.chain(optax.scale(2**-10), clip, optax.sgd(0.1))
    found = read_again(tmp_path, optaxclip.skip_nonfinite(inner))
    np.testing.assert_array_equal(found, np.array(NORMS) / 2**10)


def test_a_second_optimizer_has_a_wrapper_of_its_own(tmp_path):
    path = tmp_path / "log.csv"
    head = "step,clip_2/norm_before,skip/norm,skip/skipped,skip_2/norm,skip_2/skipped"
    path.write_text(f"{head}\n0,1,1,0,1,0\n1,2,50,1,2,0\n2,2,3,0,60,1\n")
    np.testing.assert_array_equal(optaxclip.replay.read_history(path), [1, 2, 60])
