"""Learns handwritten digits with differential privacy: clips the gradient of each
example, adds Gaussian noise to their sum, and shows what the norms of examples tell.

What it shows. The three parts of DP-SGD. Each step draws its batch by chance: every
image joins with the same probability, so the number of images differs from step to
step. They are padded to one shape, and a mask says which are real. `clipped_grad` with
`mean=False` gives a sum that no image changes by more than the limit. Noise with the
standard deviation noise * limit is added, and the sum is divided by the expected number
of images, since the real number would tell something about the data.

26 of the 1300 images have a wrong label on purpose. At the end, when the network has
learnt the rest, all of them are among the hundred longest gradients: norms of examples
find broken data. The limit bounds what those images do.

What it does not show. The price of privacy: docs/per_example.md computes epsilon for
the default settings. Nor is what it prints private, but for the accuracy on images that
are held out: shares, norms and noise scales look at the training images without noise.

How long it takes. About fifteen seconds on two CPU cores, most of it compilation.

What it prints. Accuracy on the held-out images, the share of gradients that were
clipped, the gradient noise scale before and after training, and the longest gradients
with their labels. --save PATH draws the norms before and after.

    python examples/private_digits.py --noise 0

Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
1607.00133).
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip
from optaxclip.per_example import NoiseScale, noise_scale

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

HELD_OUT, WRONG, WIDTH, SHOWN, LONGEST = 497, 26, 32, 10, 100
# A batch has 130 images on average, and at most 256: 11 standard deviations more.
BATCH, PADDED = 130, 256
LEARNING_RATE, MOMENTUM = 0.1, 0.9

Network = dict[str, jax.Array]


class Digits(NamedTuple):
    """Handwritten digits."""

    images: np.ndarray  # float32[digits, 64] in [0, 1]
    labels: np.ndarray  # int32[digits]


class Look(NamedTuple):
    """What the gradients of all training images were at one time."""

    norms: np.ndarray  # float32[digits]
    noise: NoiseScale


class Result(NamedTuple):
    """What a test may ask of the run."""

    accuracy: float  # on the held-out images
    clipped: np.ndarray  # float32[steps]: the share of the batch
    before: Look
    after: Look
    wrong: np.ndarray  # bool[digits]: whose label is wrong on purpose


def main(
    steps: int = 300,
    *,
    noise: float = 1.0,
    max_norm: float = 1.0,
    seed: int = 0,
    save: str | Path | None = None,
) -> Result:
    """Trains, prints what it found, draws a picture if one is wanted, and returns what
    happened.
    """
    training, held_out, wrong = read_digits(seed)
    start = new_network(seed)
    network, clipped = train(start, training, steps, noise, max_norm, seed)
    right = np.argmax(logits_of(network, held_out.images), axis=-1) == held_out.labels
    before, after = look(start, training), look(network, training)
    result = Result(float(np.mean(right)), np.asarray(clipped), before, after, wrong)
    print_result(result, training)
    if save is not None:
        draw(result, max_norm, Path(save))
        print(f"\nThe picture is in {save}")
    return result


def read_digits(seed: int) -> tuple[Digits, Digits, np.ndarray]:
    """The digits to train on, those held out, and which of the first have a wrong
    label.
    """
    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order].astype(np.int32)
    training = Digits(images[HELD_OUT:], labels[HELD_OUT:])
    wrong = np.arange(len(training.labels)) < WRONG
    training.labels[wrong] += random.integers(1, 10, WRONG, dtype=np.int32)
    training.labels[wrong] %= 10
    return training, Digits(images[:HELD_OUT], labels[:HELD_OUT]), wrong


def new_network(seed: int) -> Network:
    random = np.random.default_rng(seed)

    def normal(inputs: int, outputs: int) -> jax.Array:
        weight = random.normal(size=(inputs, outputs)) / np.sqrt(inputs)
        return jnp.asarray(weight, jnp.float32)

    first, second = normal(64, WIDTH), normal(WIDTH, 10)
    return {"in": first, "b": jnp.zeros(WIDTH), "out": second, "c": jnp.zeros(10)}


def logits_of(network: Network, image: Any) -> jax.Array:
    hidden = jnp.tanh(image @ network["in"] + network["b"])
    return hidden @ network["out"] + network["c"]


def loss_of(network: Network, image: jax.Array, label: jax.Array) -> jax.Array:
    """Cross entropy of ONE image, in nats."""
    logits = logits_of(network, image)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def train(
    network: Network,
    digits: Digits,
    steps: int,
    noise: float,
    max_norm: float,
    seed: int,
) -> tuple[Network, jax.Array]:
    """DP-SGD: the network, and the share of gradients that each step clipped."""
    images, labels = jnp.asarray(digits.images), jnp.asarray(digits.labels)
    optimizer = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
    # The sum, since one image changes it by max_norm at most.
    grad = optaxclip.clipped_grad(loss_of, max_norm, mean=False)

    def step(trained: Any, batch: Any) -> tuple[Any, jax.Array]:
        (network, state), (chosen, is_real, key) = trained, batch
        result = grad(network, images[chosen], labels[chosen], mask=is_real)
        noisy = with_noise(result.grads, key, noise * max_norm)
        mean = jax.tree.map(lambda x: x / BATCH, noisy)
        updates, state = optimizer.update(mean, state)
        clipped = jnp.sum(is_real & (result.factors < 1)) / jnp.sum(is_real)
        return (optax.apply_updates(network, updates), state), clipped

    chosen, is_real = batches(len(labels), steps, seed)
    keys = jax.random.split(jax.random.key(seed), steps)
    run = jax.jit(lambda *inputs: jax.lax.scan(step, *inputs))
    start = network, optimizer.init(network)
    (network, _), clipped = run(start, (chosen, is_real, keys))
    return network, clipped


def with_noise(tree: Any, key: jax.Array, deviation: float) -> Any:
    """Adds normal noise to every number."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        leaf + deviation * jax.random.normal(each, leaf.shape, leaf.dtype)
        for leaf, each in zip(leaves, keys)
    ]
    return treedef.unflatten(noisy)


def batches(examples: int, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """int[steps, PADDED], and which of them are real: Poisson sampling, on which the
    account of privacy is based. Every example joins with the same probability.
    """
    random = np.random.default_rng(seed)
    chosen = np.zeros((steps, PADDED), np.int32)
    is_real = np.zeros((steps, PADDED), bool)
    for step in range(steps):
        (drawn,) = np.nonzero(random.random(examples) < BATCH / examples)
        chosen[step, : len(drawn)] = drawn
        is_real[step, : len(drawn)] = True
    return chosen, is_real


def look(network: Network, digits: Digits) -> Look:
    """Norms and noise scale of all training images, without a limit."""
    grad = jax.jit(optaxclip.clipped_grad(loss_of, None))
    result = grad(network, digits.images, digits.labels)
    return Look(np.asarray(result.norms), noise_scale(result))


def print_result(result: Result, training: Digits) -> None:
    first, last = result.clipped[0], result.clipped[-1]
    print(f"{result.accuracy:.1%} of {HELD_OUT} held-out images are read correctly")
    print(f"clipped: {result.clipped.mean():.1%} of all gradients,")
    print(f"         {first:.1%} in the first step, {last:.1%} in the last")
    for time, seen in (("before", result.before), ("after", result.after)):
        scale, noise, signal = map(float, seen.noise)
        print(f"noise scale {time} training: {noise:.3g} / {signal:.3g} = {scale:.3g}")
    norms = result.after.norms
    longest = np.argsort(norms)[::-1][:LONGEST]
    found = np.sum(result.wrong[longest])
    print(
        f"\nof {WRONG} wrong labels {found} are among the {LONGEST} longest gradients"
    )
    print(f"median norm {np.median(norms):.3f}, and the longest gradients:")
    print(" image  label    norm")
    for number in longest[:SHOWN]:
        mark = "  wrong on purpose" if result.wrong[number] else ""
        print(f"{number:6}  {training.labels[number]:5}  {norms[number]:6.2f}{mark}")


def draw(result: Result, max_norm: float, path: Path) -> None:
    """The norms of examples before and after training."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    looks = {"before training": result.before, "after": result.after}
    panels = figure.subplots(1, 2, sharey=True)
    for axis, (time, seen) in zip(panels, looks.items()):
        norms = np.maximum(seen.norms, 1e-3)
        groups = [norms[~result.wrong], norms[result.wrong]]
        bins = np.geomspace(1e-3, 30, 50)
        names, colours = ["right label", "wrong label"], ["#0072b2", "#d55e00"]
        axis.hist(groups, bins, stacked=True, label=names, color=colours)
        axis.axvline(max_norm, color="grey", linestyle="dashed", label="limit")
        axis.set(title=time, xscale="log", yscale="symlog", xlabel="norm of an example")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def command_line() -> argparse.ArgumentParser:
    """The options of the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shown = "(default: %(default)s)"
    add("--steps", type=int, default=300, help=f"how many steps to train {shown}")
    about = "standard deviation of the noise, in units of the limit"
    add("--noise", type=float, default=1.0, help=f"{about} {shown}")
    add("--max-norm", type=float, default=1.0, help=f"limit of each example {shown}")
    add("--seed", type=int, default=0, help=f"the seed of all that is drawn {shown}")
    picture = "draw a picture to this path (default: no picture)"
    add("--save", type=Path, metavar="PATH", help=picture)
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
