"""Draws norms, limits and clipped steps. Needs matplotlib: `pip install
'optaxclip[plot]'`.
"""

from typing import Any

import numpy as np
from matplotlib.axes import MeshAxes
from matplotlib.figure import Figure

from . import Replay


def plot_history(
    history: Replay | Any,
    limits: Any = None,
    clipped: Any = None,
    *,
    word: str = "clipped",
    axis: Axes | None = None,
) -> Axes:
    """Norms and limits over the steps, on a logarithmic scale, with the clipped steps
    marked.

    Args:
      history: a `Replay`, or the norms [steps].
      limits: [steps], what the norms were held against; None for those of the `Replay`,
        or none at all. An infinite limit is not drawn.
      clipped: bool[steps]; None for those of the `Replay`, or norms above their limit.
      word: what the marked steps are called: "skipped" for a wrapper that skips.
      axis: where to draw; None makes a figure of its own, which `axis.figure` gives.

    Returns:
      The axis. NaN and inf among the norms are marked as crosses at the top.

    Raises:
      ValueError: norms of more than one dimension, or lengths that differ.
    """
    if isinstance(history, Replay):
        norms, limits, clipped = (
            history.norms,
            (history.limits if limits is None else limits),
            (history.clipped if clipped is None else clipped),
        )
    else:
        norms = history
    norms = np.asarray(norms, np.float64)
    limits = (
        np.full_like(norms, np.inf)
        if limits is None
        else np.asarray(limits, np.float64)
    )
    clipped = (
        norms > np.resize(limits, norms.shape)
        if clipped is None
        else np.asarray(clipped, bool)
    )
    if norms.ndim != 1 or limits.shape != norms.shape or clipped.shape != norms.shape:
        raise ValueError(
            "plot_history: norms, limits and clipped must be [steps] of one length, "
            f"got shapes {norms.shape}, {limits.shape} and {clipped.shape}."
        )
    if axis is None:
        axis = Figure(figsize=(9, 4), layout="constrained").add_subplot()
    steps, finite = np.arange(norms.size), np.isfinite(norms)
    axis.semilogy(
        steps,
        np.where(finite, norms, np.nan),
        color="0.55",
        linewidth=0.8,
        label="norm before clipping",
    )
    axis.semilogy(
        steps,
        np.where(np.isfinite(limits), limits, np.nan),
        color="tab:blue",
        linewidth=1.2,
        label="limit",
    )
    axis.plot(
        steps[clipped],
        norms[clipped],
        ".",
        color="tab:red",
        markersize=4,
        label=f"{word} ({clipped.mean() if clipped.size else 0:.1%})",
    )
    if not finite.all():
        axis.plot(
            steps[~finite],
            np.ones(np.sum(~finite)),
            "x",
            color="black",
            transform=axis.get_xaxis_transform(),
            clip_on=False,
            label="NaN or inf",
        )
    axis.set_xlabel("step")
    axis.set_ylabel("gradient norm")
    axis.legend(loc="upper right", framealpha=0.8, edgecolor="none")
    return axis
