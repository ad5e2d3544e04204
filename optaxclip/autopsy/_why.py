"""What broke a step: it is replayed without each cause in turn, and the first without
which it is within its limits is named.

    chip     the same program again, three times
    dtype    in float32
    data     without the examples that stand out
    layer    without the tensors that stand out
    model    none of these: weights, learning rate, or the batch as a whole
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_length, is_function, shown
from .._norms import global_norm
from ._file import Step, load, machine, name_of

PyTree = Any
Loss = Callable[..., Any]
# From weights and batch to loss and gradient.
Program = Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]

RUNS = 3  # of one program: two that agree tell that the third is wrong
FAR_EXAMPLE = 5  # medians of the examples
FAR_TENSOR = 10  # medians of the tensors
FALL = 0.7  # to at most this share, for examples that make half of a squared norm
USUAL = 10  # medians of the examples: the limit of a step without one
# The spacing of numbers at 1.
EPS = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
# The norm of the whole gradient in `metrics`, that of the outermost wrapper first.
NORMS = ("skip/norm", "spike/norm", "record/norm", "clip/norm_before")


class Tensor(NamedTuple):
    """One tensor of the gradient, in float32.

    Attributes:
      name: its path in the weights.
      norm: of its gradient.
      growth: its norm over the root of the sum of Adam's second moments, relative to
        the median of all tensors. NaN where the state has no such moments.
      rms: the root mean square of its weights.
    """

    name: str
    norm: float
    growth: float
    rms: float


class Verdict(NamedTuple):
    """What broke a step, and what shows it. As text it is what the command prints.

    Attributes:
      cause: "chip", "dtype", "data", "layer", "model", or "none" for a step that was
        within its limits.
      evidence: the numbers that show it, in a sentence.
      examples: the places in the batch of the examples that did it, for "data".
      tensors: of the gradient, the one that grew most first.
      numbers: what was compared, by name.
      not_told: what could not be judged, and why.
    """

    cause: str
    evidence: str
    examples: list[int]
    tensors: list[Tensor]
    numbers: dict[str, float]
    not_told: list[str]

    def __str__(self) -> str:
        lines = [f"{self.cause}: {self.evidence}"]
        lines += [f"not told: {text}" for text in self.not_told]
        lines += ["", *(f"{name:30} {x:10.4g}" for name, x in self.numbers.items())]
        lines += ["", f"{'tensor':30} {'norm':>10} {'growth':>10} {'rms':>10}"]
        for name, norm, growth, rms in self.tensors[:8]:
            lines.append(f"{name:30} {norm:10.4g} {growth:10.4g} {rms:10.4g}")
        return "\n".join(lines)


class Record(NamedTuple):
    """What the state says of the step."""

    norm: float | None = None  # where it is not known
    limit: float = math.inf
    loss: float = -math.inf  # where there was none
    loss_limit: float = math.inf

    @classmethod
    def of(cls, numbers: dict[str, float]) -> Record:
        """From the numbers of `metrics`."""
        for name in NORMS:
            wrapper, norm = name.split("/")
            pattern = rf"{wrapper}(_\d+)?/(.+/)?{norm}"
            keys = [key for key in numbers if re.fullmatch(pattern, key)]
            # Several are norms of parts of the gradient.
            if len(keys) == 1:
                record = cls(norm=numbers[keys[0]])
                for field in cls._fields[1:]:
                    key = keys[0].removesuffix(norm) + field
                    if key in numbers:
                        record = record._replace(**{field: numbers[key]})
                return record
        return cls()

    def allows(self, step: Record | Run) -> bool:
        """Whether norm and loss of a step are within the limits."""
        norm = math.inf if step.norm is None else step.norm
        return norm < math.inf and norm <= self.limit and step.loss <= self.loss_limit


class Run(NamedTuple):
    """Loss and gradient of a replay."""

    loss: float
    leaves: list[np.ndarray]
    norms: np.ndarray  # float64[tensors]
    norm: float

    @classmethod
    def of(cls, program: Program, params: PyTree, batch: PyTree) -> Run:
        """What a program gives."""
        loss, grads = jax.device_get(program(params, batch))
        leaves = jax.tree.leaves(grads)
        norms = np.array([np.linalg.norm(np.float64(leaf)) for leaf in leaves])
        return cls(float(loss), leaves, norms, float(np.linalg.norm(norms)))

    def agrees(self, other: Run, rounding: float) -> bool:
        """Whether gradients are the same but for rounding."""
        square = 0.0
        square_of_difference = 0.0
        for leaf, other_leaf in zip(self.leaves, other.leaves):
            array = np.asarray(leaf, np.float64)
            other_array = np.asarray(other_leaf, np.float64)
            is_finite = np.isfinite(array)
            if not np.array_equal(is_finite, np.isfinite(other_array)):
                return False
            array, other_array = array[is_finite], other_array[is_finite]
            square += np.sum(array**2)
            square_of_difference += np.sum((array - other_array) ** 2)
        return bool(square_of_difference <= rounding**2 * square)


class Part(NamedTuple):
    """Some examples alone."""

    examples: list[int]  # their places in the batch
    loss: float
    norm: float


def why(
    loss: Loss,
    file: str | Path,
    *,
    wide: Loss | None = None,
    like: PyTree = None,
    microbatch: int = 1,
) -> Verdict:
    """Replays a step that `save` has written, and says what broke it.

    | cause | is named where |
    |---|---|
    | none | the recorded norm and loss are within their limits |
    | chip | three runs of one program differ, or agree and are not what was recorded |
    | dtype | the step is within its limits in float32 |
    | data | it is, without the examples whose norms stand out |
    | layer | it is, without the tensors that stand out against Adam's moments |
    | model | in all other cases |

    A step without a limit, as of `skip_nonfinite`, is held against ten times the median
    of the norms of examples.

    Args:
      loss: the function that the step differentiates, `loss(params, batch)`, or
        `loss(params, *batch)` for a batch that was saved as a tuple. It returns the
        loss, or a tuple that begins with it, and is the mean over the batch.
      file: the path that was given to `save`, also of several processes.
      wide: the same loss in float32, for one that converts to 16 bits itself, as layers
        with a dtype do. None takes `loss`, with weights and batch in float32.
      like: trees (params, batch) of the structure that was saved, where it is not made
        of dicts, lists and tuples. Their numbers are not used.
      microbatch: how many examples are differentiated together. More than 1 is faster,
        and names parts of so many examples.

    Returns:
      A `Verdict`: `cause`, `evidence`, `examples`, `tensors`, `numbers` and `not_told`.

    Raises:
      ValueError: a file that `save` did not write, files of some processes only, or a
        structure that does not fit. TypeError: a loss that is not a function.
      OSError: no such file.

    Example:
      >>> import pathlib, tempfile
      >>> def loss(w, x, y):
      ...     return jnp.mean((x @ w - y) ** 2)
      >>> optimizer = optaxclip.skip_spikes(optax.adam(0.1), 10.0)
      >>> w, x = jnp.ones(2), jnp.ones((8, 2))
      >>> y = jnp.zeros(8).at[5].set(1e4)
      >>> grads = jax.grad(loss)(w, x, y)
      >>> _, state = optimizer.update(grads, optimizer.init(w), w)
      >>> path = pathlib.Path(tempfile.mkdtemp(), "step.npz")
      >>> path = optaxclip.autopsy.save(path, w, (x, y), state)
      >>> verdict = optaxclip.autopsy.why(loss, path)
      >>> print(verdict.cause, verdict.examples)
      data [5]
    """
    if not is_function(loss):
        raise TypeError(f"why: loss must be a function, got {shown(loss)}.")
    check_length("why: microbatch", microbatch)
    step = load(file, like)
    replays = _replays(step, loss, wide or loss, microbatch)
    cause, evidence = _cause(replays)
    examples: list[int] = []
    if cause == "data":
        examples = [place for part in replays.outliers for place in part.examples]
    record, (first_run, *other_runs) = replays.record, replays.runs
    is_random = not all(first_run.agrees(run, 0) for run in other_runs)
    narrow = replays.narrow_dtypes
    not_told = {
        "chip: no norm of the whole gradient was recorded": record.norm is None,
        f"chip: bits, since the step ran on {step.machine}": step.machine != machine(),
        "chip: bits, since those of a random program differ": is_random,
        f"dtype: the loss converts to {narrow} itself, give wide=": bool(narrow),
        "data: arrays of the batch differ in their first axes": not replays.parts,
        "layer: the state has no second moments of Adam": not step.moments,
    }
    numbers = {
        "recorded norm": math.nan if record.norm is None else record.norm,
        "limit": record.limit,
        "replayed norm": first_run.norm,
        "norm in float32": replays.wide_run.norm,
        "median norm of examples": _median([part.norm for part in replays.parts]),
    }
    return Verdict(
        cause=cause,
        evidence=evidence,
        examples=examples,
        tensors=replays.tensors,
        numbers=numbers,
        not_told=[text for text, is_true in not_told.items() if is_true],
    )


# ------------------------------------------------------------------------- the replays


class Replays(NamedTuple):
    """What a step gives without each cause."""

    record: Record
    runs: list[Run]  # of the program as it was
    rounding: float  # of that, relative
    wide_run: Run  # in float32, as all that follows
    narrow_dtypes: str  # that are in it all the same
    parts: list[Part]
    judged: str  # "norm" or "loss": what is above its limit
    outliers: list[Part]  # the parts that stand out by this
    run_of_others: Run | None  # of the batch without them, if there are some
    tensors: list[Tensor]


def _replays(step: Step, loss: Loss, wide_loss: Loss, microbatch: int) -> Replays:
    program = _program(loss)
    runs = [Run.of(program, step.params, step.batch) for _ in range(RUNS)]
    dtypes = ("f32", *_narrow_dtypes(program, step.params, step.batch))
    params, batch = jax.tree.map(_in_float32, (step.params, step.batch))
    program = _program(wide_loss)
    # Of float32, GPUs and TPUs multiply matrices in fewer bits.
    with jax.default_matmul_precision("highest"):
        run = Run.of(program, params, batch)
        parts = _parts(program, params, batch, microbatch)
        record = Record.of(step.numbers)
        usual = _median([part.norm for part in parts])
        if record.limit == math.inf and math.isfinite(usual):
            record = record._replace(limit=USUAL * usual)
        # A step may break the limit of the loss alone.
        judged = "loss" if run.norm <= record.limit else "norm"
        outliers = _outliers(parts, judged)
        run_of_others = None
        if outliers:
            others = [part.examples for part in parts if part not in outliers]
            rows = _rows(batch, np.concatenate(others))
            run_of_others = Run.of(program, params, rows)
    return Replays(
        record=record,
        runs=runs,
        # Half of the digits of the narrowest dtype.
        rounding=math.sqrt(max(EPS[dtype] for dtype in dtypes)),
        wide_run=run,
        narrow_dtypes=", ".join(_narrow_dtypes(program, params, batch)),
        parts=parts,
        judged=judged,
        outliers=outliers,
        run_of_others=run_of_others,
        tensors=_tensors(step.params, step.moments, run),
    )


def _cause(replays: Replays) -> tuple[str, str]:
    """The cause, and what shows it."""
    record, run = replays.record, replays.runs[0]
    wide_run, tensors = replays.wide_run, replays.tensors
    chip = _chip(record, replays.runs, replays.rounding)
    if chip:
        return "chip", chip
    if record.allows(record):
        return "none", f"norm {record.norm:.4g}, limit {record.limit:.4g}"
    evidence = f"norm {wide_run.norm:.4g} in float32, limit {record.limit:.4g}"
    if record.allows(wide_run) and not wide_run.agrees(run, replays.rounding):
        return "dtype", f"norm {run.norm:.4g}, {evidence}"
    others, judged = replays.run_of_others, replays.judged
    # Where the whole batch gives NaN, nothing is above it.
    if (
        others
        and record.allows(others)
        and not getattr(others, judged) > FALL * getattr(wide_run, judged)
    ):
        names = []
        for part in replays.outliers[:5]:
            names.append(f"{part.examples[0]} of norm {part.norm:.4g}")
        text = f"{others.norm:.4g} without example {', '.join(names)}"
        return "data", f"{evidence}, {text}"
    names, norm = _layer(tensors)
    if names and norm <= record.limit:
        return "layer", f"{evidence}, {norm:.4g} without {', '.join(names)}"
    broken = [tensor.name for tensor in tensors if not math.isfinite(tensor.rms)]
    if broken:
        return "model", f"{evidence}. Weights of {', '.join(broken)} are not finite"
    grown = tensors[0].name
    return "model", f"{evidence}, with all examples and tensors. {grown} grew most"


def _program(loss: Loss) -> Program:
    """Compiled once for each shape."""

    def value(params: PyTree, batch: PyTree) -> jax.Array:
        # A NamedTuple is one argument.
        arguments = batch if type(batch) is tuple else (batch,)
        result = loss(params, *arguments)
        return result[0] if isinstance(result, tuple) else result

    return jax.jit(jax.value_and_grad(value))


def _narrow_dtypes(program: Program, params: PyTree, batch: PyTree) -> list[str]:
    """Floats of 16 bits that a program computes with."""
    # The text of a program has the dtype of each variable.
    text = str(jax.make_jaxpr(program)(params, batch))
    return sorted(set(re.findall(r":(bf16|f16)\[", text)))


def _in_float32(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", np.dtype(np.float32))
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return leaf.astype(np.float32) if is_narrow else leaf


def _chip(record: Record, runs: list[Run], rounding: float) -> str:
    """What shows that a chip miscomputed. Empty where nothing does."""
    pairs = [run.agrees(other, rounding) for run, other in combinations(runs, 2)]
    norms = ", ".join(f"{run.norm:.6g}" for run in runs)
    if not any(pairs):
        return f"all runs of one program differ, or it is random: norms {norms}"
    if not all(pairs):
        return f"one run of one program differs: norms {norms}"
    norm = runs[0].norm
    if record.norm is None or not (math.isfinite(norm) or math.isfinite(record.norm)):
        return ""
    if math.isclose(record.norm, norm, rel_tol=rounding):
        return ""
    return f"recorded norm {record.norm:.6g}, or of another loss: norms {norms}"


# ------------------------------------------------------------------------ the examples


def _counts_examples(leaf: Any) -> bool:
    """Whether the first axis of an array counts examples."""
    # Not that of one key for all, as of jax.random.PRNGKey.
    is_key = np.shape(leaf) == (2,) and leaf.dtype == np.uint32
    return np.ndim(leaf) > 0 and not is_key


def _rows(batch: PyTree, rows: Any) -> PyTree:
    """Some examples of a batch."""
    return jax.tree.map(lambda x: x[rows] if _counts_examples(x) else x, batch)


def _parts(
    program: Program, params: PyTree, batch: PyTree, microbatch: int
) -> list[Part]:
    """All parts of a batch. None where it is not known what an example is."""
    sizes = {len(leaf) for leaf in jax.tree.leaves(batch) if _counts_examples(leaf)}
    if len(sizes) != 1:
        return []
    places = np.arange(sizes.pop())
    parts = []
    for begin in range(0, places.size, microbatch):
        examples = places[begin : begin + microbatch]
        loss, grads = program(params, _rows(batch, examples))
        parts.append(Part(examples.tolist(), float(loss), float(global_norm(grads))))
    return parts


def _median(numbers: list[float]) -> float:
    """Of those that are finite."""
    finite = [number for number in numbers if math.isfinite(number)]
    return median_low(finite) if finite else math.nan


def _outliers(parts: list[Part], judged: str) -> list[Part]:
    """The parts that stand out, the furthest first."""

    def size(part: Part) -> float:
        number = getattr(part, judged)
        return number if math.isfinite(number) else math.inf

    highest = FAR_EXAMPLE * _median([size(part) for part in parts])
    far = [part for part in parts if size(part) > highest]
    return sorted(far, key=size, reverse=True)


# ------------------------------------------------------------------------- the tensors


def _tensors(params: PyTree, moments: dict[str, np.ndarray], run: Run) -> list[Tensor]:
    """The tensors of a gradient, the one that grew most first."""
    tensors = []
    for (keys, leaf), norm in zip(jax.tree.leaves_with_path(params), run.norms):
        name = name_of(keys)
        moment = moments.get(name, np.array(math.nan))
        usual = math.sqrt(np.sum(np.float64(moment)))
        growth = float(norm) / usual if usual else math.nan
        rms = math.sqrt(np.mean(np.float64(leaf) ** 2))
        tensors.append(Tensor(name, float(norm), growth, rms))
    median_growth = _median([tensor.growth for tensor in tensors])
    tensors = [x._replace(growth=x.growth / median_growth) for x in tensors]

    def rank(tensor: Tensor) -> float:
        number = tensor.norm if math.isnan(tensor.growth) else tensor.growth
        return number if math.isfinite(number) else math.inf

    return sorted(tensors, key=rank, reverse=True)


def _layer(tensors: list[Tensor]) -> tuple[list[str], float]:
    """The names of the tensors that stand out, and the norm of all others."""
    far = [tensor for tensor in tensors if not math.isfinite(tensor.norm)]
    far = far or [tensor for tensor in tensors if tensor.growth > FAR_TENSOR]
    if len(far) == len(tensors):
        return [], math.inf
    norm = math.hypot(*(tensor.norm for tensor in tensors if tensor not in far))
    return [tensor.name for tensor in far], norm
