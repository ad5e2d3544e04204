"""What broke a step: the first cause whose removal brings it within the limit.

    chip     the same program again, three times
    dtype    in float32
    data     without the examples that stand out
    layer    without the tensors that stand out
    model    none of these: weights, learning rate, or the batch as a whole

The value that is held against a limit is the norm of the gradient, or the loss where
only the loss broke its limit. A value that is not finite counts as inf.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_length, is_function, shown
from .._norms import global_norm, tensor_norm
from ._file import PyTree, Step, by_name, load

Loss = Callable[..., Any]

ROUNDING = 0.1  # relative tolerance, about sqrt(bfloat16 eps)
FAR_EXAMPLE = 5  # medians of the examples
FAR_TENSOR = 10  # medians of the tensors
LIMIT_IN_MEDIANS = 10  # of the examples, for a step without a limit

CAUSES = {
    "none": "the step is within its limit",
    "chip": (
        "one program gave several norms, or the loss is random, or another one than "
        "was trained"
    ),
    "dtype": "the step is within its limit in float32",
    "data": "the step is within its limit without these examples",
    "layer": "the step is within its limit without these tensors",
    "model": "no part broke the step: weights, learning rate, or the batch as a whole",
}


class Verdict(NamedTuple):
    """What broke a step, and what shows it. As text it is what the command prints.

    Attributes:
      cause: "chip", "dtype", "data", "layer", "model", or "none" for a step that was
        within its limit.
      examples: the places in the batch of the examples that stand out, the furthest
        first.
      tensors: the names of the weights that are not finite. Where all are finite, those
        whose gradients stand out, or the one whose gradient grew most. Empty without
        Adam's moments, unless a weight or a gradient is not finite.
      numbers: what was compared, by name.
      not_told: what could not be judged, and why.
    """

    cause: str
    examples: list[int]
    tensors: list[str]
    numbers: dict[str, float]
    not_told: list[str]

    def __str__(self) -> str:
        lines = [
            f"{self.cause}: {CAUSES[self.cause]}",
            f"examples {self.examples}, tensors {self.tensors}",
        ]
        for text in self.not_told:
            lines.append(f"not told: {text}")
        for name, number in self.numbers.items():
            lines.append(f"{name:40} {number:10.4g}")
        return "\n".join(lines)


class Record(NamedTuple):
    """What the state says of a step."""

    quantity: str  # what is compared: "norm" or "loss"
    value: float  # inf where it was not finite, NaN where the state does not have it
    limit: float


class Examples(NamedTuple):
    """Replays of each example alone, and of the batch without those that stand out."""

    size: int  # how many examples, 0 where the batch cannot be cut into examples
    median: float  # NaN where no example has a gradient
    far: list[int]  # places in the batch, the furthest first
    value_without_far: float


class Tensors(NamedTuple):
    """Weights, and their gradients against Adam's second moments."""

    not_finite: list[str]  # names of weights
    far: list[str]  # names of weights whose gradients stand out
    most_grown: list[str]  # the weight whose gradient grew most, none without moments
    norm_without_far: float


class Evidence(NamedTuple):
    """What the replays of a step gave."""

    repeats: list[float]  # of the step as it was
    in_float32: float
    examples: Examples
    tensors: Tensors
    not_told: list[str]  # what could not be replayed


class Replay(NamedTuple):
    """One replay. Numbers that are not finite are inf."""

    value: jax.Array  # float[]: the norm of the gradient, or the loss
    norms: PyTree  # float[] for each tensor


Program = Callable[[PyTree, PyTree], Replay]  # of weights and a batch


def why(
    loss: Loss,
    file: str | Path,
    *,
    wide: Loss | None = None,
    like: PyTree = None,
    microbatch: int = 1,
) -> Verdict:
    """Replays a step that `save` has written, and says what broke it.

    | cause | is named if |
    |---|---|
    | chip | the recorded norm and those of three replays differ by more than 10% |
    | none | the recorded norm is within its limit |
    | dtype | the norm is within the limit in float32 |
    | data | the norm is within the limit without the examples that stand out |
    | layer | the norm is within the limit without the tensors that stand out |
    | model | no other cause is |

    An example stands out by its norm among all examples. A tensor stands out if its
    gradient is not finite, or is far above Adam's second moments.

    `skip_nonfinite` has no limit. There the limit is ten times the median norm of the
    examples that have a gradient. If only the loss is above its limit, or not finite,
    losses are compared instead of norms.

    Args:
      loss: the function that the step differentiates, `loss(params, batch)`, or
        `loss(params, *batch)` for a batch that was saved as a tuple. It returns the
        loss, or a tuple that begins with it, and is the mean over the batch.
      file: the path that was given to `save`, also of several processes.
      wide: the same loss in float32, for one that converts to 16 bits itself, as layers
        with a dtype do. None takes `loss`, with weights and batch in float32.
      like: trees (params, batch) of the structure that was saved, where it is not made
        of dicts, lists and tuples. Their numbers are not used.
      microbatch: how many examples are differentiated together, at least 1. More than 1
        is faster, and names all examples of a microbatch that stands out.

    Returns:
      A `Verdict`: `cause`, `examples`, `tensors`, `numbers` and `not_told`.

    Raises:
      ValueError: a file that `save` did not write, files of some processes only or of
        two runs, or a structure that does not fit.
      TypeError: a loss that is not a function.
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
    for name, function in (("loss", loss), ("wide", wide or loss)):
        if not is_function(function):
            raise TypeError(f"why: {name} must be a function, got {shown(function)}.")
    check_length("why: microbatch", microbatch)
    step = load(file, like)
    record = _recorded(step.numbers)
    evidence = _evidence(
        _program(loss, record.quantity),
        _program(wide or loss, record.quantity),
        step=step,
        microbatch=microbatch,
    )
    return _verdict(record, evidence)


# -------------------------------------------------------------------------- measuring


def _recorded(numbers: dict[str, float]) -> Record:
    """The norm and its limit, or the loss where that alone broke its limit."""
    # A recorder may stand behind the clipper, and have the norm of clipped gradients.
    wrappers = ["skip", "spike", "clip", "record"]
    for name, number in numbers.items():
        # Of two wrappers the one that skipped.
        if name.endswith("/skipped") and number:
            wrappers.insert(0, name.removesuffix("/skipped"))
    for wrapper in wrappers:
        norm = numbers.get(f"{wrapper}/norm", numbers.get(f"{wrapper}/norm_before"))
        if norm is None:
            continue
        limit = numbers.get(f"{wrapper}/limit", math.inf)
        loss = numbers.get(f"{wrapper}/loss", -math.inf)
        loss_limit = numbers.get(f"{wrapper}/loss_limit", math.inf)
        # NaN and inf are within no limit.
        if norm < limit and not loss < loss_limit:
            return Record("loss", math.inf if math.isnan(loss) else loss, loss_limit)
        return Record("norm", math.inf if math.isnan(norm) else norm, limit)
    return Record("norm", math.nan, math.inf)


def _program(loss: Loss, quantity: str) -> Program:
    """A replay, compiled once for each shape."""

    def loss_of_batch(params: PyTree, batch: PyTree) -> jax.Array:
        # A NamedTuple is one argument.
        arguments = batch if type(batch) is tuple else (batch,)
        result = loss(params, *arguments)
        return result[0] if isinstance(result, tuple) else result

    # Norms outside: they are compiled once for all programs of these weights.
    value_and_grad = jax.jit(jax.value_and_grad(loss_of_batch))

    def program(params: PyTree, batch: PyTree) -> Replay:
        value, grads = value_and_grad(params, batch)
        if quantity == "norm":
            value = global_norm(grads)
        replay = Replay(value, tensor_norm(grads))
        return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.inf), replay)

    return program


def _evidence(
    program: Program, wide_program: Program, *, step: Step, microbatch: int
) -> Evidence:
    """Replays a step as it was, in float32, and without what stands out."""
    repeats = []
    for _ in range(3):
        repeats.append(float(program(step.params, step.batch).value))
    params, batch = jax.tree.map(_in_float32, (step.params, step.batch))
    # Matmuls of float32 have fewer digits by default on GPU and TPU.
    with jax.default_matmul_precision("highest"):
        replay = wide_program(params, batch)
        examples = _examples(wide_program, params, batch, microbatch)
    not_told = []
    # The text of a program has the dtype of each variable: f16[8] or bf16[8].
    if "f16[" in str(jax.make_jaxpr(wide_program)(params, batch)):
        not_told.append("dtype: 16 bits are left in float32, wide= takes another loss")
    if examples.size == 0:
        not_told.append("data: the arrays of the batch have no common first axis")
    if not step.moments:
        not_told.append(
            "layer: without second moments of Adam only gradients that are not finite "
            "stand out"
        )
    return Evidence(
        repeats=repeats,
        in_float32=float(replay.value),
        examples=examples,
        tensors=_tensors(params, replay.norms, step.moments),
        not_told=not_told,
    )


def _in_float32(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(jnp.promote_types(leaf.dtype, np.float32))
    return leaf


def _counts_examples(leaf: Any) -> bool:
    """Whether the first axis of an array counts examples."""
    # (2,) is one key for all examples, from jax.random.PRNGKey.
    return leaf.ndim > 0 and (leaf.shape, leaf.dtype) != ((2,), np.uint32)


def _rows(batch: PyTree, rows: slice | np.ndarray) -> PyTree:
    """Some examples of a batch."""
    return jax.tree.map(lambda x: x[rows] if _counts_examples(x) else x, batch)


def _examples(
    program: Program, params: PyTree, batch: PyTree, microbatch: int
) -> Examples:
    """Replays each microbatch alone, and the batch without those that stand out."""
    sizes = {len(leaf) for leaf in jax.tree.leaves(batch) if _counts_examples(leaf)}
    size = 0
    if len(sizes) == 1:
        size = sizes.pop()
    # All examples of a microbatch have its value.
    values = np.empty(size)
    for begin in range(0, size, microbatch):
        rows = slice(begin, begin + microbatch)
        values[rows] = program(params, _rows(batch, rows)).value
    # Masked examples have no gradient.
    median = median_low([value for value in values if value] or [math.nan])
    is_far = values > FAR_EXAMPLE * abs(median)
    if is_far.any():
        batch = _rows(batch, ~is_far)
    return Examples(
        size=size,
        median=float(median),
        far=np.argsort(-values, kind="stable")[: is_far.sum()].tolist(),
        value_without_far=float(program(params, batch).value),
    )


def _tensors(params: PyTree, norms: PyTree, moments: dict[str, np.ndarray]) -> Tensors:
    """Finds the gradients that stand out against their history."""
    norms_by_name = by_name(jax.tree.map(float, norms))
    growths = {}
    for name, norm in norms_by_name.items():
        growths[name] = norm
        if norm < math.inf:
            # Moments are means of g^2. Without them the growth is 0.
            sum_of_moments = np.sum(moments.get(name, 0), dtype=np.float64)
            growths[name] = norm / (math.sqrt(sum_of_moments) or math.inf)
    median = median_low([x for x in growths.values() if 0 < x < math.inf] or [1])
    far = [name for name in growths if growths[name] > FAR_TENSOR * median]
    other_norms = [norms_by_name[name] for name in growths if name not in far]
    grown = [name for name in growths if growths[name] > 0]
    grown.sort(key=growths.__getitem__, reverse=True)
    weights = by_name(params)
    return Tensors(
        not_finite=[name for name in weights if not np.isfinite(weights[name]).all()],
        far=far,
        most_grown=grown[:1],
        norm_without_far=math.hypot(*other_norms),
    )


# ---------------------------------------------------------------------------- judging


def _verdict(record: Record, evidence: Evidence) -> Verdict:
    """Names the cause, and lists what was compared."""
    quantity = record.quantity
    examples = evidence.examples
    tensors = evidence.tensors
    limit = record.limit
    if limit == math.inf and not math.isnan(examples.median):
        limit = LIMIT_IN_MEDIANS * abs(examples.median)
    not_told = evidence.not_told
    if math.isnan(record.value):
        # Under another name it may be the norm of a part, as in `optax.partition`.
        without_norm = (
            "chip: no norm of the whole gradient under skip/norm, spike/norm, "
            "clip/norm_before or record/norm"
        )
        not_told = [without_norm, *not_told]
    return Verdict(
        cause=_cause(record, evidence, limit),
        examples=examples.far,
        tensors=tensors.not_finite or tensors.far or tensors.most_grown,
        numbers={
            f"recorded {quantity}": record.value,
            f"lowest {quantity} of three replays": min(evidence.repeats),
            f"highest {quantity} of three replays": max(evidence.repeats),
            "limit": limit,
            f"{quantity} in float32": evidence.in_float32,
            f"median {quantity} of examples": examples.median,
            f"{quantity} without far examples": examples.value_without_far,
            "norm without far tensors": tensors.norm_without_far,
        },
        not_told=not_told,
    )


def _cause(record: Record, evidence: Evidence, limit: float) -> str:
    """The first cause without which the value is within the limit."""
    values = evidence.repeats
    if not math.isnan(record.value):
        values = [record.value, *values]
    if not math.isclose(min(values), max(values), rel_tol=ROUNDING):
        return "chip"
    if values[0] < limit:
        return "none"
    if evidence.in_float32 < limit:
        return "dtype"
    if evidence.examples.value_without_far < limit:
        return "data"
    # Weights that are not finite make any gradient wrong, and a wrong backward pass
    # leaves the loss as it is.
    can_be_layer = record.quantity == "norm" and not evidence.tensors.not_finite
    if can_be_layer and 0 < evidence.tensors.norm_without_far < limit:
        return "layer"
    return "model"
