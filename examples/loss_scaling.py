"""Trains in float16 with dynamic loss scaling, unscaling before the clip as one should,
and after it, which is a common mistake.

What it shows. The smallest float16 number is 6e-8, so small gradients become 0 on the
way back. Loss scaling multiplies the loss by a large number and divides the gradients
by it, in float32, once they have arrived. The scale is found by trying: a step whose
gradients overflow is left out and halves it, and `GROW_EVERY` good steps in a row
double it. Three questions have to be answered in the right order:

    unscale    the gradients come back `scale` times too long, and a limit is meant for
               the true ones
    clip       so the clip comes after that. In the other order nearly every gradient is
               over the limit, is cut down to it, and only then divided by the scale:
               what arrives is `limit / scale` long, at a scale of 65536 next to nothing
    skip       around both, `optaxclip.skip_nonfinite`: on overflow parameters, momentum
               and counters stay bit for bit, without a copy of them

Both orders are one line, as parts of `optax.chain`, since `unscale` is a transformation
that takes the scale as an extra argument: `update(..., loss_scale=scale)`. The same
network on the same batches in float32 shows what the right order should come to. The
step is one jitted function, scale and all.

What it does not show. How well Adam hides the mistake: it divides by the gradient's own
size, so that the wrong order there only looks like every gradient cut to one length,
and no error tells of it. `clip/clipped_share` at 1 does.

The scale takes a few lines. Flax has them ready
(`flax.training.dynamic_scale.DynamicScale`, which unscales by itself, before any clip).

How long it takes. About half a minute on two CPU cores, most of it compilation.

What it prints. A line at each step that was skipped, and the table.

    python examples/loss_scaling.py --steps 200

Reference: Micikevicius et al., Mixed precision training, 2017 (arXiv 1710.03740).
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
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

SEED, HIDDEN, BATCH, TRAINING = 0, 128, 64, 1400
LEARNING_RATE, MOMENTUM, MAX_NORM = 0.1, 0.9, 1.0
FIRST_SCALE, GROW_EVERY = 2.0**20, 50


class LossScale(NamedTuple):
    """What the loss is multiplied by."""

    scale: jax.Array  # float32[]
    good: jax.Array  # int32[]: finite steps since it last changed


class Digits(NamedTuple):
    """Handwritten digits of 8 x 8 pixels: those to learn from, and the rest."""

    images: np.ndarray  # float32[TRAINING, 64], in [0, 1]
    labels: np.ndarray  # int[TRAINING]
    unseen_images: np.ndarray  # float32[397, 64]
    unseen_labels: np.ndarray  # int[397]


class Row(NamedTuple):
    """One line of the table."""

    run: str
    final_loss: float  # mean over the last 20 steps
    accuracy: float  # on digits that were never trained on
    # median norm of what came to the optimizer, after unscale and clip in whichever
    # order
    arrived: float
    clipped_share: float  # of the steps that were not skipped
    skipped: int  # steps that overflowed
    # how many of these left every bit of parameters, momentum and counters as it was
    unmoved: int
    scales: list[float]  # the scale of every step


def main(steps: int = 300) -> list[Row]:
    """Trains the three networks, prints the table and returns it."""
    digits = read_digits()
    batches = list(draw_batches(digits, steps))
    clip = optaxclip.clip_by_global_norm(MAX_NORM)
    rows = [
        train(
            "float32",
            jnp.float32,
            new_optimizer(steps, clip, unscale()),
            LossScale(jnp.float32(1), jnp.int32(0)),
            digits,
            batches,
        ),
        train(
            "unscale, clip",
            jnp.float16,
            new_optimizer(steps, unscale(), clip),
            new_scale(),
            digits,
            batches,
        ),
        train(
            "clip, unscale",
            jnp.float16,
            new_optimizer(steps, clip, unscale()),
            new_scale(),
            digits,
            batches,
        ),
    ]
    print_table(rows)
    return rows


def new_optimizer(
    steps: int, first: Any, second: Any
) -> optax.GradientTransformationExtraArgs:
    """SGD behind two parts in the order given, none of which moves where a gradient is
    not finite.
    """
    sgd = optax.sgd(
        optax.cosine_decay_schedule(LEARNING_RATE, steps), momentum=MOMENTUM
    )
    return optaxclip.skip_nonfinite(
        optax.named_chain(
            ("first", first),
            ("second", second),
            ("arrived", optaxclip.record_norm()),
            ("sgd", sgd),
        )
    )


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides by the loss scale that `update` is given."""

    def update(
        updates: Any, state: Any, params: Any = None, *, loss_scale: Any = 1.0, **_: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda gradient: gradient / loss_scale, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def new_scale() -> LossScale:
    return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0))


def adjust(loss_scale: LossScale, overflow: jax.Array) -> LossScale:
    """Half the scale after an overflow, twice the scale after `GROW_EVERY` good
    steps.
    """
    good = jnp.where(overflow, 0, loss_scale.good + 1)
    grow = good == GROW_EVERY
    return LossScale(
        loss_scale.scale * jnp.where(overflow, 0.5, jnp.where(grow, 2.0, 1.0)),
        jnp.where(grow, 0, good),
    )


def train(
    run: str,
    dtype: Any,
    optimizer: Any,
    loss_scale: LossScale,
    digits: Digits,
    batches: list[Any],
) -> Row:
    """One run from the common seed. Without loss scaling, in float32, the scale is 1
    and stays there.
    """
    scaling = dtype == jnp.float16

    @jax.jit
    def step(
        params: Any,
        state: Any,
        loss_scale: LossScale,
        images: jax.Array,
        labels: jax.Array,
    ) -> tuple[Any, Any, LossScale, Any, Any]:
        scaled_loss, gradients = jax.value_and_grad(
            lambda params: loss_scale.scale * mean_loss(params, images, labels, dtype)
        )(params)
        updates, state = optimizer.update(
            gradients, state, params, loss_scale=loss_scale.scale
        )
        report = optaxclip.metrics(state)
        adjusted = (
            adjust(loss_scale, report["skip/skipped"] == 1) if scaling else loss_scale
        )
        return (
            optax.apply_updates(params, updates),
            state,
            adjusted,
            scaled_loss / loss_scale.scale,
            report,
        )

    params = new_network()
    state = optimizer.init(params)
    losses, arrived, scales, unmoved, report = [], [], [], 0, {}
    for number, (images, labels) in enumerate(batches):
        before = params, state.inner_state
        scales.append(float(loss_scale.scale))
        params, state, loss_scale, loss, report = step(
            params, state, loss_scale, images, labels
        )
        losses.append(float(loss))
        if report["skip/skipped"]:
            unmoved += same_bits(before, (params, state.inner_state))
            print(
                f"{run:14} step {number:4}  overflow at scale "
                f"2^{np.log2(scales[-1]):.0f}: skipped",
                flush=True,
            )
        else:
            arrived.append(float(report["clip/arrived/norm_before"]))
    clipped_share = next(
        float(value)
        for name, value in report.items()
        if name.endswith(("first/clipped_share", "second/clipped_share"))
    )
    accuracy = float(
        jnp.mean(
            predict(params, digits.unseen_images, dtype).argmax(1)
            == digits.unseen_labels
        )
    )
    return Row(
        run,
        float(np.mean(losses[-20:])),
        accuracy,
        float(np.median(arrived)),
        clipped_share,
        int(report["skip/skipped_count"]),
        unmoved,
        scales,
    )


def same_bits(old: Any, new: Any) -> bool:
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new))
    )


def read_digits() -> Digits:
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    return Digits(
        images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]
    )


def draw_batches(digits: Digits, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(SEED)
    for _ in range(steps):
        chosen = random.choice(TRAINING, BATCH, replace=False)
        yield digits.images[chosen], digits.labels[chosen]


def new_network() -> list[dict[str, jax.Array]]:
    """Weights in float32. They are kept in it, and only computed with in float16: a
    step is often too short to be seen there.
    """
    random = np.random.default_rng(SEED)
    sizes = [64, HIDDEN, HIDDEN, 10]
    return [
        {
            "w": jnp.asarray(
                random.normal(size=(inputs, outputs)) / np.sqrt(inputs), jnp.float32
            ),
            "b": jnp.zeros(outputs),
        }
        for inputs, outputs in pairwise(sizes)
    ]


def predict(params: Any, images: Any, dtype: Any) -> jax.Array:
    x = jnp.asarray(images, dtype)
    *hidden, last = jax.tree.map(lambda weight: weight.astype(dtype), params)
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def mean_loss(params: Any, images: Any, labels: Any, dtype: Any) -> jax.Array:
    """Cross entropy in float32, of scores in `dtype`. So the scaled loss itself cannot
    overflow, only the gradients on their way back.
    """
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(params, images, dtype).astype(jnp.float32), labels
    ).mean()


def print_table(rows: list[Row]) -> None:
    print(
        f"\n{'':14}  {'':10}  {'':8}  {'norm that':>10}  {'':>7}  {'skipped':>9}  "
        f"{'scale at':>8}"
    )
    print(
        f"{'run':14}  {'final loss':>10}  {'accuracy':>8}  {'arrived':>10}  "
        f"{'clipped':>7}  {'(unmoved)':>9}  {'the end':>8}"
    )
    for row in rows:
        skipped = f"{row.skipped} ({row.unmoved})"
        scale = f"2^{np.log2(row.scales[-1]):.0f}"
        print(
            f"{row.run:14}  {row.final_loss:10.4g}  {row.accuracy:8.1%}  "
            f"{row.arrived:10.3g}  {row.clipped_share:7.1%}  {skipped:>9}  {scale:>8}"
        )
    print(
        f"\nThe limit is {MAX_NORM:g}: the norm that arrives is at most that, and "
        "should be about what it is in float32."
    )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="how many steps to train (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
