"""Training runs by `release` in one backward pass, and in two, which are the global
clip.

    PYTHONPATH=examples python -m benchmarks.release
    PYTHONPATH=examples python -m benchmarks.release --limit 1.0

The transformer of examples/release.py reads the English prose of Python's own help
pages, with five seeds of its batches. In some runs every 20th step is damaged: its text
is random, or the gradient of one random layer is 1,000 times as long.

What it prints. A row for each damage and number of passes: the loss on held-out text
with its deviation over the seeds, the largest norm after the clip, and the cosine
between the gradients before and after it. The last two columns are of steps whose norm
was below the limit: how many were shortened nevertheless, and the least that one kept.
"""

from functools import partial

import jax
import numpy as np
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from examples._shared import read_text, run
from examples.release import LENGTH, layer, new_params
from examples.release import loss_of as release_loss
from optaxclip import release, scale_cotangent

from .networks import Params

SEEDS = 5
LAYERS = 6
WIDTH = 32
BATCH = 8
SGD = optax.sgd(0.1, momentum=0.9)
TEXT = read_text()
DAMAGES = ("none", "random text", "one layer times 1,000")
COLUMNS = (
    "damage | passes | loss | norms over the limit | largest norm / limit | "
    "cosine, mean | worst | shortened below the limit | kept, at least"
)


def main(steps: int = 110, limit: float = 0.5) -> None:
    """Prints the table in Markdown."""
    print(f"| {COLUMNS} |")
    print("|---" * 9 + "|", flush=True)
    for damage in DAMAGES:
        for passes in (1, 2):
            results = train(*batches(steps, damage), limit=limit, passes=passes)
            losses, norms, norms_after, cosines = jax.device_get(results)
            kept_below = (norms_after / norms)[norms <= limit]
            numbers = [
                f"{losses.mean():.3f} ± {losses.std():.3f}",
                f"{np.mean(norms > limit):.0%}",
                f"{norms_after.max() / limit:.6f}",
                f"{cosines.mean():.3f}",
                f"{cosines.min():.3f}",
                # The rounding of a norm shortens nothing.
                f"{np.sum(kept_below < 1 - 1e-5) / max(1, kept_below.size):.1%}",
                f"{kept_below.min(initial=1):.2f}",
            ]
            print(f"| {damage} | {passes} |", " | ".join(numbers), "|", flush=True)


def batches(steps: int, damage: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each seed and step: windows of text, and what multiplies the gradient of each
    layer.
    """
    random = np.random.default_rng(0)
    last = len(TEXT.training) - LENGTH
    starts = random.integers(last, size=(SEEDS, steps, BATCH, 1))
    windows = np.asarray(TEXT.training)[starts + np.arange(LENGTH + 1)]
    factors = np.ones((SEEDS, steps, LAYERS), np.float32)
    for step in range(19, steps, 20):
        if damage == "random text":
            shape = windows[:, step].shape
            windows[:, step] = random.integers(len(TEXT.alphabet), size=shape)
        if damage == "one layer times 1,000":
            factors[:, step] = random.choice(1 + 999 * np.eye(LAYERS), SEEDS)
    return windows, factors


@partial(jax.jit, static_argnames="passes")
def train(
    windows: Array, factors: Array, *, limit: ArrayLike, passes: int
) -> tuple[ArrayLike, ...]:
    """Returns the losses of all seeds on held-out text, and of each step the norms
    before and after the clip and the cosine of the two gradients.
    """
    # A trace without decay keeps the gradients that the clip lets through.
    optimizer = optax.chain(optax.trace(decay=0.0), SGD)
    trainer = release(loss_of, optimizer, max_norm=limit, passes=passes)

    def step(carry, batch):
        params, state = carry
        grads = jax.grad(loss_of)(params, *batch)
        params, state, _ = trainer.step(params, state, *batch)
        clipped = state.optimizer[0].trace
        norm = optax.tree.norm(grads)
        norm_after = optax.tree.norm(clipped)
        cosine = optax.tree.vdot(grads, clipped) / (norm * norm_after)
        return (params, state), (norm, norm_after, cosine)

    def run_of_seed(windows, factors):
        params = new_params(len(TEXT.alphabet), LAYERS, WIDTH)
        state = trainer.init(params, windows[0], factors[0])
        (params, _), rows = lax.scan(step, (params, state), (windows, factors))
        return loss_of(params, TEXT.validation[:64], factors[0]), *rows

    return jax.vmap(run_of_seed)(windows, factors)


def loss_of(params: Params, windows: Array, factors: Array) -> Array:
    """The loss, whose gradient is multiplied by a factor for each layer."""

    def damaged_layer(x: Array, row: tuple[Params, Array]) -> tuple[Array, None]:
        weights, factor = row
        return layer(x, scale_cotangent(weights, factor))

    layers = params["layers"], factors
    return release_loss(params | {"layers": layers}, windows, damaged_layer)


if __name__ == "__main__":
    run(main, limit="the limit of the norm of all gradients")
