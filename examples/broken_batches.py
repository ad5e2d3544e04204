"""Trains a recurrent network on text with ten broken batches, unprotected, clipped and
with the broken steps skipped.

What it shows. Every eightieth batch from step 200 on is broken: each of its windows is
one character, over and over. Its gradient is many times as long as usual and useless
for everything else. Without protection training fails. With one line of protection a
run ends where the same run ends on clean batches. Five runs, from different first
weights, have the same learning rate and batches. Once, drawn in grey, no batch is
broken.

Where a run without protection ends is chance: if the first weights differ by 1e-7, as
by the rounding of another CPU, it may end at 3 in place of 30. With protection the end
hardly moves.

What it does not show. Which protection is best: `adaptive.py` has more. Nor that every
run needs one: the optimizer is SGD with momentum, and at half the learning rate
(--lr 0.1) broken batches do little harm. With Adam at 0.003 they do little harm too.

What it prints. A line for each protection, with the lowest and the highest final loss.
--save PATH draws a picture, and one for dark pages with "_dark" in its name. --table
PATH writes the losses as JSON.

From `_shared.py` come text, drawing and command line, and from `char_rnn.py` the
network.

    python examples/broken_batches.py --save broken_batches.png
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import char_rnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import File, Look, annotate, draw_both, read_text, run
from jax import Array

import optaxclip

SEED = 0
RUNS = 5  # from different first weights, on the same batches
BATCH = 16
LENGTH = 32  # characters of a window that the network predicts
FIRST = 200  # the first broken batch
EVERY = 80  # steps from one broken batch to the next
CLEAN = "(clean batches)"
AVERAGED = 50  # clean batches, whose mean loss is drawn and printed
# skip_step has no panel: its curve would be the curve of the clip.
TITLES = {
    "none": "SGD with momentum, rate {lr}, no clip",
    "global norm": "the same with clip_by_global_norm(1.0)",
}
TICKS = 1, 2, 5, 10, 20, 50  # of the loss, without protection up to 80

Optimizer = optax.GradientTransformation
Log = dict[str, Any]  # "loss" and all metrics, each float[runs, steps]


def main(
    steps: int = 1000, lr: float = 0.2, save: File = None, table: File = None
) -> dict[str, Log]:
    """Trains under each protection. Returns the log of each."""
    sgd = optax.sgd(lr, momentum=0.9)
    clipper = optaxclip.clip_by_global_norm(1.0)
    protections = {
        CLEAN: sgd,
        "none": sgd,
        "global norm": optax.chain(clipper, sgd),
        "skip_step": optaxclip.skip_step(sgd),
    }
    logs = train_all(protections, steps, RUNS)
    if save is not None:
        draw_logs = partial(draw, logs=logs, lr=lr)
        draw_both(save, panels=2, draw=draw_logs)
    if table is not None:
        rows = []
        for name, log in logs.items():
            losses = final(log)
            lowest, highest = float(losses.min()), float(losses.max())
            rows.append({"protection": name, "lowest": lowest, "highest": highest})
        text = json.dumps(rows, indent=1)
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(text + "\n")
    return logs


def train_all(
    protections: Mapping[str, Optimizer], steps: int, runs: int
) -> dict[str, Log]:
    """Runs that meet the same batches, but for those named CLEAN."""
    logs = {}
    print("protection       final losses  steps clipped  skipped")
    for name, optimizer in protections.items():
        broken = is_broken(steps)
        if name == CLEAN:
            broken = np.zeros_like(broken)
        log = train(optimizer, broken, runs)
        # `adagc` has a flag for each tensor.
        prefix = "clip/step/clipped/"
        keys = [key for key in log if key.startswith(prefix)]
        flags = [log[key] for key in keys]
        any_flag = np.any(flags, axis=0)
        clipped = np.mean(log.get("clip/step/clipped", any_flag))
        skipped = np.mean(log.get("skip/step/skipped", 0.0))
        print(
            f"{name:15}  {shown(final(log)):>12}  {clipped:13.1%}  {skipped:7.1%}",
            flush=True,
        )
        logs[name] = log
    return logs


def is_broken(steps: int) -> np.ndarray:
    """bool[steps]"""
    broken = np.zeros(steps, bool)
    broken[FIRST::EVERY] = True
    return broken


def final(log: Log) -> np.ndarray:
    """float[runs]: the mean loss of the last clean batches of each run."""
    losses = log["loss"]
    clean_losses = losses[:, ~is_broken(losses.shape[1])]
    return clean_losses[:, -AVERAGED:].mean(axis=1)


def shown(losses: np.ndarray) -> str:
    """The lowest and the highest, or one number if they are equal."""
    texts = dict.fromkeys(f"{loss:.2f}" for loss in (losses.min(), losses.max()))
    return " to ".join(texts)


def train(optimizer: Optimizer, broken: np.ndarray, runs: int) -> Log:
    """All runs at once, as one compiled scan, which returns the log of all steps."""
    text = read_text()
    random = np.random.default_rng(SEED + 1)
    size = len(broken), BATCH, 1
    start_count = len(text.training) - LENGTH
    starts = random.integers(start_count, size=size)
    characters = len(text.alphabet)
    repeated_characters = random.integers(characters, size=size)
    chain = optax.named_chain(
        # Clips nothing. It records the norm, also where a step is skipped.
        ("all", optaxclip.record_norm()),
        ("step", optimizer),
    )
    loss_and_grads = jax.value_and_grad(char_rnn.mean_loss)

    def step(trained: Any, batch: Any) -> tuple[Any, dict[str, Array]]:
        network, state = trained
        start, repeated_character, is_replaced = batch
        places = start + jnp.arange(LENGTH + 1)
        windows = text.training[places]
        windows = jnp.where(is_replaced, repeated_character, windows)
        loss, grads = loss_and_grads(network, windows)
        updates, state = chain.update(grads, state, network, value=loss)
        network = optax.apply_updates(network, updates)
        log = {"loss": loss, **optaxclip.metrics(state)}
        return (network, state), log

    batches = starts, repeated_characters, broken

    def log_of(network: char_rnn.Network) -> dict[str, Array]:
        start = network, chain.init(network)
        _, log = jax.lax.scan(step, start, batches)
        return log

    networks = [char_rnn.new_network(characters, SEED + run) for run in range(runs)]
    stacked = jax.tree.map(lambda *weights: jnp.stack(weights), *networks)
    log = jax.jit(jax.vmap(log_of))(stacked)
    return jax.device_get(log)


def draw(panels: Any, look: Look, logs: dict[str, Log], lr: float) -> None:
    """One panel without protection, and one with the clip."""
    broken = is_broken(logs[CLEAN]["loss"].shape[1])
    (clean_steps,) = np.nonzero(~broken)
    (broken_steps,) = np.nonzero(broken)
    averaged = min(AVERAGED, len(clean_steps))
    window = np.full(averaged, 1 / averaged)
    last_steps = clean_steps[averaged - 1 :]  # of each window

    def plot(panel: Any, name: str, **style: Any) -> None:
        for losses in logs[name]["loss"][:, clean_steps]:
            panel.plot(last_steps, np.convolve(losses, window, "valid"), **style)

    colours = look.orange, look.blue
    for panel, name, colour in zip(panels, TITLES, colours):
        plot(panel, CLEAN, color=look.grey, linewidth=4)
        plot(panel, name, color=colour, linewidth=1.5)
        heights = np.full(len(broken_steps), 1.15)
        panel.plot(broken_steps, heights, "^", c=colour)
        title = TITLES[name].format(lr=lr)
        panel.set_title(title, color=colour, weight="bold")
        panel.set(xlabel="step", yscale="log", ylim=(1.0, 160))
        panel.set_yticks(TICKS, map(str, TICKS))
        panel.set_yticks([], minor=True)
        loss_text = f"five runs end at {shown(final(logs[name]))}"
        annotate(panel, loss_text, place=(0.97, 0.95), colour=colour)
        clean_text = f"grey: no broken batches, {shown(final(logs[CLEAN]))}"
        annotate(panel, clean_text, place=(0.97, 0.86), colour=look.grey)
    unprotected = panels[0]
    unprotected.set_ylabel(f"mean loss of {averaged} clean batches")
    annotate(unprotected, "▲ broken batch", place=(0.37, 0.95), colour=look.orange)


if __name__ == "__main__":
    run(main, table="write the final losses as JSON")
