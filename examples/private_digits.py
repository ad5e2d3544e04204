"""Learns handwritten digits with differential privacy: clips the gradient of each
example, adds Gaussian noise to their sum, and shows what the norms of examples tell.

What it shows. The three parts of DP-SGD. Each step draws its batch by chance: every
image joins with the same probability, so the number of images differs from step to
step. They are padded to one shape, each at a random place, and a mask says which are
real. `clipped_grad` with `mean=False` gives a sum, and its sensitivity: by how much one
image changes it at most. `add_noise` adds noise of this size, times the noise
multiplier. The sum is divided by the expected number of images, since the real number
would tell something about the data.

26 of the 1300 images have a wrong label on purpose. At the end, when the network has
learnt the rest, all of them are among the hundred longest gradients: norms of examples
find broken data. The limit bounds what those images do.

What it prints. Accuracy on the held-out images, and then numbers that are not private,
since they look at the training images without noise: the share of gradients that were
clipped, the gradient noise scale, and the longest gradients.

From `_shared.py` come images, perceptron, loss and command line.

    python examples/private_digits.py --noise 0

Reference: Abadi et al., Deep learning with differential privacy, 2016 (1607.00133).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import (
    Digits,
    Layers,
    cross_entropy,
    new_perceptron,
    perceptron,
    read_digits,
    run,
)
from jax import Array

import optaxclip
from optaxclip.per_example import draw, noise_scale

HELD_OUT = 497
WRONG = 26
LONGEST = 100
MAX_NORM = 1.0  # of the gradient of one image
BATCH = 130  # images on average
PADDED = 256  # images at most: 11 standard deviations more


class Result(NamedTuple):
    """What happened."""

    accuracy: float  # on the held-out images
    clipped: np.ndarray  # float32[steps]: the share of the batch
    norms: np.ndarray  # float32[images]: of all training images, after training
    noise_scales: list[float]  # before and after training
    wrong: np.ndarray  # bool[images]: whose label is wrong on purpose


def main(steps: int = 300, noise: float = 1.0, seed: int = 0) -> Result:
    """Trains, and prints accuracy, norms and noise scales."""
    training, held_out = read_digits(HELD_OUT, seed)
    random = np.random.default_rng(seed)
    wrong = np.arange(len(training.labels)) < WRONG
    errors = random.integers(1, 10, WRONG, dtype=np.int32)
    training.labels[wrong] += errors
    training.labels[wrong] %= 10
    start = new_perceptron(64, 32, 10, seed=seed)
    params, clipped = train(start, training, steps, noise, seed)
    logits = perceptron(params, held_out.images)
    guesses = np.argmax(logits, axis=-1)
    accuracy = float(np.mean(guesses == held_out.labels))
    # All training images at once, without a limit.
    measure = jax.jit(optaxclip.clipped_grad(loss_of, None))
    before = measure(start, *training)
    after = measure(params, *training)
    result = Result(
        accuracy=accuracy,
        clipped=clipped,
        norms=np.asarray(after.norms),
        noise_scales=[float(noise_scale(x).scale) for x in (before, after)],
        wrong=wrong,
    )
    print_result(result)
    return result


def print_result(result: Result) -> None:
    clipped = result.clipped
    print(f"{result.accuracy:.1%} of {HELD_OUT} held-out images are read correctly")
    print(f"clipped: {clipped.mean():.1%} of gradients, {clipped[-1]:.1%} at the end")
    before, after = result.noise_scales
    print(f"noise scale: {before:.3g} before training, {after:.3g} after")
    order = np.argsort(-result.norms)
    longest = order[:LONGEST]
    count = np.sum(result.wrong[longest])
    print(f"of {WRONG} wrong labels {count} are among the {LONGEST} longest gradients:")
    for image in longest[:10]:
        mark = "  wrong on purpose" if result.wrong[image] else ""
        print(f"image {image:4}  norm {result.norms[image]:6.2f}{mark}")


def loss_of(params: Layers, image: Array, label: Array) -> Array:
    """The loss of ONE image."""
    logits = perceptron(params, image)
    return cross_entropy(logits, label)


def train(
    params: Layers, digits: Digits, steps: int, noise: float, seed: int
) -> tuple[Layers, np.ndarray]:
    """DP-SGD: the weights, and the share of gradients that each step clipped."""
    images = jnp.asarray(digits.images)
    labels = jnp.asarray(digits.labels)
    optimizer = optax.sgd(0.1, momentum=0.9)
    # The sum, since one image changes it by MAX_NORM at most.
    grad = optaxclip.clipped_grad(loss_of, MAX_NORM, mean=False)

    def step(trained: tuple[Layers, Any], key: Array) -> Any:
        params, state = trained
        batch_key, noise_key = jax.random.split(key)
        # Poisson sampling, on which the account of privacy is based.
        share = BATCH / len(labels)
        batch = draw(batch_key, share, examples=len(labels), places=PADDED)
        chosen = batch.chosen
        result = grad(params, images[chosen], labels[chosen], mask=batch.mask)
        total = result.grads
        # `add_noise` refuses noise of 0, which would hide nothing.
        if noise:
            total = optaxclip.add_noise(result, noise, noise_key)
        mean = jax.tree.map(lambda leaf: leaf / BATCH, total)
        updates, state = optimizer.update(mean, state)
        is_clipped = batch.mask & (result.factors < 1)
        # A batch by chance may have no image.
        count = jnp.maximum(jnp.sum(batch.mask), 1)
        clipped = jnp.sum(is_clipped) / count
        params = optax.apply_updates(params, updates)
        return (params, state), clipped

    key = jax.random.key(seed)
    keys = jax.random.split(key, steps)
    start = params, optimizer.init(params)
    scan = jax.jit(lambda start: jax.lax.scan(step, start, keys))
    (params, _), clipped = scan(start)
    return params, np.asarray(clipped)


if __name__ == "__main__":
    run(
        main,
        noise="noise multiplier: deviation of the noise, over what one image changes",
    )
