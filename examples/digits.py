"""Classifies handwritten digits with a residual network that has no normalisation:
without clipping, with AGC, and clipped by the global norm.

What it shows. Adaptive gradient clipping was made for networks without normalisation,
to let them train at large learning rates. This is a small one: residual blocks of two
matrices, Nesterov's momentum, AGC on all but the last layer (as in the paper). At small
rates all three methods learn. At large ones the runs without clipping end where
guessing does, and with either clip they learn. What clipping widens is the range of
rates, and not the best accuracy.

What it prints. A line for each method and rate: the accuracy on held-out images of two
seeds. --save PATH draws them, and the same for dark pages.

From `_shared.py` come images, loss, drawing and command line.

    python examples/digits.py --save digits.png

Reference: Brock et al., NFNets, 2021 (arXiv 2102.06171).
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import (
    Digits,
    File,
    Look,
    annotate,
    cross_entropy,
    draw_both,
    read_digits,
    run,
)
from jax import Array
from jax.typing import ArrayLike

import optaxclip

WIDTH = 64
BLOCKS = 8
BATCH = 128
HELD_OUT = 500
SEEDS = 2
RATES = 0.005, 0.01, 0.02, 0.04, 0.08, 0.16
CHANCE = 0.1  # the accuracy of guessing one of ten digits
# The clipping of AGC and the limit of the global norm, for each method. An infinite
# limit only measures, so that one compiled program serves all three.
METHODS = {
    "none": (math.inf, math.inf),
    "adaptive_grad_clip(0.01)": (0.01, math.inf),
    "clip_by_global_norm(0.5)": (math.inf, 0.5),
}

Network = dict[str, Any]
Number = float | Array


def main(steps: int = 200, save: File = None) -> dict[str, np.ndarray]:
    """Trains all networks. Returns accuracies: float[rates, seeds] for each method."""
    training, held_out = read_digits(HELD_OUT)
    random = np.random.default_rng(0)
    size = steps, BATCH
    chosen = random.integers(len(training.labels), size=size)
    images = training.images[chosen]
    labels = training.labels[chosen]
    batches = Digits(images, labels)

    @jax.jit
    def accuracy_of(
        network: Network, clipping: Number, max_norm: Number, rate: Number
    ) -> Array:
        optimizer = new_optimizer(clipping, max_norm, rate)
        trained = train(optimizer, network, batches)
        logits = predict(trained, held_out.images)
        guesses = logits.argmax(-1)
        return jnp.mean(guesses == held_out.labels)

    networks = [new_network(seed) for seed in range(SEEDS)]
    accuracies = {}
    for method, (clipping, max_norm) in METHODS.items():
        table = np.zeros((len(RATES), SEEDS), np.float32)
        accuracies[method] = table
        for row, rate in zip(table, RATES):
            for seed, network in enumerate(networks):
                row[seed] = accuracy_of(network, clipping, max_norm, rate)
            print(f"{method:24}  rate {rate:<5}  accuracies {row.round(3)}", flush=True)
    if save is not None:
        draw_accuracies = partial(draw, accuracies=accuracies)
        draw_both(save, panels=3, draw=draw_accuracies)
    return accuracies


def new_optimizer(
    clipping: Number, max_norm: Number, rate: Number
) -> optax.GradientTransformation:
    """AGC on all but the last layer, the global norm on everything."""
    # The blocks are stacked for a scan. Without `stacked` they count as one matrix.
    agc = optaxclip.adaptive_grad_clip(clipping, stacked=stacked_axes)
    mask = {"stem": True, "blocks": True, "head": False}
    return optax.chain(
        optax.masked(agc, mask),
        optaxclip.clip_by_global_norm(max_norm),
        optax.sgd(rate, momentum=0.9, nesterov=True),
    )


def stacked_axes(path: str, leaf: Array) -> int | None:
    return 1 if path.startswith("blocks") else None


def train(
    optimizer: optax.GradientTransformation, network: Network, batches: Digits
) -> Network:
    """One run, as a scan."""

    def mean_loss(network: Network, batch: Digits) -> Array:
        logits = predict(network, batch.images)
        return cross_entropy(logits, batch.labels)

    def step(trained: tuple[Network, Any], batch: Digits) -> Any:
        network, state = trained
        grads = jax.grad(mean_loss)(network, batch)
        updates, state = optimizer.update(grads, state, network)
        network = optax.apply_updates(network, updates)
        return (network, state), None

    start = network, optimizer.init(network)
    (network, _), _ = jax.lax.scan(step, start, batches)
    return network


def new_network(seed: int) -> Network:
    """Weights of variance 1 / (number of inputs)."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        inputs = shape[-2]
        weights = random.normal(size=shape) / inputs**0.5
        return jnp.asarray(weights, jnp.float32)

    first = normal(BLOCKS, WIDTH, WIDTH)
    second = normal(BLOCKS, WIDTH, WIDTH)
    return {
        "stem": normal(64, WIDTH),
        "blocks": (first, second),
        "head": normal(WIDTH, 10),
    }


def predict(network: Network, images: ArrayLike) -> Array:
    """Logits: a linear layer, residual blocks, another linear layer."""

    def block(x: Array, weights: tuple[Array, Array]) -> Any:
        first, second = weights
        hidden = jax.nn.relu(x @ first)
        return x + hidden @ second, None

    x = images @ network["stem"]
    x, _ = jax.lax.scan(block, x, network["blocks"])
    return x @ network["head"]


def draw(panels: Any, look: Look, accuracies: dict[str, np.ndarray]) -> None:
    """A panel for each method, and in it a line for each seed."""
    colours = look.orange, look.blue, look.green
    rate_texts = [f"{rate:g}".lstrip("0") for rate in RATES]
    for panel, method, colour in zip(panels, accuracies, colours):
        panel.axhline(CHANCE, color=look.grey, linestyle="--")
        annotate(panel, "guessing", place=(0.25, 0.19), colour=look.grey)
        table = accuracies[method]
        panel.plot(RATES, table, "o-", color=colour, linewidth=2)
        title = "no clip" if method == "none" else method
        panel.set_title(title, color=colour, weight="bold", fontsize=14)
        panel.set(xlabel="learning rate", xscale="log", ylim=(0, 1))
        panel.set_xticks(RATES, rate_texts)
        panel.minorticks_off()
    without_clip, *_ = panels
    without_clip.set_ylabel("test accuracy")
    without_clip.figure.suptitle(
        "Handwritten digits: residual network without normalisation, "
        "SGD with Nesterov's momentum"
    )
    seeds_text = "two seeds,\na line for each"
    annotate(without_clip, seeds_text, place=(0.97, 0.5), colour=look.grey)


if __name__ == "__main__":
    run(main)
