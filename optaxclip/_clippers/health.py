"""Records early signs that a run will break, for `metrics` and the doctor.

A sign is a number that each tensor has beside its norm, such as "zeros", the share of
its elements that are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from .. import _trees as trees
from .._arguments.checks import (
    BEGIN_ANEW,
    check_flag,
    check_state,
    check_whole_number,
    shown,
)
from .._arguments.updates import weights_of
from .._devices import mesh_types
from .._devices.mesh import MeshAxes
from .._norm_clipper import make_clipper
from .._norms.axes import Stacked
from .._norms.norms import Norms, TensorNorm
from .._norms.options import checked_options
from .._state.interop import exported, is_placeholder
from .._state.state import ClipState, spans_of_names
from .._trees import PyTree, leaves_to_clip
from ..rules._memory import has_reached, in_buffer_of

CALL = "record_health"
SIGNS_OF_WEIGHTS = ("weight_norm", "rounding")
SIGNS_OF_VALUES = ("zeros", "subnormals", "nonfinite")
# The share of dead rows in the first steps. NaN would raise under `jax_debug_nans`.
UNKNOWN = np.float32(-np.inf)


@exported
class HealthState(NamedTuple):
    """The state of `record_health`."""

    norms: ClipState  # the norm of each tensor, N in all, and the names of tensors
    # float32[N] under "weight_norm", "zeros" and so on: one number beside each norm
    signs: dict[str, Array]
    # int32[rows] for each embedding: steps since a row had a gradient
    idle: dict[str, Array]
    dead: dict[str, Array]  # float32[] for each embedding: the share of dead rows

    @property
    def step(self) -> Array:
        """int32[]: updates seen."""
        return self.norms.step


def record_health(
    *,
    weights: bool = True,
    values: bool = True,
    embeddings: str | Collection[str] = (),
    patience: int = 100,
    stacked: Stacked = None,
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Records early signs that a run will break, for each tensor. Changes nothing.

    In front of the optimizer it sees gradients, and behind it updates. The doctor,
    `python -m optaxclip.doctor log.jsonl`, reads the log of both. Behind the optimizer
    give it a name that contains "update", by which the doctor knows that it sees
    updates:

        optimizer = optax.named_chain(
            ("gradients", optaxclip.record_health()),
            ("clip", optaxclip.clip_by_global_norm(1.0)),
            ("adam", optax.adam(1e-3)),
            ("updates", optaxclip.record_health(values=False)),
        )

    With x the gradient or update of a tensor and w its weights, `metrics` shows:

        health/norm          |x|
        health/weight_norm   |w|
        health/ratio         |x| / |w|: inf for weights of 0, and 0 if x is 0 too
        health/rounding      the distance from 1 to the next number in the dtype of w,
                             0.0078 in bfloat16. Updates whose ratio is below a quarter
                             of it are mostly rounded away
        health/zeros         the share of elements that are 0
        health/subnormals    the share of elements so small that they have lost digits:
                             below 6.1e-5 in float16. Still smaller ones underflow
        health/nonfinite     how many elements are NaN or inf
        health/dead_rows     the share of the rows of an embedding without a gradient
                             in the last `patience` steps. -inf in the first steps,
                             until so many have passed

    Args:
      weights: whether to read the weights, for `weight_norm`, `ratio` and `rounding`.
        `update` needs params then.
      values: whether to look at elements, for `zeros`, `subnormals` and `nonfinite`.
      embeddings: the path of a leaf, such as "embed/table", or several paths.
        Dead rows of these leaves are counted. A row is an entry along axis 0. The state
        keeps an integer for each row.
      patience: steps without a gradient after which a row is dead. At least 1.
      stacked: which axes of a leaf index its layers, each with its own numbers: 1 for
        the leading axis, 2 for the two leading ones, (1,) for axis 1, a tree prefix
        of these, or a function of path and leaf. `metrics` shows the largest, and with
        `layers=True` all.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None (each device measures its own
        part), or a tree prefix of PartitionSpec. Stacked leaves that are split need the
        PartitionSpecs.

    Returns:
      A transformation with a `HealthState`.

    Raises:
      ValueError: a `patience` that is not whole or below 1, `weights` without params in
        update, a path in `embeddings` that no leaf has, or an embedding that is
        split inside shard_map.
      TypeError: a `patience` that is not a number, an option that is not True or
        False, or `embeddings` that are no paths.

    Example:
      >>> recorder = optaxclip.record_health()
      >>> grads = jnp.array([3.0, 0.0, 4.0, 0.0])
      >>> weights = jnp.array([10.0, 0.0, 0.0, 0.0])
      >>> _, state = recorder.update(grads, recorder.init(weights), weights)
      >>> numbers = optaxclip.metrics(state, floats=True)
      >>> for name in ("ratio", "zeros"):
      ...     print(name, round(numbers[f"health/{name}"], 2))
      ratio 0.5
      zeros 0.5
    """
    check_flag(f"{CALL}: weights", weights)
    check_flag(f"{CALL}: values", values)
    check_whole_number(f"{CALL}: patience", patience)
    if isinstance(embeddings, str):
        embeddings = (embeddings,)
    if not isinstance(embeddings, Collection):
        raise TypeError(
            f"{CALL}: embeddings must be the path of a leaf, such as 'embed/table', or "
            f"several paths, got {shown(embeddings)}."
        )
    embedding_names = tuple(embeddings)
    measure = TensorNorm(
        **checked_options(CALL, ord=None, stacked=stacked, mesh_axes=mesh_axes)
    )
    signs: tuple[str, ...] = ()
    if weights:
        signs += SIGNS_OF_WEIGHTS
    if values:
        signs += SIGNS_OF_VALUES

    def init(params: PyTree) -> HealthState:
        norms: Any = _norm_recorder(measure).init(params)
        # optax.tree_map_params calls init without parameters.
        if is_placeholder(params):
            shape = ()
            embedding_leaves = dict.fromkeys(embedding_names, jnp.zeros(0))
        else:
            shape = norms.norm.shape
            tree = leaves_to_clip(params, CALL)
            embedding_leaves = _embedding_leaves(tree, embedding_names)
        return HealthState(
            norms,
            # Each sign has an array of its own, so that the state can be donated.
            signs={sign: jnp.zeros(shape, jnp.float32) for sign in signs},
            idle={
                name: jnp.zeros(len(leaf), jnp.int32)
                for name, leaf in embedding_leaves.items()
            },
            dead={name: jnp.full((), UNKNOWN) for name in embedding_names},
        )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **_: object
    ) -> tuple[PyTree, HealthState]:
        check_state(CALL, state, HealthState)
        if {*state.signs, *state.idle} != {*signs, *embedding_names}:
            raise ValueError(f"{CALL}: state was made with other options. {BEGIN_ANEW}")
        tree = leaves_to_clip(updates, CALL)
        embedding_leaves = _embedding_leaves(tree, embedding_names)
        tree_of_weights = weights_of(CALL, tree, params) if weights else None
        new_state = _after_step(
            measure, tree, embedding_leaves, state, tree_of_weights, patience
        )
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _embedding_leaves(tree: PyTree, names: tuple[str, ...]) -> dict[str, Array]:
    """The leaves with these paths. Raises ValueError if one is not there, or has no
    rows.
    """
    leaves_with_rows: dict[str, Array] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if jnp.ndim(leaf):
            leaves_with_rows[trees.path_name(path)] = leaf
    for name in names:
        if name not in leaves_with_rows:
            raise ValueError(
                f"{CALL}: embeddings must name leaves with rows, got {shown(name)}. "
                f"There are {trees.listed(leaves_with_rows)}."
            )
    return {name: leaves_with_rows[name] for name in names}


# Jitted at module level, like the update of a clipper.
@partial(jax.jit, static_argnums=0)
def _after_step(
    measure: TensorNorm,
    tree: PyTree,
    embedding_leaves: dict[str, Array],
    state: HealthState,
    weights: PyTree,
    patience: int,
) -> HealthState:
    """Measures the norms, signs and dead rows of one step, and returns the new state.

    Args:
      measure: measures the norm of each tensor.
      tree: the gradients, or behind an optimizer the updates.
      embedding_leaves: the leaves of `tree` whose dead rows are counted, by name.
      state: of the step before.
      weights: a tree like `tree`, or None if the recorder reads no weights.
      patience: steps without a gradient after which a row is dead.
    """
    norms = measure(tree)
    _check_whole_embeddings(norms, embedding_leaves)
    local_signs: dict[str, list[Array]] = {}
    # The state has the signs that the options ask for.
    if "zeros" in state.signs:
        local_signs |= _signs_of_values(measure, tree)
    if weights is not None:
        local_signs |= _signs_of_weights(measure, weights)
    recorder = _norm_recorder(measure)

    def state_after(numbers: Norms) -> PyTree:
        """The state of the norms, if these numbers were the norms of this step."""
        _, new_state = recorder.update(tree, state.norms, grad_norm=numbers)
        return new_state

    signs: dict[str, Array] = {}
    for sign, numbers in local_signs.items():
        # A norm clipper puts the numbers of all layers and devices into one array. To
        # have signs in the same order they are recorded as if they were norms.
        numbers_as_norms = norms._replace(values=norms.gathered(numbers))
        signs[sign] = state_after(numbers_as_norms).norm.astype(jnp.float32)
    idle: dict[str, Array] = {}
    dead: dict[str, Array] = {}
    # Before `patience` updates no row can count as dead.
    is_early = ~has_reached(state.step + 1, patience)
    for name, leaf in embedding_leaves.items():
        idle[name] = _idle_steps(leaf, state.idle[name])
        is_dead = has_reached(idle[name], patience)
        share = jnp.mean(is_dead, dtype=jnp.float32)
        dead[name] = jnp.where(is_early, UNKNOWN, share)
    new_state = HealthState(state_after(norms), signs, idle, dead)
    return jax.tree.map(in_buffer_of, new_state, state)


def _norm_recorder(measure: TensorNorm) -> optax.GradientTransformationExtraArgs:
    """A clipper without a limit, which records the norms of a tree in its state."""
    return make_clipper(measure, None, call=CALL, limit_argument="norm")


def _check_whole_embeddings(norms: Norms, names: Collection[str]) -> None:
    """Raises ValueError if a device has only a part of an embedding."""
    split_leaves = []
    for path, spec in zip(norms.paths, norms.specs):
        name = trees.path_name(path)
        if name in names and spec.joined_along:
            split_leaves.append(name)
    if split_leaves:
        raise ValueError(
            f"{CALL}: embeddings needs whole leaves, and devices have parts of "
            f"{trees.listed(split_leaves)} inside shard_map: record outside it, or "
            "without embeddings."
        )


def _idle_steps(leaf: Array, steps: Array) -> Array:
    """int32[rows]: steps since each row of an embedding had a gradient, from the
    gradients of this step and the steps before it.
    """
    entry_axes = tuple(range(1, leaf.ndim))
    has_gradient = jnp.any(leaf != 0, entry_axes)
    # On an Explicit mesh the result would be split like the rows of the leaf, and
    # `steps` is not.
    has_gradient = mesh_types.resharded(has_gradient)
    return jnp.where(has_gradient, 0, steps + 1)


# --------------------------------------------------------------------- signs of leaves


def _signs_of_weights(measure: TensorNorm, weights: PyTree) -> dict[str, list[Array]]:
    """The signs of weights: for each a list with the number of each tensor. A stacked
    leaf has those of the layers on this device.
    """
    weight_norms = measure(weights).local_values()
    roundings = [
        jnp.full_like(norm, jnp.finfo(leaf.dtype).eps)
        for norm, leaf in zip(weight_norms, jax.tree.leaves(weights))
    ]
    return {"rounding": roundings, "weight_norm": weight_norms}


def _signs_of_values(measure: TensorNorm, tree: PyTree) -> dict[str, list[Array]]:
    """The signs of values: shares and counts of elements, as `_signs_of_weights` lists
    them.

    A mask is 1 at the elements that count, such as zeros, and 0 at all others. So its
    squared norm is their count, and its mean square is their share. They are computed
    as norms because these already add up what several devices hold.
    """

    def squared_norms(
        norm_of: TensorNorm, mask_of: Callable[[Array], Array]
    ) -> list[Array]:
        norms_of_masks = norm_of(jax.tree.map(mask_of, tree))
        return [jnp.square(norm) for norm in norms_of_masks.local_values()]

    root_mean_square = measure._replace(ord="rms")
    counts = squared_norms(measure, _is_nonfinite)
    return {
        "zeros": squared_norms(root_mean_square, _is_zero),
        "subnormals": squared_norms(root_mean_square, _is_subnormal),
        "nonfinite": [jnp.round(count) for count in counts],
    }


def _is_zero(x: Array) -> Array:
    return jnp.float32(_bits_of_absolutes(x) == 0)


def _is_subnormal(x: Array) -> Array:
    bits = _bits_of_absolutes(x)
    finfo = jnp.finfo(x.dtype)
    smallest_normal = np.asarray(finfo.tiny, finfo.dtype)
    return jnp.float32((bits > 0) & (bits < smallest_normal.view(bits.dtype)))


def _is_nonfinite(x: Array) -> Array:
    return jnp.float32(~jnp.isfinite(x))


def _bits_of_absolutes(x: Array) -> Array:
    """The bits of |x|, as integers. A CPU that compares subnormal floats takes them for
    0.
    """
    real = jnp.abs(x) if jnp.iscomplexobj(x) else x
    size = jnp.finfo(x.dtype).bits
    unsigned = np.dtype(f"uint{size}")
    magnitude_mask = unsigned.type(2 ** (size - 1) - 1)
    return lax.bitcast_convert_type(real, unsigned) & magnitude_mask


# ------------------------------------------------------------------------- the report


def health_numbers(
    state: HealthState, *, summary: bool, layers: bool
) -> Iterator[tuple[str, str, Array]]:
    """Yields sign, path and value, for `metrics`: the largest number of each tensor, or
    with `layers` the number of each layer. With `summary` it is the largest of all
    tensors, under the path "". Dead rows come last, for each embedding.
    """
    spans = spans_of_names(state.norms, by_layer=layers and not summary, call="metrics")
    if not spans:
        return
    sizes = {name: span.size for name, span in spans.items()}
    if summary:
        sizes = {"": sum(sizes.values())}
    for sign, numbers in _largest(tuple(sizes.values()), state).items():
        # Split outside of jit, where hundreds of results would take long to compile.
        for path, value in zip(sizes, list(numbers)):
            yield sign, path, value
    for path, share in state.dead.items():
        yield "dead_rows", path, share


@partial(jax.jit, static_argnums=0)
def _largest(sizes: tuple[int, ...], state: HealthState) -> dict[str, Array]:
    """The largest number of each tensor, for each sign, the norm and the ratio.
    `sizes[i]` is how many numbers tensor i has, one for each layer.
    """
    norm = state.norms.norm
    signs = {"norm": norm, **state.signs}
    if "weight_norm" in signs:
        ratio = jnp.where(norm == 0, 0, norm / signs["weight_norm"])
        signs["ratio"] = ratio.astype(jnp.float32)
    # int[tensors, layers]: the indices of each tensor. `np.resize` repeats the indices
    # of a tensor with fewer layers, which leaves its largest number the same.
    indices: list[np.ndarray] = []
    for size, end in zip(sizes, np.cumsum(sizes)):
        indices.append(np.resize(np.arange(end - size, end), max(sizes)))
    largest: dict[str, Array] = {}
    for sign, numbers in signs.items():
        largest[sign] = jnp.max(jnp.ravel(numbers)[np.array(indices)], axis=1)
    return largest
