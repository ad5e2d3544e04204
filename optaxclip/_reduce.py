"""From leaves to norms: sums of each leaf, joined over leaves and devices, and roots.

    LeafSpec    how one leaf enters its norm
    norms_of    the norms of some leaves, with their derivative

`norms_of` has a way for each order:

    order 2, "rms", "average"    `_by_squares`    sums of squares, and roots
        on a CPU                                  one float64 sum of each leaf
        on a GPU                                  three sums, small leaves merged
        elsewhere                                 three sums in `jnp`
        split leaves, 64-bit leaves               three sums on every platform
    order inf                    `_largest`       the largest modulus
    any other order              `_by_powers`     divided by the largest, then powers

Norms are right for every finite input: no square overflows or is lost. The derivative
is finite everywhere, and 0 at zero.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from . import _mesh as mesh
from . import _mesh_types as mesh_types
from . import _sums as sums
from ._mesh import AxisNames
from ._moduli import tangent_of_modulus
from ._options import Ord
from ._sums import Axes, Sums, divided, plain_sum, traced_once

OF_SQUARES = (None, 2, "rms", "average")  # orders whose norm is a root of squares
# At most this many terms are stacked into one table on a TPU.
TABLE_SIZE = 16
# Leaves of at most so many numbers are summed together on a GPU, by one kernel.
SMALL = 2**16


class LeafSpec(NamedTuple):
    """How one leaf enters its norm. Static."""

    norm_index: Any  # an index into the norms, an int. None: the leaf is left alone
    # The axes that are summed, and stay with size 1. None: all, to a scalar.
    axes: Axes = None
    summed_over: AxisNames = ()  # the mesh axes that split the summed axes
    # For each axis of the leaf, the mesh axes that split it if it is kept. () if no
    # kept axis is split.
    kept_over: tuple[AxisNames, ...] = ()
    # Whether kept axes are units, of which each device has the norms of its own.
    # Otherwise they are layers, and each device has the norms of all of them.
    has_units: bool = False

    @property
    def units_over(self) -> AxisNames:
        """The mesh axes that split its units."""
        return tuple(chain.from_iterable(self.kept_over)) if self.has_units else ()

    @property
    def layers_over(self) -> AxisNames:
        """The mesh axes that split its layers."""
        return () if self.has_units else tuple(chain.from_iterable(self.kept_over))

    @property
    def joined_over(self) -> AxisNames:
        """The mesh axes over which its norm is joined."""
        return self.summed_over + self.layers_over

    def local_value(self, values: Sequence[Any]) -> Any:
        """The entry of this leaf in `values`, which has one for each norm. Of a stacked
        leaf it has the layers that this device holds.
        """
        value = values[self.norm_index]
        return mesh.local_layers(value, self.kept_over) if self.layers_over else value


Specs = tuple[LeafSpec, ...]


# ------------------------------------------------------------------------------ norms


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def norms_of(
    specs: Specs, norm_count: int, ord: Ord, arrays: list[Array]
) -> list[Array]:
    """The norms of some leaves.

    Args:
      specs: how each leaf enters its norm.
      norm_count: how many norms there are. A norm without leaves is 0.
      ord: their order.
      arrays: the leaves. On a device of shard_map and pmap, its part of them.

    Returns:
      For each norm a scalar, or an array with the axes of a leaf that keeps some.
    """
    if ord == math.inf:
        return _largest(specs, norm_count, arrays)
    if ord in OF_SQUARES:
        return _by_squares(specs, norm_count, ord, arrays)
    return _by_powers(specs, norm_count, ord, arrays)


# ---------------------------------------------------------------------- sums of squares


def _by_squares(
    specs: Specs, norm_count: int, ord: Ord, arrays: list[Array]
) -> list[Array]:
    """The norms by sums of squares, on each platform in its way."""
    is_joined = any(spec.joined_over for spec in specs)
    if is_joined or sums.norm_dtype(arrays) == np.float64:
        return _by_three_sums(specs, norm_count, ord, arrays)
    # One choice of the platform for all leaves, which is traced once.
    return sums.per_platform(
        arrays,
        cpu=partial(_norms_on_a_cpu, specs, norm_count, ord),
        gpu=partial(_norms_on_a_gpu, specs, norm_count, ord),
        plain=partial(_norms_in_jnp, specs, norm_count, ord),
    )


def _by_three_sums(
    specs: Specs, norm_count: int, ord: Ord, arrays: list[Array]
) -> list[Array]:
    """Float64 leaves, and leaves whose sums cross devices: three sums on every
    platform. A CPU converts its float64 sum into three.
    """
    totals = _three_sums(specs, norm_count, arrays, sums.three_sums, _by_platform)
    counts = _counts(specs, norm_count, ord, arrays, sums.norm_dtype(arrays))
    return sums.per_platform(
        totals,
        cpu=partial(_roots, ord, counts),
        gpu=partial(_roots, ord, counts, most_single_roots=sums.FEW_NORMS_ON_A_GPU),
        plain=partial(_roots, ord, counts, most_single_roots=sums.FEW_NORMS_ON_A_TPU),
    )


def _norms_on_a_cpu(
    specs: Specs, norm_count: int, ord: Ord, arrays: list[Array]
) -> list[Array]:
    """The norms by one sum of each leaf: sums, means and roots in float64, rounded
    once.
    """
    with jax.enable_x64(True):
        terms = []
        for spec, array in zip(specs, arrays):
            terms.append(sums.float64_sum(array, spec.axes))
        zeros = [jnp.zeros((), np.float64)] * norm_count
        totals = _joined(specs, terms, zeros, ADD, _by_pairs)
        counts = _counts(specs, norm_count, ord, arrays, np.float64)
        norms = []
        for total, count in zip(totals, counts):
            norm = _root(ord, count, total)
            norms.append(lax.convert_element_type(norm, np.float32))
        return norms


def _norms_on_a_gpu(
    specs: Specs, norm_count: int, ord: Ord, arrays: list[Array]
) -> list[Array]:
    """The norms on a GPU, which starts a kernel for each sum: small leaves of one norm
    become one vector.
    """
    merged: list[tuple[LeafSpec, Array]] = []
    small: dict[Any, list[Array]] = {}  # by norm and dtype
    for spec, array in zip(specs, arrays):
        # Where jit splits leaves, a vector of them would take a collective.
        is_whole = spec.axes is None and jax.typeof(array).sharding.mesh.empty
        is_small = isinstance(array.size, int) and array.size <= SMALL
        if is_whole and is_small and not jnp.iscomplexobj(array):
            small.setdefault((spec.norm_index, array.dtype), []).append(array)
        else:
            merged.append((spec, array))
    for (norm_index, _), small_arrays in small.items():
        vector = small_arrays[0]
        if len(small_arrays) > 1:
            vector = jnp.concatenate([array.reshape(-1) for array in small_arrays])
        merged.append((LeafSpec(norm_index), vector))
    merged_specs = tuple(spec for spec, _ in merged)
    merged_arrays = [array for _, array in merged]
    sums_of_leaf = sums.three_sums_on_a_gpu
    totals = _three_sums(
        merged_specs, norm_count, merged_arrays, sums_of_leaf, _by_pairs
    )
    counts = _counts(specs, norm_count, ord, arrays, sums.norm_dtype(arrays))
    return _roots(ord, counts, totals, most_single_roots=sums.FEW_NORMS_ON_A_GPU)


def _norms_in_jnp(
    specs: Specs, norm_count: int, ord: Ord, arrays: list[Array]
) -> list[Array]:
    """The norms in plain `jnp`, on a TPU and any other platform."""
    totals = _three_sums(specs, norm_count, arrays, sums.three_sums_in_jnp, _by_table)
    counts = _counts(specs, norm_count, ord, arrays, sums.norm_dtype(arrays))
    return _roots(ord, counts, totals, most_single_roots=sums.FEW_NORMS_ON_A_TPU)


def _three_sums(
    specs: Specs,
    norm_count: int,
    arrays: list[Array],
    sums_of_leaf: Callable[..., Sums],
    over_leaves: Callable[..., Any],
) -> list[Sums]:
    """The three sums of squares of each norm. `sums_of_leaf` takes those of a leaf, and
    `over_leaves` joins those of several leaves.
    """
    dtype = sums.norm_dtype(arrays)
    # One of the three sums may overflow, at which jax_debug_infs would raise.
    with jax.debug_infs(False):
        terms = []
        for spec, array in zip(specs, arrays):
            terms.append(sums_of_leaf(array, spec.axes, dtype))
        zero = jnp.zeros((), dtype)
        zeros = [Sums(zero, zero, zero)] * norm_count
        return _joined(specs, terms, zeros, ADD, over_leaves)


def _counts(
    specs: Specs, norm_count: int, ord: Ord, arrays: list[Array], dtype: DTypeLike
) -> list[Any]:
    """For each norm the number of elements that its mean is over, on all devices, and
    at least 1. All 1 for an order that is no mean.
    """
    if not isinstance(ord, str):
        return list(np.ones(norm_count, dtype))
    counts = [0] * norm_count
    for spec, array in zip(specs, arrays):
        axes = range(array.ndim) if spec.axes is None else spec.axes
        count = math.prod(array.shape[axis] for axis in axes)
        counts[spec.norm_index] += count * mesh.device_count(spec.summed_over)
    numbers = []
    for count in counts:
        # A size of jax.export may be a symbol, which only jnp makes an array.
        number = np.asarray(count) if isinstance(count, int) else jnp.asarray(count)
        numbers.append(number.astype(dtype).clip(1))
    return numbers


@partial(traced_once, static_argnums=0)
def _root(ord: Ord, count: ArrayLike, total: Sums | Array) -> Array:
    """The norm, from three sums of squares or from one in float64."""
    if isinstance(total, Sums):
        norm = sums.root_of_mean(count, total)
    else:
        norm = jnp.sqrt(total / count if isinstance(ord, str) else total)
    if ord == "average":
        # sqrt(sum / N) / sqrt(N) = sqrt(sum) / N
        norm = norm / count**0.5
    return norm


def _roots(
    ord: Ord, counts: list[Any], totals: list[Sums], most_single_roots: float = math.inf
) -> list[Array]:
    """The norms from their sums. Of more norms than `most_single_roots` the scalars are
    stacked, and one root is taken of the vector.

    XLA on a GPU would put the root of each into every kernel that takes all norms: a
    step with AGC took 1.5 times as long to compile for an H100
    (`python -m benchmarks --only whole_step_compiled`). A TPU would take each root by
    itself.
    """
    scalar_indices = [
        index for index, total in enumerate(totals) if not total.plain.ndim
    ]
    # Inside shard_map they may differ over different mesh axes.
    types = {jax.typeof(totals[index].plain) for index in scalar_indices}
    if len(totals) <= most_single_roots or len(types) != 1:
        return [_root(ord, count, total) for count, total in zip(counts, totals)]
    vectors = []
    for field in Sums._fields:
        scalars = [getattr(totals[index], field) for index in scalar_indices]
        vectors.append(jnp.stack(scalars))
    count_vector = jnp.stack([counts[index] for index in scalar_indices])
    norm_vector = _root(ord, count_vector, Sums(*sums.materialized_on_gpu(vectors)))
    norm_of_index = dict(zip(scalar_indices, list(norm_vector)))
    norms = []
    for index, total in enumerate(totals):
        if index in norm_of_index:
            norms.append(norm_of_index[index])
        else:
            norms.append(_root(ord, counts[index], total))
    return norms


# ------------------------------------------------------- joined over leaves and devices


class Join(NamedTuple):
    """How terms become one: their sum, or the largest of them."""

    pair: Callable[..., Array]  # two arrays
    table: Callable[..., Array]  # an axis of a table
    collective: Callable[..., Array]  # the arrays of all devices along mesh axes


ADD = Join(jnp.add, jnp.sum, lax.psum)
MAX = Join(jnp.maximum, jnp.max, lax.pmax)

# What a leaf adds to its norm: an array, or three sums.
Term = TypeVar("Term", Array, Sums)


def _joined(
    specs: Specs,
    terms: list[Term],
    zeros: list[Term],
    join: Join,
    over_leaves: Callable[..., Any],
) -> list[Term]:
    """For each norm the terms of its leaves as one, over leaves and devices.

    `zeros` has one for each norm: its value without leaves. Arrays that jit splits are
    global, and need no collective: XLA adds up their parts.
    """
    # All norms are joined over the same mesh axes, by one collective. Only units that
    # devices split have mesh axes of their own.
    shared: set[str] = set()
    for spec in specs:
        if not spec.units_over:
            shared.update(spec.joined_over)
    mesh_axes_of_norms = [tuple(sorted(shared))] * len(zeros)
    terms_of_norms: list[list[Term]] = [[] for _ in zeros]
    for spec, term in zip(specs, terms):
        if spec.units_over:
            mesh_axes_of_norms[spec.norm_index] = tuple(sorted(spec.summed_over))
        mesh_axes = mesh_axes_of_norms[spec.norm_index]
        terms_of_norms[spec.norm_index].append(
            _counted_once(spec, term, mesh_axes, join)
        )
    totals = []
    for terms_of_norm, zero in zip(terms_of_norms, zeros):
        totals.append(over_leaves(terms_of_norm, join) if terms_of_norm else zero)
    arrays, treedef = jax.tree.flatten(totals)
    mesh_axes_of_arrays = []
    for total, mesh_axes in zip(totals, mesh_axes_of_norms):
        mesh_axes_of_arrays += [mesh_axes] * len(jax.tree.leaves(total))
    return treedef.unflatten(
        mesh.joined_over_devices(join.collective, arrays, mesh_axes_of_arrays)
    )


def _counted_once(spec: LeafSpec, term: Term, mesh_axes: AxisNames, join: Join) -> Term:
    """The term of a leaf on this device, as a collective over these mesh axes takes it:
    layers stand among zeros for the layers of other devices, and a term that several
    devices have is divided by their number.
    """
    if not mesh_axes:
        return term
    copies = 1
    if join is ADD:
        copies = mesh.device_count({*mesh_axes} - {*spec.joined_over})

    def counted_once(array: Array) -> Array:
        if spec.layers_over:
            array = mesh.among_zeros(array, spec.kept_over)
        if copies > 1:
            array = array / copies
        return mesh_types.varying_over(array, mesh_axes)

    return jax.tree.map(counted_once, term)


def _by_platform(terms: list[Term], join: Join) -> Term:
    """The terms of some leaves as one, by pairs or by a table."""
    if len(terms) == 1:
        return terms[0]
    by_pairs = partial(_by_pairs, join=join)
    by_table = partial(_by_table, join=join)
    return sums.per_platform(terms, cpu=by_pairs, gpu=by_pairs, plain=by_table)


def _by_pairs(terms: list[Term], join: Join) -> Term:
    """The terms joined in pairs, and the results in pairs again. XLA fuses the adds
    into the kernel that reads the result.
    """
    while len(terms) > 1:
        joined = []
        for left, right in zip(terms[::2], terms[1::2]):
            joined.append(jax.tree.map(join.pair, left, right))
        if len(terms) % 2:
            joined.append(terms[-1])
        terms = joined
    return terms[0]


def _by_table(terms: list[Term], join: Join) -> Term:
    """The terms joined as columns of a table. Of a chain of adds a TPU would run each
    by itself.
    """
    treedef = jax.tree.structure(terms[0])
    while len(terms) > 1:
        joined = []
        for start in range(0, len(terms), TABLE_SIZE):
            block = terms[start : start + TABLE_SIZE]
            # A row for each array of a term, such as each of three sums.
            entries = []
            for row in zip(*map(jax.tree.leaves, block)):
                entries += row
            # The barrier keeps XLA from making a chain of the sum of a stack.
            stack = lax.optimization_barrier(jnp.stack(entries))
            table = stack.reshape(-1, len(block))
            joined.append(treedef.unflatten(list(join.table(table, 1))))
        terms = joined
    return terms[0]


# ------------------------------------------------------------------------ other orders


def _largest(specs: Specs, norm_count: int, arrays: list[Array]) -> list[Array]:
    """The norms of order inf. Found as integers: the bits of non-negative floats sort
    as the floats do.
    """
    dtype = sums.norm_dtype(arrays)
    integer = np.int64 if dtype == np.float64 else np.int32
    terms = []
    for spec, array in zip(specs, arrays):
        terms.append(sums.largest_bits(array, spec.axes, dtype))
    zeros = [jnp.zeros((), integer)] * norm_count
    totals = _joined(specs, terms, zeros, MAX, _by_platform)
    return [lax.bitcast_convert_type(bits, dtype) for bits in totals]


def _by_powers(
    specs: Specs, norm_count: int, ord: float, arrays: list[Array]
) -> list[Array]:
    """The norms of order p. Elements are divided by the largest of their norm first, so
    that no power leaves the range. The division is a second read.
    """
    dtype = sums.norm_dtype(arrays)
    order = float(ord)
    divisors = []
    for largest in _largest(specs, norm_count, arrays):
        # 0, NaN and inf do not divide. They come out of the sum as they are.
        divides = (largest > 0) & (largest < jnp.inf)
        divisors.append(jnp.where(divides, largest, jnp.ones_like(largest)))
    terms = []
    for spec, array in zip(specs, arrays):
        # In [0, 1], and one of them is 1. A power that vanishes is too small to count.
        quotient = divided(jnp.abs(array).astype(dtype), spec.local_value(divisors))
        if order.is_integer():
            power = lax.integer_pow(quotient, int(order))
        else:
            power = quotient**order
        terms.append(plain_sum(power, spec.axes))
    zeros = [jnp.zeros((), dtype)] * norm_count
    totals = _joined(specs, terms, zeros, ADD, _by_platform)
    norms = []
    for divisor, total in zip(divisors, totals):
        norms.append(divisor * total ** (1 / order))
    return norms


# -------------------------------------------------------------------------- derivative


@norms_of.defjvp
def _norms_jvp(
    specs: Specs,
    norm_count: int,
    ord: Ord,
    primals: tuple[list[Array]],
    tangents: tuple[list[Array]],
) -> Any:
    """By hand: sqrt has no finite derivative at 0, and squares may overflow.

    d norm = sum (|x| / norm)^(p-1) d|x|
    d rms = sum (x / rms) dx / N
    d average = sum (x / rms) dx / N^1.5, as average = rms / N^0.5
    """
    (arrays,) = primals
    (array_tangents,) = tangents
    norms = norms_of(specs, norm_count, ord, arrays)
    dtype = sums.norm_dtype(arrays)
    zeros = [jnp.zeros((), dtype)] * norm_count
    # The norm of each x / norm, and what its sum is divided by.
    norms_of_quotients = norms
    divisors = _counts(specs, norm_count, ord, arrays, dtype)
    if ord == "average":
        norms_of_quotients = [x * count**0.5 for x, count in zip(norms, divisors)]
        divisors = [count * count**0.5 for count in divisors]
    terms = []
    weights = []
    for spec, array, tangent in zip(specs, arrays, array_tangents):
        norm = spec.local_value(norms_of_quotients)
        if ord in OF_SQUARES:
            # |x| d|x| = x dx, which has a second derivative at x = 0 as well.
            term = _slope(array, tangent, norm)
        else:
            weight = _weight(ord, jnp.abs(array).astype(dtype), norm)
            term = weight * tangent_of_modulus(array, tangent).astype(dtype)
            weights.append(weight)
        terms.append(jnp.sum(term, spec.axes, keepdims=spec.axes is not None))
    if ord == math.inf:
        # A maximum is shared by all elements that are the largest.
        divisors = _tie_counts(specs, weights, zeros)
    totals = _joined(specs, terms, zeros, ADD, _by_platform)
    return norms, [total / divisor for total, divisor in zip(totals, divisors)]


def _tie_counts(specs: Specs, weights: list[Array], zeros: list[Array]) -> list[Array]:
    """For each norm of order inf the number of its largest elements, at least 1: those
    whose weight is 1, in all leaves and on all devices.
    """
    counts_of_leaves = []
    for spec, weight in zip(specs, weights):
        counts_of_leaves.append(plain_sum(weight, spec.axes))
    counts = _joined(specs, counts_of_leaves, zeros, ADD, _by_platform)
    # Nothing is the largest where the norm is NaN: 0 / 1.
    return [jnp.maximum(count, 1) for count in counts]


def _slope(array: Array, tangent: Array, norm: Array) -> Array:
    """x / norm * dx. Not by way of |x|, whose derivative at 0 is 0: the second
    derivative would be lost there.
    """
    if jnp.iscomplexobj(array):
        real = _slope(jnp.real(array), jnp.real(tangent), norm)
        return real + _slope(jnp.imag(array), jnp.imag(tangent), norm)
    # Where the norm is 0 all x are 0: 0 / 1 is 0. A norm that is NaN also divides by 1,
    # and the NaN in x shows.
    divisor = jnp.where(norm > 0, norm, 1.0)
    quotient = divided(array.astype(norm.dtype), divisor)
    return quotient * tangent.astype(norm.dtype)


def _weight(ord: float, moduli: Array, norm: Array) -> Array:
    """The derivative of a norm by the moduli of a leaf. For order inf it is 1 for each
    of the largest.
    """
    if ord == math.inf:
        return (moduli == norm).astype(moduli.dtype)
    divisor = jnp.where(norm > 0, norm, 1.0)
    quotient = divided(moduli, divisor)
    # Two wheres: at 0 a power below 1 does not exist, and the unused branch of a where
    # must stay finite as well.
    power = jnp.where(quotient > 0, quotient, 1.0) ** (float(ord) - 1.0)
    return jnp.where(quotient > 0, power, 0.0)
