"""Norms of order 2, "rms" and "average": roots of sums of squares.

Each platform sums the squares of a leaf, joins the sums of leaves, and takes roots in
its own way:

              sums of a leaf       leaves are joined    roots
    CPU       one, of float64      in pairs             one by one
    GPU       three (sums.py)      in pairs             of a vector, if many
    plain     three in `jnp`       as a table           of a vector, if many

`plain` is a TPU and any other platform. Norms of float64 have three sums on a CPU too:
no dtype is wider. Up to FEW_NORMS_ON_A_GPU and FEW_NORMS_ON_A_TPU norms have a root
each.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._devices.platforms import (
    FEW_NORMS_ON_A_GPU,
    FEW_NORMS_ON_A_TPU,
    materialized_on_gpu,
    per_platform,
    traced_once,
)
from .._numbers import norm_dtype
from . import join, sums
from .options import Ord
from .specs import LeafSpec, NormPlan
from .sums import Sums

# Leaves of at most so many numbers are merged into a vector on a GPU.
MOST_NUMBERS_TO_MERGE = 2**16


def norms_by_squares(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms of some leaves, by sums of squares."""
    # The platform is chosen once for all leaves, so each branch is traced once.
    return per_platform(
        arrays,
        cpu=partial(_norms_on_a_cpu, plan),
        gpu=partial(_norms_on_a_gpu, plan),
        plain=partial(_plain_norms, plan),
    )


def _norms_on_a_cpu(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms by one sum of each leaf: sums, means and roots in float64, rounded
    once. Norms of float64 take three sums.
    """
    dtype = norm_dtype(arrays)
    sums_of_leaf: Callable[..., Any] = sums.one_sum
    if dtype == np.float64:
        sums_of_leaf = sums.three_sums_in_jnp
    with jax.enable_x64(True):
        norms = _roots_of_sums(
            plan,
            arrays,
            sums_of_leaf,
            np.dtype(np.float64),
            join_leaves=join.in_pairs,
            most_separate_roots=math.inf,
        )
        return [lax.convert_element_type(norm, dtype) for norm in norms]


def _norms_on_a_gpu(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms by three sums of each large leaf, and of small leaves together."""
    merged_plan, vectors = _merged(plan, arrays)
    return _roots_of_sums(
        merged_plan,
        vectors,
        sums.three_sums_on_a_gpu,
        norm_dtype(arrays),
        join_leaves=join.in_pairs,
        most_separate_roots=FEW_NORMS_ON_A_GPU,
    )


def _plain_norms(plan: NormPlan, arrays: list[Array]) -> list[Array]:
    """The norms by three sums of each leaf, on a TPU and any other platform."""
    return _roots_of_sums(
        plan,
        arrays,
        sums.three_sums_in_jnp,
        norm_dtype(arrays),
        join_leaves=join.as_table,
        most_separate_roots=FEW_NORMS_ON_A_TPU,
    )


def _roots_of_sums(
    plan: NormPlan,
    arrays: list[Array],
    sums_of_leaf: Callable[..., Any],
    dtype: np.dtype,
    *,
    join_leaves: Callable[..., Any],
    most_separate_roots: float,
) -> list[Array]:
    """The norms as roots of sums of squares. `sums_of_leaf` takes one sum or three of
    each leaf, in a dtype. More than `most_separate_roots` roots are taken as one
    vector.
    """
    # One of three sums may overflow, at which jax_debug_infs would raise.
    with jax.debug_infs(False):
        terms = []
        for spec, array in zip(plan.specs, arrays):
            terms.append(sums_of_leaf(array, spec.summed_axes, dtype))
        totals = join.per_norm(plan, terms, operation=join.ADD, join_leaves=join_leaves)
    counts = plan.element_counts(arrays, dtype)
    if len(totals) > most_separate_roots:
        return _roots_of_vector(plan.ord, counts, totals)
    return [_root(plan.ord, count, total) for count, total in zip(counts, totals)]


def _merged(plan: NormPlan, arrays: list[Array]) -> tuple[NormPlan, list[Array]]:
    """The same norms of fewer leaves: small ones that share a norm and a dtype become
    one vector, since a GPU starts a kernel for each sum.
    """
    merged_specs: list[LeafSpec] = []
    merged_arrays: list[Array] = []
    small_arrays_of: dict[tuple[LeafSpec, np.dtype], list[Array]] = {}
    for spec, array in zip(plan.specs, arrays):
        if _can_be_merged(spec, array):
            small_arrays_of.setdefault((spec, array.dtype), []).append(array)
        else:
            merged_specs.append(spec)
            merged_arrays.append(array)
    for (spec, _), small_arrays in small_arrays_of.items():
        vector = small_arrays[0]
        if len(small_arrays) > 1:
            vector = jnp.concatenate([array.reshape(-1) for array in small_arrays])
        merged_specs.append(spec)
        merged_arrays.append(vector)
    return plan._replace(specs=tuple(merged_specs)), merged_arrays


def _can_be_merged(spec: LeafSpec, array: Array) -> bool:
    """Whether a leaf may become part of a vector of small leaves."""
    # If the type names a mesh, jit may have split the leaf. To concatenate split leaves
    # would take a collective.
    has_mesh = not jax.typeof(array).sharding.mesh.empty
    if spec.summed_axes is not None or has_mesh:
        return False
    # A size of jax.export may be a symbol.
    return isinstance(array.size, int) and array.size <= MOST_NUMBERS_TO_MERGE


# ------------------------------------------------------------------------------ roots


@partial(traced_once, static_argnums=0)
def _root(ord: Ord, count: ArrayLike, total: Sums | Array) -> Array:
    """The norm, from three sums of squares or from one in float64. `count` is 1 for
    an order that is not a mean.
    """
    if isinstance(total, Sums):
        norm = sums.root_of_mean(count, total)
    else:
        norm = jnp.sqrt(total / count)
    if ord == "average":
        # sqrt(sum / N) / sqrt(N) = sqrt(sum) / N
        norm = norm / count**0.5
    return norm


def _roots_of_vector(ord: Ord, counts: list[Any], totals: list[Sums]) -> list[Array]:
    """The norms from three sums each. Scalars are stacked, and one root is taken of the
    vector. Sums of units and of layers have a root each.

    With separate roots XLA recomputes each in every kernel that reads all norms: a step
    with AGC took 1.5 times as long to compile for an H100 (`python -m benchmarks --only
    whole_step_compiled`). On a TPU each root is a scalar operation.
    """
    # The indices of the norms whose sums are scalars.
    indices = [index for index, total in enumerate(totals) if not total.unscaled.ndim]
    scalars = [totals[index] for index in indices]
    # Inside shard_map sums may vary along different mesh axes, but a stack has one
    # type. If no sum is a scalar, there is no type.
    scalar_types = {jax.typeof(total.unscaled) for total in scalars}
    if len(scalar_types) != 1:
        return [_root(ord, count, total) for count, total in zip(counts, totals)]
    vectors = jax.tree.map(lambda *numbers: lax.stack(numbers), *scalars)
    vectors = materialized_on_gpu(vectors)
    counts_of_scalars = jnp.array([counts[index] for index in indices])
    roots = lax.unstack(_root(ord, counts_of_scalars, vectors))
    norm_of_index = dict(zip(indices, roots))
    for index, (count, total) in enumerate(zip(counts, totals)):
        if index not in norm_of_index:
            norm_of_index[index] = _root(ord, count, total)
    return [norm_of_index[index] for index in range(len(totals))]
