"""Trains a recurrent network on text with ten broken batches, unprotected, clipped and
with the broken steps skipped.

What it shows. Every eightieth batch from step 200 on is broken: each of its windows is
one character, over and over. Its gradient is many times as long as usual and useless
for everything else. Without protection training fails. With one line of protection the
run ends where the same run ends on clean batches. Four runs have the same seed and
learning rate: three meet the broken batches and one, drawn in grey, does not.

What it does not show. Which protection is best: `adaptive.py` has more. Nor that every
run needs one: the optimizer is SGD with momentum, and at half the learning rate
(--lr 0.1) broken batches do little harm. With Adam at 0.003 they do little harm too.

What it prints. A line for each run as it ends. --save PATH draws a picture, and one for
dark pages with "_dark" in its name. --table PATH writes the losses as JSON.

    python examples/broken_batches.py --save broken_batches.png
"""

import json
from typing import Any

import char_rnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import File, Look, draw_both, read_text, run, write

import optaxclip

SEED, BATCH, LENGTH, FIRST, EVERY = 0, 16, 32, 200, 80
CLEAN = "(clean batches)"
AVERAGED = 50  # clean batches, whose mean loss is drawn and printed
# skip_step has no panel: its curve would be the curve of the clip.
TITLES = {
    "none": "SGD with momentum, rate {lr}, no clip",
    "global norm": "the same with clip_by_global_norm(1.0)",
}

TICKS = 1, 2, 5, 10, 20, 50  # of the loss, without protection up to 45

Log = dict[str, Any]  # "loss" and all metrics, each with a number for each step


def main(
    steps: int = 1000, lr: float = 0.2, save: File = None, table: File = None
) -> dict[str, Log]:
    """Trains the four networks. Returns the log of each."""
    sgd = optax.sgd(lr, momentum=0.9)
    clipped = optax.chain(optaxclip.clip_by_global_norm(1.0), sgd)
    protections = {CLEAN: sgd, "none": sgd, "global norm": clipped}
    protections["skip_step"] = optaxclip.skip_step(sgd)
    runs = train_all(protections, steps)
    if save is not None:
        draw_both(save, 2, lambda panels, look: draw(panels, look, runs, lr))
    if table is not None:
        rows = [{"run": name, "final_loss": final(log)} for name, log in runs.items()]
        table.write_text(json.dumps(rows, indent=1) + "\n")
    return runs


def train_all(protections: dict[str, Any], steps: int) -> dict[str, Log]:
    """Runs that meet the same batches, but for the one named CLEAN."""
    runs = {}
    print("protection       final loss  steps clipped  skipped")
    for name, optimizer in protections.items():
        log = train(optimizer, is_broken(steps) & (name != CLEAN))
        # `adagc` has a flag for each tensor.
        flags = [log[key] for key in log if key.startswith("clip/step/clipped/")]
        clipped = np.mean(log.get("clip/step/clipped", np.any(flags, axis=0)))
        skipped = np.mean(log.get("skip/step/skipped", 0.0))
        shares = f"{clipped:13.1%}  {skipped:7.1%}"
        print(f"{name:15}  {final(log):10.4g}  {shares}", flush=True)
        runs[name] = log
    return runs


def is_broken(steps: int) -> np.ndarray:
    """bool[steps]"""
    return np.isin(np.arange(steps), np.arange(FIRST, steps, EVERY))


def final(log: Log) -> float:
    """The mean loss of the last clean batches."""
    return float(log["loss"][~is_broken(len(log["loss"]))][-AVERAGED:].mean())


def train(optimizer: Any, broken: np.ndarray) -> Log:
    """One run, as one compiled scan, which returns the log of all steps at once."""
    # The first part clips nothing. It records the norm, also where a step is skipped.
    optimizer = optax.named_chain(("all", optaxclip.record_norm()), ("step", optimizer))
    text, random = read_text(), np.random.default_rng(SEED + 1)
    size = len(broken), BATCH, 1
    starts = random.integers(len(text.training) - LENGTH, size=size)
    stuck = random.integers(len(text.alphabet), size=size)

    def step(trained: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        (network, state), (start, character, is_stuck) = trained, batch
        windows = text.training[start + jnp.arange(LENGTH + 1)]
        windows = jnp.where(is_stuck, character, windows)
        loss, grads = jax.value_and_grad(char_rnn.mean_loss)(network, windows)
        updates, state = optimizer.update(grads, state, network, value=loss)
        log = {"loss": loss, **optaxclip.metrics(state)}
        return (optax.apply_updates(network, updates), state), log

    network = char_rnn.new_network(len(text.alphabet))
    batches = starts, stuck, broken
    scan = jax.jit(lambda trained: jax.lax.scan(step, trained, batches))
    return jax.device_get(scan((network, optimizer.init(network)))[1])


def draw(panels: Any, look: Look, runs: dict[str, Log], lr: float) -> None:
    """One panel without protection, and one with the clip."""
    broken = is_broken(len(runs[CLEAN]["loss"]))
    (steps,), (marks,) = np.nonzero(~broken), np.nonzero(broken)
    window = np.full(AVERAGED, 1 / AVERAGED)
    means = {
        name: np.convolve(log["loss"][steps], window, "valid")
        for name, log in runs.items()
    }
    ends = steps[AVERAGED - 1 :]
    for axis, name, colour in zip(panels, TITLES, (look.orange, look.blue)):
        axis.plot(ends, means[CLEAN], color=look.grey, linewidth=4)
        axis.plot(ends, means[name], color=colour, linewidth=2)
        axis.plot(marks, np.full(len(marks), 1.15), "^", c=colour)
        axis.set_title(TITLES[name].format(lr=lr), color=colour, weight="bold")
        axis.set(xlabel="step", yscale="log", ylim=(1.0, 120))
        axis.set_yticks(TICKS, map(str, TICKS))
        axis.set_yticks([], minor=True)
        write(axis, f"final loss {final(runs[name]):.2f}", (0.97, 0.93), colour)
    panels[0].set_ylabel(f"mean loss of {AVERAGED} clean batches")
    grey = f"grey: no broken batches, {final(runs[CLEAN]):.2f}"
    write(panels[1], grey, (0.97, 0.83), look.grey)
    write(panels[0], "▲ broken batch", (0.37, 0.93), look.orange)


if __name__ == "__main__":
    run(main, table="write the final losses as JSON")
