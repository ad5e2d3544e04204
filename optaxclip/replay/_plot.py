"""A picture of norms, limits and clipped steps, drawn with matplotlib."""

from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from ._run import Replay

# matplotlib is the extra `plot`, so only type checkers import it here.
if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_history(
    history: Replay | ArrayLike,
    limits: ArrayLike | None = None,
    clipped: ArrayLike | None = None,
    *,
    word: str = "clipped",
    axis: "Axes | None" = None,
) -> "Axes":
    """Draws norms and limits over the steps, on a logarithmic scale, with the clipped
    steps marked. Needs matplotlib.

    Args:
      history: a `Replay`, or the norms [steps].
      limits: [steps], what the norms were held against. None for those of the `Replay`,
        or for none at all. An infinite limit is not drawn.
      clipped: bool[steps]. None for those of the `Replay`, or for norms above their
        limit.
      word: what the marked steps are called: "skipped" for a wrapper that skips.
      axis: where to draw. None makes a figure, which `axis.figure` gives.

    Returns:
      The axis. NaN and inf among the norms are marked as crosses at the top.

    Raises:
      ValueError: norms and limits of lengths that differ.
      ImportError: matplotlib is not installed.

    Example:
      >>> history = optaxclip.replay.run(2.0, [1.0, 4.0, 3.0, 2.0])
      >>> axis = optaxclip.replay.plot_history(history)
      >>> print(axis.lines[2].get_label(), axis.lines[2].get_xdata())
      clipped (50.0%) [1 2]
    """
    if axis is None:
        # Figure and not pyplot: no window system is asked for, and nothing is kept.
        from matplotlib.figure import Figure

        axis = Figure(figsize=(9, 4), layout="constrained").add_subplot()
    if isinstance(history, Replay):
        limits = history.limits if limits is None else limits
        clipped = history.clipped if clipped is None else clipped
        history = history.norms
    norms = np.asarray(history, np.float64)
    # Without limits no norm is above its own.
    limits = np.full_like(norms, np.inf) if limits is None else np.asarray(limits)
    clipped = np.asarray(norms > limits if clipped is None else clipped, bool)
    steps, finite = np.arange(norms.size), np.isfinite(norms)
    # Lines have gaps where they are NaN. "0.55" is a gray of matplotlib.
    drawn = np.where(finite, norms, np.nan)
    axis.semilogy(steps, drawn, color="0.55", lw=0.8, label="norm before clipping")
    drawn = np.where(np.isfinite(limits), limits, np.nan)
    axis.semilogy(steps, drawn, color="tab:blue", label="limit")
    # The mean of no steps would be NaN, with a warning.
    label = f"{word} ({clipped.mean() if clipped.size else 0:.1%})"
    axis.plot(steps[clipped], norms[clipped], "r.", markersize=4, label=label)
    if not finite.all():
        # Crosses at the top of the axis, which is 1 in this transform. Without
        # clip_on=False half of each would be cut off.
        place = {"transform": axis.get_xaxis_transform(), "clip_on": False}
        ones = np.ones(np.sum(~finite))
        axis.plot(steps[~finite], ones, "kx", label="NaN or inf", **place)
    axis.set(xlabel="step", ylabel="gradient norm")
    axis.legend(loc="upper right", framealpha=0.8, edgecolor="none")
    return axis
