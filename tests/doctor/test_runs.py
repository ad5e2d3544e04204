"""Runs that break by construction are named before their loss doubles, and healthy runs
raise no alarm.
"""

import numpy as np
import pytest

from optaxclip.doctor import diagnose
from tests.doctor.runs import BROKEN, HEALTHY, STEPS, log_of

# The seeds that docs/doctor.md counts. `log_of` compiles once for all of them.
SEEDS = range(6)


def doubled(rows):
    """The first step whose loss is twice the lowest before. STEPS if there is none.

    Of the median of 5 steps, since the loss of a batch is noisy.
    """
    losses = np.array([row["loss"] for row in rows])
    losses = np.where(np.isfinite(losses), losses, np.inf)
    medians = [np.median(losses[max(0, n - 4) : n + 1]) for n in range(STEPS)]
    lowest = np.minimum.accumulate(medians)
    above = np.flatnonzero(medians > 2 * lowest)
    return above[0] if above.size else STEPS


@pytest.mark.parametrize("cause", BROKEN)
def test_a_cause_is_named_before_the_loss_doubles(cause):
    rows = log_of(BROKEN[cause](0))
    end = doubled(rows)
    # What is known at the last step before.
    found = diagnose(rows[:end])
    assert [each.cause for each in found][:1] == [cause]
    assert found[0].step < end and found[0].value > found[0].limit


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name):
    rows = log_of(HEALTHY[name](0))
    assert doubled(rows) == STEPS
    assert diagnose(rows) == []


@pytest.mark.slow
def test_other_seeds_say_the_same():
    early = 0
    for seed in SEEDS:
        for cause, run in BROKEN.items():
            rows = log_of(run(seed))
            first = diagnose(rows)[0]
            assert first.cause == cause and first.step <= doubled(rows)
            early += first.step < doubled(rows)
        for run in HEALTHY.values():
            assert diagnose(log_of(run(seed))) == []
    # In one run of 36 the rate is named in the very step in which the loss doubles.
    assert early >= 35
