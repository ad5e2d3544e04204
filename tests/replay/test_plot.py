"""Pictures show norms, limits and the steps that a rule would clip."""

import numpy as np
import pytest
from matplotlib.figure import Figure

import optaxclip
from optaxclip.replay import plot_history

NORMS = np.float32([1.0, 1.5, 1.2, np.nan, 9.0, 1.1, np.inf, 7.0] * 10)


def test_the_picture_has_norms_limits_and_clipped_steps():
    result = optaxclip.replay.run(optaxclip.rules.z_score(1.0), NORMS)
    axis = plot_history(result)
    labels = [line.get_label() for line in axis.lines]
    assert labels[:2] == ["norm before clipping", "limit"] and labels[3] == "NaN or inf"
    assert len(axis.lines[2].get_xdata()) == int(result.clipped.sum())
    own = Figure().add_subplot()
    assert plot_history(NORMS, axis=own) is own
    with pytest.raises(ValueError, match="broadcast"):
        plot_history(NORMS, NORMS[:3])


def lines_of(axis):
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata(), float),
            np.asarray(line.get_ydata(), float),
        )
        for line in axis.lines
    }


def test_a_picture_of_bare_norms_marks_those_above_their_limits():
    norms = [1.0, 5.0, np.nan, 2.0]
    # The first is at its limit.
    drawn = lines_of(plot_history(norms, [1.0, 2.0, 2.0, np.inf], word="skipped"))
    np.testing.assert_array_equal(drawn["norm before clipping"][1], [1, 5, np.nan, 2])
    np.testing.assert_array_equal(drawn["limit"][1], [1, 2, 2, np.nan])
    np.testing.assert_array_equal(drawn["skipped (25.0%)"], [[1], [5]])
    np.testing.assert_array_equal(drawn["NaN or inf"], [[2], [1]])
    drawn = lines_of(plot_history([1.0, np.inf]))
    assert np.isnan(drawn["norm before clipping"][1][1]) and "clipped (0.0%)" in drawn
    assert lines_of(plot_history([1.0, 2.0]))["clipped (0.0%)"][0].size == 0
    assert "clipped (0.0%)" in lines_of(plot_history([]))


def test_a_replay_picture_takes_other_limits_and_marks():
    axis = plot_history(
        optaxclip.replay.run(2.0, [1.0, 3.0]), [4.0, 5.0], [True, False]
    )
    drawn = lines_of(axis)
    np.testing.assert_array_equal(drawn["limit"][1], [4, 5])
    np.testing.assert_array_equal(drawn["clipped (50.0%)"], [[0], [1]])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "gradient norm")
