"""Trains a recurrent network on text with a few broken batches in it, without
protection and under clippers that learn their limit, and compares.

What it shows. The network of `char_rnn.py` reads the same prose, but at every eightieth
step from the two hundredth on the batch is broken: each of its windows is one character
of the alphabet, over and over. Repeated sequences are one source that OLMo 2 found for
its predecessor's spikes. The gradient of such a batch is many times as long as usual,
in a direction that is wrong for everything else. Seven runs meet these batches, from
the same seed and at the same learning rate. The eighth never does.

    none           broken batches set the run back, and from one of them it does not
                   return
    global norm    a fixed limit, just above the usual norm
    autoclip       the 10th percentile of the norms so far: clips nearly all steps
    zclip          clips norms more than 2.5 deviations above the running mean
    adagc          each tensor against its own average, from step 100 on. Its limit is
                   drawn as the norm of the tensors' limits
    skip_spikes    leaves out the steps that ZClip would clip. That limit is tight for
                   skipping: good steps are left out too. z_score(4.0) leaves out fewer
    skip_step      leaves out steps six deviations above the last 128, of norm or loss,
                   as OLMo does

What it does not show. Which protection is best: all end near the run without broken
batches. AutoClip and AdaGC also clip good steps, which acts like a smaller learning
rate. At half the learning rate (--lr 0.1) broken batches do little harm to any run.
With twice as many (--every 40) skip_step may let some through, since the norms that it
skipped are in its window too, and raise the limit for what comes next.

The spike score is that of OLMo 2: the share of values at least seven standard
deviations away from a rolling mean, here of the 128 values before (1000 in the paper).
It is given twice. Over all steps it counts the broken batches themselves, which no
optimizer can make disappear, and it is low for a run so unsteady that nothing stands
out any more. Over the clean steps alone it tells what a broken batch left behind.

How long it takes. About a minute on two CPU cores, compilation included.

What it prints. A line for each run as it ends, then the table. --save PATH draws
norm and limit at every step, and the same for dark pages. --log PATH writes the norms
of the last run in the table as CSV for `python -m optaxclip.replay`: under skip_step
those of a healthy run in which nothing was clipped.

    python examples/adaptive.py --seed 1 --log run.csv && python -m optaxclip.replay
    run.csv

Reference: OLMo 2, 2025 (arXiv 2501.00656). The papers of the clippers are named in
their docstrings.
"""

import argparse
import csv
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

if __package__:  # imported from the root of the repository, as the tests do
    from . import char_rnn
    from ._pictures import Look, draw_both, prepare
else:
    import char_rnn
    from _pictures import Look, draw_both, prepare

SEED, BATCH, LENGTH = 0, 16, 32
LEARNING_RATE, MOMENTUM, MAX_NORM = 0.2, 0.9, 1.0
FIRST, EVERY = 200, 80
WINDOW, FAR = 128, 7.0
CLEAN = "(clean batches)"


class Curves(NamedTuple):
    """What was seen at every step of a run."""

    loss: (
        jax.Array | np.ndarray
    )  # float32[steps]: of the batch that came, broken or not, before the step
    norm: (
        jax.Array | np.ndarray
    )  # float32[steps]: global norm of the gradient, before clipping
    # float32[steps]: what it was held against, of several tensors the norm of their
    # limits, inf for none
    limit: jax.Array | np.ndarray
    clipped: (
        jax.Array | np.ndarray
    )  # bool[steps]: whether any part of the gradient was shortened
    skipped: jax.Array | np.ndarray  # bool[steps]: whether the step was left out


class Row(NamedTuple):
    """One line of the table."""

    protection: str
    final_loss: float  # mean over the last 50 clean steps
    validation_loss: float
    loss_spikes: float  # spike score over all steps, in [0, 1]
    norm_spikes: float
    clean_loss_spikes: float  # spike score over the clean steps
    clean_norm_spikes: float
    clip_rate: float
    skipped: int
    broken_skipped: int  # how many of the skipped steps had a broken batch


def main(
    steps: int = 1000,
    *,
    first: int = FIRST,
    every: int = EVERY,
    lr: float = LEARNING_RATE,
    seed: int = SEED,
    only: Sequence[str] = (),
    save: str | Path | None = None,
    log: str | Path | None = None,
) -> list[Row]:
    """Trains the networks, all or only some, prints the table, draws a picture and
    writes a log if they are wanted, and returns the table.
    """
    rows, runs, broken = compare(
        steps, first=first, every=every, lr=lr, seed=seed, only=only
    )
    if save is not None:
        lines = -(-len(runs) // 3)
        draw_both(save, (13, 4 * lines), functools.partial(draw, runs, lines))
        print(f"\nThe picture is in {save}")
    if log is not None:
        write_log(runs[rows[-1].protection], broken, log)
        print(
            f"The norms of {rows[-1].protection} are in {log}: python -m "
            f"optaxclip.replay {log}"
        )
    return rows


def compare(
    steps: int,
    *,
    first: int = FIRST,
    every: int = EVERY,
    lr: float = LEARNING_RATE,
    seed: int = SEED,
    only: Sequence[str] = (),
) -> tuple[list[Row], dict[str, Curves], np.ndarray]:
    """Trains the networks. Returns the table, the curves by protection, and whether
    each step had a broken batch.
    """
    text = char_rnn.read_text()
    broken = np.isin(np.arange(steps), np.arange(first, steps, every))
    random = np.random.default_rng(seed + 1)
    starts, stuck = (
        random.integers(high, size=(steps, BATCH, 1))
        for high in (len(text.training) - LENGTH, len(text.alphabet))
    )
    print(
        f"{steps} steps, {broken.sum()} of them with a broken batch. SGD with "
        f"momentum, learning rate {lr:g}"
    )
    rows, runs = [], {}
    for protection, optimizer in protections(
        optax.sgd(lr, momentum=MOMENTUM), steps
    ).items():
        if only and protection not in only:
            continue
        began = time.perf_counter()
        runs[protection], network = train(
            optimizer, text, (starts, stuck, broken & (protection != CLEAN))
        )
        rows.append(
            summary(
                protection,
                runs[protection],
                broken,
                float(jax.jit(char_rnn.mean_loss)(network, text.validation)),
            )
        )
        print(
            f"{protection:15} validation loss {rows[-1].validation_loss:7.4g}  "
            f"{time.perf_counter() - began:4.1f} s",
            flush=True,
        )
    print_table(rows)
    return rows, runs, broken


def protections(sgd: Any, steps: int) -> dict[str, Any]:
    """The optimizers. All have the defaults of their papers. AutoClip remembers the
    whole run, as its paper does.
    """
    return {
        CLEAN: sgd,
        "none": sgd,
        "global norm": optax.chain(optaxclip.clip_by_global_norm(MAX_NORM), sgd),
        "autoclip": optax.chain(optaxclip.autoclip(window=steps), sgd),
        "zclip": optax.chain(optaxclip.zclip(), sgd),
        "adagc": optax.chain(optaxclip.adagc(), sgd),
        "skip_spikes": optaxclip.skip_spikes(sgd, optaxclip.rules.z_score()),
        "skip_step": optaxclip.skip_step(sgd),
    }


def train(
    optimizer: Any, text: char_rnn.Text, batches: Any
) -> tuple[Curves, dict[str, jax.Array]]:
    """One run from the common seed, as one compiled scan."""
    optimizer = optax.named_chain(("all", optaxclip.record_norm()), ("step", optimizer))

    def step(trained: Any, batch: Any) -> tuple[Any, Curves]:
        network, state = trained
        loss, gradient = jax.value_and_grad(char_rnn.mean_loss)(
            network, read(text.training, *batch)
        )
        updates, state = optimizer.update(gradient, state, network, value=loss)
        return (optax.apply_updates(network, updates), state), what_happened(
            loss, optaxclip.metrics(state)
        )

    network = char_rnn.new_network(len(text.alphabet))
    (network, _), curves = jax.jit(lambda *args: jax.lax.scan(step, *args))(
        (network, optimizer.init(network)), batches
    )
    return jax.tree.map(np.asarray, curves), network


def read(
    text: jax.Array, starts: jax.Array, stuck: jax.Array, broken: jax.Array
) -> jax.Array:
    """A batch of windows of the text. Where it is broken, each has one character, over
    and over.
    """
    return jnp.where(broken, stuck, text[starts + jnp.arange(LENGTH + 1)])


def what_happened(loss: jax.Array, report: dict[str, jax.Array]) -> Curves:
    """The last step, out of the metrics of whatever optimizer it was."""
    limits = [
        value
        for name, value in report.items()
        if name.startswith(("clip/step/limit", "skip/step/limit"))
    ]
    factors = [
        value for name, value in report.items() if name.startswith("clip/step/factor")
    ]
    limit = jnp.linalg.norm(jnp.stack(limits)) if limits else jnp.inf
    skipped = report.get("skip/step/consecutive_count", jnp.zeros(())) > 0
    return Curves(
        loss,
        report["clip/all/norm_before"],
        jnp.float32(limit),
        jnp.any(jnp.array(factors) < 1),
        skipped,
    )


def spike_score(values: jax.Array | np.ndarray) -> float:
    """The share of values at least seven deviations from the mean of the `WINDOW` (half
    of all, if that is fewer) before them. NaN counts.
    """
    window = min(WINDOW, len(values) // 2)
    values = values.astype(np.float64)
    before = np.lib.stride_tricks.sliding_window_view(values, window)[:-1]
    with np.errstate(invalid="ignore"):
        usual = np.abs(values[window:] - before.mean(axis=1)) < FAR * before.std(axis=1)
    return float(np.mean(~usual))


def summary(
    protection: str, curves: Curves, broken: np.ndarray, validation_loss: float
) -> Row:
    return Row(
        protection=protection,
        final_loss=float(curves.loss[~broken][-50:].mean()),
        validation_loss=validation_loss,
        loss_spikes=spike_score(curves.loss),
        norm_spikes=spike_score(curves.norm),
        clean_loss_spikes=spike_score(curves.loss[~broken]),
        clean_norm_spikes=spike_score(curves.norm[~broken]),
        clip_rate=float(curves.clipped.mean()),
        skipped=int(curves.skipped.sum()),
        broken_skipped=int((curves.skipped & broken).sum()),
    )


def print_table(rows: list[Row]) -> None:
    print(
        f"\n{'':15}  {'':10}  {'':10}  {'spike score, %':^14}  {'on clean steps':^14}  "
        f"{'':>7}  {'skipped,':>8}"
    )
    print(
        "protection       final loss  validation    loss    norm    loss    norm  "
        "clipped  (broken)"
    )
    for row in rows:
        scores = "  ".join(f"{score:6.2%}" for score in row[3:7])
        skipped = f"{row.skipped} ({row.broken_skipped})"
        print(
            f"{row.protection:15}  {row.final_loss:10.4g}  "
            f"{row.validation_loss:10.4g}  {scores}  {row.clip_rate:7.1%}  {skipped:>8}"
        )


def draw(runs: dict[str, Curves], lines: int, figure: Any, look: Look) -> None:
    """Norm and limit of each run, and which steps it clipped or left out."""
    panels = figure.subplots(lines, min(len(runs), 3), sharex=True, sharey=True)
    panels = np.ravel(panels)
    for axis, (protection, run) in zip(panels, runs.items()):
        draw_norms(axis, run, look)
        axis.set_title(protection, weight="bold")
        prepare(axis, look, xlabel="step", yscale="log")
        axis.legend(loc="upper right", ncols=2, fontsize="small", frameon=False)
    for axis in panels[len(runs) :]:
        axis.set_visible(False)
    panels[0].set_ylabel("gradient norm")
    # Without protection a norm may go anywhere: the axis suits the others.
    usual = [run.norm for name, run in runs.items() if name != "none"]
    seen = np.concatenate(usual or [run.norm for run in runs.values()])
    panels[0].set_ylim(0.8 * seen.min(), 6 * seen.max())


def draw_norms(axis: Any, run: Curves, look: Look) -> None:
    """One run, with a legend for what there is in it."""
    axis.plot(run.norm, color=look.grey, linewidth=1, label="norm")
    if np.isfinite(run.limit).any():
        axis.plot(run.limit, color=look.blue, linewidth=2.5, label="limit")
    marks = {
        "clipped": (run.clipped, {"marker": ".", "markersize": 5}),
        "skipped": (run.skipped, {"marker": "x", "markersize": 7}),
    }
    for word, (chosen, mark) in marks.items():
        if chosen.any():
            steps = np.flatnonzero(chosen)
            label = f"{word} ({chosen.mean():.1%})"
            mark |= {"color": look.orange, "linestyle": "none", "label": label}
            axis.plot(steps, run.norm[steps], **mark)


def average(values: jax.Array | np.ndarray, length: int = 20) -> np.ndarray:
    """The mean of each value and those just before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - length, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def write_log(curves: Curves, broken: np.ndarray, path: str | Path) -> None:
    with Path(path).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "loss", "grad_norm", "broken"])
        table.writerows(
            zip(
                range(len(broken)),
                curves.loss.tolist(),
                curves.norm.tolist(),
                broken.astype(int).tolist(),
            )
        )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(protections(optax.sgd(1.0), 1))
    parser.add_argument(
        "--steps",
        type=char_rnn.count,
        default=1000,
        help="how many steps to train (default: %(default)s)",
    )
    parser.add_argument(
        "--first",
        type=int,
        default=FIRST,
        help="the first step with a broken batch (default: %(default)s)",
    )
    parser.add_argument(
        "--every",
        type=char_rnn.count,
        default=EVERY,
        help="how many steps later the next one comes (default: %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=LEARNING_RATE,
        help="the learning rate (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=SEED,
        help="the seed of the batches (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        choices=names,
        metavar="PROTECTION",
        help=f"run only these, of {', '.join(names)} (default: all)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="PATH",
        help="draw a picture to this path (default: no picture)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="PATH",
        help="write the norms of the last run in the table as CSV (default: no file)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
