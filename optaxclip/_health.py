"""Early signs that a run will break, of each tensor, for `metrics` and the doctor."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from . import _mesh as mesh
from . import _trees as trees
from ._checks import check_flag, check_length, check_params, check_state
from ._exported import exported
from ._kernel import make_clipper
from ._mesh import MeshAxes
from ._norms import Norms, TensorNorm, check_measure
from ._state import PLACEHOLDER, ClipState, counts_of, with_layers
from ._sums import plain_sum
from ._trees import Stacked, clipped_leaves, values_of

CALL = "record_health"
OF_WEIGHTS = ("weight_norm", "cosine")
OF_VALUES = ("zeros", "subnormals", "nonfinite")
# The numbers of a report, in their order.
HEALTH = ("norm", "ratio", *OF_WEIGHTS, *OF_VALUES, "dead_rows")


@exported
class HealthState(NamedTuple):
    """The state of `record_health`."""

    norms: ClipState  # the norm of each tensor, and their names
    signs: dict[str, Any]  # float32[N] each: a number for each of these norms
    # int32[rows] of each embedding: steps without a gradient until the row is dead
    left: dict[str, Any]

    @property
    def step(self) -> Any:
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
    """Records early signs that a run will break, of each tensor. Changes nothing.

    In front of the optimizer it sees gradients, and behind it updates. `python -m
    optaxclip.doctor log.jsonl` reads the log of both:

        optimizer = optax.named_chain(
            ("gradients", optaxclip.record_health()),
            ("clip", optaxclip.clip_by_global_norm(1.0)),
            ("adam", optax.adam(1e-3)),
            ("updates", optaxclip.record_health(values=False)),
        )

    With x the gradient or update of a tensor and w its weights, `metrics` shows:

        health/norm          |x|
        health/weight_norm   |w|
        health/ratio         |x| / |w|, inf for weights of 0
        health/cosine        <x, w> / (|x| |w|), 0 where either is 0. An update that
                             keeps pointing along its weights makes them grow
        health/zeros         the share of elements that are 0
        health/subnormals    the share of elements too small for all digits of their
                             dtype, as before underflow: below 6.1e-5 in float16
        health/nonfinite     how many elements are NaN or inf
        health/dead_rows     the share of the rows of an embedding without a gradient
                             in the last `patience` steps

    Args:
      weights: whether to read the weights, for `weight_norm`, `ratio` and `cosine`.
        `update` needs params then.
      values: whether to look at elements, for `zeros`, `subnormals` and `nonfinite`.
      embeddings: the path of a leaf, such as "embed/table", or several, whose rows are
        counted. A row is an entry along axis 0. Each keeps an integer. Inside shard_map
        a device counts the rows of its part, so split the rows, and not the columns.
      patience: steps without a gradient after which a row is dead. At least 1.
      stacked: which axes of a leaf count layers, each of which has its own numbers: 1
        for the leading axis, 2 for the two leading ones, (1,) for axis 1, a tree prefix
        of these, or a function of path and leaf. `metrics` shows the largest, and with
        `layers=True` all.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A transformation with a `HealthState`. The cosine is summed in float32 (float64 on
      a CPU) of products in float32, so it is 0 or NaN if these leave the range.

    Raises:
      ValueError: a `patience` below 1, `weights` without params in update, or a path in
        `embeddings` that is none.
      TypeError: a number that is not whole, or an option that is not True or False.

    Example:
      >>> recorder = optaxclip.record_health()
      >>> grads = jnp.array([3.0, 0.0, 4.0, 0.0])
      >>> weights = jnp.array([10.0, 0.0, 0.0, 0.0])
      >>> _, state = recorder.update(grads, recorder.init(weights), weights)
      >>> found = optaxclip.metrics(state, floats=True)
      >>> for name in ("ratio", "cosine", "zeros"):
      ...     print(name, round(found[f"health/{name}"], 2))
      ratio 0.5
      cosine 0.6
      zeros 0.5

    Reference: the cosine is that of marin's log of a run of 535B, 2026 (issue 9148).
    """
    check_flag(f"{CALL}: weights", weights)
    check_flag(f"{CALL}: values", values)
    check_length(f"{CALL}: patience", patience)
    tables = [embeddings] if isinstance(embeddings, str) else list(embeddings)
    options = {"stacked": stacked, "mesh_axes": mesh_axes}
    measure = TensorNorm(**check_measure(CALL, None, **options))
    signs = OF_WEIGHTS if weights else ()
    signs += OF_VALUES if values else ()

    def init(params: Any) -> HealthState:
        norms: Any = _recorder(measure).init(params)
        sizes: dict[str, Any] = dict.fromkeys(tables, ())
        # optax.tree_map_params calls init without parameters.
        if not isinstance(params, PLACEHOLDER):
            tree = clipped_leaves(params, CALL)
            sizes = {name: len(_table(tree, name)) for name in tables}
        # Each is its own array, so that the state can be donated.
        return HealthState(
            norms,
            {x: jnp.zeros_like(norms.norm, jnp.float32) for x in signs},
            {x: jnp.full(size, patience, jnp.int32) for x, size in sizes.items()},
        )

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        check_state(CALL, state, HealthState)
        tree = clipped_leaves(updates, CALL)
        beside = None
        if weights:
            check_params(CALL, params)
            beside = values_of(CALL, "params", tree, params)
        static = measure, bool(values), int(patience)
        return updates, _after_step(static, tree, state, beside)

    return optax.GradientTransformationExtraArgs(init, update)


def _recorder(measure: TensorNorm) -> optax.GradientTransformationExtraArgs:
    return make_clipper(measure, None, call=CALL, name="norm")


# Jitted at module level, as the update of a clipper, so that equal recorders share a
# program.
@partial(jax.jit, static_argnums=0)
def _after_step(static: Any, tree: Any, state: HealthState, weights: Any) -> Any:
    measure, values, patience = static
    norms = measure(tree)
    update = _recorder(measure).update

    def recorded(numbers: list[Any]) -> Any:
        # The kernel puts numbers of leaves where their norms are.
        own = norms.treedef.unflatten(numbers)
        return update(tree, state.norms, grad_norm=own)[1]

    lengths = jax.tree.leaves(norms.tree())
    found = {}
    if weights is not None:
        of_weights = jax.tree.leaves(measure(weights).tree())
        found["weight_norm"] = of_weights
        dots = _sums(norms, jax.tree.map(_product, tree, weights))
        found["cosine"] = list(map(_cosine, dots, lengths, of_weights))
    if values:
        found |= _of_values(norms, tree)
    signs = {}
    for name, numbers in found.items():
        signs[name] = recorded(numbers).norm.astype(jnp.float32)
    left = {}
    for name, steps in state.left.items():
        table = _table(tree, name)
        alive = jnp.any(table != 0, tuple(range(1, table.ndim)))
        # An Explicit mesh would split it like the rows of the table.
        alive = mesh.resharded(alive)
        left[name] = jnp.where(alive, patience, jnp.maximum(steps - 1, 0))
    return HealthState(recorded(lengths), signs, left)


# ------------------------------------------------------------------- numbers of leaves


def _sums(norms: Norms, tree: Any) -> list[jax.Array]:
    """The sum of each array on all devices, over what the norm of its leaf sums."""
    terms, names = [], []
    for x, leaf in zip(jax.tree.leaves(tree), norms.leaves):
        terms.append(plain_sum(x, leaf.dims))
        names.append(tuple(sorted(leaf.split.summed)))
    return mesh.joined(lax.psum, terms, names)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = np.promote_types(jnp.result_type(x, w), np.float32)
    return jnp.real(jnp.conj(x.astype(wide)) * w.astype(wide))


def _cosine(dot: Any, one: Any, two: Any) -> jax.Array:
    is_zero = (one == 0) | (two == 0)
    one, two = jnp.where(is_zero, 1, one), jnp.where(is_zero, 1, two)
    # Divided one by one: the product of two norms may leave the range.
    return jnp.where(is_zero, 0, dot / one / two)


def _of_values(norms: Norms, tree: Any) -> dict[str, list[Any]]:
    found: list[Any] = []
    counts = []
    for x, leaf in zip(jax.tree.leaves(tree), norms.leaves):
        found.append(_kinds(x))
        summed = range(x.ndim) if leaf.dims is None else leaf.dims
        size = math.prod(x.shape[axis] for axis in summed)
        counts.append(size * mesh.axes_size(leaf.split.summed))
    kinds = zip(*found) if found else ([], [], [])
    zeros, small, broken = (_sums(norms, kind) for kind in kinds)
    shares = [list(map(operator.truediv, x, counts)) for x in (zeros, small)]
    return dict(zip(OF_VALUES, [*shares, broken]))


def _kinds(x: jax.Array) -> list[jax.Array]:
    """Where elements are 0, subnormal, and not finite: 1 there, and else 0."""
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    info = jnp.finfo(x.dtype)
    unsigned = np.dtype(f"uint{info.bits}")
    # As integers, without the sign: a CPU takes subnormal numbers for 0.
    bits = lax.bitcast_convert_type(x, unsigned)
    bits = bits & unsigned.type(2 ** (info.bits - 1) - 1)
    normal = np.asarray(info.tiny, x.dtype).view(unsigned)
    kinds = bits == 0, (bits > 0) & (bits < normal), ~jnp.isfinite(x)
    return [kind.astype(jnp.float32) for kind in kinds]


def _table(tree: Any, name: str) -> Any:
    entries = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {trees.name(path): leaf for path, leaf in entries}
    if not jnp.ndim(leaves.get(name, 0)):
        raise ValueError(
            f"{CALL}: embeddings must name leaves with rows, got {name!r}. There are "
            f"{trees.listed(leaves)}."
        )
    return leaves[name]


# ------------------------------------------------------------------------- the report


def health_rows(
    state: HealthState, *, summary: bool, layers: bool
) -> Iterator[tuple[str, str, Any]]:
    """Name, path and value of each number, for `metrics`."""
    parts = counts_of(state.norms)
    if layers and not summary:
        parts = with_layers(state.norms, "metrics")
    counts = {name: count for part in parts for name, count in part.items()}
    sizes = [count or 1 for count in counts.values()]
    if summary and sizes:
        counts, sizes = {"": None}, [sum(sizes)]
    for sign, numbers in _largest(tuple(sizes), state).items():
        for name, value in zip(counts, numbers):
            yield sign, name, value
    for name, left in state.left.items():
        yield "dead_rows", name, jnp.mean(left == 0, dtype=jnp.float32)


@partial(jax.jit, static_argnums=0)
def _largest(sizes: tuple[int, ...], state: HealthState) -> dict[str, list[jax.Array]]:
    """Of each sign the largest of so many entries."""
    norm = state.norms.norm
    signs = {"norm": norm, **state.signs}
    if "weight_norm" in signs:
        ratio = jnp.where(norm == 0, 0, norm / signs["weight_norm"])
        signs["ratio"] = ratio.astype(jnp.float32)
    found = {}
    for sign, numbers in signs.items():
        parts = jnp.split(jnp.ravel(numbers), np.cumsum(sizes)[:-1])
        found[sign] = [own[jnp.argmax(abs(own))] for own in parts[: len(sizes)]]
    return found
