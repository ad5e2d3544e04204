"""Early signs that a run will break, of each tensor, for `metrics` and the doctor."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from . import _mesh as mesh
from . import _mesh_types as mesh_types
from . import _trees as trees
from ._axes import Stacked
from ._checks import BEGIN_ANEW, check_flag, check_length, check_state, shown
from ._exported import PLACEHOLDER, exported
from ._kernel import make_clipper
from ._mesh import MeshAxes
from ._moduli import wide_dtype
from ._norms import Norms, TensorNorm
from ._options import check_measure
from ._state import ClipState, sizes_of
from ._sums import plain_sum
from ._trees import clipped_leaves, weights_of
from .rules._memory import in_place

CALL = "record_health"
OF_WEIGHTS = ("weight_norm", "cosine", "rounding")
OF_VALUES = ("zeros", "subnormals", "nonfinite")
# The numbers of a report, in their order.
HEALTH = ("norm", "ratio", *OF_WEIGHTS, *OF_VALUES, "dead_rows")


@exported
class HealthState(NamedTuple):
    """The state of `record_health`."""

    norms: ClipState  # the norm of each tensor, and their names
    signs: dict[str, Any]  # float32[N] each: a number for each of these norms
    # int32[rows] of each embedding: steps since the row had a gradient
    idle: dict[str, Any]
    dead: dict[str, Any]  # float32[] of each: the share of its rows that is dead

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
    optaxclip.doctor log.jsonl` reads the log of both, and takes for updates what has
    "update" in its name:

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
        health/rounding      the distance from 1 to the next number in the dtype of w,
                             0.0078 in bfloat16. Updates whose ratio is below a quarter
                             of it are mostly rounded away
        health/zeros         the share of elements that are 0
        health/subnormals    the share of elements too small for all digits of their
                             dtype, as before underflow: below 6.1e-5 in float16
        health/nonfinite     how many elements are NaN or inf
        health/dead_rows     the share of the rows of an embedding without a gradient
                             in the last `patience` steps. NaN before as many have
                             passed, so that the first number is what is usual

    Args:
      weights: whether to read the weights, for `weight_norm`, `ratio`, `cosine` and
        `rounding`. `update` needs params then.
      values: whether to look at elements, for `zeros`, `subnormals` and `nonfinite`.
      embeddings: the path of a leaf, such as "embed/table", or several, whose rows are
        counted. A row is an entry along axis 0. Each keeps an integer.
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
      ValueError: a `patience` that is not whole or below 1, `weights` without params in
        update, a path in `embeddings` that is none, or, with `embeddings`, a leaf that
        is split inside shard_map.
      TypeError: what is no number, or an option that is not True or False.

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
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    measure = TensorNorm(**check_measure(CALL, None, **numbers))
    # Static, so that equal recorders share a program.
    options = measure, values, patience
    signs = OF_WEIGHTS if weights else ()
    signs += OF_VALUES if values else ()

    def init(params: Any) -> HealthState:
        norms: Any = _recorder(measure).init(params)
        # optax.tree_map_params calls init without parameters.
        if isinstance(params, PLACEHOLDER):
            zeros = jnp.zeros(())
            sizes: dict[str, Any] = dict.fromkeys(tables, ())
        else:
            zeros = jnp.zeros_like(norms.norm, jnp.float32)
            tree = clipped_leaves(params, CALL)
            sizes = {name: len(_table(tree, name)) for name in tables}
        # Each is its own array, so that the state can be donated.
        return HealthState(
            norms,
            {x: jnp.copy(zeros) for x in signs},
            {x: jnp.zeros(size, jnp.int32) for x, size in sizes.items()},
            {x: jnp.full((), jnp.nan, jnp.float32) for x in tables},
        )

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, HealthState]:
        check_state(CALL, state, HealthState)
        if {*state.signs, *state.idle} != {*signs, *tables}:
            raise ValueError(f"{CALL}: state was made with other options. {BEGIN_ANEW}")
        tree = clipped_leaves(updates, CALL)
        for name, steps in state.idle.items():
            rows = len(_table(tree, name))
            if len(steps) != rows:
                raise ValueError(
                    f"{CALL}: state was made for {len(steps)} rows in {name!r}, but "
                    f"the updates have {rows}. {BEGIN_ANEW}"
                )
        beside = weights_of(CALL, tree, params) if weights else None
        return updates, _after_step(options, tree, state, beside)

    return optax.GradientTransformationExtraArgs(init, update)


def _recorder(measure: TensorNorm) -> optax.GradientTransformationExtraArgs:
    return make_clipper(measure, None, call=CALL, name="norm")


# Jitted at module level, as the update of a clipper.
@partial(jax.jit, static_argnums=0)
def _after_step(
    options: Any, tree: Any, state: HealthState, weights: Any
) -> HealthState:
    measure, values, patience = options
    norms = measure(tree)
    update = _recorder(measure).update

    def recorded(numbers: list[Any]) -> Any:
        # The kernel puts numbers of leaves where their norms are.
        own = norms._replace(values=norms.gathered(numbers))
        return update(tree, state.norms, grad_norm=own)[1]

    def vector(numbers: list[Any]) -> jax.Array:
        return recorded(numbers).norm.astype(jnp.float32)

    lengths = norms.local_values()
    found = {}
    if weights is not None:
        of_weights = measure(weights).local_values()
        found["weight_norm"] = of_weights
        dots = _dots(norms, tree, weights)
        found["cosine"] = list(map(_cosine, dots, lengths, of_weights))
        found["rounding"] = [
            jnp.full_like(length, jnp.finfo(w.dtype).eps)
            for length, w in zip(lengths, jax.tree.leaves(weights))
        ]
    if values:
        found |= _of_values(norms, tree)
    signs = {name: vector(numbers) for name, numbers in found.items()}
    if state.idle:
        _check_whole(norms, "embeddings")
    idle, dead = {}, {}
    for name, steps in state.idle.items():
        table = _table(tree, name)
        alive = jnp.any(table != 0, tuple(range(1, table.ndim)))
        # An Explicit mesh would split it like the rows of the table.
        alive = mesh_types.resharded(alive)
        idle[name] = jnp.where(alive, 0, jnp.minimum(steps, 2**30) + 1)
        share = jnp.mean(idle[name] >= patience, dtype=jnp.float32)
        # Before, no row can have been idle for as long.
        is_known = state.step + 1 >= patience
        dead[name] = jnp.where(is_known, share, jnp.float32(jnp.nan))
    new = HealthState(recorded(lengths), signs, idle, dead)
    return jax.tree.map(in_place, new, state)


# ------------------------------------------------------------------- numbers of leaves


def _sums(norms: Norms, arrays: list[Any]) -> list[jax.Array]:
    """The sum of each array on all devices, over what the norm of its leaf sums."""
    terms = [plain_sum(x, spec.axes) for x, spec in zip(arrays, norms.specs)]
    names = [tuple(sorted(spec.summed_over)) for spec in norms.specs]
    return mesh.joined_over_devices(lax.psum, terms, names)


def _dots(norms: Norms, tree: Any, weights: Any) -> list[jax.Array]:
    products = []
    for x, w in zip(jax.tree.leaves(tree), jax.tree.leaves(weights)):
        wide = np.promote_types(wide_dtype(x), wide_dtype(w))
        product = jnp.conj(x.astype(wide)) * w.astype(wide)
        products.append(jnp.real(product))
    return _sums(norms, products)


def _cosine(dot: Any, one: Any, two: Any) -> jax.Array:
    is_zero = (one == 0) | (two == 0)
    one, two = jnp.where(is_zero, 1, one), jnp.where(is_zero, 1, two)
    # |<x, w>| / |x| is at most |w|. Without the bounds XLA would divide by the product
    # of both norms, which may leave the range.
    return jnp.where(is_zero, 0, jnp.clip(dot / one, -two, two) / two)


def _of_values(norms: Norms, tree: Any) -> dict[str, list[Any]]:
    counts, sizes = {name: list[Any]() for name in OF_VALUES}, []
    for x, spec in zip(jax.tree.leaves(tree), norms.specs):
        x = jnp.abs(x) if jnp.iscomplexobj(x) else x
        info = jnp.finfo(x.dtype)
        unsigned = np.dtype(f"uint{info.bits}")
        # As integers, without the sign: a CPU takes subnormal numbers for 0.
        bits = lax.bitcast_convert_type(x, unsigned)
        bits = bits & unsigned.type(2 ** (info.bits - 1) - 1)
        normal = np.asarray(info.tiny, x.dtype).view(unsigned)
        # In the order of OF_VALUES.
        each = bits == 0, (bits > 0) & (bits < normal), ~jnp.isfinite(x)
        for own, is_one in zip(counts.values(), each):
            own.append(is_one.astype(jnp.float32))
        sizes.append(x.size * mesh.device_count(spec.summed_over))
    found = {name: _sums(norms, own) for name, own in counts.items()}
    for name in ("zeros", "subnormals"):
        # Of the layers of a stacked leaf each has its part of the elements.
        found[name] = [x * (x.size / n) for x, n in zip(found[name], sizes)]
    return found


def _table(tree: Any, name: str) -> Any:
    leaves = {trees.name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    if name not in leaves or not jnp.ndim(leaves[name]):
        raise ValueError(
            f"{CALL}: embeddings must name leaves with rows, got {shown(name)}. "
            f"There are {trees.listed(leaves)}."
        )
    return leaves[name]


def _check_whole(norms: Norms, option: str) -> None:
    for spec, path in zip(norms.specs, norms.paths):
        over = {*spec.joined_over}
        if over:
            raise ValueError(
                f"{CALL}: {option} needs whole leaves, and {trees.name(path)!r} is "
                f"split over {mesh.listed(over)} inside shard_map: record outside it, "
                f"or without {option}."
            )


# ------------------------------------------------------------------------- the report


def health_numbers(
    state: HealthState, *, summary: bool, layers: bool
) -> Iterator[tuple[str, str, Any]]:
    """Name, path and value of each number, for `metrics`."""
    sizes = sizes_of(state.norms, layers and not summary)
    if summary and sizes:
        sizes = {"": sum(sizes.values())}
    for sign, numbers in _largest(tuple(sizes.values()), state).items():
        for name, value in zip(sizes, numbers):
            yield sign, name, value
    for name, share in state.dead.items():
        yield "dead_rows", name, share


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
        found[sign] = [own[jnp.argmax(jnp.abs(own))] for own in parts[: len(sizes)]]
    return found
