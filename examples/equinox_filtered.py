"""Trains an equinox model, whose leaves are not all weights, under a limit for each
tensor that learns, and shows that only weights are clipped and reported.

What it shows. An equinox module is a tree, and functions, whole numbers and Python
floats may be leaves of it. Here they are an activation function, how often a layer is
repeated, and a factor. `eqx.filter_value_and_grad` gives None in their places, and None
is passed over: it has no norm, no state and no name in the metrics. What remains to be
written is equinox's usual filter where the optimizer starts,

    optimizer.init(eqx.filter(model, eqx.is_inexact_array))

without which the activation function raises a TypeError there, as it does in optax's
own transformations.

The clipper is `adagc`. For the first hundred steps the limit is one for all weights
together. Then each tensor gets its own: 1.5 times the running average of its clipped
norm. The paper has 1.05. Norms of batches as small as these differ more.

What it prints. For each tenth of the run the mean loss. Then for each weight, named as
in the model, norm and limit at the last step, and the share of steps that were clipped.

    python examples/equinox_filtered.py --steps 400

Reference: Wang et al., AdaGC, 2025 (arXiv 2502.11034).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from _shared import cross_entropy, packages, read_text, run

import optaxclip

with packages():
    import equinox as eqx

BATCH, CONTEXT, FEATURES, WIDTH = 128, 12, 16, 128


class Network(eqx.Module):
    """Embeddings of the last characters, one after the other, through a perceptron with
    a repeated residual layer.
    """

    embedding: jax.Array  # float32[characters, FEATURES]
    widen: eqx.nn.Linear
    repeated: eqx.nn.Linear
    readout: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]  # no weight, as the two below
    times: int  # how often the repeated layer is used
    factor: float  # of what the repeated layer adds

    def __init__(self, characters: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.embedding = jax.random.normal(keys[0], (characters, FEATURES))
        self.widen = eqx.nn.Linear(CONTEXT * FEATURES, WIDTH, key=keys[1])
        self.repeated = eqx.nn.Linear(WIDTH, WIDTH, key=keys[2])
        self.readout = eqx.nn.Linear(WIDTH, characters, key=keys[3])
        self.activation, self.times, self.factor = jax.nn.gelu, 2, 0.5

    def __call__(self, context: jax.Array) -> jax.Array:
        """Logits of the character after int[CONTEXT]."""
        hidden = self.activation(self.widen(self.embedding[context].ravel()))
        for _ in range(self.times):
            hidden = hidden + self.factor * self.activation(self.repeated(hidden))
        return self.readout(hidden)


class Result(NamedTuple):
    """What happened."""

    losses: np.ndarray  # float32[steps]: in nats per character, before the step
    report: dict[str, jax.Array]  # the metrics of the last step
    network: Network  # trained


def main(steps: int = 400) -> Result:
    """Trains and prints what it finds."""
    text, random, losses, report = read_text(), np.random.default_rng(0), [], {}
    characters = np.asarray(text.training)
    network = Network(len(text.alphabet), jax.random.key(0))
    optimizer = optax.chain(optaxclip.adagc(1.5, warmup=100), optax.adam(3e-3))
    state = optimizer.init(eqx.filter(network, eqx.is_inexact_array))
    for _ in range(steps):
        starts = random.integers(len(characters) - CONTEXT, size=(BATCH, 1))
        windows = characters[starts + np.arange(CONTEXT + 1)]
        network, state, loss, report = train_step(network, state, windows, optimizer)
        losses.append(float(loss))
        if len(losses) % max(1, steps // 10) == 0:
            print(f"step {len(losses):4}  mean loss {np.mean(losses[-40:]):.4f}")
    print("\nweight               norm   limit  steps clipped")
    start = "clip/norm_before/"
    for name in (key.removeprefix(start) for key in report if key.startswith(start)):
        norm, limit, share = (
            report[f"clip/{number}/{name}"]
            for number in ("norm_before", "limit", "clipped_share")
        )
        print(f"{name:16}  {norm:7.4f} {limit:7.4f}  {share:13.1%}")
    return Result(np.array(losses), report, network)


def mean_loss(network: Network, windows: jax.Array) -> jax.Array:
    """Of the last character of each window."""
    return cross_entropy(jax.vmap(network)(windows[:, :-1]), windows[:, -1])


@eqx.filter_jit
def train_step(
    network: Network, state: Any, windows: Any, optimizer: Any
) -> tuple[Network, Any, jax.Array, dict[str, jax.Array]]:
    """One step. What is not an array is a constant of the compiled program."""
    loss, gradient = eqx.filter_value_and_grad(mean_loss)(network, windows)
    weights = eqx.filter(network, eqx.is_inexact_array)
    updates, state = optimizer.update(gradient, state, weights)
    return eqx.apply_updates(network, updates), state, loss, optaxclip.metrics(state)


if __name__ == "__main__":
    run(main)
