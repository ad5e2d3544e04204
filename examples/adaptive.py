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

From `_shared.py` come drawing and command line, and from `broken_batches.py` the run.

    python examples/adaptive.py --save adaptive.png

References: Seetharaman et al., AutoClip, 2020 (arXiv 2007.14469). Kumar et al., ZClip,
2025 (arXiv 2504.02507). Wang et al., AdaGC, 2025 (arXiv 2502.11034). OLMo 2, 2025
(arXiv 2501.00656).
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optax
from _shared import File, Look, annotate, draw_both, run
from broken_batches import Log, is_broken, train_all

import optaxclip


class Drawn(NamedTuple):
    """What a panel says about a run."""

    prefix: str  # of the names of its metrics
    verb: str  # what happened to a step over the limit
    limit_text: str


# The limit of skip_step is a staircase: the mean of the last 128 norms plus six
# deviations. A broken norm raises both, until it has left the window.
DRAWN = {
    "autoclip": Drawn(
        prefix="clip/step",
        verb="clipped",
        limit_text="limit: below nearly all norms,\nlike a smaller learning rate",
    ),
    "zclip": Drawn(
        prefix="clip/step",
        verb="clipped",
        limit_text="limit: just above the usual norms",
    ),
    "skip_step": Drawn(
        prefix="skip/step",
        verb="skipped",
        limit_text="limit: far above. Each spike\nraises it for 128 steps",
    ),
}


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
    logs = train_all(protections, steps, runs=1)
    if save is not None:
        draw_logs = partial(draw, logs=logs)
        draw_both(save, panels=len(DRAWN), draw=draw_logs, height=5)
    return logs


def draw(panels: Any, look: Look, logs: dict[str, Log]) -> None:
    """Norm and limit of a run, and which steps it clipped or left out."""
    norms = [logs[name]["record/all/norm"][0] for name in DRAWN]
    lowest = 0.8 * np.min(norms)
    highest = 12 * np.max(norms)
    broken = is_broken(len(norms[0]))
    for panel, norm, (name, drawn) in zip(panels, norms, DRAWN.items()):
        limit = logs[name][f"{drawn.prefix}/limit"][0]
        is_over = logs[name][f"{drawn.prefix}/{drawn.verb}"][0] == 1
        (steps,) = np.nonzero(is_over)
        panel.plot(norm, color=look.grey, linewidth=1, label="gradient norm")
        panel.plot(limit, color=look.blue, linewidth=2.5, label="limit")
        # Large dots of nearly every step would hide the norm.
        size = 2 if is_over.mean() > 0.5 else 6
        panel.plot(steps, norm[steps], ".", color=look.orange, markersize=size)
        panel.plot([], [], ".", color=look.orange, label="clipped or skipped step")
        panel.set_title(name, weight="bold")
        panel.set(xlabel="step", yscale="log", ylim=(lowest, highest))
        counts_text = (
            f"{drawn.verb}: {is_over[broken].sum()} of {broken.sum()} broken batches,\n"
            f"{is_over[~broken].sum()} of {(~broken).sum()} healthy ones"
        )
        annotate(panel, counts_text, place=(0.97, 0.98), colour=look.orange)
        annotate(panel, drawn.limit_text, place=(0.97, 0.80), colour=look.blue)
    first, *_ = panels
    first.set_ylabel("gradient norm")
    figure = first.figure
    figure.suptitle(
        f"The spikes are {broken.sum()} broken batches of {len(broken)}. "
        "A limit between usual norms and spikes clips only spikes."
    )
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


if __name__ == "__main__":
    run(main)
