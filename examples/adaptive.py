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

from functools import partial
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
    # As in the paper, the window is the whole run.
    autoclip = optaxclip.autoclip(window=steps)
    zclip = optaxclip.zclip()
    adagc = optaxclip.adagc()
    spike_rule = optaxclip.rules.z_score()
    protections = {
        "autoclip": optax.chain(autoclip, sgd),
        "zclip": optax.chain(zclip, sgd),
        "adagc": optax.chain(adagc, sgd),
        "skip_spikes": optaxclip.skip_spikes(sgd, spike_rule),
        "skip_step": optaxclip.skip_step(sgd),
    }
    logs = train_all(protections, steps)
    if save is not None:
        draw_logs = partial(draw, logs=logs)
        draw_both(save, panels=len(DRAWN), draw=draw_logs)
    return logs


def draw(panels: Any, look: Look, logs: dict[str, Log]) -> None:
    """Norm and limit of a run, and which steps it clipped or left out."""
    norms = [logs[name]["record/all/norm"] for name in DRAWN]
    lowest = 0.8 * np.min(norms)
    highest = 6 * np.max(norms)
    for panel, name in zip(panels, DRAWN):
        prefix = DRAWN[name]
        log = logs[name]
        norm = log["record/all/norm"]
        limit = log[f"{prefix}/limit"]
        verb = "skipped" if prefix == "skip/step" else "clipped"
        flags = log[f"{prefix}/{verb}"]
        (steps,) = np.nonzero(flags)
        share = len(steps) / len(norm)
        panel.plot(norm, color=look.grey, linewidth=1, label="norm")
        panel.plot(limit, color=look.blue, linewidth=2.5, label="limit")
        # Where nearly every step has a dot, small dots lie behind the norm.
        size, zorder = (3, 1) if share > 0.5 else (6, 3)
        dots = norm[steps]
        panel.plot(steps, dots, ".", color=look.orange, markersize=size, zorder=zorder)
        panel.plot([], [], ".", color=look.orange, label=f"{verb} step")
        title = f"{name}: {share:.1%} {verb}"
        panel.set_title(title, weight="bold")
        panel.set(xlabel="step", yscale="log", ylim=(lowest, highest))
        panel.legend(loc="upper right", ncols=2, fontsize="small", frameon=False)
    panels[0].set_ylabel("gradient norm")


if __name__ == "__main__":
    run(main)
