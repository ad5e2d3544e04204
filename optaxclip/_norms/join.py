"""Joins the terms of each norm, over its leaves and over devices.

A term is what a leaf adds to its norm: an array, or three sums of squares. Terms are
added, or the largest is taken. A norm of several leaves is a scalar, since leaves that
keep axes have norms of their own.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._devices import mesh, mesh_types
from .._devices.mesh import AxisNames
from .._devices.platforms import per_platform
from .specs import LeafSpec, NormPlan
from .sums import Term

# At most this many terms are stacked into one table on a TPU.
TABLE_SIZE = 16


class Operation(NamedTuple):
    """How terms become one."""

    pair: Callable[..., Array]  # joins two arrays
    table: Callable[..., Array]  # joins the columns of a table
    collective: Callable[..., Array]  # joins the arrays of devices along mesh axes


ADD = Operation(lax.add, jnp.sum, lax.psum)
MAX = Operation(lax.max, jnp.max, lax.pmax)


def per_norm(
    plan: NormPlan,
    terms: list[Term],
    *,
    operation: Operation,
    join_leaves: Callable[[list[Term], Operation], Term],
) -> list[Term]:
    """Joins the terms of each norm, over its leaves and over devices.

    Arrays that jit splits are global, and need no collective: XLA adds up their parts.

    Args:
      plan: which leaf has which norm.
      terms: of each leaf. At least one.
      operation: `ADD` or `MAX`.
      join_leaves: joins the terms of several leaves, such as `in_pairs`.
    """
    mesh_axes_of_norms = _mesh_axes_of_norms(plan)
    terms_of_norms: list[list[Term]] = [[] for _ in range(plan.norm_count)]
    for spec, term in zip(plan.specs, terms):
        mesh_axes = mesh_axes_of_norms[spec.norm_index]
        term = _counted_once(spec, term, mesh_axes, operation)
        terms_of_norms[spec.norm_index].append(term)
    totals = []
    for terms_of_norm in terms_of_norms:
        if terms_of_norm:
            totals.append(join_leaves(terms_of_norm, operation))
        else:
            # A label without leaves has the norm 0.
            totals.append(jax.tree.map(_zero_like, terms[0]))
    # A total of three sums is three arrays.
    arrays, treedef = jax.tree.flatten(totals)
    mesh_axes_of_arrays = []
    for total, mesh_axes in zip(totals, mesh_axes_of_norms):
        mesh_axes_of_arrays += [mesh_axes] * len(jax.tree.leaves(total))
    joined = mesh.joined_over_devices(operation.collective, arrays, mesh_axes_of_arrays)
    return treedef.unflatten(joined)


def _zero_like(array: Array) -> Array:
    """A scalar 0 of the dtype of an array."""
    return jnp.zeros((), array.dtype)


# --------------------------------------------------------------------------- leaves


def joined_by_platform(terms: list[Term], operation: Operation) -> Term:
    """The terms of one norm as one, in pairs or as a table."""
    if len(terms) == 1:
        return terms[0]
    pairs = partial(in_pairs, operation=operation)
    table = partial(as_table, operation=operation)
    return per_platform(terms, cpu=pairs, gpu=pairs, plain=table)


def in_pairs(terms: list[Term], operation: Operation) -> Term:
    """The terms joined in pairs, and the results in pairs again. XLA fuses the adds
    into the kernel that reads the result.
    """
    while len(terms) > 1:
        joined = []
        for left, right in zip(terms[::2], terms[1::2]):
            joined.append(jax.tree.map(operation.pair, left, right))
        if len(terms) % 2:
            joined.append(terms[-1])
        terms = joined
    return terms[0]


def as_table(terms: list[Term], operation: Operation) -> Term:
    """Terms that are scalars, joined as the columns of a table. Its rows are the three
    sums, or one row where a term is one number. A TPU would run each add of a chain of
    adds by itself.
    """
    treedef = jax.tree.structure(terms[0])
    while len(terms) > 1:
        joined = []
        for start in range(0, len(terms), TABLE_SIZE):
            terms_of_table = terms[start : start + TABLE_SIZE]
            columns = [jax.tree.leaves(term) for term in terms_of_table]
            rows = list(zip(*columns))
            # The barrier keeps XLA from making a chain of the sum of a stack.
            stack = lax.optimization_barrier(lax.stack(list(chain(*rows))))
            totals_of_rows = operation.table(stack.reshape(len(rows), -1), 1)
            joined.append(treedef.unflatten(lax.unstack(totals_of_rows)))
        terms = joined
    return terms[0]


# -------------------------------------------------------------------------- devices


def _mesh_axes_of_norms(plan: NormPlan) -> list[AxisNames]:
    """The mesh axes over which each norm is joined. Norms of split leaves share one
    collective, over the mesh axes of all of them. Units that devices split are joined
    separately, over the mesh axes that split their summed axes.
    """
    shared: set[str] = set()
    for spec in plan.specs:
        if not spec.mesh_axes_of_units:
            shared.update(spec.joined_along)
    # Norms of leaves that are not split need no collective: each device has the whole
    # leaf. With `mesh_axes=None` each device has leaves, and norms, of its own.
    mesh_axes_of_norms: list[AxisNames] = [()] * plan.norm_count
    for spec in plan.specs:
        if spec.mesh_axes_of_units:
            mesh_axes_of_norms[spec.norm_index] = tuple(
                sorted(spec.mesh_axes_of_summed)
            )
        elif spec.joined_along:
            mesh_axes_of_norms[spec.norm_index] = tuple(sorted(shared))
    return mesh_axes_of_norms


def _counted_once(
    spec: LeafSpec, term: Term, mesh_axes: AxisNames, operation: Operation
) -> Term:
    """The term that this device gives to a collective over these mesh axes, so that the
    leaf counts once. Layers of other devices are zeros. A term that several devices
    have is divided by their number.
    """
    if not mesh_axes:
        return term
    copies = 1
    if operation is ADD:
        copies = mesh.device_count({*mesh_axes} - {*spec.joined_along})

    def for_collective(array: Array) -> Array:
        # The kept axes count layers here.
        if spec.mesh_axes_of_layers:
            array = mesh.placed_among_zeros(array, spec.mesh_axes_of_kept)
        if copies > 1:
            array = array / copies
        return mesh_types.varying_over(array, mesh_axes)

    return jax.tree.map(for_collective, term)
