"""Logs what a clipper did, to TensorBoard and as JSON lines, saves the run with Orbax,
continues it bit for bit, and finds a limit in the log.

What it shows. `optaxclip.metrics(state)` is a flat dict of numbers, which any logger
takes. They stay on the device until half of the run is done: a fetch after every step
would make the device wait each time.

A limit that learns, such as `zclip`'s, has its memory in the optimizer state. The run
is saved halfway and restored from shapes alone, as in a new process. It ends bit for
bit like a run without a break. Without the clip's memory it ends elsewhere.

What it prints. How the runs end, and which share of steps some limits would have
clipped. --folder PATH keeps log and checkpoint for `tensorboard --logdir PATH`.

    python examples/checkpoint_and_metrics.py --folder logs
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import (
    File,
    Layers,
    cross_entropy,
    needed_packages,
    new_perceptron,
    perceptron,
    read_digits,
    run,
)
from jax import Array

import optaxclip

with needed_packages():
    import orbax.checkpoint as ocp
    from tensorboardX import SummaryWriter

DIGITS, _ = read_digits(held_out=0)
CLIPPER = optaxclip.zclip()
OPTIMIZER = optax.chain(CLIPPER, optax.adam(3e-3))

Report = dict[str, Any]  # the loss and the metrics of a step


class Training(NamedTuple):
    """All that has to be saved."""

    step: Any  # int32[]: batches seen. The next one follows from it
    params: Any  # Layers
    opt_state: Any  # in it the clip's memory


def main(steps: int = 300, folder: File = None) -> dict[str, Training]:
    """Trains, logs, saves and continues. Returns how each run ended."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (folder or Path(temporary)).resolve()
        halfway, first_reports = train(new_training(), steps // 2)
        write_log(folder, first_reports, first_step=0)
        save(folder / "checkpoint", halfway)
        straight, last_reports = train(halfway, steps)
        write_log(folder, last_reports, first_step=int(halfway.step))

        restored = restore(folder / "checkpoint")
        resumed, _ = train(restored, steps)
        without_memory, _ = train(forgetful(restored), steps)
        norms = optaxclip.replay.read_history(folder / "log.jsonl")
    ends = {"straight": straight, "resumed": resumed, "memory lost": without_memory}
    for name, end in ends.items():
        print(f"{name}: {differing(end, straight)} arrays differ from straight")
    for row in optaxclip.replay.suggest(norms)[:5]:
        print(f"{row.rule} would have clipped {row.clip_rate:.1%} of the steps")
    return ends


def new_training() -> Training:
    params = new_perceptron(64, 64, 64, 10)
    state = OPTIMIZER.init(params)
    step = jnp.int32(0)
    return Training(step, params, state)


def forgetful(training: Training) -> Training:
    """The same training with the first memory of the clip, and with Adam's moments."""
    new_state: Any = OPTIMIZER.init(training.params)
    new_clip, _ = new_state
    _, adam = training.opt_state
    return training._replace(opt_state=(new_clip, adam))


def train(training: Training, until: int) -> tuple[Training, list[Report]]:
    """On to step `until`."""
    reports = []
    for number in range(int(training.step), until):
        # A batch follows from its number alone, so nothing else has to be saved.
        random = np.random.default_rng(number)
        chosen = random.integers(len(DIGITS.labels), size=16)
        images = DIGITS.images[chosen]
        labels = DIGITS.labels[chosen]
        training, report = take_step(training, images, labels)
        reports.append(report)
    return training, jax.device_get(reports)


def mean_loss(params: Layers, images: Array, labels: Array) -> Array:
    logits = perceptron(params, images)
    return cross_entropy(logits, labels)


@jax.jit
def take_step(
    training: Training, images: Array, labels: Array
) -> tuple[Training, Report]:
    step, params, state = training
    loss_and_grads = jax.value_and_grad(mean_loss)
    loss, grads = loss_and_grads(params, images, labels)
    updates, state = OPTIMIZER.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    training = Training(step + 1, params, state)
    report = {"loss": loss, **optaxclip.metrics(state)}
    return training, report


def write_log(folder: Path, reports: list[Report], first_step: int) -> None:
    """A line of JSON for each step, and the same for TensorBoard. A run that is
    continued goes on in the same file.
    """
    mode = "a" if first_step else "w"
    # By the suffix no two files of TensorBoard have the same name.
    board = SummaryWriter(str(folder), filename_suffix=f".{first_step}")
    with board, (folder / "log.jsonl").open(mode) as lines:
        for step, report in enumerate(reports, first_step):
            row: dict[str, float | None] = {"step": step}
            for name, value in report.items():
                number = float(value)
                # inf is a limit that is not known yet. JSON has no inf.
                if np.isfinite(number):
                    row[name] = number
                    board.add_scalar(name, number, step)
                else:
                    row[name] = None
            lines.write(json.dumps(row) + "\n")


def save(path: Path, training: Training) -> None:
    """Replaces the only checkpoint. Long runs keep several."""
    with ocp.StandardCheckpointer() as checkpointer:  # waits until all is written
        checkpointer.save(path, training, force=True)


def restore(path: Path) -> Training:
    """Restores as a new process does: from shapes, dtypes and devices alone."""
    device, *_ = jax.devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.eval_shape(new_training)

    def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return shape.update(sharding=sharding)

    shapes = jax.tree.map(placed, shapes)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, shapes)


def differing(training: Training, straight: Training) -> int:
    """How many arrays are not the same to the bit."""

    def differs(left: Array, right: Array) -> bool:
        left_bytes = np.asarray(left).tobytes()
        right_bytes = np.asarray(right).tobytes()
        return left_bytes != right_bytes

    differences = jax.tree.map(differs, training, straight)
    return sum(jax.tree.leaves(differences))


if __name__ == "__main__":
    run(main, folder="where log and checkpoint go")
