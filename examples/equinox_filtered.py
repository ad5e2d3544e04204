"""Trains an equinox model, whose leaves are not all weights, under a limit for each
tensor that learns, and shows that only weights are clipped and reported.

What it shows. The network predicts the next character of a Python module. An equinox
module is a tree, and functions, whole numbers and Python floats may be leaves of it.
Here they are an activation function, how often a layer is repeated, and a factor.
`eqx.filter_value_and_grad` gives None in their places, and None is passed over: it has
no norm, no state and no name in the metrics. What remains to be written is equinox's
usual filter where the optimizer starts,

    optimizer.init(eqx.filter(model, eqx.is_inexact_array))

without which the activation function raises a TypeError there, as it does in optax's
own transformations.

The clipper is `adagc`. For the first hundred steps the limit is one for all weights
together. Then each tensor gets its own: 1.5 times the running average of its clipped
norm. The paper has 1.05. Norms of batches as small as these differ more.

What it prints. For each tenth of the run the mean loss. Then for each weight, named as
in the model, norm and limit at the last step, and the share of steps that were clipped.

    pip install equinox
    python examples/equinox_filtered.py --steps 400

Reference: Wang et al., AdaGC, 2025 (arXiv 2502.11034).
"""

import argparse
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import optaxclip

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    error.add_note("Install what this program needs: pip install equinox")
    raise

STEPS = 400
BATCH = 128
CONTEXT = 12  # characters before the one that is predicted
FEATURES = 16
WIDTH = 128


class Network(eqx.Module):
    """Embeddings of the last characters, one after the other, through a perceptron with
    a repeated residual layer.
    """

    embedding: Array  # float32[characters, FEATURES]
    widen: eqx.nn.Linear
    repeated: eqx.nn.Linear
    readout: eqx.nn.Linear
    activation: Callable[[Array], Array]  # no weight, as the two below
    times: int  # how often the repeated layer is used
    factor: float  # of what the repeated layer adds

    def __init__(self, characters: int, key: Array) -> None:
        keys = jax.random.split(key, 4)
        embedding_key, widen_key, repeated_key, readout_key = keys
        linear = eqx.nn.Linear
        shape = characters, FEATURES
        self.embedding = jax.random.normal(embedding_key, shape)
        self.widen = linear(CONTEXT * FEATURES, WIDTH, key=widen_key)
        self.repeated = linear(WIDTH, WIDTH, key=repeated_key)
        self.readout = linear(WIDTH, characters, key=readout_key)
        self.activation = jax.nn.gelu
        self.times = 2
        self.factor = 0.5

    def __call__(self, context: Array) -> Array:
        """Logits of the character after int[CONTEXT]."""
        features = self.embedding[context].ravel()
        hidden = self.activation(self.widen(features))
        for _ in range(self.times):
            residual = self.activation(self.repeated(hidden))
            hidden = hidden + self.factor * residual
        return self.readout(hidden)


class Result(NamedTuple):
    """What happened."""

    losses: np.ndarray  # float32[steps]: in nats per character, before the step
    report: dict[str, Array]  # the metrics of the last step
    network: Network  # trained


def main(steps: int = STEPS) -> Result:
    """Trains, and prints losses, norms and limits."""
    text = inspect.getsource(argparse)
    alphabet, characters = np.unique(list(text), return_inverse=True)
    random = np.random.default_rng(0)
    key = jax.random.key(0)
    network = Network(len(alphabet), key)
    clipper = optaxclip.adagc(1.5, warmup=100)
    optimizer = optax.chain(clipper, optax.adam(3e-3))
    weights = eqx.filter(network, eqx.is_inexact_array)
    state = optimizer.init(weights)
    report = {}
    losses = []
    tenth = max(1, steps // 10)
    last_start = len(characters) - CONTEXT
    positions = np.arange(CONTEXT + 1)
    for step in range(1, steps + 1):
        starts = random.integers(last_start, size=(BATCH, 1))
        windows = characters[starts + positions]
        windows = jnp.asarray(windows)
        network, state, loss, report = train_step(network, state, windows, optimizer)
        # Waits for the device. `checkpoint_and_metrics.py` does not fetch each step.
        losses.append(float(loss))
        if step % tenth == 0:
            mean = np.mean(losses[-tenth:])
            print(f"step {step:4}  mean loss {mean:.4f}")
    print_weights(report)
    return Result(np.array(losses), report, network)


def print_weights(report: dict[str, Array]) -> None:
    """A line for each weight."""
    print("\nweight               norm   limit  steps clipped")
    prefix = "clip/norm_before/"
    for key, norm in report.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            limit = report[f"clip/limit/{name}"]
            share = report[f"clip/clipped_share/{name}"]
            print(f"{name:16}  {norm:7.4f} {limit:7.4f}  {share:13.1%}")


def mean_loss(network: Network, windows: Array) -> Array:
    """The mean over the last characters of all windows."""
    contexts = windows[:, :-1]
    labels = windows[:, -1]
    logits = jax.vmap(network)(contexts)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@eqx.filter_jit
def train_step(
    network: Network,
    state: Any,
    windows: Array,
    optimizer: optax.GradientTransformation,
) -> tuple[Network, Any, Array, dict[str, Array]]:
    """One step. Leaves that are not arrays are constants of the compiled program."""
    loss_and_grads = eqx.filter_value_and_grad(mean_loss)
    loss, grads = loss_and_grads(network, windows)
    weights = eqx.filter(network, eqx.is_inexact_array)
    updates, state = optimizer.update(grads, state, weights)
    network = eqx.apply_updates(network, updates)
    report = optaxclip.metrics(state)
    return network, state, loss, report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    main(parser.parse_args().steps)
