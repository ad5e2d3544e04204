"""Trains in float16 with dynamic loss scaling, unscaling before the clip as one should,
and after it, which is a common mistake.

What it shows. The smallest float16 number is 6e-8, so small gradients become 0 on the
way back. Loss scaling multiplies the loss by a large number and divides the gradients
by it, in float32, once they have arrived. A step whose gradients overflow is left out
and halves the scale, and 50 good steps in a row double it. The right order:

    unscale    the gradients come back `scale` times too long, and a limit is meant for
               the true ones
    clip       so the clip comes after that. In the other order nearly every gradient is
               cut to the limit and then divided by the scale, so that next to nothing
               is left
    skip       around both, `optaxclip.skip_nonfinite`: on overflow parameters, momentum
               and counters stay bit for bit, without a copy of them

`unscale` is a part of the chain that takes the scale as an extra argument. The same
network in float32 shows the loss that the right order should reach. The wrong order
raises no error, and Adam would hide it. A `clip/clipped_share` of 1 shows it.

What it prints. For each run the loss at the end, the median norm that arrived at the
optimizer, the share of clipped steps, how many were skipped, and the last scale.

    python examples/loss_scaling.py --steps 300

Reference: Micikevicius et al., Mixed precision training, 2017 (arXiv 1710.03740).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import cross_entropy, new_perceptron, perceptron, read_digits, run

import optaxclip

BATCH, MAX_NORM, FIRST_SCALE, GROW_EVERY = 64, 1.0, 2.0**20, 50


class LossScale(NamedTuple):
    """What the loss is multiplied by."""

    scale: jax.Array  # float32[]
    good: jax.Array  # int32[]: finite steps since it last changed


def main(steps: int = 300) -> dict[str, dict[str, np.ndarray]]:
    """Trains the three networks. Returns the log of each."""
    orders = ("clip", "unscale"), ("unscale", "clip"), ("clip", "unscale")
    dtypes, runs = (jnp.float32, jnp.float16, jnp.float16), {}
    print("run                     final loss  norm  clipped  skipped (unmoved)  scale")
    for dtype, order in zip(dtypes, orders):
        name = f"{dtype.__name__}: {', '.join(order)}"
        runs[name] = log = train(dtype, order, steps)
        good = log["skipped"] == 0
        norm, clipped = np.median(log["arrived"][good]), log["clipped"][good].mean()
        skipped = f"{(~good).sum()} ({log['unmoved'].sum()})"
        scale = f"2^{np.log2(log['scale'][-1]):.0f}"
        numbers = f"{log['loss'][-20:].mean():10.4f}  {norm:.2g}  {clipped:7.1%}"
        print(f"{name:22}  {numbers}  {skipped:>17}  {scale}", flush=True)
    return runs


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides by the `loss_scale` that `update` is given."""

    def update(
        updates: Any, state: Any, params: Any = None, *, loss_scale: Any = 1.0, **_: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda gradient: gradient / loss_scale, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def adjust(loss_scale: LossScale, overflow: Any) -> LossScale:
    """Half the scale after an overflow, twice the scale after GROW_EVERY good steps."""
    good = jnp.where(overflow, 0, loss_scale.good + 1)
    grow = good == GROW_EVERY
    factor = jnp.where(overflow, 0.5, jnp.where(grow, 2.0, 1.0))
    return LossScale(loss_scale.scale * factor, jnp.where(grow, 0, good))


def train(dtype: Any, order: tuple[str, ...], steps: int) -> dict[str, np.ndarray]:
    """One run, as one compiled scan. In float32 the scale is 1 and stays there."""
    parts = {"clip": optaxclip.clip_by_global_norm(MAX_NORM), "unscale": unscale()}
    last = ("arrived", optaxclip.record_norm()), ("sgd", optax.sgd(0.1, momentum=0.9))
    chain = optax.named_chain(*((name, parts[name]) for name in order), *last)
    optimizer: Any = optaxclip.skip_nonfinite(chain)
    is_scaled = dtype == jnp.float16

    def scaled_loss(params: Any, images: Any, labels: Any, scale: Any) -> jax.Array:
        # Weights are kept in float32, where a small step is seen, and computed with in
        # float16. The loss is float32, so that only gradients can overflow.
        params, images = jax.tree.map(lambda x: x.astype(dtype), (params, images))
        logits = perceptron(params, images).astype(jnp.float32)
        return scale * cross_entropy(logits, labels)

    def step(trained: Any, batch: Any) -> Any:
        params, state, loss_scale = trained
        scale = loss_scale.scale
        loss, grads = jax.value_and_grad(scaled_loss)(params, *batch, scale)
        updates, after = optimizer.update(grads, state, params, loss_scale=scale)
        new = optax.apply_updates(params, updates)
        report = optaxclip.metrics(after)
        log = {"loss": loss / scale, "scale": scale}
        log["arrived"] = report["record/arrived/norm"]
        log["clipped"] = report["clip/clipped"]
        log["skipped"] = report["skip/skipped"]
        both = (params, state.inner_state), (new, after.inner_state)
        same = jax.tree.map(lambda old, new: jnp.all(old == new), *both)
        log["unmoved"] = jnp.all(jnp.array(jax.tree.leaves(same)))
        if is_scaled:
            loss_scale = adjust(loss_scale, report["skip/skipped"] == 1)
        return (new, after, loss_scale), log

    (images, labels), _ = read_digits(held_out=0)
    chosen = np.random.default_rng(0).integers(len(labels), size=(steps, BATCH))
    batches = jnp.asarray(images)[chosen], jnp.asarray(labels)[chosen]
    params = new_perceptron(64, 128, 128, 10)
    first = LossScale(jnp.float32(FIRST_SCALE if is_scaled else 1), jnp.int32(0))
    start = params, optimizer.init(params), first
    return jax.device_get(jax.jit(partial(jax.lax.scan, step))(start, batches)[1])


if __name__ == "__main__":
    run(main)
