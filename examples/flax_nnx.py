"""Trains a convolutional network of flax NNX with the clipper inside `nnx.Optimizer`,
and reads from the optimizer what the clipper did.

What it shows. A clipper is a part of the optax chain, and `nnx.Optimizer` takes the
chain as it is. The step under `nnx.jit` has no line more than without clipping. The
network has batch normalisation, whose running averages are variables but no weights:
`wrt=nnx.Param` keeps them away from the optimizer and from the norm.

`nnx.Optimizer` keeps each array of the optax state inside a variable.
`optaxclip.metrics(optimizer.opt_state)` reads them there, inside jit or outside, and
`metrics(nnx.state(optimizer))` reads the same from a checkpoint's state, where tensors
are numbered instead of named.

Two are in the chain: `record_norm(tensor_norm)` keeps the norm of each weight's
gradient and changes nothing, and `clip_by_global_norm` clips. `named_chain` gives them
the names under which they are reported.

How long it takes. About twenty seconds on two CPU cores, half of it compilation.

What it prints. The network reads handwritten digits of 8 by 8 pixels. For each tenth of
the run the loss, the norm before clipping and after it, and the share of steps that
were clipped so far. Then the share of the held-out digits that are read correctly, and
the norms by weight at the last step.

    python examples/flax_nnx.py --steps 300
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

try:
    from flax import nnx
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

SEED, BATCH, HELD_OUT = 0, 32, 360
MAX_NORM, LEARNING_RATE = 1.0, 3e-3


class Network(nnx.Module):
    """Two convolutions, a halving of the picture, and a linear readout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.average = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.readout = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array | np.ndarray) -> jax.Array:
        hidden = nnx.relu(self.average(self.first(jnp.asarray(images))))
        hidden = nnx.max_pool(
            nnx.relu(self.second(hidden)), window_shape=(2, 2), strides=(2, 2)
        )
        return self.readout(hidden.reshape(len(hidden), -1))


class Digits(NamedTuple):
    """Handwritten digits."""

    images: np.ndarray  # float32[digits, 8, 8, 1] in [0, 1]
    labels: np.ndarray  # int32[digits]


class Result(NamedTuple):
    """What a test may ask of the run."""

    losses: np.ndarray  # float32[steps]: cross entropy in nats, before the step
    reports: list[dict[str, float]]  # the metrics of every step
    accuracy: float  # on the held-out digits
    network: Network  # trained


def main(steps: int = 300) -> Result:
    """Trains, prints the tables, and returns what happened."""
    training, held_out = read_digits()
    network, optimizer = new_network_and_optimizer()
    print(
        f"{len(training.labels)} digits, {weights_of(network)} weights, limit "
        f"{MAX_NORM:g}, {steps} steps\n"
    )
    print("  step    loss  norm before  norm after  clipped so far")
    losses, reports = [], []
    for step, batch in enumerate(batches(training, steps), start=1):
        loss, report = train_step(network, optimizer, batch)
        losses.append(float(loss))
        reports.append({name: float(value) for name, value in report.items()})
        if step % max(1, steps // 10) == 0:
            print_line(step, losses[-1], reports[-1])
    network.eval()  # batch normalisation uses its running averages from here on
    accuracy = float(
        jnp.mean(jnp.argmax(network(held_out.images), axis=-1) == held_out.labels)
    )
    print(
        f"\n{accuracy:.1%} of {len(held_out.labels)} held-out digits are read correctly"
    )
    print_norms(reports[-1])
    return Result(np.array(losses, np.float32), reports, accuracy, network)


def read_digits() -> tuple[Digits, Digits]:
    """The digits to train on, and those held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels[order].astype(np.int32)
    return Digits(images[HELD_OUT:], labels[HELD_OUT:]), Digits(
        images[:HELD_OUT], labels[:HELD_OUT]
    )


def batches(digits: Digits, steps: int) -> Any:
    random = np.random.default_rng(SEED + 1)
    for _ in range(steps):
        chosen = random.choice(len(digits.labels), BATCH, replace=False)
        yield Digits(digits.images[chosen], digits.labels[chosen])


def new_network_and_optimizer() -> tuple[Network, nnx.Optimizer]:
    chain = optax.named_chain(
        ("tensors", optaxclip.record_norm(optaxclip.tensor_norm)),
        ("all", optaxclip.clip_by_global_norm(MAX_NORM)),
        ("adamw", optax.adamw(LEARNING_RATE)),
    )
    network = Network(nnx.Rngs(SEED))
    return network, nnx.Optimizer(network, chain, wrt=nnx.Param)


def mean_loss(network: Network, digits: Digits) -> jax.Array:
    """Cross entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(
        network(digits.images), digits.labels
    ).mean()


@nnx.jit
def train_step(
    network: Network, optimizer: nnx.Optimizer, digits: Digits
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One step, in place as NNX does it: the loss before it and what the clippers
    saw.
    """
    loss, gradient = nnx.value_and_grad(mean_loss)(network, digits)
    optimizer.update(network, gradient)
    return loss, optaxclip.metrics(optimizer.opt_state)


def weights_of(network: Network) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(network, nnx.Param)))


def print_line(step: int, loss: float, report: dict[str, float]) -> None:
    before, after, share = (
        report[f"clip/all/{name}"]
        for name in ("norm_before", "norm_after", "clipped_share")
    )
    print(f"{step:6}  {loss:6.4f}  {before:11.4f}  {after:10.4f}  {share:14.1%}")


def print_norms(report: dict[str, float]) -> None:
    print("\nweight            norm of its last gradient")
    start = "clip/tensors/norm_before/"
    for name, value in report.items():
        if name.startswith(start):
            print(f"{name.removeprefix(start):16}  {value:25.4f}")


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
