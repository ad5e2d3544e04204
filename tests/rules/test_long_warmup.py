"""A warmup that is longer than its window."""

import numpy as np

import optaxclip
from optaxclip import rules

NORMS = np.array([1.0, 4.0, 2.0, 9.0, 3.0, 0.5])


def limits(rule):
    return np.asarray(optaxclip.replay.run(rule, NORMS).limits)


def test_a_warmup_counts_norms_that_left_the_window_too():
    for rule in (
        rules.windowed_quantile(0.5, 2, warmup=4),
        rules.windowed_mean(0.0, 2, warmup=4),
    ):
        np.testing.assert_array_equal(limits(rule), [np.inf] * 4 + [5.5, 6.0])


def test_with_the_current_norm_the_warmup_ends_one_step_earlier():
    for rule in (
        rules.windowed_quantile(0.5, 2, warmup=4, current=True),
        rules.windowed_mean(0.0, 2, warmup=4, current=True),
    ):
        np.testing.assert_array_equal(limits(rule), [np.inf] * 3 + [5.5, 6.0, 1.75])
