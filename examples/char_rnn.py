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

From `_shared.py` come text, loss and command line.

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
from jax import Array

import optaxclip

SEED = 0
HIDDEN = 128
BATCH = 32
LENGTH = 64  # characters of a window that the network predicts
CLIPPERS = {
    "none": optax.identity(),
    "value": optaxclip.clip_by_value(0.003),
    "tensor norm": optaxclip.clip_by_tensor_norm(0.15),
    "global norm": optaxclip.clip_by_global_norm(0.3),
}

Network = dict[str, Array]
Log = dict[str, np.ndarray]  # "loss", and the norms "before" and "after" the clip


def main(steps: int = 250, lr: float = 0.8) -> dict[str, Log]:
    """Trains the four networks. Returns the log of each."""
    text = read_text()
    logs = {}
    print("clipping     final loss  validation  largest norm  steps clipped")
    for clipping, clipper in CLIPPERS.items():
        optimizer = optax.named_chain(
            ("before", optaxclip.record_norm()),
            ("clipper", clipper),
            ("after", optaxclip.record_norm()),
            ("momentum", optax.sgd(lr, momentum=0.9)),
        )
        network, log = train(optimizer, text, steps)
        validation = jax.jit(mean_loss)(network, text.validation)
        final_loss = log["loss"][-20:].mean()
        largest_norm = log["before"].max()
        # If the norms before and after differ, the clipper did something.
        clipped = np.mean(log["after"] < log["before"])
        print(
            f"{clipping:11}  {final_loss:10.4g}  {validation:10.4g}  "
            f"{largest_norm:12.4g}  {clipped:13.0%}",
            flush=True,
        )
        logs[clipping] = log
    return logs


def new_network(characters: int, seed: int = SEED) -> Network:
    """The first weights. An orthogonal recurrence neither stretches nor shrinks a
    vector: training makes the gradients grow.
    """
    random = np.random.default_rng(seed)
    embedding = random.normal(size=(characters, HIDDEN))
    recurrence = random.normal(size=(HIDDEN, HIDDEN))
    readout = random.normal(size=(HIDDEN, characters))
    weights = {
        "embedding": 0.5 * embedding,
        "recurrence": np.linalg.qr(recurrence).Q,
        "bias": np.zeros(HIDDEN),
        "readout": 0.5 / math.sqrt(HIDDEN) * readout,
        "readout_bias": np.zeros(characters),
    }
    network = {}
    for name, weight in weights.items():
        network[name] = jnp.asarray(weight, jnp.float32)
    return network


def read_character(network: Network, hidden: Array, character: Array) -> Array:
    """One step through time: h = tanh(E[c] + h W + b)."""
    carried = hidden @ network["recurrence"] + network["bias"]
    return jnp.tanh(network["embedding"][character] + carried)


def predict(network: Network, hidden: Array) -> Array:
    return hidden @ network["readout"] + network["readout_bias"]


def mean_loss(network: Network, windows: Array) -> Array:
    """The mean over int[batch, time]: each character but the first, given those before
    it.
    """

    def step(hidden: Array, character: Array) -> tuple[Array, Array]:
        hidden = read_character(network, hidden, character)
        return hidden, hidden

    start = jnp.zeros((len(windows), HIDDEN))
    # Time comes first, as the scan goes along it.
    characters = windows.T
    _, hidden = jax.lax.scan(step, start, characters[:-1])
    logits = predict(network, hidden)
    return cross_entropy(logits, characters[1:])


def train(
    optimizer: optax.GradientTransformation, text: Text, steps: int
) -> tuple[Network, Log]:
    """One run from the common seed, as one compiled scan."""
    loss_and_grads = jax.value_and_grad(mean_loss)

    def step(trained: tuple[Network, Any], start: Array) -> Any:
        network, state = trained
        places = start + jnp.arange(LENGTH + 1)
        windows = text.training[places]
        loss, grads = loss_and_grads(network, windows)
        updates, state = optimizer.update(grads, state, network)
        network = optax.apply_updates(network, updates)
        report = optaxclip.metrics(state)
        log = {
            "loss": loss,
            "before": report["record/before/norm"],
            "after": report["record/after/norm"],
        }
        return (network, state), log

    network = new_network(len(text.alphabet))
    random = np.random.default_rng(SEED + 1)
    start_count = len(text.training) - LENGTH
    starts = random.integers(start_count, size=(steps, BATCH, 1))
    batches = jnp.asarray(starts)
    start = network, optimizer.init(network)
    scan = jax.jit(lambda start: jax.lax.scan(step, start, batches))
    (network, _), log = scan(start)
    return network, jax.device_get(log)


if __name__ == "__main__":
    run(main)
