"""What broke a step: the first cause whose removal brings it within the limit.

    chip     the same program again, three times
    dtype    in float32
    data     without the examples that stand out
    layer    without the tensors that stand out
    model    none of these: weights, learning rate, or the batch as a whole

What is held against a limit is the norm of the gradient, or the loss where that alone
broke its limit. Either is inf where it is not finite.
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
    "chip": "one program gave several norms. Or its loss is random, or not of the step",
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
        whose gradients stand out, or the one whose gradient grew most.
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


class Run(NamedTuple):
    """One replay. Numbers that are not finite are inf."""

    value: jax.Array  # the norm of the gradient, or the loss
    norms: PyTree  # of its tensors


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
    | chip | the recorded norm and those of three replays are not all the same |
    | none | the recorded norm is within its limit |
    | dtype | the norm is within the limit in float32 |
    | data | it is, without the examples whose norms stand out |
    | layer | it is, without the tensors that stand out against Adam's moments |
    | model | in all other cases |

    A step without a limit, as of `skip_nonfinite`, is held against ten times the median
    of the norms of examples that have a gradient. Where the loss alone broke its limit,
    or is not finite, losses are compared in the place of norms.

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
      A `Verdict`: `cause`, `examples`, `tensors`, `numbers` and `not_told`.

    Raises:
      ValueError: a file that `save` did not write, files of some processes only or of
        two runs, or a structure that does not fit. TypeError: a loss that is not a
        function.
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
    return _verdict(loss, wide or loss, load(file, like), microbatch)


def _verdict(loss: Loss, wide: Loss, step: Step, microbatch: int) -> Verdict:
    """Replays a step as it was, in float32, and without what stands out."""
    quantity, recorded, limit = _recorded(step.numbers)

    # The chip: the same program again, three times.
    program = _program(loss, quantity)
    replays = [float(program(step.params, step.batch).value) for _ in range(3)]

    # The dtype: float32 matmuls run in lower precision by default on GPU and TPU.
    program = _program(wide, quantity)
    params, batch = jax.tree.map(_in_float32, (step.params, step.batch))
    # The text of a program has the dtype of each variable: f16[8] or bf16[8].
    has_16_bits = "f16[" in str(jax.make_jaxpr(program)(params, batch))
    with jax.default_matmul_precision("highest"):
        run = program(params, batch)
        # The data: each example alone, then the batch without those that stand out.
        values = _values_of_examples(program, params, batch, microbatch)
        # Masked examples have no gradient.
        median = median_low([value for value in values if value] or [math.nan])
        is_far = values > FAR_EXAMPLE * abs(median)
        usual_batch = batch
        if is_far.any():
            usual_batch = _rows(batch, ~is_far)
        value_without_far = float(program(params, usual_batch).value)
    if limit == math.inf and values.size:
        limit = LIMIT_IN_MEDIANS * abs(median)

    # The layer: the norm without the tensors that stand out.
    norms = by_name(jax.tree.map(float, run.norms))
    growths = _growths(norms, step.moments)
    far_tensors = [name for name in norms if growths[name] > FAR_TENSOR]
    norms_without_far = [norms[name] for name in norms if name not in far_tensors]
    norm_without_far = math.hypot(*norms_without_far)
    broken = []
    for name, leaf in by_name(params).items():
        if not np.isfinite(leaf).all():
            broken.append(name)

    without = {"none": recorded, "dtype": float(run.value), "data": value_without_far}
    # If the backward pass is wrong the loss is unaffected, so losses cannot blame a
    # layer.
    if quantity == "norm" and norm_without_far > 0 and not broken:
        without["layer"] = norm_without_far
    not_told = {
        "chip: no norm of the whole gradient was recorded": math.isnan(recorded),
        "dtype: 16 bits are left in float32, wide= takes another loss": has_16_bits,
        "data: arrays of the batch differ in their first axes": not values.size,
        "layer: the state has no second moments of Adam": not step.moments,
    }
    return Verdict(
        cause=_cause([recorded, *replays], without, limit),
        examples=np.argsort(-values, kind="stable")[: is_far.sum()].tolist(),
        tensors=broken or far_tensors or [max(growths, key=growths.__getitem__)],
        numbers={
            f"recorded {quantity}": recorded,
            f"lowest {quantity} of three replays": min(replays),
            f"highest {quantity} of three replays": max(replays),
            "limit": limit,
            f"{quantity} in float32": without["dtype"],
            f"median {quantity} of examples": median,
            f"{quantity} without far examples": value_without_far,
            "norm without far tensors": norm_without_far,
        },
        not_told=[text for text, is_true in not_told.items() if is_true],
    )


def _cause(observed: list[float], without: dict[str, float], limit: float) -> str:
    """The first cause without which the value is within the limit."""
    if not math.isclose(np.nanmin(observed), np.nanmax(observed), rel_tol=ROUNDING):
        return "chip"
    for cause, value in without.items():
        if value < limit:
            return cause
    return "model"


def _recorded(numbers: dict[str, float]) -> tuple[str, float, float]:
    """What is judged, "norm" or "loss", and what the state says of it: the number and
    its limit. NaN is a norm that it does not know.
    """
    # Of two wrappers the one that skipped.
    flags = [name for name in numbers if name.endswith("/skipped") and numbers[name]]
    skipped = [name.removesuffix("/skipped") for name in flags]
    for wrapper in (*skipped, "skip", "spike", "record", "clip"):
        norm = numbers.get(f"{wrapper}/norm", numbers.get(f"{wrapper}/norm_before"))
        if norm is not None:
            limit = numbers.get(f"{wrapper}/limit", math.inf)
            loss = numbers.get(f"{wrapper}/loss", -math.inf)
            loss_limit = numbers.get(f"{wrapper}/loss_limit", math.inf)
            # A NaN is not within its limit, nor is inf.
            if norm < limit and not loss < loss_limit:
                return "loss", loss if math.isfinite(loss) else math.inf, loss_limit
            return "norm", norm if math.isfinite(norm) else math.inf, limit
    return "norm", math.nan, math.inf


def _program(loss: Loss, quantity: str) -> Callable[..., Run]:
    """A replay, compiled once for each shape."""

    def value(params: PyTree, batch: PyTree) -> jax.Array:
        # A NamedTuple is one argument.
        arguments = batch if type(batch) is tuple else (batch,)
        result = loss(params, *arguments)
        return result[0] if isinstance(result, tuple) else result

    # Norms outside: they are compiled once for all programs of these weights.
    value_and_grad = jax.jit(jax.value_and_grad(value))

    def program(params: PyTree, batch: PyTree) -> Run:
        result, grads = value_and_grad(params, batch)
        if quantity == "norm":
            result = global_norm(grads)
        run = Run(result, tensor_norm(grads))
        return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.inf), run)

    return program


def _in_float32(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(jnp.promote_types(leaf.dtype, np.float32))
    return leaf


def _counts_examples(leaf: Any) -> bool:
    """Whether the first axis of an array counts examples."""
    # (2,) is one key for all examples, from jax.random.PRNGKey.
    return leaf.ndim > 0 and (leaf.shape, leaf.dtype) != ((2,), np.uint32)


def _rows(batch: PyTree, rows: Any) -> PyTree:
    """Some examples of a batch."""
    return jax.tree.map(lambda x: x[rows] if _counts_examples(x) else x, batch)


def _values_of_examples(
    program: Callable[..., Run], params: PyTree, batch: PyTree, microbatch: int
) -> np.ndarray:
    """float64[examples]: what the microbatch of an example gives. Empty where arrays of
    the batch differ in how many examples they have.
    """
    counts = {len(leaf) for leaf in jax.tree.leaves(batch) if _counts_examples(leaf)}
    values = np.empty(min(counts) if len(counts) == 1 else 0)
    for begin in range(0, values.size, microbatch):
        rows = slice(begin, begin + microbatch)
        values[rows] = program(params, _rows(batch, rows)).value
    return values


def _growths(norms: dict[str, float], moments: dict[str, Any]) -> dict[str, float]:
    """Norms over the roots of Adam's second moments, in medians of all tensors. 0 where
    moments are 0 or none are there, and inf where the norm is inf.
    """
    growths = {}
    for name, norm in norms.items():
        history = math.sqrt(np.sum(moments.get(name, 0), dtype=np.float64)) or math.inf
        growths[name] = norm
        if norm < math.inf:
            growths[name] = norm / history
    median = median_low([x for x in growths.values() if 0 < x < math.inf] or [1])
    return {name: growth / median for name, growth in growths.items()}
