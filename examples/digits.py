"""Classifies handwritten digits with a residual network that has no normalisation:
without clipping, with AGC, and clipped by the global norm.

What it shows. The network is an NF-ResNet in small: convolutions with scaled weight
standardisation, and residual branches h + alpha * f(h / beta) that keep the variance
known, so that no batch norm is needed. Batch norm also allowed large
learning rates. The paper says that adaptive gradient clipping (AGC), which holds the
gradient of every filter against the filter's weights, gives that back, and changes
little where the rate is small anyhow. The 1297 images of scikit-learn's digits are
learnt in batches of 128, by SGD with Nesterov's momentum at a constant rate of 0.05
times 1 to 32. Weights, batches and all else are the same for the three methods. AGC is
at 0.04, on all but the final linear layer. The global norm is at 0.5, on everything.
Without clipping the larger rates fail. With either clipper all of them learn, and the
best accuracy of each method is about the same: clipping gives a wider range of rates,
not more accuracy. At the smallest rate both clip much, and learning is a little slower.

What it does not show. That AGC is better than the global norm, or the other way round.
How well either does depends on its limit (CLIPPING and MAX_NORM in the program). Nor
that AGC is needed for digits: at a moderate rate no clipping does as well. Nor the
paper's scale, where a batch has 4096 images, the rate is warmed up and decays, and
learnt scalars that begin at 0 close each branch.

How long it takes. A minute and a half of CPU time, so about a minute on two idle cores,
compilation included. All runs, of every method, rate and seed, are one compiled
program.

What it prints. A table with a row for each method and rate: accuracy, loss, what share
of the filters' gradients (AGC) or of the steps (global norm) was shortened, and how
many seeds diverged. --save PATH draws the accuracy over the rate, for each way to
clip beside no clipping, and the same for dark pages.

    python examples/digits.py --seeds 1

Reference: Brock, De, Smith, Simonyan, High-performance large-scale image recognition
without normalization, 2021 (arXiv 2102.06171). Brock, De, Smith, Characterizing signal
propagation to close the performance gap in unnormalized ResNets, 2021 (arXiv
2101.08692).
"""

import argparse
import functools
import math
import time
from collections.abc import Sequence
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

if __package__:  # imported from the root of the repository, as the tests do
    from ._pictures import Look, draw_both, note, prepare
else:
    from _pictures import Look, draw_both, note, prepare

BATCH, WIDTH, BLOCKS, ALPHA, BASE_RATE, HELD_OUT = 128, 16, 4, 0.2, 0.05, 500
MULTIPLES = (1, 2, 4, 8, 16, 32)
CLIPPING, MAX_NORM = 0.04, 0.5

# For each method the clipping of AGC and the limit of the global norm. An infinite
# limit only measures, so that one compiled program serves all three.
METHODS = {
    "none": (math.inf, math.inf),
    "AGC": (CLIPPING, math.inf),
    "global norm": (math.inf, MAX_NORM),
}
TITLES = {
    "AGC": f"adaptive_grad_clip({CLIPPING})",
    "global norm": f"clip_by_global_norm({MAX_NORM})",
}


class Digits(NamedTuple):
    """The images and what they show, in a fixed random order, divided."""

    images: jax.Array  # float32[examples, 8, 8, 1]: mean 0, variance 1 over all pixels
    labels: jax.Array  # int32[examples]
    test_images: jax.Array  # never trained on
    test_labels: jax.Array


class Lane(NamedTuple):
    """What is different between runs."""

    rate: Any  # float32[]: learning rate
    clipping: Any  # float32[]: of AGC, inf for none
    max_norm: Any  # float32[]: of the global norm, inf for none
    seed: Any  # int32[]: of the weights and of the order of the batches


class Outcome(NamedTuple):
    """How one run went."""

    losses: jax.Array  # float32[steps]: cross entropy in nats, before the step
    accuracy: jax.Array  # float32[]: on the test images
    # float32[]: units that AGC shortened, over all units of convolutions and all steps
    clipped_units: jax.Array
    clipped_steps: (
        jax.Array
    )  # float32[]: steps that the global norm shortened, over all steps


class Row(NamedTuple):
    """One line of the table: one method at one learning rate, over the seeds."""

    method: str
    rate: float
    accuracy: float  # mean
    accuracies: tuple[float, ...]  # of each seed
    final_loss: float  # mean over seeds and the last tenth of the steps
    clipped_share: float  # of units for AGC, of steps for the global norm
    # seeds whose loss was NaN or inf at some step, or ended no lower than that of a
    # guess
    diverged: int


def main(
    steps: int = 100,
    *,
    seeds: int = 2,
    multiples: Sequence[float] = MULTIPLES,
    save: str | Path | None = None,
) -> list[Row]:
    """Trains all networks, prints the table, draws a picture if one is wanted, and
    returns the table.
    """
    digits, rates = read_digits(), [BASE_RATE * multiple for multiple in multiples]
    print(
        f"{len(digits.labels)} images to train on, {len(digits.test_labels)} to test. "
        f"batches of {BATCH}, {steps} steps, {seeds} seeds",
        flush=True,
    )
    began = time.perf_counter()
    train_all = compile_runs(digits, steps, seeds, lanes_of("none", rates, seeds))
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for method in METHODS:
        began = time.perf_counter()
        rows += summary(
            method, rates, jax.device_get(train_all(lanes_of(method, rates, seeds)))
        )
        print(
            f"{method}: {len(rates) * seeds} networks in "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
    print_table(rows)
    if save is not None:
        draw_both(save, (13, 4), functools.partial(draw, rows))
        print(f"\nThe picture is in {save}")
    return rows


def read_digits() -> Digits:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (
        ((images - images.mean()) / images.std())
        .reshape(-1, 8, 8, 1)
        .astype(np.float32)[order]
    )
    labels = labels.astype(np.int32)[order]
    return Digits(
        *map(
            jnp.asarray,
            (
                images[HELD_OUT:],
                labels[HELD_OUT:],
                images[:HELD_OUT],
                labels[:HELD_OUT],
            ),
        )
    )


def new_network(seed: int) -> dict[str, Any]:
    """Weights. The blocks are stacked, layer upon layer, for `lax.scan`."""
    random = np.random.default_rng(seed)
    return {
        "stem": new_convolution(random, (3, 3, 1, WIDTH)),
        "blocks": {
            name: new_convolution(random, (BLOCKS, 3, 3, WIDTH, WIDTH))
            for name in ("first", "second")
        },
        "head": {
            "weight": jnp.asarray(
                random.normal(size=(WIDTH, 10)) / math.sqrt(WIDTH), jnp.float32
            ),
            "bias": jnp.zeros(10),
        },
    }


def new_convolution(
    random: np.random.Generator, shape: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Weights of variance 1 / (number of inputs). There may be layers in front of the
    four axes of one convolution.
    """
    *layers, height, width, inputs, outputs = shape
    weight = random.normal(size=shape) / math.sqrt(height * width * inputs)
    return {
        "weight": jnp.asarray(weight, jnp.float32),
        "gain": jnp.ones((*layers, outputs)),
        "bias": jnp.zeros((*layers, outputs)),
    }


def standardise(weight: jax.Array) -> jax.Array:
    """Scaled weight standardisation: over the inputs of each output, mean 0 and
    variance 1 / (number of inputs).
    """
    inputs = math.prod(weight.shape[:-1])
    centred = weight - weight.mean((0, 1, 2), keepdims=True)
    return centred * jax.lax.rsqrt(
        jnp.maximum(inputs * weight.var((0, 1, 2), keepdims=True), 1e-4)
    )


def convolve(
    convolution: dict[str, jax.Array], images: jax.Array, stride: int = 1
) -> jax.Array:
    """A 3 by 3 convolution with padding. As one matrix product: inside a loop, XLA's
    own convolution is ten times slower on CPU.
    """
    kernel = convolution["gain"] * standardise(convolution["weight"])
    padded, size = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0))), images.shape[1]
    patches = [
        padded[:, y : y + size : stride, x : x + size : stride]
        for y in range(3)
        for x in range(3)
    ]
    return (
        jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])
        + convolution["bias"]
    )


def relu(x: jax.Array) -> jax.Array:
    """The rectifier, scaled so that what is normal with variance 1 has variance 1
    afterwards.
    """
    return math.sqrt(2 / (1 - 1 / math.pi)) * jax.nn.relu(x)


def predict(network: dict[str, Any], images: jax.Array) -> jax.Array:
    """Logits: a stem, residual blocks h + alpha * f(h / beta) where beta^2 is the
    variance that h has by construction, the mean over the image, a linear layer.
    """

    def block(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        weights, beta = layer
        branch = convolve(weights["first"], relu(h / beta))
        return h + ALPHA * convolve(weights["second"], relu(branch)), None

    betas = np.sqrt(1 + ALPHA**2 * np.arange(BLOCKS + 1, dtype=np.float32))
    h, _ = jax.lax.scan(
        block,
        convolve(network["stem"], images, stride=2),
        (network["blocks"], betas[:-1]),
    )
    return (
        relu(h / betas[-1]).mean((1, 2)) @ network["head"]["weight"]
        + network["head"]["bias"]
    )


def mean_loss(
    network: dict[str, Any], images: jax.Array, labels: jax.Array
) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(network, images), labels
    ).mean()


def new_optimizer(lane: Lane) -> optax.GradientTransformationExtraArgs:
    """AGC on all but the final linear layer, the global norm on everything, Nesterov's
    momentum.
    """
    # The leading axis of the blocks counts layers. Unsaid, each would look like one
    # three-dimensional convolution.
    agc = optaxclip.adaptive_grad_clip(
        lane.clipping, stacked=lambda path, leaf: int(path.startswith("blocks"))
    )
    return optax.named_chain(
        ("agc", optax.masked(agc, {"stem": True, "blocks": True, "head": False})),
        ("global", optaxclip.clip_by_global_norm(lane.max_norm)),
        ("sgd", optax.sgd(lane.rate, momentum=0.9, nesterov=True)),
    )


def train(
    digits: Digits, starts: dict[str, Any], batches: jax.Array, lane: Lane
) -> Outcome:
    """One run. Those with one seed start from the same weights and see the same
    batches.
    """
    optimizer = new_optimizer(lane)
    network, batches = jax.tree.map(lambda x: x[lane.seed], (starts, batches))

    def step(trained: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        network, state = trained
        loss, gradient = jax.value_and_grad(mean_loss)(
            network, digits.images[batch], digits.labels[batch]
        )
        updates, state = optimizer.update(gradient, state, network)
        return (optax.apply_updates(network, updates), state), loss

    (network, state), losses = jax.lax.scan(
        step, (network, optimizer.init(network)), batches
    )
    report = optaxclip.metrics(state)
    accuracy = (
        predict(network, digits.test_images).argmax(-1) == digits.test_labels
    ).mean()
    return Outcome(
        losses, accuracy, share_of_units(report), report["clip/global/clipped_share"]
    )


def compile_runs(digits: Digits, steps: int, seeds: int, lanes: Lane) -> Any:
    """A compiled function from lanes to outcomes: one lane after the other, which is
    faster on few cores than all abreast.
    """
    starts = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *map(new_network, range(seeds))
    )
    batches = jnp.asarray(
        np.stack(
            [shuffled_batches(seed, len(digits.labels), steps) for seed in range(seeds)]
        )
    )
    return (
        jax.jit(
            lambda lanes: jax.lax.map(
                functools.partial(train, digits, starts, batches), lanes
            )
        )
        .lower(lanes)
        .compile()
    )


def shuffled_batches(seed: int, examples: int, steps: int) -> np.ndarray:
    """int[steps, BATCH]: every epoch in an order of its own, without what would not
    fill a batch.
    """
    random, each = np.random.default_rng(seed), examples // BATCH
    epochs = [
        random.permutation(examples)[: each * BATCH] for _ in range(-(-steps // each))
    ]
    return np.concatenate(epochs).reshape(-1, BATCH)[:steps]


def share_of_units(report: dict[str, jax.Array]) -> jax.Array:
    """Over the filters of all convolutions. Biases and gains are clipped as well but
    not counted.
    """
    filters = {"stem": 1, "blocks/first": BLOCKS, "blocks/second": BLOCKS}
    shares = [
        layers * report[f"clip/agc/clipped_share/{name}/weight"]
        for name, layers in filters.items()
    ]
    return jnp.sum(jnp.stack(shares)) / sum(filters.values())


def lanes_of(method: str, rates: Sequence[float], seeds: int) -> Lane:
    """Every rate with every seed, side by side: the seed runs fastest."""
    rate, seed = (
        axis.ravel() for axis in np.meshgrid(rates, np.arange(seeds), indexing="ij")
    )
    clipping, max_norm = (
        np.full(rate.shape, limit, np.float32) for limit in METHODS[method]
    )
    return Lane(rate.astype(np.float32), clipping, max_norm, seed.astype(np.int32))


def summary(method: str, rates: Sequence[float], outcomes: Outcome) -> list[Row]:
    """A row for each rate."""
    rows = []
    for rate, *fields in zip(
        rates, *(np.split(field, len(rates)) for field in outcomes)
    ):
        runs = Outcome(*fields)
        final_losses = runs.losses[:, -max(1, runs.losses.shape[1] // 10) :].mean(
            axis=1
        )
        learned = np.isfinite(runs.losses).all(axis=1) & (final_losses < math.log(10))
        rows.append(
            Row(
                method=method,
                rate=rate,
                accuracy=float(runs.accuracy.mean()),
                accuracies=tuple(runs.accuracy.tolist()),
                final_loss=float(final_losses.mean()),
                clipped_share=float(
                    (
                        runs.clipped_steps
                        if method == "global norm"
                        else runs.clipped_units
                    ).mean()
                ),
                diverged=int((~learned).sum()),
            )
        )
    return rows


def print_table(rows: list[Row]) -> None:
    print(
        "\nclipping      rate  accuracy  of each seed    final loss  clipped  diverged"
    )
    for row in rows:
        each = " ".join(f"{accuracy:.3f}" for accuracy in row.accuracies)
        print(
            f"{row.method:11}  {row.rate:5.3g}  {row.accuracy:8.3f}  {each:14}  "
            f"{row.final_loss:10.3g}  {row.clipped_share:7.1%}  {row.diverged} of "
            f"{len(row.accuracies)}"
        )


def draw(rows: list[Row], figure: Any, look: Look) -> None:
    """Accuracy over the learning rate, with and without each way to clip."""
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    ticks = sorted({row.rate for row in rows})
    for axis, method, colour in zip(panels, TITLES, (look.blue, look.green)):
        draw_accuracies(axis, rows, "none", look.orange)
        draw_accuracies(axis, rows, method, colour)
        axis.axhline(0.1, color=look.grey, linestyle="dotted")
        axis.set_title(TITLES[method], color=colour, weight="bold")
        prepare(axis, look, xlabel="learning rate", xscale="log", ylim=(0, 1.02))
        axis.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        axis.minorticks_off()
    panels[0].set_ylabel("test accuracy")
    note(panels[0], "no clipping", (0.49, 0.6), look.orange)
    note(panels[0], "guessing", (0.25, 0.19), look.grey)
    seeds = len(rows[0].accuracies)
    note(panels[1], f"dashes: each of {seeds} seeds", (0.49, 0.4), look.grey)


def draw_accuracies(axis: Any, rows: list[Row], method: str, colour: str) -> None:
    """The mean over the seeds as a line, and each seed as a dash."""
    own = [row for row in rows if row.method == method]
    rates = [row.rate for row in own]
    axis.plot(rates, [row.accuracy for row in own], color=colour, linewidth=2)
    each = {"color": colour, "linestyle": "none", "marker": "_", "markersize": 14}
    axis.plot(rates, [row.accuracies for row in own], **each)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="how many steps to train (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=2,
        help="how many runs of each network (default: %(default)s)",
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
