"""Logs what a clipper did, to TensorBoard and as JSON lines, and finds a limit in what
was logged.

What it shows. `optaxclip.metrics(state)` is a flat dict of numbers, which any logger
takes as it is. A network that guesses the next character of Python's own help pages is
trained twice. First under a limit so high that nothing is clipped, which only logs:

    folder/loose/events.out.tfevents...    for `tensorboard --logdir folder`, left out
                                           where tensorboardX is not installed
    folder/loose.jsonl                     one JSON object for each step

Then the log is asked: `read_history` takes the norms out of it, `suggest` has candidate
limits with the share of steps that each would have clipped, and the fixed limit that
would have clipped about a tenth of them is taken for the second run. `python -m
optaxclip.replay` prints the same candidates, and draws the norms beside the log.

The numbers stay on the device until `FETCH` steps are done. To fetch them after every
step would make it wait each time.

What it does not show. That a tenth is right. Nor is the share of the second run exactly
a tenth: clipping changes a run, so its norms differ.

How long it takes. About half a minute on two CPU cores.

What it prints. The table of `python -m optaxclip.replay`, and a table of the two runs:
the share of steps that replay foretold, and what came.

    python examples/logging_metrics.py --folder logs && tensorboard --logdir logs
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

try:
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None

SEED, CONTEXT, EMBEDDING, HIDDEN, BATCH, LEARNING_RATE = 0, 12, 16, 128, 64, 0.1
LOOSE, WANTED, FETCH = 100.0, 0.1, 50


class Text(NamedTuple):
    """The help pages as numbers."""

    characters: np.ndarray  # int32[length]
    different: int  # how many different ones there are


class Row(NamedTuple):
    """One line of the table."""

    run: str
    limit: float
    foretold: float  # share of steps that replay says would be clipped, in [0, 1]
    clipped: float  # share that was
    final_loss: float  # mean over the last 50 steps


class Result(NamedTuple):
    """What the program found."""

    rows: list[Row]
    suggestions: list[Any]  # optaxclip's candidates
    table: str  # what the command printed


def main(steps: int = 600, *, folder: str | Path | None = None) -> Result:
    """Trains, logs, asks the log, trains again, prints both tables and returns what it
    found.
    """
    text = read_text()
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory())
            if folder is None
            else folder
        )
        loose = train("loose", LOOSE, 0.0, text, steps, folder)
        log = folder / "loose.jsonl"
        suggestions = optaxclip.replay.suggest(optaxclip.replay.read_history(log))
        fixed = [
            candidate
            for candidate in suggestions
            if candidate.rule == f"optaxclip.clip_by_global_norm({candidate.limit:g})"
        ]
        chosen = min(fixed, key=lambda candidate: abs(candidate.clip_rate - WANTED))
        command = [sys.executable, "-m", "optaxclip.replay", "--force", str(log)]
        table = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout
        print(f"$ python -m optaxclip.replay --force {log.name}\n{table}", flush=True)
        suggested = train(
            "suggested", chosen.limit, chosen.clip_rate, text, steps, folder
        )
    print_table([loose, suggested])
    return Result([loose, suggested], suggestions, table)


def train(
    run: str, limit: float, foretold: float, text: Text, steps: int, folder: Path
) -> Row:
    """One run, logged."""
    optimizer = optax.chain(
        optaxclip.clip_by_global_norm(limit), optax.sgd(LEARNING_RATE, momentum=0.9)
    )

    @jax.jit
    def step(
        params: Any, state: Any, windows: jax.Array
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(mean_loss)(params, windows)
        updates, state = optimizer.update(gradients, state, params)
        return (
            optax.apply_updates(params, updates),
            state,
            {"loss": loss, **optaxclip.metrics(state)},
        )

    random = np.random.default_rng(SEED)
    params = new_network(text.different)
    state = optimizer.init(params)
    losses, waiting, last = [], [], {}
    with open_log(run, folder) as log:
        for number in range(steps):
            starts = random.integers(len(text.characters) - CONTEXT, size=(BATCH, 1))
            params, state, report = step(
                params, state, text.characters[starts + np.arange(CONTEXT + 1)]
            )
            waiting.append(report)
            if len(waiting) == FETCH or number + 1 == steps:
                for place, values in enumerate(
                    jax.device_get(waiting), number + 1 - len(waiting)
                ):
                    last = {name: float(value) for name, value in values.items()}
                    log(place, last)
                    losses.append(last["loss"])
                waiting.clear()
    return Row(
        run, limit, foretold, last["clip/clipped_share"], float(np.mean(losses[-50:]))
    )


@contextlib.contextmanager
def open_log(run: str, folder: Path) -> Any:
    """A function of step and numbers that writes both logs."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context((folder / f"{run}.jsonl").open("w"))
        board = (
            stack.enter_context(SummaryWriter(str(folder / run)))
            if SummaryWriter
            else None
        )

        def log(step: int, numbers: dict[str, float]) -> None:
            # A limit that there is none of yet is written as Infinity, a broken norm as
            # NaN: Python and read_history know these, strict JSON does not.
            lines.write(json.dumps({"step": step, **numbers}) + "\n")
            if board is not None:
                for name, number in numbers.items():
                    board.add_scalar(name, number, step)

        yield log


def read_text() -> Text:
    """The help pages as one line."""
    prose = " ".join(" ".join(topics.values()).split())
    different, characters = np.unique(np.array(list(prose)), return_inverse=True)
    return Text(characters.astype(np.int32), len(different))


def new_network(different: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(SEED)
    weights = {
        "embedding": random.normal(size=(different, EMBEDDING)),
        "hidden": random.normal(size=(CONTEXT * EMBEDDING, HIDDEN))
        / np.sqrt(CONTEXT * EMBEDDING),
        "readout": random.normal(size=(HIDDEN, different)) / np.sqrt(HIDDEN),
    }
    return {name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()}


def mean_loss(network: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
    """Cross entropy, in nats, of the last character of each window, given those before
    it.
    """
    seen = network["embedding"][windows[:, :-1]].reshape(len(windows), -1)
    scores = jnp.tanh(seen @ network["hidden"]) @ network["readout"]
    return optax.softmax_cross_entropy_with_integer_labels(
        scores, windows[:, -1]
    ).mean()


def print_table(rows: list[Row]) -> None:
    print(
        f"{'run':10}  {'limit':>6}  {'clipped, foretold':>17}  {'clipped':>7}  "
        f"{'final loss':>10}"
    )
    for row in rows:
        print(
            f"{row.run:10}  {row.limit:6.3g}  {row.foretold:17.1%}  "
            f"{row.clipped:7.1%}  {row.final_loss:10.4f}"
        )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=600,
        help="how many steps to train (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="where the logs and the picture go (default: a temporary folder)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
