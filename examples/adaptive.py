"""Trains the network of `broken_batches.py` under limits that learn, and shows what
each limit was.

What it shows. The run meets the same ten broken batches, from the same seed and at the
same learning rate.

    autoclip       the 10th percentile of the norms so far: clips nearly all steps
    zclip          clips norms more than 2.5 deviations above the running mean
    adagc          each tensor against its own average, from step 100 on
    skip_spikes    leaves out the steps that are over the limit of ZClip. In a run that
                   skips there are more of them, also good steps. z_score(4.0)
                   leaves out fewer
    skip_step      leaves out steps six deviations above the last 128, of norm or loss,
                   as OLMo does

What it does not show. Which protection is best: all end near the run without broken
batches. AutoClip and AdaGC also clip good steps, which acts like a smaller learning
rate. With twice as many broken batches skip_step may let some through: the norms that
it skipped are in its window too, and raise the limit for later steps.

What it prints. A line for each run as it ends. --save PATH draws norms and limits of
three of them, and the same for dark pages.

    python examples/adaptive.py --save adaptive.png

References: Seetharaman et al., AutoClip, 2020 (arXiv 2007.14469). Kumar et al., ZClip,
2025 (arXiv 2504.02507). Wang et al., AdaGC, 2025 (arXiv 2502.11034). OLMo 2, 2025
(arXiv 2501.00656).
"""

from typing import Any

import numpy as np
import optax
from _shared import File, Look, draw_both, run
from broken_batches import Log, train_all

import optaxclip

# The runs that are drawn, and what begins the names of their metrics.
DRAWN = {"autoclip": "clip/step", "zclip": "clip/step", "skip_step": "skip/step"}


def main(steps: int = 1000, lr: float = 0.2, save: File = None) -> dict[str, Log]:
    """Trains the networks. Returns the log of each."""
    sgd = optax.sgd(lr, momentum=0.9)
    protections = {
        # As in the paper, the window is the whole run.
        "autoclip": optax.chain(optaxclip.autoclip(window=steps), sgd),
        "zclip": optax.chain(optaxclip.zclip(), sgd),
        "adagc": optax.chain(optaxclip.adagc(), sgd),
        "skip_spikes": optaxclip.skip_spikes(sgd, optaxclip.rules.z_score()),
        "skip_step": optaxclip.skip_step(sgd),
    }
    logs = train_all(protections, steps)
    if save is not None:
        draw_both(save, len(DRAWN), lambda panels, look: draw(panels, look, logs))
    return logs


def draw(panels: Any, look: Look, logs: dict[str, Log]) -> None:
    """Norm and limit of a run, and which steps it clipped or left out."""
    norms = np.concatenate([logs[name]["record/all/norm"] for name in DRAWN])
    y_limits = 0.8 * norms.min(), 6 * norms.max()
    for panel, (name, prefix) in zip(panels, DRAWN.items()):
        log = logs[name]
        norm = log["record/all/norm"]
        verb = "skipped" if prefix == "skip/step" else "clipped"
        (steps,) = np.nonzero(log[f"{prefix}/{verb}"])
        share = len(steps) / len(norm)
        panel.plot(norm, color=look.grey, linewidth=1, label="norm")
        panel.plot(
            log[f"{prefix}/limit"], color=look.blue, linewidth=2.5, label="limit"
        )
        # Where nearly every step has a dot, small dots lie behind the norm.
        size, zorder = (3, 1) if share > 0.5 else (6, 3)
        panel.plot(
            steps, norm[steps], ".", color=look.orange, markersize=size, zorder=zorder
        )
        panel.plot([], [], ".", color=look.orange, label=f"{verb} step")
        panel.set_title(f"{name}: {share:.1%} {verb}", weight="bold")
        panel.set(xlabel="step", yscale="log", ylim=y_limits)
        panel.legend(loc="upper right", ncols=2, fontsize="small", frameon=False)
    panels[0].set_ylabel("gradient norm")


if __name__ == "__main__":
    run(main)
