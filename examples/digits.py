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

    python examples/digits.py --save digits.png

Reference: Brock et al., NFNets, 2021 (arXiv 2102.06171).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import File, Look, cross_entropy, draw_both, read_digits, run, write

import optaxclip

WIDTH, BLOCKS, HELD_OUT, SEEDS = 64, 8, 500, 2
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


def main(steps: int = 200, save: File = None) -> dict[str, np.ndarray]:
    """Trains all networks. Returns accuracies: float[rates, seeds] for each method."""
    training, held_out = read_digits(HELD_OUT)
    chosen = np.random.default_rng(0).integers(len(training.labels), size=(steps, 128))
    batches = training.images[chosen], training.labels[chosen]

    @jax.jit
    def accuracy(network: Network, clipping: Any, max_norm: Any, rate: Any) -> Any:
        optimizer = new_optimizer(clipping, max_norm, rate)
        trained = train(optimizer, network, batches)
        return jnp.mean(predict(trained, held_out.images).argmax(-1) == held_out.labels)

    networks, accuracies = [new_network(seed) for seed in range(SEEDS)], {}
    for method, limits in METHODS.items():
        accuracies[method] = np.zeros((len(RATES), SEEDS), np.float32)
        for row, rate in zip(accuracies[method], RATES):
            row[:] = [accuracy(network, *limits, rate) for network in networks]
            print(f"{method:24}  rate {rate:<5}  accuracies {row.round(3)}", flush=True)
    if save is not None:
        draw_both(save, 3, lambda panels, look: draw(panels, look, accuracies))
    return accuracies


def new_optimizer(clipping: Any, max_norm: Any, rate: Any) -> Any:
    """AGC on all but the last layer, the global norm on everything."""
    # The blocks are stacked for a scan. Without `stacked` they count as one matrix.
    agc = optaxclip.adaptive_grad_clip(
        clipping, stacked=lambda path, leaf: int(path.startswith("blocks"))
    )
    return optax.chain(
        optax.masked(agc, {"stem": True, "blocks": True, "head": False}),
        optaxclip.clip_by_global_norm(max_norm),
        optax.sgd(rate, momentum=0.9, nesterov=True),
    )


def train(optimizer: Any, network: Network, batches: Any) -> Network:
    """One run, as a scan."""

    def loss(network: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(predict(network, images), labels)

    def step(trained: Any, batch: Any) -> tuple[Any, None]:
        network, state = trained
        grads = jax.grad(loss)(network, *batch)
        updates, state = optimizer.update(grads, state, network)
        return (optax.apply_updates(network, updates), state), None

    return jax.lax.scan(step, (network, optimizer.init(network)), batches)[0][0]


def new_network(seed: int) -> Network:
    """Weights of variance 1 / (number of inputs)."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    blocks = normal(BLOCKS, WIDTH, WIDTH), normal(BLOCKS, WIDTH, WIDTH)
    return {"stem": normal(64, WIDTH), "blocks": blocks, "head": normal(WIDTH, 10)}


def predict(network: Network, images: Any) -> jax.Array:
    """Logits: a linear layer, residual blocks, another linear layer."""

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(x @ weights[0]) @ weights[1], None

    x, _ = jax.lax.scan(block, images @ network["stem"], network["blocks"])
    return x @ network["head"]


def draw(panels: Any, look: Look, accuracies: dict[str, np.ndarray]) -> None:
    """A panel for each method, and in it a line for each seed."""
    colours = look.orange, look.blue, look.green
    for axis, method, colour in zip(panels, accuracies, colours):
        axis.axhline(CHANCE, color=look.grey, linestyle="--")
        axis.plot(RATES, accuracies[method], "o-", color=colour, linewidth=2)
        title = "no clip" if method == "none" else method
        axis.set_title(title, color=colour, weight="bold", fontsize=14)
        axis.set(xlabel="learning rate", xscale="log", ylim=(0, 1))
        axis.set_xticks(RATES, [f"{rate:g}".lstrip("0") for rate in RATES])
        axis.minorticks_off()
    panels[0].set_ylabel("test accuracy")
    write(panels[0], "two seeds,\na line for each", (0.97, 0.5), look.grey)
    write(panels[1], "guessing", (0.97, 0.19), look.grey)


if __name__ == "__main__":
    run(main)
