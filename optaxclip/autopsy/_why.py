"""What broke a step: it is replayed without each cause in turn, and the first without
which it is within its limit is named.

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
from ._file import PyTree, by_name, load

Loss = Callable[..., Any]

ROUNDING = 0.1  # half of the digits of bfloat16: sqrt(2^-7)
FAR_EXAMPLE = 5  # medians of the examples
FAR_TENSOR = 10  # medians of the tensors
USUAL = 10  # medians of the examples: the limit of a step without one

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

    size: jax.Array  # the norm of the gradient, or the loss
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
    of the norms of examples. Where the loss alone broke its limit, losses are compared
    in the place of norms.

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
    judged, recorded, limit = _recorded(step.numbers)

    # The chip: the same program again, three times.
    program = _program(loss, judged)
    replays = [float(program(step.params, step.batch).size) for _ in range(3)]
    observed = [recorded, *replays]
    is_same = math.isclose(np.nanmin(observed), np.nanmax(observed), rel_tol=ROUNDING)

    # The dtype: in float32, whose matrices GPUs and TPUs else multiply in fewer bits.
    program = _program(wide or loss, judged)
    params, batch = jax.tree.map(_in_float32, (step.params, step.batch))
    # The text of a program has the dtype of each variable: f16[8] or bf16[8].
    has_16_bits = "f16[" in str(jax.make_jaxpr(program)(params, batch))
    with jax.default_matmul_precision("highest"):
        run = program(params, batch)
        # The data: each example alone, then the batch without those that stand out.
        sizes = _sizes_of_examples(program, params, batch, microbatch)
        usual = median_low([*sizes] or [math.nan])
        is_far = sizes > FAR_EXAMPLE * abs(usual)
        usual_batch = batch
        if is_far.any():
            usual_batch = _rows(batch, ~is_far)
        size_without_far = float(program(params, usual_batch).size)
    examples = np.argsort(-sizes, kind="stable")[: is_far.sum()].tolist()
    size = float(run.size)
    if limit == math.inf and sizes.size:
        limit = USUAL * usual

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

    if not is_same:
        cause = "chip"
    elif recorded < limit:
        cause = "none"
    elif size < limit:
        cause = "dtype"
    elif size_without_far < limit:
        cause = "data"
    # A wrong gradient leaves the loss as it was.
    elif judged == "norm" and 0 < norm_without_far < limit:
        cause = "layer"
    else:
        cause = "model"
    not_told = {
        "chip: no norm of the whole gradient was recorded": math.isnan(recorded),
        "dtype: the loss converts to 16 bits itself, give wide=": has_16_bits,
        "data: arrays of the batch differ in their first axes": not sizes.size,
        "layer: the state has no second moments of Adam": not step.moments,
    }
    return Verdict(
        cause=cause,
        examples=examples,
        tensors=broken or far_tensors or [max(growths, key=growths.__getitem__)],
        numbers={
            f"recorded {judged}": recorded,
            f"lowest {judged} of three replays": min(replays),
            f"highest {judged} of three replays": max(replays),
            "limit": limit,
            f"{judged} in float32": size,
            f"median {judged} of examples": usual,
            f"{judged} without far examples": size_without_far,
            "norm without far tensors": norm_without_far,
        },
        not_told=[text for text, is_true in not_told.items() if is_true],
    )


def _recorded(numbers: dict[str, float]) -> tuple[str, float, float]:
    """What is judged, "norm" or "loss", and what the state says of it: the number and
    its limit. NaN is a norm that it does not know.
    """
    for name in ("skip/norm", "spike/norm", "record/norm", "clip/norm_before"):
        if name in numbers:
            wrapper, _ = name.split("/")
            norm = numbers[name]
            limit = numbers.get(f"{wrapper}/limit", math.inf)
            loss = numbers.get(f"{wrapper}/loss", -math.inf)
            loss_limit = numbers.get(f"{wrapper}/loss_limit", math.inf)
            if norm < limit and loss > loss_limit:
                return "loss", loss, loss_limit
            return "norm", norm if math.isfinite(norm) else math.inf, limit
    return "norm", math.nan, math.inf


def _program(loss: Loss, judged: str) -> Callable[..., Run]:
    """A replay, compiled once for each shape."""

    def value(params: PyTree, batch: PyTree) -> jax.Array:
        # A NamedTuple is one argument.
        arguments = batch if type(batch) is tuple else (batch,)
        result = loss(params, *arguments)
        return result[0] if isinstance(result, tuple) else result

    # Norms outside: they are compiled once for all programs of these weights.
    value_and_grad = jax.jit(jax.value_and_grad(value))

    def program(params: PyTree, batch: PyTree) -> Run:
        number, grads = value_and_grad(params, batch)
        size = number if judged == "loss" else global_norm(grads)
        run = Run(size, tensor_norm(grads))
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


def _sizes_of_examples(
    program: Callable[..., Run], params: PyTree, batch: PyTree, microbatch: int
) -> np.ndarray:
    """float64[examples]: what the microbatch of an example gives. Empty where arrays of
    the batch differ in how many examples they have.
    """
    counts = {len(leaf) for leaf in jax.tree.leaves(batch) if _counts_examples(leaf)}
    sizes = np.empty(min(counts) if len(counts) == 1 else 0)
    for begin in range(0, sizes.size, microbatch):
        rows = slice(begin, begin + microbatch)
        sizes[rows] = program(params, _rows(batch, rows)).size
    return sizes


def _growths(norms: dict[str, float], moments: dict[str, Any]) -> dict[str, float]:
    """Norms over the roots of Adam's second moments, in medians of all tensors. 0 where
    there are no moments, and inf where the norm is inf.
    """
    growths = {}
    for name, norm in norms.items():
        history = math.sqrt(np.sum(moments.get(name, 0), dtype=np.float64)) or math.inf
        growths[name] = norm
        if norm < math.inf:
            growths[name] = norm / history
    usual = median_low([growth for growth in growths.values() if growth] or [1])
    return {name: growth / usual for name, growth in growths.items()}
