"""Trains in float16 with dynamic loss scaling, unscaling before the clip as one should,
and after it, which is a common mistake.

What it shows. The smallest float16 number is 6e-8, so small gradients become 0 on the
way back. Loss scaling multiplies the loss by a large number and divides the gradients
by it, in float32, once they have arrived. A step whose gradients overflow is left out
and halves the scale, down to 1, and 50 good steps in a row double it. The right order:

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

    pip install scikit-learn
    python examples/loss_scaling.py --steps 300

Reference: Micikevicius et al., Mixed precision training, 2017 (arXiv 1710.03740).
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

import optaxclip

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    error.add_note("Install what this program needs: pip install scikit-learn")
    raise

STEPS = 300
BATCH = 64
MAX_NORM = 0.5
FIRST_SCALE = 2.0**20
GROW_EVERY = 50  # good steps
RUNS = [
    (jnp.float32, ("clip", "unscale")),
    (jnp.float16, ("unscale", "clip")),
    (jnp.float16, ("clip", "unscale")),
]

Params = dict[str, Array]
Log = dict[str, np.ndarray]


class LossScale(NamedTuple):
    """The number that multiplies the loss."""

    scale: Array  # float32[]
    good_steps: Array  # int32[]: finite steps since it last changed


def main(steps: int = STEPS) -> dict[str, Log]:
    """Trains the three networks. Returns the log of each."""
    logs = {}
    print("run                     final loss  norm  clipped  skipped  scale")
    for dtype, order in RUNS:
        name = f"{dtype.__name__}: {', '.join(order)}"
        logs[name] = train(dtype, order, steps)
        print_line(name, logs[name])
    return logs


def print_line(name: str, log: Log) -> None:
    is_good = log["skipped"] == 0
    loss = log["loss"][-20:].mean()
    norm = clipped = np.nan
    if is_good.any():
        norm = np.median(log["arrived"][is_good])
        clipped = log["clipped"][is_good].mean()
    skipped = (~is_good).sum()
    power = np.log2(log["scale"][-1])
    print(
        f"{name:22}  {loss:10.4f}  {norm:.2g}  {clipped:7.1%}  {skipped:7}  "
        f"2^{power:.0f}",
        flush=True,
    )


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides by the `loss_scale` that `update` is given."""

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        loss_scale: ArrayLike = 1.0,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda leaf: leaf / loss_scale, updates)
        return grads, state

    return optax.GradientTransformationExtraArgs(init, update)


def adjust(loss_scale: LossScale, overflow: Array) -> LossScale:
    """Half the scale after an overflow, twice the scale after GROW_EVERY good steps."""
    good_steps = jnp.where(overflow, 0, loss_scale.good_steps + 1)
    grows = good_steps == GROW_EVERY
    growth = jnp.where(grows, 2.0, 1.0)
    factor = jnp.where(overflow, 0.5, growth)
    # Broken data overflows at any scale. Below 1 small gradients would become 0.
    scale = jnp.maximum(loss_scale.scale * factor, 1.0)
    return LossScale(scale, jnp.where(grows, 0, good_steps))


def new_optimizer(order: tuple[str, str]) -> optax.GradientTransformationExtraArgs:
    clipper = optaxclip.clip_by_global_norm(MAX_NORM)
    parts = {"clip": clipper, "unscale": unscale()}
    first, second = order
    chain = optax.named_chain(
        (first, parts[first]),
        (second, parts[second]),
        ("arrived", optaxclip.record_norm()),
        ("sgd", optax.sgd(0.1, momentum=0.9)),
    )
    return optaxclip.skip_nonfinite(chain)


def new_params() -> Params:
    """One hidden layer."""
    first_key, second_key = jax.random.split(jax.random.key(0))
    normal = jax.nn.initializers.lecun_normal()
    return {
        "hidden": normal(first_key, (64, 128)),
        "bias": jnp.zeros(128),
        "output": normal(second_key, (128, 10)),
    }


def train(dtype: Any, order: tuple[str, str], steps: int) -> Log:
    """One run, as one compiled scan. In float32 the scale is 1 and stays there."""
    optimizer = new_optimizer(order)
    is_scaled = dtype == jnp.float16

    def scaled_loss(
        params: Params, images: Array, labels: Array, scale: Array
    ) -> Array:
        # Weights are kept in float32, where a small step is seen, and computed with in
        # float16. The loss is float32, so that only gradients can overflow.
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        images = images.astype(dtype)
        hidden = jnp.tanh(images @ params["hidden"] + params["bias"])
        logits = hidden @ params["output"]
        logits = logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return scale * losses.mean()

    loss_and_grads = jax.value_and_grad(scaled_loss)

    def step(trained: Any, batch: tuple[Array, Array]) -> Any:
        params, state, loss_scale = trained
        scale = loss_scale.scale
        images, labels = batch
        loss, grads = loss_and_grads(params, images, labels, scale)
        updates, state = optimizer.update(grads, state, params, loss_scale=scale)
        params = optax.apply_updates(params, updates)
        report = optaxclip.metrics(state)
        log = {
            "loss": loss / scale,
            "scale": scale,
            "arrived": report["record/arrived/norm"],
            "clipped": report["clip/clipped"],
            "skipped": report["skip/skipped"],
        }
        if is_scaled:
            # Not `skipped`: after 100 broken steps skip_nonfinite lets one through.
            overflow = ~jnp.isfinite(report["skip/norm"])
            loss_scale = adjust(loss_scale, overflow)
        return (params, state, loss_scale), log

    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    size = steps, BATCH
    chosen = random.integers(len(labels), size=size)
    images = jnp.asarray(images[chosen]) / 16
    labels = jnp.asarray(labels[chosen])
    batches = images, labels
    params = new_params()
    state = optimizer.init(params)
    first_scale = jnp.float32(FIRST_SCALE if is_scaled else 1)
    loss_scale = LossScale(first_scale, jnp.int32(0))
    start = params, state, loss_scale
    scan = jax.jit(lambda start: jax.lax.scan(step, start, batches))
    _, log = scan(start)
    return jax.device_get(log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    main(parser.parse_args().steps)
