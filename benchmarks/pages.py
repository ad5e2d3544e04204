"""Writes the numbers of README.md and docs/ from the JSON in benchmarks/results/.

    python -m benchmarks.pages

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a number in a sentence
between `<!-- number: FILE/ROW/COLUMN -->` and `<!-- end -->`. A test fails when a page
does not have what this would write. Where the JSON is from:

    results/costs.json           python -m benchmarks --only whole_step
                                     --only whole_step_compiled --json PATH
    results/per_example.json     python -m benchmarks --only per_example --only
                                     per_example_auto --only per_example_unseen
                                     --only per_example_compiled --json PATH
    results/gpu.json             on a GPU, by the commands in costs.md, per_example.md
    results/broken_batches.json  python examples/broken_batches.py --table PATH
    results/suites.json          python -m tests.suites --json PATH, which also writes
    results/clients.json         python -m tests.clients --json PATH    their pages
    results/methods.json         python -m benchmarks.methods --json PATH
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .methods import claims, scores
from .report import all_rows, grid, shown

Rows = list[dict[str, Any]]

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- (table|number): (.*?) -->(.*?)<!-- end -->", re.DOTALL)
# The steps of the digest, and how the pages call them.
DIGEST = {
    "none": "nothing, Adam alone",
    "global norm": "`clip_by_global_norm`",
    "optax, global norm": "`optax.clip_by_global_norm`",
    "tensor RMS": "`clip_by_tensor_rms`",
    "optax, tensor RMS": "`optax.clip_by_block_rms`",
    "AGC": "`adaptive_grad_clip`",
    "optax, AGC": "`optax.adaptive_grad_clip`",
    "by value": "`clip_by_value`",
    "optax, by value": "`optax.clip`",
    "skip": "`skip_nonfinite`",
    "optax, skip": "`optax.apply_if_finite`",
    "zclip": "`zclip`",
}
# The rows that the README has of them.
SHORT = ("none", "global norm", "optax, global norm", "AGC", "optax, AGC")
# What clips each example, and how the pages call it. "auto" names what it chose.
EACH = [
    ("optaxclip, auto", "`clipped_grad`"),
    ("optaxclip, ghost", '`method="ghost"`'),
    ("optaxclip, one pass, 8 at once", '`method="one_pass", microbatch=8`'),
    ("optax, all at once", "optax `per_example_global_norm_clip`"),
    ("jax_privacy, all at once", "jax_privacy `clipped_grad`"),
    ("jax_privacy, 8 at once", "the same, `microbatch_size=8`"),
    ("Opacus, hooks", "Opacus, hooks"),
    ("Opacus, ghost", "Opacus, ghost clipping"),
]
IN_JAX = EACH[:-2]
# The methods of `clipped_grad` and of optax, which small models are clipped by.
SMALL = EACH[:4]


def main() -> None:
    """Writes the pages that are out of date, and names them."""
    for page in PAGES:
        text = page.read_text()
        if render(text) != text:
            page.write_text(render(text))
            print(f"Written: {page.relative_to(ROOT)}")


def render(text: str) -> str:
    """The text of a page, with every block as the JSON has it."""
    return BLOCK.sub(_rendered, text)


def _rendered(block: re.Match[str]) -> str:
    form, name, _ = block.groups()
    content = number(name) if form == "number" else f"\n{TABLES[name]()}\n"
    return f"<!-- {form}: {name} -->{content}<!-- end -->"


def results(name: str) -> Any:
    """What a program wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str, table: str) -> Rows:
    """The rows of one table of the benchmarks."""
    return results(name)["tables"][table]["rows"]


def number(path: str) -> str:
    """One number of a list of rows, which are named by their first columns."""
    file, name, column = path.split("/")
    content = results(file)
    if file == "methods":
        content = scores.rows(content)
    rows = {next(iter(row.values())): row for row in content}
    return f"{rows[name][column]:.2f}"


def costs() -> str:
    """The kernels that a whole step starts on an H100: the rows of README."""
    kernels = {}
    for row in rows_of("costs", "whole_step_compiled"):
        if row["device"] == "h100":
            kernels[row["model"], row["clipped by"]] = row["kernels"]
    lines = []
    for name in SHORT:
        tiny = shown(kernels["actor and critic", name])
        large = shown(kernels["4 layers, unrolled", name])
        lines.append([DIGEST[name], tiny, large])
    return grid(["kernels, clipped by", "short step", "long step"], lines)


def digest() -> str:
    """What a clip adds to a whole step: the main columns of two tables."""
    times = {}
    for file, device in (("costs", "CPU"), ("gpu", "H100")):
        for row in rows_of(file, "whole_step"):
            times[f"{row['network']}, {device}", row["clipped by"]] = row["time"]
    networks = list(dict.fromkeys(network for network, _ in times))
    header = ["clipped by", *networks, "decoder, TPU v5e: GB"]
    lines = []
    for name, title in DIGEST.items():
        line = [shown(times[network, name]) for network in networks]
        lines.append([title, *line, _added(name)])
    return grid(header, lines)


def _added(name: str) -> str:
    """GB that a scanned decoder's step moves on a TPU, and what a clip adds to them."""
    gigabytes = {}
    for row in rows_of("costs", "whole_step_compiled"):
        if (row["device"], row["model"]) == ("v5e", "8 layers, scanned"):
            gigabytes[row["clipped by"]] = row["GB"]
    if name not in gigabytes:
        return "-"
    if name == "none":
        return f"{gigabytes[name]:.2f}"
    return f"{gigabytes[name] / gigabytes['none'] - 1:+.1%}".replace("%", " %")


def each_package() -> str:
    """The time of each package, in its fastest way: a line for each model.

    With one digit, since the times of some packages differ much between rounds.
    """
    names = "optaxclip, auto", "jax_privacy", "Opacus"
    lines = []
    for model, rows in by_model("per_example").items():
        times = [f"{_smallest(rows, name, 'time'):.1f}" for name in names]
        lines.append([model, *times])
    return grid(["model", "`clipped_grad`", *names[1:]], lines)


def each_row(
    names_and_titles: list[tuple[str, str]], column: str, file: str = "per_example"
) -> str:
    """A line for each name, with the smallest number of its rows for each model."""
    models = by_model("per_example", file)
    lines = []
    for name, title in names_and_titles:
        numbers = [_smallest(rows, name, column) for rows in models.values()]
        lines.append([title, *map(shown, numbers)])
    return grid(["clipped by", *models], lines)


def each_choice(table: str) -> str:
    """For small models what "auto" chose, and its time beside the other methods."""
    titles = [title for _, title in SMALL]
    head = ["model", "batch", "chosen", *titles, "over the best", "memory", "compile"]
    lines = []
    for model, rows_of_model in by_model(table).items():
        for batch in dict.fromkeys(row["batch"] for row in rows_of_model):
            rows = [row for row in rows_of_model if row["batch"] == batch]
            # The second one, behind the gradient that is not clipped.
            auto = rows[1]
            chosen = auto["gradient"].removeprefix("optaxclip, auto: ")
            times = [_smallest(rows, name, "time") for name, _ in SMALL]
            other_times = [time for time in times[1:] if time is not None]
            over_best = auto["time"] / min(other_times)
            numbers = [*times, over_best, auto["memory"], auto["compile"]]
            lines.append([model, str(batch), chosen, *map(shown, numbers)])
    return grid(head, lines)


def by_model(table: str, file: str = "per_example") -> dict[str, Rows]:
    """The rows of each model."""
    models: dict[str, Rows] = {}
    for row in rows_of(file, table):
        models.setdefault(row["model"], []).append(row)
    return models


def _smallest(rows: Rows, name: str, column: str) -> float | None:
    """The smallest number of the gradients whose name begins so."""
    numbers = [row[column] for row in rows if row["gradient"].startswith(name)]
    return min(numbers, default=None)


def _rows(
    table: str, file: str = "per_example", show: Callable[[Any], str] = shown
) -> str:
    """All rows of a table."""
    content = results(file)["tables"][table]
    return all_rows(content["columns"], content["rows"], show)


TABLES: dict[str, Callable[[], str]] = {
    "costs": costs,
    "digest": digest,
    "whole_step": lambda: _rows("whole_step", "costs"),
    "whole_step_gpu": lambda: _rows("whole_step", "gpu"),
    "whole_step_compiled": lambda: _rows("whole_step_compiled", "costs"),
    "each_time": lambda: each_row(EACH, "time"),
    "each_time_on_a_gpu": lambda: each_row(IN_JAX, "time", "gpu"),
    "each_memory": lambda: each_row(IN_JAX, "temporary memory"),
    "each_package": each_package,
    "each_choice": lambda: each_choice("per_example_auto"),
    "each_unseen": lambda: each_choice("per_example_unseen"),
    "methods_optimizers": lambda: scores.optimizers_table(results("methods")),
    "methods_claims": lambda: claims.table(results("methods")),
    "methods_faults": lambda: scores.faults_table(results("methods")),
    "methods_worse": lambda: scores.worse_table(results("methods")),
    "methods_healthy": lambda: scores.tasks_table(results("methods"), 0),
    "methods_batches": lambda: scores.tasks_table(results("methods"), 1),
    "methods_elements": lambda: scores.tasks_table(results("methods"), 2),
    "methods_layer": lambda: scores.tasks_table(results("methods"), 3),
    "each_compiled": lambda: _rows("per_example_compiled", show=str),
}

if __name__ == "__main__":
    main()
