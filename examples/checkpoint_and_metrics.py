"""Logs what a clipper did, to TensorBoard and as JSON lines, saves the run with Orbax,
continues it bit for bit, and finds a limit in the log.

What it shows. `optaxclip.metrics(state)` is a flat dict of numbers, which any logger
takes. They stay on the device until half of the run is done: a fetch after every step
would make the device wait each time.

A limit that learns, such as `zclip`'s, has its memory in the optimizer state. The run
is saved halfway and restored from shapes alone, as in a new process. It ends bit for
bit like a run without a break. Without the clip's memory it ends elsewhere.

What it prints. How the runs end, how many steps some limits would have clipped, which
of them is the guard against accidents, and the last limit of the run.
--folder PATH keeps log and checkpoint for `tensorboard --logdir PATH`.

    pip install orbax-checkpoint tensorboardX scikit-learn
    python examples/checkpoint_and_metrics.py --folder logs
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import optaxclip

try:
    import orbax.checkpoint as ocp
    from sklearn.datasets import load_digits
    from tensorboardX import SummaryWriter
except ModuleNotFoundError as error:
    error.add_note(
        "Install what this program needs: "
        "pip install orbax-checkpoint tensorboardX scikit-learn"
    )
    raise

STEPS = 300
IMAGES, LABELS = load_digits(return_X_y=True)
CLIPPER = optaxclip.zclip()
OPTIMIZER = optax.chain(CLIPPER, optax.adam(3e-3))

Params = dict[str, Array]
Report = dict[str, Any]  # the loss and the metrics of a step


class Training(NamedTuple):
    """All that has to be saved."""

    step: Any  # int32[]: batches seen. The next one follows from it
    params: Any  # Params
    opt_state: Any  # in it the clip's memory


def main(steps: int = STEPS, folder: Path | None = None) -> dict[str, Training]:
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
    for name in ("resumed", "memory lost"):
        count = differing(ends[name], straight)
        print(f"{name}: {count} arrays differ from the run without a break")
    for row in optaxclip.replay.suggest(norms)[:5]:
        steps_clipped = round(row.clip_rate * len(norms))
        note = ", the guard" if row.is_guard else ""
        print(
            f"{row.rule} would have clipped {steps_clipped} of {len(norms)} steps{note}"
        )
    clip_state, _ = straight.opt_state
    print(f"All runs had zclip(), whose limit ended at {clip_state.limit:.3g}")
    return ends


def new_params() -> Params:
    """One hidden layer."""
    first_key, second_key = jax.random.split(jax.random.key(0))
    normal = jax.nn.initializers.lecun_normal()
    return {
        "hidden": normal(first_key, (64, 128)),
        "bias": jnp.zeros(128),
        "output": normal(second_key, (128, 10)),
    }


def new_training() -> Training:
    params = new_params()
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
        chosen = random.integers(len(LABELS), size=16)
        images = IMAGES[chosen] / 16
        training, report = take_step(training, images, LABELS[chosen])
        reports.append(report)
    return training, jax.device_get(reports)


def mean_loss(params: Params, images: Array, labels: Array) -> Array:
    hidden = jnp.tanh(images @ params["hidden"] + params["bias"])
    logits = hidden @ params["output"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


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
            numbers = jax.tree.map(float, report)
            row = {"step": step, **numbers}
            lines.write(json.dumps(row) + "\n")
            for name, number in numbers.items():
                # inf is a limit that is not known yet. TensorBoard would warn.
                if math.isfinite(number):
                    board.add_scalar(name, number, step)


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    parser.add_argument("--folder", type=Path, help="(default: nothing is kept)")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.folder)
