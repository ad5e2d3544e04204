"""Pictures show norms, limits and the steps that a rule would clip."""

import numpy as np
from matplotlib.figure import Figure

import optaxclip
from optaxclip.replay import plot_history

NORMS = np.float32([1.0, 1.5, 1.2, np.nan, 9.0, 1.1, np.inf, 7.0] * 10)


def test_the_picture_has_norms_limits_and_clipped_steps():
    result = optaxclip.replay.run(optaxclip.rules.z_score(1.0), NORMS)
    steps = 10 * np.arange(NORMS.size)
    axis = plot_history(result, steps=steps)
    clipped = np.asarray(result.clipped)
    share = f"clipped ({clipped.sum()} of 80)"
    drawn = {str(line.get_label()): line.get_data() for line in axis.lines}
    assert list(drawn) == ["norm before clipping", "limit", share] and clipped.any()
    np.testing.assert_array_equal(drawn["norm before clipping"], [steps, NORMS])
    np.testing.assert_array_equal(drawn["limit"], [steps, result.limits])
    np.testing.assert_array_equal(drawn[share], [steps[clipped], NORMS[clipped]])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "gradient norm")


def test_several_histories_are_drawn():
    norms = np.stack([NORMS, 2 * NORMS], axis=1)
    axis = plot_history(optaxclip.replay.run(5.0, norms))
    steps, _ = axis.lines[-1].get_data()
    is_clipped = np.isfinite(norms) & (norms > 5)
    np.testing.assert_array_equal(steps, np.nonzero(is_clipped)[0])


def test_the_legend_hides_no_norm():
    for norms in (NORMS, np.float32([0.01, 0.02, 900.0, 0.01])):
        axis = plot_history(optaxclip.replay.run(2.0, norms))
        axis.figure.canvas.draw()
        legend = axis.get_legend().get_window_extent()
        highest = norms[np.isfinite(norms)].max()
        _, height = axis.transData.transform((0, highest))
        assert height < legend.y0 and legend.y1 < axis.bbox.y1


def test_an_infinite_limit_does_not_stretch_the_picture():
    axis = plot_history(optaxclip.replay.run(None, NORMS))
    low, high = axis.get_ylim()
    assert 0.5 < low < 1.0 and 9.0 < high < 20.0


def test_a_picture_may_have_a_place_of_its_own():
    axis = Figure().add_subplot()
    history = optaxclip.replay.run(2.0, [1.0, 3.0])
    assert plot_history(history, axis=axis) is axis
    np.testing.assert_array_equal(axis.lines[0].get_xdata(), [0, 1])
