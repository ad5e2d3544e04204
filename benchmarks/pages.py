"""Writes the numbers of README.md and docs/ from the JSON in benchmarks/results/.

    python -m benchmarks.pages

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a number in a sentence
between `<!-- number: FILE/ROW/COLUMN -->` and `<!-- end -->`. A test fails when a page
does not have what this would write. Where the JSON is from:

    results/costs.json           python -m benchmarks --only whole_step
                                     --only whole_step_compiled --only step --json PATH
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
SHORT = ("global norm", "optax, global norm", "AGC", "optax, AGC")
# Ways to clip each example, and how the pages call them. "auto" names what it chose.
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
IN_JAX = [way for way in EACH if "Opacus" not in way[0]]


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
    kind, name, _ = block.groups()
    content = number(name) if kind == "number" else f"\n{TABLES[name]()}\n"
    return f"<!-- {kind}: {name} -->{content}<!-- end -->"


def results(name: str) -> Any:
    """What a program wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str, table: str) -> list[dict[str, Any]]:
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
    """What a clip adds to a whole step on an H100: four rows of the digest."""
    rows = rows_of("gpu", "whole_step")
    times = {(row["network"], row["clipped by"]): row["time"] for row in rows}
    lines = []
    for name in SHORT:
        tiny, large = times["actor and critic", name], times["decoder", name]
        lines.append([DIGEST[name], shown(tiny), shown(large)])
    return grid(["clipped by", "0.3 ms step", "7 ms step"], lines)


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


def each_time() -> str:
    """The time of each way to clip each example, over the plain gradient's."""
    return _of_each(EACH, "time")


def each_time_on_a_gpu() -> str:
    """The same on a GPU."""
    return _of_each(IN_JAX, "time", "gpu")


def each_memory() -> str:
    """The temporary memory of each way in JAX, over the plain gradient's."""
    return _of_each(IN_JAX, "temporary memory")


def each_package() -> str:
    """The time of each package, in its fastest way: a line for each model.

    With one digit, since the times of some packages differ much between rounds.
    """
    rows, lines = rows_of("per_example", "per_example"), []
    names = "optaxclip, auto", "jax_privacy", "Opacus"
    for model in dict.fromkeys(row["model"] for row in rows):
        times = [_smallest(rows, model, name, "time") for name in names]
        lines.append([model, *(f"{time:.1f}" for time in times)])
    return grid(["model", "`clipped_grad`", *names[1:]], lines)


def _of_each(
    ways: list[tuple[str, str]], column: str, file: str = "per_example"
) -> str:
    """A line for each way, with the smallest number of its rows for each model."""
    rows = rows_of(file, "per_example")
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    for name, title in ways:
        found = [_smallest(rows, model, name, column) for model in models]
        lines.append([title, *map(shown, found)])
    return grid(["clipped by", *models], lines)


def _smallest(rows: list[dict[str, Any]], model: str, name: str, column: str) -> Any:
    own = [row for row in rows if row["model"] == model]
    own = [row[column] for row in own if row["gradient"].startswith(name)]
    return min(own, default=None)


def each_choice() -> str:
    """For small models of many kinds what "auto" takes beside the other methods."""
    rows, ways, lines = rows_of("per_example", "per_example_auto"), EACH[:4], []
    for key in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["model"], row["batch"]) == key]
        times = [shown(_smallest(own, key[0], name, "time")) for name, _ in ways]
        best = float(times[0]) / min(map(float, times[1:]))
        memory = _smallest(own, key[0], ways[0][0], "memory")
        lines.append([key[0], str(key[1]), *times, shown(best), shown(memory)])
    titles = [title for _, title in ways]
    return grid(["model", "batch", *titles, "over the best", "memory"], lines)


def each_unseen() -> str:
    """The same for models by which no estimate was set, with the method chosen."""
    rows = rows_of("per_example", "per_example_unseen")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        plain, auto, *others = [row for row in rows if row["model"] == model]
        chosen = auto["gradient"].removeprefix("optaxclip, auto: ")
        times = [_smallest(rows, model, name, "time") for name, _ in EACH[:4]]
        over_best = auto["time"] / min(row["time"] for row in others)
        line = [model, str(plain["batch"]), chosen, *map(shown, times)]
        lines.append([*line, shown(over_best), shown(auto["memory"])])
    titles = [title for _, title in EACH[:4]]
    return grid(["model", "batch", "chosen", *titles, "over the best", "memory"], lines)


def _rows(table: str, file: str = "per_example", show: Any = shown) -> str:
    """All rows of a table."""
    found = results(file)["tables"][table]
    return all_rows(found["columns"], found["rows"], show)


TABLES: dict[str, Callable[[], str]] = {
    "costs": costs,
    "digest": digest,
    "whole_step": lambda: _rows("whole_step", "costs"),
    "whole_step_gpu": lambda: _rows("whole_step", "gpu"),
    "whole_step_compiled": lambda: _rows("whole_step_compiled", "costs"),
    "step": lambda: _rows("step", "costs"),
    "each_time": each_time,
    "each_time_on_a_gpu": each_time_on_a_gpu,
    "each_memory": each_memory,
    "each_package": each_package,
    "each_choice": each_choice,
    "each_unseen": each_unseen,
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
