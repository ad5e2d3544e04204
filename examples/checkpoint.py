"""Saves a run in the middle with Orbax, continues it bit for bit, and takes a
checkpoint of optax's clip over into this library's.

What it shows. A rule that learns its limit has a memory, and the memory is part of the
optimizer state: who saves that state has saved the clip. Three runs of the same network
on the same batches, clipped by `optaxclip.zclip`, which learns mean and deviation of
the norms so far:

    straight             without a break
    resumed              saved halfway, restored into shapes and dtypes alone
                         (`jax.eval_shape`), as a new process would: it ends bit for bit
                         like the first
    without the memory   the same, but the clip begins anew. It knows no norm, lets
                         everything through for 25 steps, and goes another way as soon
                         as it judges a norm differently

Then the way here from `optax.chain(optax.clip_by_global_norm(1.0), optax.adam(...))`.
Optax's clip keeps an `optax.EmptyState()` where this library keeps a `ClipState`, so
that the old checkpoint does not fit the new optimizer. It is restored into the OLD
optimizer's shapes, and then `take_over` keeps all of it but the clip's place, which
gets a fresh state. Adam's moments are the very ones that were saved. Two runs continue
from there:

    optax, continued     with optax's clip
    taken over           with this library's: the same limit, the same run but for
                         rounding

What it does not show. Keeping the newest few checkpoints, and saving while training
goes on: that is Orbax's `CheckpointManager`.

How long it takes. About half a minute on two CPU cores, most of it compilation.

What it prints. The table: loss at the end, the largest difference of a weight from the
run it is compared with, and how many leaves of the optimizer state are bit for bit the
same, right after the restore and at the end. The checkpoints are in a temporary folder,
or in the one given with --folder.

    python examples/checkpoint.py --folder checkpoints

Reference: Kumar et al., ZClip: adaptive spike mitigation for LLM pre-training, 2025
(arXiv 2504.02507).
"""

import argparse
import contextlib
import functools
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

try:
    import orbax.checkpoint as ocp
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

SEED, HIDDEN, BATCH, LEARNING_RATE, MAX_NORM = 0, 64, 16, 3e-3, 1.0


class Training(NamedTuple):
    """All that has to be saved."""

    step: jax.Array  # int32[]: batches seen. The next one follows from it
    params: Any  # the weights
    opt_state: Any  # of the optimizer, and in it the clip's memory


class Row(NamedTuple):
    """One line of the table."""

    run: str
    compared_with: str
    final_loss: float  # mean over all digits
    difference: (
        float  # largest of a weight, from the run it is compared with, at the end
    )
    leaves: int  # of the optimizer state
    restored: int  # how many of them begin bit for bit as they were saved
    ended: int  # how many end bit for bit like those of the run it is compared with


def main(steps: int = 300, *, folder: str | Path | None = None) -> list[Row]:
    """Trains, saves, restores and continues, prints the table and returns it."""
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory())
            if folder is None
            else folder
        ).resolve()
        rows = [*resume(steps, folder / "zclip"), *move(steps, folder / "optax")]
    print_table(rows)
    return rows


def resume(steps: int, path: Path) -> list[Row]:
    """A run with a clip that remembers: straight through, and saved and continued."""
    optimizer = optax.chain(
        optaxclip.zclip(), optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    )
    halfway = train(optimizer, new_training(optimizer), steps // 2)
    save(path, halfway)
    straight = train(optimizer, halfway, steps)

    restored = restore(path, optimizer)
    forgetful = restored._replace(
        opt_state=take_over(restored.opt_state, optimizer.init(restored.params))
    )
    return [
        compare("straight", straight, halfway, "itself", straight, halfway),
        compare(
            "resumed",
            train(optimizer, restored, steps),
            restored,
            "straight",
            straight,
            halfway,
        ),
        compare(
            "without the memory",
            train(optimizer, forgetful, steps),
            forgetful,
            "straight",
            straight,
            halfway,
        ),
    ]


def move(steps: int, path: Path) -> list[Row]:
    """A run that began under optax's clip and goes on under this library's."""
    adam = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    old = optax.chain(optax.clip_by_global_norm(MAX_NORM), adam)
    new = optax.chain(optaxclip.clip_by_global_norm(MAX_NORM), adam)
    halfway = train(old, new_training(old), steps // 2)
    save(path, halfway)

    continued = train(old, halfway, steps)
    restored = restore(
        path, old
    )  # into the shapes of the optimizer that it was saved with
    moved = restored._replace(
        opt_state=take_over(restored.opt_state, new.init(restored.params))
    )
    return [
        compare("optax, continued", continued, halfway, "itself", continued, halfway),
        compare(
            "taken over",
            train(new, moved, steps),
            moved,
            "optax, continued",
            continued,
            halfway,
        ),
    ]


def take_over(old_state: Any, fresh_state: Any) -> Any:
    """The old state, with the fresh one's in every place of a clip.

    Both are states of the same optimizer but for the clip. Whatever is found in the old
    one where the fresh one has a `ClipState` gives way. It may be nested at will.
    """

    def is_clip(state: Any) -> bool:
        return isinstance(state, optaxclip.ClipState)

    return jax.tree.map(
        lambda fresh, old: fresh if is_clip(fresh) else old,
        fresh_state,
        old_state,
        is_leaf=is_clip,
    )


def save(path: Path, training: Training) -> None:
    with (
        ocp.StandardCheckpointer() as checkpointer
    ):  # waits at its end until all is written
        checkpointer.save(path, training, force=True)


def restore(path: Path, optimizer: Any) -> Training:
    """What a new process does: it needs the shapes, dtypes and devices of what was
    saved, and no values.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: new_training(optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(
            path,
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
                shapes,
            ),
        )


def new_training(optimizer: Any) -> Training:
    random = np.random.default_rng(SEED)
    sizes = [64, HIDDEN, HIDDEN, 10]
    params = [
        {
            "w": jnp.asarray(
                random.normal(size=(inputs, outputs)) / np.sqrt(inputs), jnp.float32
            ),
            "b": jnp.zeros(outputs),
        }
        for inputs, outputs in pairwise(sizes)
    ]
    return Training(jnp.int32(0), params, optimizer.init(params))


def train(optimizer: Any, training: Training, until: int) -> Training:
    """On to step `until`. Which digits a batch has follows from its number alone, so
    nothing else has to be saved.
    """
    images, labels = read_digits()
    take_step = compile_step(optimizer)
    for number in range(int(training.step), until):
        chosen = np.random.default_rng((SEED, number)).integers(len(labels), size=BATCH)
        training = take_step(training, images[chosen], labels[chosen])
    return training


@functools.cache
def compile_step(optimizer: Any) -> Callable[..., Training]:
    @jax.jit
    def step(training: Training, images: jax.Array, labels: jax.Array) -> Training:
        gradients = jax.grad(mean_loss)(training.params, images, labels)
        updates, state = optimizer.update(
            gradients, training.opt_state, training.params
        )
        return Training(
            training.step + 1, optax.apply_updates(training.params, updates), state
        )

    return step


@functools.cache
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32) / 16, labels


def mean_loss(params: Any, images: Any, labels: Any) -> jax.Array:
    x, (*hidden, last) = images, params
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return optax.softmax_cross_entropy_with_integer_labels(
        x @ last["w"] + last["b"], labels
    ).mean()


def compare(
    run: str,
    end: Training,
    begin: Training,
    other: str,
    other_end: Training,
    saved: Training,
) -> Row:
    differences = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), end.params, other_end.params
    )
    final_loss = float(jax.jit(mean_loss)(end.params, *read_digits()))
    leaves = len(jax.tree.leaves(end.opt_state))
    return Row(
        run,
        other,
        final_loss,
        max(jax.tree.leaves(differences)),
        leaves,
        same_leaves(begin, saved),
        same_leaves(end, other_end),
    )


def same_leaves(one: Training, other: Training) -> int:
    """How many leaves of one optimizer state are at the same place of the other, with
    the same dtype and bits.
    """
    places = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(other.opt_state)
    }
    return sum(
        same_bits(leaf, places.get(jax.tree_util.keystr(path)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(one.opt_state)
    )


def same_bits(one: Any, other: Any) -> bool:
    return (
        other is not None
        and one.dtype == other.dtype
        and one.shape == other.shape
        and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    )


def print_table(rows: list[Row]) -> None:
    print(
        f"{'':18}  {'':16}  {'':>10}  {'largest':>10}  "
        f"{'optimizer state, same bits':^26}"
    )
    print(
        f"{'run':18}  {'compared with':16}  {'final loss':>10}  {'difference':>10}  "
        f"{'as saved':>12}  {'at the end':>12}"
    )
    for row in rows:
        saved, ended = (
            f"{count} of {row.leaves}" for count in (row.restored, row.ended)
        )
        print(
            f"{row.run:18}  {row.compared_with:16}  {row.final_loss:10.6f}  "
            f"{row.difference:10.3g}  {saved:>12}  {ended:>12}"
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
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="where the checkpoints go. What it has of an earlier run is "
        "replaced (default: a temporary folder)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
