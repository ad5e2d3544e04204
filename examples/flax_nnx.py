"""Trains a convolutional network of flax NNX with the clipper inside `nnx.Optimizer`,
and reads from the optimizer what the clipper did.

What it shows. A clipper is a part of the optax chain, and `nnx.Optimizer` takes the
chain as it is. The step under `nnx.jit` has no line more than without clipping. The
network has batch normalisation, whose running averages are variables but no weights:
`wrt=nnx.Param` keeps them away from the optimizer and from the norm.

`optaxclip.metrics(optimizer.opt_state)` reads the variables in which NNX keeps the
state, inside jit or outside. A checkpoint's `nnx.state` is first put into an optimizer,
by `nnx.update(optimizer, state)`.

Two are in the chain: `record_norm(tensor_norm)` keeps the norm of each weight's
gradient and changes nothing, and `clip_by_global_norm` clips. `named_chain` gives them
the names under which they are reported.

What it prints. For each tenth of the run the loss, the norm before clipping and after
it, and the share of steps that were clipped so far. Then the share of held-out digits
that are read correctly, and the norms by weight at the last step.

    pip install flax scikit-learn
    python examples/flax_nnx.py --steps 300
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import optaxclip

try:
    from flax import nnx
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    error.add_note("Install what this program needs: pip install flax scikit-learn")
    raise

STEPS = 300
BATCH = 32
TRAINING = 1437  # digits. The last 360 are held out


class Network(nnx.Module):
    """Two convolutions, a halving of the picture, and a linear readout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        size = 3, 3
        self.first = nnx.Conv(1, 16, size, rngs=rngs)
        self.average = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Conv(16, 32, size, rngs=rngs)
        features = 4 * 4 * 32
        self.readout = nnx.Linear(features, 10, rngs=rngs)

    def __call__(self, images: Any) -> Array:
        pixels = jnp.asarray(images)
        pictures = pixels.reshape(-1, 8, 8, 1)
        hidden = self.first(pictures)
        hidden = self.average(hidden)
        hidden = nnx.relu(hidden)
        hidden = self.second(hidden)
        hidden = nnx.relu(hidden)
        halves = 2, 2
        hidden = nnx.max_pool(hidden, halves, strides=halves)
        features = hidden.reshape(len(hidden), -1)
        return self.readout(features)


class Result(NamedTuple):
    """What happened."""

    reports: list[dict[str, float]]  # the loss and the metrics of every step
    accuracy: float  # on the held-out digits
    optimizer: nnx.Optimizer  # at the end


def main(steps: int = STEPS) -> Result:
    """Trains, and prints losses, norms and the accuracy."""
    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray(images) / 16
    labels = jnp.asarray(labels)
    rngs = nnx.Rngs(0)
    network = Network(rngs)
    chain = optax.named_chain(
        ("tensors", optaxclip.record_norm(optaxclip.tensor_norm)),
        ("all", optaxclip.clip_by_global_norm(1.0)),
        ("adamw", optax.adamw(3e-3)),
    )
    optimizer = nnx.Optimizer(network, chain, wrt=nnx.Param)
    random = np.random.default_rng(0)
    reports = []
    tenth = max(1, steps // 10)
    print("  step    loss  norm before  norm after  clipped so far")
    for step in range(1, steps + 1):
        chosen = random.choice(TRAINING, BATCH, replace=False)
        report = train_step(network, optimizer, images[chosen], labels[chosen])
        # Waits for the device. `checkpoint_and_metrics.py` does not fetch each step.
        report = jax.device_get(report)
        report = {name: float(value) for name, value in report.items()}
        reports.append(report)
        if step % tenth == 0:
            print_line(step, report)
    network.eval()  # batch normalisation uses its running averages from here on
    logits = network(images[TRAINING:])
    guesses = jnp.argmax(logits, axis=-1)
    is_right = guesses == labels[TRAINING:]
    accuracy = float(jnp.mean(is_right))
    print(f"\n{accuracy:.1%} of {len(guesses)} held-out digits are read correctly\n")
    prefix = "record/tensors/norm/"
    for name, value in reports[-1].items():
        if name.startswith(prefix):
            weight = name.removeprefix(prefix)
            print(f"{weight:16}  last gradient's norm {value:.2g}")
    return Result(reports, accuracy, optimizer)


def mean_loss(network: Network, images: Array, labels: Array) -> Array:
    logits = network(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@nnx.jit
def train_step(
    network: Network, optimizer: nnx.Optimizer, images: Array, labels: Array
) -> dict[str, Array]:
    """One step, in place as NNX does it. Returns the loss before it, and the metrics
    after it.
    """
    loss_and_grads = nnx.value_and_grad(mean_loss)
    loss, grads = loss_and_grads(network, images, labels)
    optimizer.update(network, grads)
    report = optaxclip.metrics(optimizer.opt_state)
    return {"loss": loss, **report}


def print_line(step: int, report: dict[str, float]) -> None:
    loss = report["loss"]
    before = report["clip/all/norm_before"]
    after = report["clip/all/norm_after"]
    share = report["clip/all/clipped_share"]
    print(f"{step:6}  {loss:6.4f}  {before:11.4f}  {after:10.4f}  {share:14.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    main(parser.parse_args().steps)
