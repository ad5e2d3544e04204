"""Accumulates gradients with `optax.MultiSteps` and clips in both orders: the averaged
gradient, or each small one before it is averaged. Only the first is a large batch.

What it shows. A batch too large for memory is read in parts, and the optimizer takes a
step with the average of their gradients. Where the clipper stands in the optax chain
decides what it sees:

    inside     optax.MultiSteps(optax.chain(clipper, optimizer), 8)      the average,
               once for 8 parts: the same step as the large batch would give
    before     optax.chain(clipper, optax.MultiSteps(optimizer, 8))      each part: its
               noisier gradient is longer, so far more is cut off, and unevenly

The large batch is really computed, as the third run. After the first step `inside` has
its weights to float32 accuracy, and so it has at the end: what is left are sums in
another order. `before` departs at the first step. That is right where one part in eight
may be broken and should not spoil the others. As a way to save memory it is another
method, with a shorter step.

The metrics are found inside `MultiSteps` as elsewhere, and mean what the clipper saw.
Inside, they are those of the last whole step and stay as they are until the next, so
that they are logged once in 8 parts, and counts are counts of whole steps. Before, they
are those of the last part and change with each.

The optimizer is SGD with momentum, on purpose: Adam divides by the size of the gradient
and turns another rounding, where a gradient is almost zero, into another step.

How long it takes. About fifteen seconds on two CPU cores.

What it prints. The network reads the English prose of Python's own help pages and
predicts each character from the eight before it. The table has for each run the norm
that its clipper saw in the first whole step (of parts: in the eighth), the share of
what it saw that it clipped, the loss of the first and the last step, and how far the
weights are from those of the large batch after the first step and after the last,
relative to the way that those have gone.

    python examples/accumulation.py --steps 150
"""

import argparse
import math
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

SEED, PART, PARTS, CONTEXT, FEATURES, WIDTH = 0, 16, 8, 8, 16, 128
MAX_NORM, LEARNING_RATE, MOMENTUM = 1.0, 0.2, 0.9


class Run(NamedTuple):
    """What was seen at every call of the optimizer, and where it led."""

    losses: (
        np.ndarray
    )  # float32[calls]: cross entropy in nats per character, before the call
    norms: np.ndarray  # float32[calls]: clip/norm_before after the call
    clipped_count: int  # gradients that were clipped, as the clipper counts them
    clipped_share: float  # of those that it saw
    first: Any  # the weights after the first whole step
    last: Any  # the weights at the end


class Row(NamedTuple):
    """One line of the table."""

    clipping: str
    norm: (
        float  # what the clipper saw in the first whole step, or in the last part of it
    )
    clipped_count: int
    clipped_share: float
    first_loss: float  # of the first whole batch
    last_loss: float
    # from the large batch after the first step: |difference| / |its way so far|
    apart_first: float
    apart_last: float


def main(steps: int = 150) -> list[Row]:
    """Trains in three ways with the same data, prints the table, and returns it. The
    first row is the large batch.
    """
    text, alphabet = read_text()
    starts = np.random.default_rng(SEED + 1).integers(
        len(text) - CONTEXT, size=(steps, PARTS * PART, 1)
    )
    batches = text[starts + np.arange(CONTEXT + 1)]
    parts = batches.reshape(steps * PARTS, PART, CONTEXT + 1)
    network = new_network(len(alphabet))
    print(
        f"{len(text)} characters. {steps} steps, each of {PARTS} parts of {PART} "
        f"windows. The limit is {MAX_NORM:g}"
    )
    clipper, sgd = (
        optaxclip.clip_by_global_norm(MAX_NORM),
        optax.sgd(LEARNING_RATE, momentum=MOMENTUM),
    )
    large = train(optax.chain(clipper, sgd), network, batches, calls_per_step=1)
    rows = [row("large batch", large, large, network)]
    for clipping, optimizer in accumulating(clipper, sgd).items():
        rows.append(
            row(
                clipping,
                train(optimizer, network, parts, calls_per_step=PARTS),
                large,
                network,
            )
        )
    print_table(rows)
    return rows


def accumulating(clipper: Any, sgd: Any) -> dict[str, Any]:
    """The two orders."""
    return {
        "inside": optax.MultiSteps(
            optax.chain(clipper, sgd), PARTS
        ).gradient_transformation(),
        "before": optax.chain(
            clipper, optax.MultiSteps(sgd, PARTS).gradient_transformation()
        ),
    }


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


def new_network(characters: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(SEED)
    weights = {
        "embedding": random.normal(size=(characters, FEATURES)),
        "widen": random.normal(size=(CONTEXT * FEATURES, WIDTH))
        / math.sqrt(CONTEXT * FEATURES),
        "bias": np.zeros(WIDTH),
        "readout": random.normal(size=(WIDTH, characters)) / math.sqrt(WIDTH),
    }
    return {name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()}


def mean_loss(network: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
    """Cross entropy, in nats, of the last character of each window, given those before
    it.
    """
    context = network["embedding"][windows[:, :-1]].reshape(len(windows), -1)
    logits = jnp.tanh(context @ network["widen"] + network["bias"]) @ network["readout"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, windows[:, -1]
    ).mean()


def train(
    optimizer: Any,
    network: dict[str, jax.Array],
    batches: np.ndarray,
    *,
    calls_per_step: int,
) -> Run:
    """One run. The loop knows nothing of accumulation: between whole steps the updates
    are zeros.
    """

    @jax.jit
    def call(
        network: Any, state: Any, windows: jax.Array
    ) -> tuple[Any, Any, jax.Array, dict[str, jax.Array]]:
        loss, gradient = jax.value_and_grad(mean_loss)(network, windows)
        updates, state = optimizer.update(gradient, state, network)
        return (
            optax.apply_updates(network, updates),
            state,
            loss,
            optaxclip.metrics(state),
        )

    state, losses, norms, first = optimizer.init(network), [], [], None
    report = {}
    for number, windows in enumerate(batches, start=1):
        network, state, loss, report = call(network, state, windows)
        losses.append(loss)
        norms.append(report["clip/norm_before"])
        first = network if number == calls_per_step else first
    return Run(
        np.array(losses),
        np.array(norms),
        int(report["clip/clipped_count"]),
        float(report["clip/clipped_share"]),
        first,
        network,
    )


def row(clipping: str, run: Run, large: Run, start: Any) -> Row:
    calls = len(run.losses) // len(large.losses)
    return Row(
        clipping=clipping,
        norm=float(run.norms[calls - 1]),
        clipped_count=run.clipped_count,
        clipped_share=run.clipped_share,
        first_loss=float(run.losses[:calls].mean()),
        last_loss=float(run.losses[-calls:].mean()),
        apart_first=distance(run.first, large.first) / distance(large.first, start),
        apart_last=distance(run.last, large.last) / distance(large.last, start),
    )


def distance(tree: Any, other: Any) -> float:
    """Norm of the difference, in float64."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other))
    return math.sqrt(
        sum(
            np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum()
            for a, b in pairs
        )
    )


def print_table(rows: list[Row]) -> None:
    print(f"\n{'':12}  {'':9}  {'':14}  {'loss':^18}  apart from the large batch")
    print(
        "clipping      norm seen         clipped      first      last  after a step    "
        "at the end"
    )
    for row in rows:
        numbers = (
            f"{row.norm:9.6f}  {row.clipped_count:5} ({row.clipped_share:6.1%})  "
            f"{row.first_loss:9.6f} {row.last_loss:9.6f}"
        )
        print(
            f"{row.clipping:12}  {numbers}  {row.apart_first:12.1e}  "
            f"{row.apart_last:12.1e}"
        )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=150,
        help="how many steps to train (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
