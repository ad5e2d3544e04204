"""What broke a step: the first cause of the table in `why` that fits.

The value of a step is the norm of its gradient, or its loss where only the loss broke
its limit. A value that is not finite counts as inf.

    recording    the value and its limit, from the state of the optimizer
    replay       the value and the gradient, computed from weights and batch
    evidence     what all replays of a step show
    verdict      the cause, from recording and evidence

An example or a tensor is far if it stands out from the others.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments.checks import check_whole_number, shown
from .._arguments.functions import is_function
from .._norms.norms import global_norm, tensor_norm
from .._trees import PyTree
from ._file import Step, by_name, load

Loss = Callable[..., Any]

# Relative tolerance between values of equal steps: about the root of bfloat16's eps.
ROUNDING = 0.1
# An example is far if its value is above 5 times the median of those that are not 0. A
# tensor is far if its gradient grew by more than 10 times the median growth.
FAR_EXAMPLE = 5
FAR_TENSOR = 10
# The limit where the state has none, in medians of the examples.
LIMIT_IN_MEDIANS = 10

CAUSES = {
    "chip": (
        "recorded value and replays differ: the chip erred, or the loss is random, or "
        "loss or batch are not those of the step"
    ),
    "none": "the step is within its limit",
    "dtype": "the step is within its limit in float32",
    "data": "the step is within its limit without these examples",
    "layer": "the step is within its limit without these tensors",
    "model": "no part broke the step: weights, learning rate, or the batch as a whole",
}


class Verdict(NamedTuple):
    """What broke a step, and the numbers that show it. `str` is the command's output.

    Attributes:
      cause: "chip", "dtype", "data", "layer", "model", or "none" for a step that was
        within its limit.
      examples: the indices in the batch of the examples that stand out, the furthest
        first. If the step is within its limit without some of them, only these.
      tensors: the names of the weights that are not finite. If all weights are finite,
        the names of the tensors whose gradients stand out, or the name of the tensor
        whose gradient grew most. Empty without Adam's moments, unless a weight or a
        gradient is not finite.
      numbers: the numbers that were compared, by name.
      not_told: the causes that could not be judged, and why.
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


class Recording(NamedTuple):
    """The value of a step and its limit, from the state of the optimizer."""

    quantity: str  # "norm" or "loss"
    value: float | None  # inf where it is not finite, None where it was not recorded
    limit: float  # inf where there is none


class Examples(NamedTuple):
    """Replays of each example alone, and of the batch without the far ones."""

    median: float  # NaN where no example has a gradient
    # Indices in the batch, the furthest first: as few as bring the value within the
    # limit, or all far ones.
    far: list[int]
    value_without_far: float
    limit: float  # that of the recording, or one from the median


class Tensors(NamedTuple):
    """Weights and gradients that may be at fault, by name."""

    not_finite: list[str]  # weights
    far: list[str]  # gradients
    grew_most: list[str]  # the gradient that grew most, if one has a history
    norm_without_far: float  # of all other gradients


class Evidence(NamedTuple):
    """What all replays of a step show."""

    repeats: list[float]  # values of three replays of the step as it was
    in_float32: float  # the value in float32
    examples: Examples
    tensors: Tensors
    not_told: list[str]  # causes that cannot be judged


# A function of weights and batch, to the value of the step and its gradient.
Replay = Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]


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

    `skip_nonfinite` has no limit, and the limit of a clipper does not count, since a
    clipper may clip every step. There the limit is ten times the median norm of the
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
    check_whole_number("why: microbatch", microbatch)
    step = load(file, like)
    recording = _recording(step.metrics)
    replay = _replay_of(loss, recording.quantity)
    wide_replay = _replay_of(wide or loss, recording.quantity)
    evidence = _evidence(step, replay, wide_replay, int(microbatch), recording.limit)
    return _verdict(recording, evidence)


# -------------------------------------------------------------------------- measuring


def _recording(metrics: dict[str, float]) -> Recording:
    """The norm in the metrics of a state, or the loss if only that broke its limit."""
    for prefix in _prefixes(metrics):
        norm = metrics.get(f"{prefix}/norm", metrics.get(f"{prefix}/norm_before"))
        if norm is None:
            continue
        limit = metrics.get(f"{prefix}/limit", math.inf)
        # A clipper may clip every step, so a norm over its limit is no broken step.
        if prefix == "clip":
            limit = math.inf
        loss = metrics.get(f"{prefix}/loss", -math.inf)
        loss_limit = metrics.get(f"{prefix}/loss_limit", math.inf)
        # A state without a loss has -inf, and skips no step for it.
        has_no_loss = loss == -math.inf and not metrics.get(f"{prefix}/skipped")
        loss_is_fine = has_no_loss or _is_within(loss, loss_limit)
        if _is_within(norm, limit) and not loss_is_fine:
            return Recording("loss", value=_inf_unless_finite(loss), limit=loss_limit)
        return Recording("norm", value=_inf_unless_finite(norm), limit=limit)
    return Recording("norm", value=None, limit=math.inf)


def _is_within(number: float, limit: float) -> bool:
    """Whether a skip lets a norm or a loss pass: it is finite and at most the limit."""
    return math.isfinite(number) and number <= limit


def _inf_unless_finite(number: float) -> float:
    return number if math.isfinite(number) else math.inf


def _prefixes(metrics: dict[str, float]) -> list[str]:
    """The prefixes of metrics with the norm of the whole gradient, the surest first:

    1. Skips that skipped, the outermost first: the state of a skip inside them is that
       of an earlier step.
    2. A skip that let the step pass.
    3. record_spikes and a clipper, in the order of the chain: the second of them may
       see clipped gradients.
    4. A recorder of norms, which has no limit.
    """
    skips = []
    others = []
    for name, number in metrics.items():
        prefix, _, metric = name.partition("/")
        # In optax.partition a skip has a name, as in skip/a/skipped. It is left out,
        # because its norm is of one part of the gradient.
        if metric == "skipped" and number:
            skips.append(prefix)
        if name in ("spike/norm", "clip/norm_before"):
            others.append(prefix)
    return [*skips, "skip", *others, "record"]


def _replay_of(loss: Loss, quantity: str) -> Replay:
    """Returns a function that replays a step. It compiles once for each shape."""

    def loss_of_batch(params: PyTree, batch: PyTree) -> jax.Array:
        # A NamedTuple is one argument.
        arguments = batch if type(batch) is tuple else (batch,)
        result = loss(params, *arguments)
        return result[0] if isinstance(result, tuple) else result

    # The norm is computed outside of this jit. It does not depend on the shape of the
    # batch, so it compiles only once. Weights may have integers among them, such as
    # counters.
    value_and_grad = jax.jit(jax.value_and_grad(loss_of_batch, allow_int=True))

    def replay(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        value, grads = value_and_grad(params, batch)
        if quantity == "norm":
            value = global_norm(grads)
        return jnp.where(jnp.isfinite(value), value, jnp.inf), grads

    return replay


def _evidence(
    step: Step, replay: Replay, wide_replay: Replay, microbatch: int, limit: float
) -> Evidence:
    """Replays the step three times as it was, and then in float32: whole, and by its
    examples.
    """
    repeats = []
    for _ in range(3):
        value, _ = replay(step.params, step.batch)
        repeats.append(float(value))
    params, batch = jax.tree.map(_at_least_float32, (step.params, step.batch))
    # Matmuls of float32 have fewer digits by default on GPU and TPU.
    with jax.default_matmul_precision("highest"):
        value, grads = wide_replay(params, batch)
        wide_value = float(value)
        examples = _examples(wide_replay, params, batch, microbatch, wide_value, limit)

    not_told = []
    # The text of a program has the dtype of each variable: f16[8] or bf16[8].
    if "f16[" in str(jax.make_jaxpr(wide_replay)(params, batch)):
        not_told.append(
            "dtype: the loss still computes in 16 bits, wide= takes one of float32"
        )
    if _example_count(batch) == 0:
        not_told.append("data: the arrays of the batch share no first axis with rows")
    if not step.moments:
        not_told.append(
            "layer: without second moments of Adam only gradients that are not finite "
            "stand out"
        )
    return Evidence(
        repeats=repeats,
        in_float32=wide_value,
        examples=examples,
        tensors=_tensors(params, grads, step.moments),
        not_told=not_told,
    )


def _at_least_float32(leaf: Any) -> Any:
    """A leaf of floats in at least float32, and any other one as it is."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(jnp.promote_types(leaf.dtype, np.float32))
    return leaf


def _has_examples(leaf: Any) -> bool:
    """Whether the first axis of an array counts examples."""
    # A key of jax.random.PRNGKey is uint32[2]. It is one key for all examples. Two
    # labels of this dtype look like a key too.
    is_key = leaf.shape == (2,) and leaf.dtype == np.uint32
    return leaf.ndim > 0 and not is_key


def _example_count(batch: PyTree) -> int:
    """The number of examples, or 0 if the arrays of the batch differ in it."""
    counts = {len(leaf) for leaf in jax.tree.leaves(batch) if _has_examples(leaf)}
    return counts.pop() if len(counts) == 1 else 0


def _select(batch: PyTree, rows: slice | np.ndarray) -> PyTree:
    """The examples of a batch in these rows."""
    return jax.tree.map(lambda x: x[rows] if _has_examples(x) else x, batch)


def _examples(
    replay: Replay,
    params: PyTree,
    batch: PyTree,
    microbatch: int,
    value_of_batch: float,
    limit: float,
) -> Examples:
    """Replays each microbatch alone, and the batch without far examples. A microbatch
    has `microbatch` examples, and the last one may have fewer.
    """

    def value_of(rows: slice | np.ndarray) -> float:
        value, _ = replay(params, _select(batch, rows))
        return float(value)

    count = _example_count(batch)
    microbatches = [slice(i, i + microbatch) for i in range(0, count, microbatch)]
    # All examples of a microbatch have its value.
    values = np.empty(count)
    for rows in microbatches:
        values[rows] = value_of(rows)
    # A weighted mean over padding alone is 0 / 0. With other examples it is finite. So
    # in a batch with a finite value, examples without one are padding.
    is_finite = np.isfinite(values)
    if math.isfinite(value_of_batch):
        values[~is_finite] = 0.0
    else:
        for rows in microbatches:
            with_others = is_finite.copy()
            with_others[rows] = True
            if not is_finite[rows].any() and math.isfinite(value_of(with_others)):
                values[rows] = 0.0
    # Masked examples have no gradient.
    nonzero_values = values[values != 0]
    median = median_low(nonzero_values) if nonzero_values.size else math.nan
    # A loss may be negative.
    is_far = values > FAR_EXAMPLE * abs(median)
    if limit == math.inf and not math.isnan(median):
        limit = LIMIT_IN_MEDIANS * abs(median)
    # Examples of one microbatch have one value, and go together.
    far_values = np.unique(values[is_far])[::-1]

    def value_without(far_count: int) -> float:
        if far_count == 0:
            return value_of_batch
        return value_of(values < far_values[far_count - 1])

    def is_within_without(far_count: int) -> bool:
        return _is_within(value_without(far_count), limit)

    # The fewest of the furthest without which the step is within its limit.
    far_count = bisect_left(range(len(far_values)), True, key=is_within_without)
    is_left_out = np.isin(values, far_values[:far_count])
    furthest_first = np.argsort(-values, kind="stable")
    return Examples(
        median=float(median),
        far=[int(index) for index in furthest_first if is_left_out[index]],
        value_without_far=value_without(far_count),
        limit=limit,
    )


def _tensors(params: PyTree, grads: PyTree, moments: dict[str, np.ndarray]) -> Tensors:
    """The weights that are not finite, and the gradients that grew more than others.

    The growth of a gradient is its norm divided by its history, the root of the sum of
    Adam's second moments. It is 0 without a history.
    """
    weights = by_name(params)
    norms = {}
    growths = {}
    for name, norm in zip(weights, tensor_norm(jax.tree.leaves(grads))):
        # An integer, or a leaf of size 0, has no norm.
        norm = float(norm or 0.0)
        # Adam's moments lack their bias correction, one factor for all tensors. Growths
        # are only compared with each other, so it cancels.
        history = math.sqrt(np.sum(moments.get(name, 0.0), dtype=np.float64))
        norms[name] = norm
        growths[name] = norm / history if history else 0.0
        if not math.isfinite(norm):
            growths[name] = math.inf
    finite_growths = [growth for growth in growths.values() if 0 < growth < math.inf]
    median = median_low(finite_growths) if finite_growths else 0.0
    # Without a history growths are 0, or inf where a gradient is not finite.
    far = [name for name in growths if growths[name] > FAR_TENSOR * median]
    other_norms = [norms[name] for name in norms if name not in far]
    return Tensors(
        not_finite=[name for name in weights if not np.isfinite(weights[name]).all()],
        far=far,
        grew_most=[max(growths, key=growths.__getitem__)] if finite_growths else [],
        norm_without_far=math.hypot(*other_norms),
    )


# ---------------------------------------------------------------------------- judging


def _verdict(recording: Recording, evidence: Evidence) -> Verdict:
    """Names the cause, and lists what was compared."""
    quantity = recording.quantity
    value = recording.value
    examples = evidence.examples
    tensors = evidence.tensors
    not_told = []
    if value is None:
        # A norm with a name of its own may be of a part, as in `optax.partition`.
        not_told.append(
            "chip: no norm of the whole gradient under skip/norm, spike/norm, "
            "clip/norm_before or record/norm"
        )
    not_told += evidence.not_told
    recording = recording._replace(limit=examples.limit)
    cause = _cause(recording, evidence)
    if cause == "none" and recording.limit == math.inf:
        not_told.append(
            "any finite step counts as none, since neither a skip nor the norms of "
            "examples give a limit"
        )
    return Verdict(
        cause=cause,
        examples=examples.far,
        tensors=tensors.not_finite or tensors.far or tensors.grew_most,
        numbers={
            f"recorded {quantity}": math.nan if value is None else value,
            f"lowest {quantity} of three replays": min(evidence.repeats),
            f"highest {quantity} of three replays": max(evidence.repeats),
            "limit": recording.limit,
            f"{quantity} in float32": evidence.in_float32,
            f"median nonzero {quantity} of examples": examples.median,
            f"{quantity} without far examples": examples.value_without_far,
            "norm without far tensors": tensors.norm_without_far,
        },
        not_told=not_told,
    )


def _cause(recording: Recording, evidence: Evidence) -> str:
    """The first cause that fits, in the order of the table in `why`."""
    limit = recording.limit
    values = evidence.repeats
    if recording.value is not None:
        values = [recording.value, *values]
    if not math.isclose(min(values), max(values), rel_tol=ROUNDING):
        return "chip"
    if _is_within(values[0], limit):
        return "none"
    if _is_within(evidence.in_float32, limit):
        return "dtype"
    if _is_within(evidence.examples.value_without_far, limit):
        return "data"
    # Weights that are not finite make any gradient wrong, and a wrong backward pass
    # leaves the loss as it is.
    can_be_layer = recording.quantity == "norm" and not evidence.tensors.not_finite
    norm_without_far = evidence.tensors.norm_without_far
    if can_be_layer and norm_without_far > 0 and _is_within(norm_without_far, limit):
        return "layer"
    return "model"
