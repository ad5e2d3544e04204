"""A seventh task: digits with DP-SGD, whose clip is that of each example."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

import optaxclip as oc
from examples._shared import new_perceptron, perceptron
from examples.private_digits import loss_of
from optaxclip.per_example import draw

from .tasks import DIGITS, TRAINING_DIGITS, Params

METHODS = {
    "hard, limit 0.1": (oc.shrinks.hard, 0.1),
    "hard, limit 1": (oc.shrinks.hard, 1.0),
    "hard, limit 10": (oc.shrinks.hard, 10.0),
    "auto_s": (oc.shrinks.auto_s(), 1.0),
}
RATES = [0.3, 1.0, 3.0, 10.0]  # divided by the limit, to which steps are proportional
BATCH = 130


def row(seeds: int, steps: int) -> dict[str, Any]:
    """The shares of digits that each method reads wrongly in the end."""
    costs = {}
    for name, (shrink, limit) in METHODS.items():
        one_rate = partial(wrong_share, shrink, limit, steps)
        trained = jax.jit(jax.vmap(one_rate, in_axes=(None, None, 0)))
        columns = []
        for seed in range(seeds):
            start = new_perceptron(64, 32, 10, seed=seed)
            key = random.key(seed)
            columns.append(trained(start, key, jnp.asarray(RATES)))
        costs[name] = [np.stack(columns, axis=-1).round(4).tolist()]
    return {"rates": RATES, "untrained": [0.9], "costs": costs}


def wrong_share(
    shrink: oc.shrinks.Shrink,
    limit: float,
    steps: int,
    params: Params,
    key: jax.Array,
    rate: jax.Array,
) -> jax.Array:
    """One training, with noise of the size of the limit."""
    images = jnp.asarray(TRAINING_DIGITS.images)
    labels = jnp.asarray(TRAINING_DIGITS.labels)
    share = BATCH / len(labels)
    grad = oc.clipped_grad(loss_of, limit, shrink=shrink, mean=False)

    def step(params: Params, key: jax.Array) -> tuple[Params, None]:
        batch_key, noise_key = random.split(key)
        # Poisson sampling, padded to one size.
        batch = draw(batch_key, share, examples=len(labels), places=2 * BATCH)
        chosen = batch.chosen
        clipped = grad(params, images[chosen], labels[chosen], mask=batch.mask)
        total = oc.add_noise(clipped, 1.0, noise_key)
        size = rate / (limit * BATCH)
        return jax.tree.map(lambda w, g: w - size * g, params, total), None

    params, _ = lax.scan(step, params, random.split(key, steps))
    guesses = perceptron(params, DIGITS.images).argmax(-1)
    return jnp.mean(guesses != DIGITS.labels)
