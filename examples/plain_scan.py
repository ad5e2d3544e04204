"""Trains without any framework, a whole epoch as one compiled scan, and brings the
clipper's numbers of all its steps out of it at once.

What it shows. The body of `lax.scan` is the usual step. Its second result is what is to
be kept of each step, here the loss and `optaxclip.metrics(state)`: a flat dict of
scalars goes in, the same dict of arrays with a number for each step comes out. Nothing
is sent to the host in between, so that logging every step costs one transfer for each
epoch. The state has the same shapes and dtypes after every update, which is what a scan
asks of its carry. Weights and state are donated, so that the new ones take the place of
the old.

The limit learns: the 90th percentile of the last hundred norms. It follows them as they
fall, so that some steps are clipped in nearly every epoch (fewer than one in ten, since
norms of the past are longer). What the share would have been under other limits can be
asked of the norms that came out of the scan.

How long it takes. About five seconds on two CPU cores, most of it compilation.

What it prints. The network, a perceptron, reads handwritten digits of 8 by 8 pixels.
For each epoch the mean loss, the median and the largest norm, the last limit and the
share of steps that were clipped, and the share of the held-out digits that are read
correctly. With --log all metrics of every step go into a CSV file, which `python -m
optaxclip.replay` reads: it prints what other limits would have clipped, and draws.

    python examples/plain_scan.py --steps 450 --log run.csv
"""

import argparse
import csv
import functools
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

SEED, BATCH, HELD_OUT = 0, 32, 357
WIDTHS = 64, 128, 128, 10
LEARNING_RATE, MOMENTUM = 0.1, 0.9


class Digits(NamedTuple):
    """Handwritten digits."""

    images: np.ndarray  # float32[digits, 64] in [0, 1]
    labels: np.ndarray  # int32[digits]


class Result(NamedTuple):
    """What a test may ask of the run."""

    history: dict[
        str, np.ndarray
    ]  # float32[steps] each: "loss", and the metrics under their names
    accuracy: float  # on the held-out digits
    state: Any  # the optimizer's, at the end


def main(steps: int = 450, *, log: str | Path | None = None) -> Result:
    """Trains for as many whole epochs as there are in `steps` (or for a part of the
    first), prints the tables, and returns what happened.
    """
    training, held_out = read_digits()
    epoch_length = min(steps, len(training.labels) // BATCH)
    optimizer = new_optimizer()
    network = new_network()
    trained, seen = (network, optimizer.init(network)), []
    epoch = compile_epoch(optimizer, training)
    print(
        f"{steps // epoch_length} epochs of {epoch_length} steps\n\n epoch  mean loss  "
        "median norm  largest   limit  clipped"
    )
    for number, order in enumerate(
        orders(len(training.labels), steps // epoch_length, epoch_length), start=1
    ):
        trained, history = epoch(trained, order)
        seen.append(jax.device_get(history))
        print_epoch(number, seen[-1])
    history = {name: np.concatenate([part[name] for part in seen]) for name in seen[0]}
    accuracy = float(
        jnp.mean(
            jnp.argmax(predict(trained[0], held_out.images), axis=-1) == held_out.labels
        )
    )
    print(
        f"\n{accuracy:.1%} of {len(held_out.labels)} held-out digits are read correctly"
    )
    if log is not None:
        write_log(history, log)
        print(
            f"All {len(history)} numbers of {len(history['loss'])} steps are in {log}: "
            f"python -m optaxclip.replay {log}"
        )
    return Result(history, accuracy, trained[1])


def read_digits() -> tuple[Digits, Digits]:
    """The digits to train on, and those held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images, labels = (
        (images[order] / 16).astype(np.float32),
        labels[order].astype(np.int32),
    )
    return Digits(images[HELD_OUT:], labels[HELD_OUT:]), Digits(
        images[:HELD_OUT], labels[:HELD_OUT]
    )


def orders(digits: int, epochs: int, epoch_length: int) -> Any:
    """int[epoch_length, BATCH] for each epoch: which digits come when."""
    random = np.random.default_rng(SEED + 1)
    for _ in range(epochs):
        yield random.permutation(digits)[: epoch_length * BATCH].reshape(
            epoch_length, BATCH
        )


def new_network() -> list[dict[str, jax.Array]]:
    random = np.random.default_rng(SEED)
    return [
        {
            "weight": jnp.asarray(
                random.normal(size=size) * math.sqrt(2 / size[0]), jnp.float32
            ),
            "bias": jnp.zeros(size[1]),
        }
        for size in itertools.pairwise(WIDTHS)
    ]


def new_optimizer() -> optax.GradientTransformation:
    rule = optaxclip.rules.windowed_quantile(0.9, 100)
    return optax.chain(
        optaxclip.clip_by_global_norm(rule), optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
    )


def predict(
    network: list[dict[str, jax.Array]], images: jax.Array | np.ndarray
) -> jax.Array:
    *hidden, readout = network
    x = jnp.asarray(images)
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ readout["weight"] + readout["bias"]


def mean_loss(network: list[dict[str, jax.Array]], digits: Digits) -> jax.Array:
    """Cross entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(network, digits.images), digits.labels
    ).mean()


def compile_epoch(optimizer: optax.GradientTransformation, training: Digits) -> Any:
    """A function: (network, optimizer state) and the order of the digits become the
    same two later, and float32[steps] for each number that is kept.
    """
    training = jax.tree.map(jnp.asarray, training)

    def step(trained: Any, chosen: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        network, state = trained
        loss, gradient = jax.value_and_grad(mean_loss)(
            network, jax.tree.map(lambda part: part[chosen], training)
        )
        updates, state = optimizer.update(gradient, state, network)
        return (optax.apply_updates(network, updates), state), {
            "loss": loss,
            **optaxclip.metrics(state),
        }

    return jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)


def print_epoch(number: int, history: dict[str, np.ndarray]) -> None:
    norms, limit, clipped = (
        history["clip/norm_before"],
        history["clip/limit"][-1],
        history["clip/clipped"].mean(),
    )
    print(
        f"{number:6}  {history['loss'].mean():9.4f}  {np.median(norms):11.4f}  "
        f"{norms.max():7.4f}  {limit:6.4f}  {clipped:7.1%}"
    )


def write_log(history: dict[str, np.ndarray], path: str | Path) -> None:
    with Path(path).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *history])
        table.writerows(
            [step, *numbers]
            for step, numbers in enumerate(
                zip(*(column.tolist() for column in history.values()))
            )
        )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=450,
        help="how many steps to train (default: %(default)s)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="PATH",
        help="write the metrics of every step as CSV (default: no file)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
