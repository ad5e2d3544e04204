"""Trains the model that gradient clipping was invented for, a plain (Elman, tanh)
recurrent network, with and without clipping.

What it shows. The network reads the English prose of Python's own help pages, one
character at a time. Back through 64 characters a gradient is a product of 64 Jacobians,
so that a step a little too long makes the next gradient much longer, and soon the
weights are where nothing can be learned. The same network is trained from the same seed
on the same batches without clipping, clipped by value, by the norm of each tensor and
by the norm of everything. At the default learning rate the first of the four blows up
within ten steps and the others learn. The limits are tight, so that nearly every step
is clipped. At a lower rate (--lr 0.3) all four learn, as they do with Adam, which
measures its steps by the gradients' own size.

How long it takes. Half a minute to a minute on two CPU cores, compilation included.

What it prints. A line now and then while it works, a table of the four runs, and a
sample written by the best of them. --save PATH draws a picture with the loss and the
gradient norm of every step.

    python examples/char_rnn.py --optimizer adam --lr 0.01 --steps 500

Reference: Mikolov, Statistical language models based on neural networks, 2012. Pascanu,
Mikolov, Bengio, On the difficulty of training recurrent neural networks, 2013 (arXiv
1211.5063).
"""

import argparse
import functools
import math
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

SEED, HIDDEN, BATCH, LENGTH = 0, 128, 32, 64
MAX_VALUE, MAX_TENSOR_NORM, MAX_GLOBAL_NORM = 0.003, 0.15, 0.3

# Each with the learning rate at which it is tried unless --lr says otherwise.
OPTIMIZERS = {
    "momentum": (functools.partial(optax.sgd, momentum=0.9), 0.8),
    "sgd": (optax.sgd, 3.0),
    "adam": (optax.adam, 0.03),
    "adamw": (optax.adamw, 0.03),
}
CLIPPERS = {
    "none": optax.identity(),
    "value": optaxclip.clip_by_value(MAX_VALUE),
    "tensor norm": optaxclip.clip_by_tensor_norm(MAX_TENSOR_NORM),
    "global norm": optaxclip.clip_by_global_norm(MAX_GLOBAL_NORM),
}
COLOURS = {
    "none": "#d55e00",
    "value": "#e69f00",
    "tensor norm": "#009e73",
    "global norm": "#0072b2",
}


class Text(NamedTuple):
    """The prose as numbers."""

    alphabet: str  # the character of each number
    training: jax.Array  # int32[characters]: the first 95 %
    validation: jax.Array  # int32[windows, LENGTH + 1]: the rest, never trained on


class Curves(NamedTuple):
    """What was seen at every step of a run."""

    loss: (
        jax.Array | np.ndarray
    )  # float32[steps]: cross entropy in nats per character, before the step
    norm: (
        jax.Array | np.ndarray
    )  # float32[steps]: global norm of the gradient, before clipping
    clipped: jax.Array | np.ndarray  # bool[steps]: whether the clipper changed anything


class Row(NamedTuple):
    """One line of the table."""

    clipping: str
    final_loss: float  # mean over the last 20 steps
    validation_loss: float
    largest_norm: float  # inf if a norm was not finite
    clipped_share: float
    steps_per_second: float  # without compilation
    diverged: bool  # the loss was NaN or inf at some step, or ended above its start


def main(
    steps: int = 250,
    *,
    lr: float | None = None,
    optimizer: str = "momentum",
    save: str | Path | None = None,
) -> list[Row]:
    """Trains the four networks, prints the table and a sample, draws a picture if one
    is wanted, and returns the table.
    """
    text = read_text()
    make_optimizer, usual_rate = OPTIMIZERS[optimizer]
    rate = usual_rate if lr is None else lr
    print(
        f"{len(text.training)} characters, {len(text.alphabet)} different ones. "
        f"{optimizer}, learning rate {rate:g}, {steps} steps"
    )
    rows, curves, networks = [], {}, {}
    for clipping, clipper in CLIPPERS.items():
        row, curves[clipping], networks[clipping] = train(
            clipping, clipper, make_optimizer(rate), text, steps
        )
        rows.append(row)
    print_table(rows)
    best = min(
        rows, key=lambda row: (math.isnan(row.validation_loss), row.validation_loss)
    )
    print(
        "\nWritten by the best of them, clipping: "
        f"{best.clipping}\n{write(networks[best.clipping], text.alphabet)}"
    )
    if save is not None:
        draw(rows, curves, save)
        print(f"\nThe picture is in {save}")
    return rows


def read_text() -> Text:
    """The help pages as one line of prose, without repeated paragraphs and without what
    is no word: code, grammar, the rulers of tables.
    """
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))
    words = " ".join(paragraphs).split()
    prose = " ".join(
        word for word in words if word.isascii() and word.strip("().,:;").isalpha()
    )
    alphabet = "".join(sorted(set(prose)))
    numbers = np.array([alphabet.index(character) for character in prose], np.int32)
    training, held_out = np.split(numbers, [len(numbers) * 95 // 100])
    windows = held_out[: len(held_out) // (LENGTH + 1) * (LENGTH + 1)].reshape(
        -1, LENGTH + 1
    )
    return Text(alphabet, jnp.asarray(training), jnp.asarray(windows))


def new_network(characters: int) -> dict[str, jax.Array]:
    """Weights. An orthogonal recurrence neither stretches nor shrinks what goes through
    it: it is training that makes the gradients grow.
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
    network: dict[str, jax.Array], hidden: jax.Array, character: jax.Array
) -> jax.Array:
    """One step through time: h = tanh(E[c] + h W + b)."""
    return jnp.tanh(
        network["embedding"][character]
        + hidden @ network["recurrence"]
        + network["bias"]
    )


def predict(network: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
    return hidden @ network["readout"] + network["readout_bias"]


def mean_loss(network: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
    """Cross entropy, in nats, of every character of int[batch, time] but the first,
    given those before it.
    """

    def step(hidden: jax.Array, character: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = read_character(network, hidden, character)
        return hidden, hidden

    _, hidden = jax.lax.scan(step, jnp.zeros((len(windows), HIDDEN)), windows[:, :-1].T)
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(network, hidden), windows[:, 1:].T
    ).mean()


def train(
    clipping: str, clipper: Any, optimizer: Any, text: Text, steps: int
) -> tuple[Row, Curves, dict[str, jax.Array]]:
    """One run from the common seed."""
    measured = (
        ("norm", optaxclip.record_norm()),
        (
            "largest",
            optaxclip.record_norm(
                functools.partial(optaxclip.global_norm, ord=math.inf)
            ),
        ),
    )
    optimizer = optax.named_chain(
        *measured, ("clipper", clipper), ("optimizer", optimizer)
    )
    network = new_network(len(text.alphabet))
    trained = network, optimizer.init(network)
    # Many steps to a round trip: the largest number that divides them all, so that
    # there is one program to compile.
    trip = max(number for number in range(1, 31) if steps % number == 0)
    starts = np.random.default_rng(SEED + 1).integers(
        len(text.training) - LENGTH, size=(steps // trip, trip, BATCH, 1)
    )
    take_steps = compile_steps(clipping, optimizer, text, trained, starts[0])
    seen, began = [], time.perf_counter()
    for starts_of_trip in starts:
        trained, curves = take_steps(trained, starts_of_trip)
        seen.append(jax.device_get(curves))
        report_progress(clipping, len(seen), len(starts), seen[-1])
    seconds = time.perf_counter() - began
    curves = jax.tree.map(lambda *parts: np.concatenate(parts), *seen)
    return (
        summary(
            clipping,
            curves,
            float(jax.jit(mean_loss)(trained[0], text.validation)),
            seconds,
        ),
        curves,
        trained[0],
    )


def compile_steps(
    clipping: str, optimizer: Any, text: Text, trained: Any, starts: np.ndarray
) -> Any:
    """A compiled function: (network, optimizer state) and int[steps, batch, 1], where
    in the text to start, become the same two later and `Curves`.
    """

    def step(trained: Any, starts: jax.Array) -> tuple[Any, Curves]:
        network, state = trained
        loss, gradient = jax.value_and_grad(mean_loss)(
            network, text.training[starts + jnp.arange(LENGTH + 1)]
        )
        updates, state = optimizer.update(gradient, state, network)
        report = optaxclip.metrics(state)
        return (optax.apply_updates(network, updates), state), Curves(
            loss, report["clip/norm/norm_before"], was_clipped(clipping, report)
        )

    # The old weights and state are given away, so that the new ones can take their
    # place in memory.
    return (
        jax.jit(
            lambda trained, starts: jax.lax.scan(step, trained, starts),
            donate_argnums=0,
        )
        .lower(trained, starts)
        .compile()
    )


def was_clipped(clipping: str, report: dict[str, jax.Array]) -> jax.Array:
    """Whether this step's clipper shortened anything. Clipping by value has no norm of
    its own: there the largest element tells.
    """
    if clipping == "value":
        return report["clip/largest/norm_before"] > MAX_VALUE
    factors = [
        value
        for name, value in report.items()
        if name.startswith("clip/clipper/factor")
    ]
    return jnp.any(jnp.array(factors) < 1)


def report_progress(
    clipping: str, trips: int, trips_in_all: int, curves: Curves
) -> None:
    if trips % max(1, trips_in_all // 5) == 0:
        step = trips * len(curves.loss)
        print(
            f"{clipping:12} step {step:5}  loss {curves.loss.mean():8.4g}  largest "
            f"norm {curves.norm.max():9.3g}",
            flush=True,
        )


def summary(
    clipping: str, curves: Curves, validation_loss: float, seconds: float
) -> Row:
    final_loss = float(curves.loss[-20:].mean())
    return Row(
        clipping=clipping,
        final_loss=final_loss,
        validation_loss=validation_loss,
        largest_norm=float(
            np.where(np.isfinite(curves.norm), curves.norm, np.inf).max()
        ),
        clipped_share=float(curves.clipped.mean()),
        steps_per_second=len(curves.loss) / seconds,
        diverged=not (np.isfinite(curves.loss).all() and final_loss <= curves.loss[0]),
    )


def print_table(rows: list[Row]) -> None:
    print(
        "\nclipping      final loss  validation  largest norm  steps clipped  steps/s  "
        "diverged"
    )
    for row in rows:
        numbers = (
            f"{row.final_loss:10.4g}  {row.validation_loss:10.4g}  "
            f"{row.largest_norm:12.4g}  {row.clipped_share:13.0%}  "
            f"{row.steps_per_second:7.1f}"
        )
        print(f"{row.clipping:12}  {numbers}  {'yes' if row.diverged else 'no':>8}")


def write(
    network: dict[str, jax.Array],
    alphabet: str,
    *,
    characters: int = 300,
    temperature: float = 0.6,
) -> str:
    """Lets the network write, one character after the other, each drawn from what it
    predicts.
    """

    def step(
        state: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, character = state
        hidden = read_character(network, hidden, character)
        character = jax.random.categorical(key, predict(network, hidden) / temperature)
        return (hidden, character), character

    beginning = jnp.zeros(HIDDEN), jnp.array(alphabet.index(" "))
    _, written = jax.lax.scan(
        step, beginning, jax.random.split(jax.random.key(SEED + 2), characters)
    )
    return "".join(alphabet[number] for number in written.tolist())


def draw(rows: list[Row], curves: dict[str, Curves], picture: str | Path) -> None:
    """Loss and gradient norm over the steps, side by side."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, norms = figure.subplots(1, 2)
    for row in rows:
        label = f"{row.clipping} (diverged)" if row.diverged else row.clipping
        style = {"color": COLOURS[row.clipping], "label": label, "linewidth": 1.2}
        losses.plot(curves[row.clipping].loss, **style)
        norms.plot(curves[row.clipping].norm, **style)
    losses.set(title="Loss", xlabel="step", ylabel="cross entropy (nats per character)")
    norms.set(
        title="Gradient norm before clipping",
        xlabel="step",
        ylabel="global norm",
        yscale="log",
    )
    frame_losses(losses, curves)
    norms.legend(title="clipped by")
    for axes in (losses, norms):
        axes.grid(alpha=0.3)
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def frame_losses(axes: Any, curves: dict[str, Curves]) -> None:
    """Ends the axis a little above the first loss, or what diverged would flatten all
    the others, and says how far it went.
    """
    lowest = min(np.nanmin(curve.loss) for curve in curves.values())
    top = 1.5 * curves["none"].loss[0]
    axes.set_ylim(0.8 * lowest, top)
    for clipping, curve in curves.items():
        outside = np.flatnonzero(~(curve.loss <= top))
        if outside.size:
            axes.annotate(
                f" up to {np.max(curve.loss):.3g}",
                (outside[0], top),
                va="top",
                color=COLOURS[clipping],
                xytext=(2, -4),
                textcoords="offset points",
            )


def count(text: str) -> int:
    """A whole number of at least 1, from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=250,
        help="how many steps to train (default: %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=float,
        help="the learning rate (default: one for each optimizer)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="momentum",
        metavar="NAME",
        help=f"of {', '.join(OPTIMIZERS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="PATH",
        help="draw a picture to this path (default: no picture)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
