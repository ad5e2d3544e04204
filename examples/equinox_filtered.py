"""Trains an equinox model, whose leaves are not all weights, under a limit for each
tensor that learns, and shows that only weights are clipped and reported.

What it shows. An equinox module is a tree, and functions, whole numbers and Python
floats may be leaves of it. Here they are an activation function, how often a layer is
repeated, and a factor. `eqx.filter_value_and_grad` gives None in their places, and None
is passed over: it has no norm, no state and no name in the metrics. What remains to be
written is equinox's usual filter where the optimizer starts,

    optimizer.init(eqx.filter(model, eqx.is_inexact_array))

without which the activation function raises a TypeError there, as it does in optax's
own transformations. `eqx.apply_updates` passes over None as well.

The clipper is `adagc`. For the first hundred steps the limit is one for all weights
together. Then each tensor gets its own: a multiple of the running average of its
clipped norm. The paper's multiple is 1.05. Norms of batches as small as these differ
more from step to step, and under 1.05 nearly every step is clipped, so here it is 1.5.
The table at the end has one line for each weight, named as in the model.

How long it takes. About twenty seconds on two CPU cores.

What it prints. The network reads the English prose of Python's own help pages and
predicts each character from the twelve before it. For each tenth of the run the mean
loss and the mean share of tensors that were clipped. Then for each weight its norm and
limit at the last step, and the share of steps in which it was clipped.

    python examples/equinox_filtered.py --steps 400

Reference: Bengio, Ducharme, Vincent, Jauvin, A neural probabilistic language model,
2003 (the network). Wang et al., AdaGC, 2025 (arXiv 2502.11034).
"""

import argparse
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import optaxclip

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

SEED, BATCH, CONTEXT, FEATURES, WIDTH = 0, 128, 12, 16, 128
RATIO, WARMUP, LEARNING_RATE = 1.5, 100, 3e-3


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
    """What a test may ask of the run."""

    losses: (
        np.ndarray
    )  # float32[steps]: cross entropy in nats per character, before the step
    reports: list[dict[str, float]]  # the metrics of every step
    network: Network  # trained


def main(steps: int = 400) -> Result:
    """Trains, prints the tables, and returns what happened."""
    text, alphabet = read_text()
    network = Network(len(alphabet), jax.random.key(SEED))
    optimizer = optax.chain(
        optaxclip.adagc(RATIO, warmup=WARMUP), optax.adam(LEARNING_RATE)
    )
    weights = eqx.filter(network, eqx.is_inexact_array)
    state = optimizer.init(weights)
    print(
        f"{len(text)} characters, "
        f"{sum(leaf.size for leaf in jax.tree.leaves(weights))} weights in "
        f"{len(jax.tree.leaves(weights))} tensors"
    )
    print(
        f"{len(jax.tree.leaves(network)) - len(jax.tree.leaves(weights))} leaves are "
        f"none: {network.activation.__name__}, {network.times}, {network.factor}\n"
    )
    print("  step  mean loss  tensors clipped")
    losses, reports, every = [], [], max(1, steps // 10)
    for windows in batches(text, steps):
        network, state, loss, report = train_step(network, state, windows, optimizer)
        losses.append(float(loss))
        reports.append({name: float(value) for name, value in report.items()})
        if len(losses) % every == 0:
            share = np.mean([clipped_share(report) for report in reports[-every:]])
            loss = np.mean(losses[-every:])
            print(f"{len(losses):6}  {loss:9.4f}  {share:15.1%}")
    print_tensors(reports[-1])
    return Result(np.array(losses, np.float32), reports, network)


def read_text() -> tuple[np.ndarray, str]:
    """The help pages as prose, without what is no word: the numbers of its characters,
    and the alphabet.
    """
    words = " ".join(dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))).split()
    prose = " ".join(
        word for word in words if word.isascii() and word.strip("().,:;").isalpha()
    )
    alphabet, numbers = np.unique(np.array(list(prose)), return_inverse=True)
    return numbers.astype(np.int32), "".join(alphabet)


def batches(text: np.ndarray, steps: int) -> Any:
    """int32[BATCH, CONTEXT + 1] for each step: windows of the text, of which the last
    character is to be predicted.
    """
    random = np.random.default_rng(SEED)
    for _ in range(steps):
        yield text[
            random.integers(len(text) - CONTEXT, size=(BATCH, 1))
            + np.arange(CONTEXT + 1)
        ]


def mean_loss(network: Network, windows: jax.Array) -> jax.Array:
    """Cross entropy, in nats, of the last character of each window."""
    return optax.softmax_cross_entropy_with_integer_labels(
        jax.vmap(network)(windows[:, :-1]), windows[:, -1]
    ).mean()


@eqx.filter_jit
def train_step(
    network: Network, state: Any, windows: jax.Array, optimizer: Any
) -> tuple[Network, Any, jax.Array, dict[str, jax.Array]]:
    """One step. What is not an array is a constant of the compiled program."""
    loss, gradient = eqx.filter_value_and_grad(mean_loss)(network, windows)
    updates, state = optimizer.update(
        gradient, state, eqx.filter(network, eqx.is_inexact_array)
    )
    return eqx.apply_updates(network, updates), state, loss, optaxclip.metrics(state)


def clipped_share(report: dict[str, float]) -> float:
    return float(
        np.mean(
            [
                value
                for name, value in report.items()
                if name.startswith("clip/clipped/")
            ]
        )
    )


def print_tensors(report: dict[str, float]) -> None:
    print("\nweight               norm   limit  steps clipped")
    start = "clip/norm_before/"
    for name in (name.removeprefix(start) for name in report if name.startswith(start)):
        norm, limit, share = (
            report[f"clip/{number}/{name}"]
            for number in ("norm_before", "limit", "clipped_share")
        )
        print(f"{name:16}  {norm:7.4f} {limit:7.4f}  {share:13.1%}")


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=400,
        help="how many steps to train (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
