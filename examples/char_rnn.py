"""Trains the model that gradient clipping was invented for, a plain (Elman, tanh)
recurrent network, with and without clipping.

What it shows. The network reads the English prose of Python's own help pages, one
character at a time. Back through 64 characters a gradient is a product of 64 Jacobians,
so that a step a little too long makes the next gradient much longer, and soon the
weights are where nothing can be learned. The same network is trained from the same seed
on the same batches without clipping, clipped by value, by the norm of each tensor and
by the norm of everything. The first of the four blows up within ten steps and the
others learn. The limits are tight, so that nearly every step is clipped. At a lower
rate (--lr 0.3) all four learn.

What it prints. A line for each run, as soon as it is done.

    python examples/char_rnn.py --steps 250

Reference: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural
networks, 2013 (arXiv 1211.5063).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import Text, cross_entropy, read_text, run

import optaxclip

SEED, HIDDEN, BATCH, LENGTH = 0, 128, 32, 64
CLIPPERS = {
    "none": optax.identity(),
    "value": optaxclip.clip_by_value(0.003),
    "tensor norm": optaxclip.clip_by_tensor_norm(0.15),
    "global norm": optaxclip.clip_by_global_norm(0.3),
}

Network = dict[str, jax.Array]


def main(steps: int = 250, lr: float = 0.8) -> dict[str, dict[str, np.ndarray]]:
    """Trains the four networks. Returns the loss and the norms of every step, by
    clipping.
    """
    text, runs = read_text(), {}
    print("clipping     final loss  validation  largest norm  steps clipped")
    for clipping, clipper in CLIPPERS.items():
        # If the norms before and after differ, the clipper did something.
        optimizer = optax.named_chain(
            ("before", optaxclip.record_norm()),
            ("clipper", clipper),
            ("after", optaxclip.record_norm()),
            ("momentum", optax.sgd(lr, momentum=0.9)),
        )
        network, log = train(optimizer, text, steps)
        validation = jax.jit(mean_loss)(network, text.validation)
        clipped = np.mean(log["after"] < log["before"])
        print(
            f"{clipping:11}  {log['loss'][-20:].mean():10.4g}  {validation:10.4g}  "
            f"{log['before'].max():12.4g}  {clipped:13.0%}",
            flush=True,
        )
        runs[clipping] = log
    return runs


def new_network(characters: int) -> Network:
    """The first weights. An orthogonal recurrence neither stretches nor shrinks a
    vector: training makes the gradients grow.
    """
    random = np.random.default_rng(SEED)
    weights = {
        "embedding": 0.5 * random.normal(size=(characters, HIDDEN)),
        "recurrence": np.linalg.qr(random.normal(size=(HIDDEN, HIDDEN))).Q,
        "bias": np.zeros(HIDDEN),
        "readout": 0.5 / math.sqrt(HIDDEN) * random.normal(size=(HIDDEN, characters)),
        "readout_bias": np.zeros(characters),
    }
    return {name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()}


def read_character(
    network: Network, hidden: jax.Array, character: jax.Array
) -> jax.Array:
    """One step through time: h = tanh(E[c] + h W + b)."""
    carried = hidden @ network["recurrence"] + network["bias"]
    return jnp.tanh(network["embedding"][character] + carried)


def predict(network: Network, hidden: jax.Array) -> jax.Array:
    return hidden @ network["readout"] + network["readout_bias"]


def mean_loss(network: Network, windows: jax.Array) -> jax.Array:
    """Of every character of int[batch, time] but the first, given those before it."""

    def step(hidden: jax.Array, character: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = read_character(network, hidden, character)
        return hidden, hidden

    _, hidden = jax.lax.scan(step, jnp.zeros((len(windows), HIDDEN)), windows[:, :-1].T)
    return cross_entropy(predict(network, hidden), windows[:, 1:].T)


def train(optimizer: Any, text: Text, steps: int) -> tuple[Network, Any]:
    """One run from the common seed, as one compiled scan."""

    def step(trained: Any, starts: jax.Array) -> Any:
        network, state = trained
        windows = text.training[starts + jnp.arange(LENGTH + 1)]
        loss, gradient = jax.value_and_grad(mean_loss)(network, windows)
        updates, state = optimizer.update(gradient, state, network)
        report = optaxclip.metrics(state)
        log = {name: report[f"record/{name}/norm"] for name in ("before", "after")}
        return (optax.apply_updates(network, updates), state), {"loss": loss} | log

    network, random = new_network(len(text.alphabet)), np.random.default_rng(SEED + 1)
    last = len(text.training) - LENGTH
    starts: Any = random.integers(last, size=(steps, BATCH, 1))
    scan = jax.jit(lambda trained: jax.lax.scan(step, trained, starts))
    (network, _), log = scan((network, optimizer.init(network)))
    return network, jax.device_get(log)


if __name__ == "__main__":
    run(main)
