"""26 faults that were planted in trainers, as steps. All are found, but for two that
make NaN 0 on purpose. 23 have their name, and none has a wrong one.
"""

from collections import defaultdict

import pytest

import optaxclip

from . import right_steps, wrong_steps

# The settings that most trainers run: 8 devices, 4 devices, micro-batches.
SETTINGS = ["replicated", "small_limit", "accumulated"]
# Step, kind of its norm, kind of its update. None: nothing is wrong with it.
PLANTED = [
    ("decay_before_clip", "weights_added", "weights_added"),
    ("scaled_loss", "scaled", "scaled"),
    ("adam_before_clip", None, "other_direction"),
    ("gradients_summed", "gradients_summed", "gradients_summed"),
    ("clip_before_division", "gradients_summed", "gradients_summed"),
    ("eight_limits", None, "other_limit"),
    ("frozen_leaf", None, "groups_apart"),
    ("leaf_not_clipped", "leaves_left_out", "groups_apart"),
    ("clip_of_microbatches", "microbatches_apart", "microbatches_apart"),
    ("clip_outside_multi_steps", "microbatches_apart", "microbatches_apart"),
    ("scale_of_8", "scaled", "scaled"),
    ("norm_of_weights", "norm_of_weights", None),
    ("norm_of_last_step", "zero_norm", None),
    ("clipped_by_value", None, "clipped_by_value"),
    ("largest_element", "largest_element", "largest_element"),
    ("scale_of_1000", "scaled", "scaled"),
    ("clipped_twice", None, "clipped_twice"),
    ("squared_in_log", "squared", None),
    ("squared_in_factor", None, "squared"),
    ("sum_of_norms", "sum_of_norms", "sum_of_norms"),
    ("rms", "rms", "rms"),
    ("microbatch_dropped", "unknown", "other_direction"),
    ("updated_twice", None, "other_rate"),
    ("rate_before_clip", None, "scaled"),
]
# Their relatives.
FURTHER = [
    ("half_the_limit", None, "other_limit"),
    ("rate_of_a_tenth", None, "other_rate"),
    ("penalty_in_loss", "weights_added", "weights_added"),
    ("averaged_twice", "averaged_twice", "averaged_twice"),
    ("root_of_factor", None, "unknown"),
]
# Adam's eps and a limit of 1e-6 bring a second fact, which is true as well.
AS_WELL = {
    "adam_before_clip": "clipped_below_limit",
    "squared_in_factor": "not_clipped",
}


@pytest.mark.parametrize(("name", "norm", "update"), [*PLANTED, *FURTHER])
def test_a_planted_fault_has_its_name(name, norm, update):
    kinds = defaultdict(set)
    make_step = getattr(wrong_steps, name)
    for row in optaxclip.check_step(make_step, settings=SETTINGS):
        if row.case != "nan" and row.kind != AS_WELL.get(name):
            kinds[row.what].add(row.kind)
    wanted = {"norm": norm, "update": update}
    assert kinds == {what: {kind} for what, kind in wanted.items() if kind}


def test_nan_that_is_made_0_on_purpose_is_not_found():
    """Before the norm, or after it. With those above these are all 26."""
    for make_step in (wrong_steps.nan_to_0, right_steps.skips_nan):
        assert optaxclip.check_step(make_step, settings=SETTINGS) == []
    assert len(PLANTED) + 2 == 26
