"""A picture of norms, limits and clipped steps, drawn with matplotlib."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from ._replay import Replay

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
      ValueError: norms of more than one dimension, or lengths that differ.
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
    norms, limits, clipped = _checked(history, limits, clipped)
    steps, finite = np.arange(norms.size), np.isfinite(norms)
    # Lines have gaps where they are NaN.
    shown = (
        np.where(finite, norms, np.nan),
        np.where(np.isfinite(limits), limits, np.nan),
    )
    # "0.55" is a gray of matplotlib: 0 is black, 1 is white.
    norm_line = {
        "color": "0.55",
        "linewidth": 0.8,
        "label": "norm before clipping",
    }
    limit_line = {"color": "tab:blue", "linewidth": 1.2, "label": "limit"}
    axis.semilogy(steps, shown[0], **norm_line)
    axis.semilogy(steps, shown[1], **limit_line)
    # The mean of no steps would be NaN, with a warning.
    share = clipped.mean() if clipped.size else 0
    dots = {
        "color": "tab:red",
        "markersize": 4,
        "label": f"{word} ({share:.1%})",
    }
    # `plot` keeps the logarithmic scale that `semilogy` has set.
    axis.plot(steps[clipped], norms[clipped], ".", **dots)
    if not finite.all():
        _mark_at_the_top(axis, steps[~finite])
    axis.set_xlabel("step")
    axis.set_ylabel("gradient norm")
    axis.legend(loc="upper right", framealpha=0.8, edgecolor="none")
    return axis


def _checked(
    history: Any, limits: Any, clipped: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Norms, limits and marks, [steps] each."""
    norms = history
    if isinstance(history, Replay):
        norms = history.norms
        limits = history.limits if limits is None else limits
        clipped = history.clipped if clipped is None else clipped
    norms = np.asarray(norms, np.float64)
    # Without limits no norm is above its own.
    limits = np.full_like(norms, np.inf) if limits is None else limits
    limits = np.asarray(limits, np.float64)
    if clipped is None:
        # Resized, so that lengths that differ reach the error below, and not NumPy's.
        clipped = norms > np.resize(limits, norms.shape)
    clipped = np.asarray(clipped, bool)
    if (
        norms.ndim != 1
        or limits.shape != norms.shape
        or clipped.shape != norms.shape
    ):
        raise ValueError(
            "plot_history: norms, limits and clipped must be [steps] of one length, "
            f"got shapes {norms.shape}, {limits.shape} and {clipped.shape}."
        )
    return norms, limits, clipped


def _mark_at_the_top(axis: Any, steps: np.ndarray) -> None:
    """Crosses at the steps whose norm was NaN or inf."""
    # The x of data, and the y of the axis, whose top is 1 at any range of norms.
    # Without clip_on=False half of each cross would be cut off.
    place = {"transform": axis.get_xaxis_transform(), "clip_on": False}
    axis.plot(
        steps,
        np.ones(steps.size),
        "x",
        color="black",
        label="NaN or inf",
        **place,
    )
