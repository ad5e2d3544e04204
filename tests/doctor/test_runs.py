"""Trainings that are broken on purpose are named, and healthy ones raise no alarm: some
of those that `python -m benchmarks.doctor` runs.
"""

import jax
import pytest

from benchmarks.doctor.broken import BROKEN, BROKEN_LATER
from benchmarks.doctor.healthy import HEALTHY
from optaxclip.doctor import diagnose

TRAININGS = {training.name: training for training in [*BROKEN, *BROKEN_LATER, *HEALTHY]}
NAMES_OF_BROKEN = (
    "SGD's rate too high from the start (1)",
    "NaN in the backward pass alone (1)",
    "loss scale x 1024 not undone (1)",
    "labels shuffled from a step on (1)",
    "weight decay with the wrong sign (1)",
    "updates below the rounding of bfloat16 (1)",
    "a loss that underflows in float16 (1)",
    "half of the tokens vanish (1)",
    "attention logits explode (1)",
    "gradients that are never reset (1)",
    "weight decay far too strong (2)",
)
NAMES_OF_HEALTHY = (
    "cosine to zero (1)",
    "a GAN in turns (1)",
    "bfloat16 weights (1)",
    "float16, dynamic scale (1)",
)


def causes_of(name):
    training = TRAININGS[name]
    with jax.numpy_rank_promotion("allow"):
        rows = training.train(training.seed)
    return [finding.cause for finding in diagnose(rows)]


@pytest.mark.parametrize("name", NAMES_OF_BROKEN)
def test_a_training_that_is_broken_on_purpose_is_named(name):
    first_cause = causes_of(name)[0]
    assert first_cause in TRAININGS[name].causes


@pytest.mark.parametrize("name", NAMES_OF_HEALTHY)
def test_a_healthy_training_raises_no_alarm(name):
    assert not TRAININGS[name].causes
    assert causes_of(name) == []
