"""Writes the numbers of README.md and docs/ from the JSON in benchmarks/results/.

    python -m benchmarks.pages

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a number in a sentence
between `<!-- number: FILE/ROW/COLUMN -->` and `<!-- end -->`. A test fails when a page
does not have what this would write. Where the JSON is from:

    results/compiled.json        python -m benchmarks --only compiled --json PATH
    results/cpu.json             python -m benchmarks --only step --json PATH
    results/per_example.json     python -m benchmarks --only per_example
                                     --only per_example_compiled --json PATH
    results/broken_batches.json  python examples/broken_batches.py --table PATH
    results/suites.json          python -m tests.suites --json PATH, which also writes
    results/clients.json         python -m tests.clients --json PATH    their pages
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- (table|number): (.*?) -->(.*?)<!-- end -->", re.DOTALL)
DEVICES = {"h100": "H100", "v5e": "TPU v5e"}
# How the two programs call the same clipper, and how the pages do.
CLIPPERS = [
    ("none", "none", "nothing, Adam alone"),
    ("global norm", "optaxclip.clip_by_global_norm", "`clip_by_global_norm`"),
    ("optax, global norm", "optax.clip_by_global_norm", "the same of optax"),
    ("tensor RMS", "optaxclip.clip_by_tensor_rms", "`clip_by_tensor_rms`"),
    ("optax, tensor RMS", "optax.clip_by_block_rms", "`clip_by_block_rms` of optax"),
    ("AGC", "optaxclip.adaptive_grad_clip", "`adaptive_grad_clip`"),
    ("optax, AGC", "optax.adaptive_grad_clip", "the same of optax"),
]
# Ways to clip each example, and how the pages call them. "auto" names what it chose.
EACH = [
    ("optaxclip, auto", "`clipped_grad`"),
    ("optaxclip, ghost", '`method="ghost"`'),
    ("optaxclip, one pass, 8 at once", '`method="one_pass", microbatch=8`'),
    ("optaxclip, two passes, 8 at once", '`method="two_pass", microbatch=8`'),
    ("optax, all at once", "optax `per_example_global_norm_clip`"),
    ("jax_privacy, all at once", "jax_privacy `clipped_grad`"),
    ("jax_privacy, 8 at once", "the same, `microbatch_size=8`"),
    ("Opacus, hooks", "Opacus, hooks"),
    ("Opacus, ghost", "Opacus, ghost clipping"),
]
PACKAGES = [
    ("optaxclip, auto", "`clipped_grad`"),
    ("jax_privacy", "jax_privacy"),
    ("Opacus", "Opacus"),
]


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
    if kind == "number":
        return f"<!-- {kind}: {name} -->{number(name)}<!-- end -->"
    return f"<!-- {kind}: {name} -->\n{TABLES[name]()}\n<!-- end -->"


def results(name: str) -> Any:
    """What a program wrote, None where it did not run yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rows_of(name: str, table: str) -> list[dict[str, Any]]:
    """The rows of one table of the benchmarks."""
    found = results(name)
    return found["tables"][table]["rows"] if found else []


def number(path: str) -> str:
    """One number of a list of rows, which are named by their first columns."""
    file, name, column = path.split("/")
    rows = {next(iter(row.values())): row for row in results(file)}
    return f"{rows[name][column]:.2f}"


def costs() -> str:
    """Clippers in an Adam step of GPT-2 small, on three kinds of device."""
    header = ["clipped by", "H100: GB", "H100: kernels", "TPU v5e: GB", "CPU: time"]
    lines = []
    for compiled, timed, shown in CLIPPERS:
        h100, v5e = (_compiled(device, compiled) for device in ("h100", "v5e"))
        numbers = [_shown(h100, "GB"), _shown(h100, "kernels"), _shown(v5e, "GB")]
        lines.append([shown, *numbers, _cpu_time(timed)])
    return markdown(header, lines)


def _compiled(
    device: str, name: str, model: str = "GPT-2 small", dtype: str = "float32"
) -> dict[str, Any]:
    wanted = {"device": device, "model": model, "gradients": dtype, "clipped by": name}
    for row in rows_of("compiled", "compiled"):
        if wanted.items() <= row.items():
            return row
    return {}


def _cpu_time(clipper: str) -> str:
    """A time while clipping and one while not, over that of Adam alone."""
    if clipper == "none":
        return "1"
    for row in rows_of("cpu", "step"):
        if (row["optimizer"], row["clipper"]) == ("Adam", clipper):
            both = sorted((row["time, clipping"], row["time, not clipping"]))
            return " to ".join(dict.fromkeys(f"{time:.2f}" for time in both))
    return "-"


def compiled() -> str:
    """Every step that was compiled for a GPU or a TPU."""
    rows = rows_of("compiled", "compiled")
    if not rows:
        return "Not measured yet."
    known = results("compiled")["tables"]["compiled"]["columns"]
    columns = [column for column in known if column != "compile"]
    return markdown(columns, [[_shown(row, name) for name in columns] for row in rows])


def compile_times() -> str:
    """The time to compile a step with a clip, over that of the same step with optax's,
    on each device: the smallest and the largest of all dtypes.
    """
    rows = rows_of("compiled", "compiled")
    kinds = {(row["device"], row["model"]): None for row in rows}
    lines = []
    for device, model in kinds:
        times = {}
        for row in rows:
            if (row["device"], row["model"]) == (device, model):
                times[row["gradients"], row["clipped by"]] = row["compile"]
        norms = _over_optax(times, ("global norm", "tensor RMS"))
        agc = _over_optax(times, ("AGC",))
        if norms != "-":
            lines.append([device, model, norms, agc])
    return markdown(["compiled for", "model", "global norm, tensor RMS", "AGC"], lines)


def _over_optax(times: dict[tuple[str, str], float], clippers: tuple[str, ...]) -> str:
    found = []
    for (dtype, name), time in times.items():
        other = times.get((dtype, f"optax, {name}"))
        if name in clippers and other:
            found.append(f"{time / other:.1f}")
    return " to ".join(dict.fromkeys((min(found), max(found)))) if found else "-"


def cpu() -> str:
    """Every optimizer and clipper that was timed on a CPU."""
    rows = rows_of("cpu", "step")
    columns = ["optimizer", "clipper", "time, clipping", "time, not clipping"]
    columns += ["temporary memory"]
    return markdown(columns, [[_shown(row, name) for name in columns] for row in rows])


def each_time() -> str:
    """The time of each way to clip each example, over the plain gradient's."""
    return _of_each(EACH, "time")


def each_memory() -> str:
    """The temporary memory of each way in JAX, over the plain gradient's."""
    return _of_each([way for way in EACH if "Opacus" not in way[0]], "temporary memory")


def each_package() -> str:
    """The time of each package, in its fastest way: a line for each model.

    With one digit, since the times of some packages differ much between rounds.
    """
    rows = rows_of("per_example", "per_example")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        line = [model]
        for name, _ in PACKAGES:
            times = [x["time"] for x in own if x["gradient"].startswith(name)]
            line.append(f"{min(times):.1f}")
        lines.append(line)
    return markdown(["model", *(shown for _, shown in PACKAGES)], lines)


def _of_each(ways: list[tuple[str, str]], column: str) -> str:
    """A line for each way, with the smallest number of its rows for each model."""
    rows = rows_of("per_example", "per_example")
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    for name, shown in ways:
        own = [row for row in rows if row["gradient"].startswith(name)]
        lines.append([shown, *(_smallest(own, model, column) for model in models)])
    return markdown(["clipped by", *models], lines)


def _smallest(rows: list[dict[str, Any]], model: str, column: str) -> str:
    own = [row for row in rows if row["model"] == model]
    return min((_shown(row, column) for row in own), key=float, default="-")


def each_compiled() -> str:
    """Plain and clipped gradients on a GPU and a TPU."""
    rows = rows_of("per_example", "per_example_compiled")
    columns = ["device", "model", "gradient", "kernels", "GB", "temporary MB"]
    return markdown(columns, [[str(row[name]) for name in columns] for row in rows])


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(row: dict[str, Any], column: str) -> str:
    value = row.get(column, "-")
    return f"{value:.2f}" if isinstance(value, float) else str(value)


TABLES: dict[str, Callable[[], str]] = {
    "costs": costs,
    "compiled": compiled,
    "compile_times": compile_times,
    "cpu": cpu,
    "each_time": each_time,
    "each_memory": each_memory,
    "each_package": each_package,
    "each_compiled": each_compiled,
}

if __name__ == "__main__":
    main()
