"""From the leaves of a tree to its norms, over all devices.

    Leaf       what is static of a leaf: which norm it belongs to, and what is summed
    Plan       all leaves, and the order of the norms
    norms_of   the norms of a plan, with their derivative
    Norms      the norms of a tree

`norms_of` takes three steps: sums of each leaf, joined over the leaves of a norm and
over devices, and the root of each sum.

Norms are right for every finite input: no square overflows or is lost. The derivative
is finite everywhere, and 0 at zero.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from . import _mesh as mesh
from . import _sums as squares
from ._mesh import Names, Split
from ._sums import Dims, Sums, divided, plain_sum

# Terms that a TPU adds up at once.
TOGETHER = 16
# Leaves of at most so many numbers are summed together on a GPU, for one kernel.
SMALL = 2**16
# For more norms than these a GPU takes all roots in one separate kernel.
FEW_NORMS = 12
OF_SQUARES = (None, 2, "rms", "average")  # orders whose norm is a root of squares


class Leaf(NamedTuple):
    """What is static of a clipped leaf."""

    norm: Any  # the index of its norm, or None
    dims: Dims = None  # the dimensions that are summed
    split: Split = Split()
    # The mesh axes that split its units: each device has the norms of its own.
    units_over: Names = ()


class Norms(NamedTuple):
    """The norms of a tree."""

    # float[] for a norm, the same on all devices
    # float[layers, 1, 1] for the layers of a stacked leaf, those of all devices
    # float[1, units] for the units of a leaf, those of this device
    values: list[Any]
    leaves: tuple[Leaf, ...]
    paths: tuple[Any, ...]  # of each norm: its key path in the tree of norms
    treedef: Any  # of the tree of norms, as norm functions return it
    units: tuple[int, ...] = ()  # the indices of those that are of units
    noun: str = "leaf"  # what errors call that which has a norm
    allow_missing: bool = False  # whether limits may name norms that there are not
    holes: tuple[Any, ...] = ()  # key paths of what has no norm, such as None

    def tree(self) -> Any:
        """The norms as a tree. A node of the user's that checks its arrays, such as
        their shapes, refuses them.
        """
        return self.treedef.unflatten(self.on_device())

    def on_device(self) -> list[Any]:
        """The norms. Of layers a device gets the norms of its own."""
        values = list(self.values)
        for leaf in self.leaves:
            if leaf.norm is not None:
                values[leaf.norm] = entry_of_leaf(leaf, values)
        return values

    def on_all_devices(self, numbers: Sequence[Any]) -> list[Any]:
        """Numbers like `values`, from numbers like those of `on_device`."""
        values = list(numbers)
        for leaf in self.leaves:
            if leaf.norm is not None and leaf.split.kept:
                among_zeros = mesh.at_own_place(values[leaf.norm], leaf.split)
                values[leaf.norm] = lax.psum(among_zeros, leaf.split.kept_names())
        return values


def entry_of_leaf(leaf: Leaf, values: Sequence[Any]) -> Any:
    """The entry of a leaf in numbers like those of `Norms.values`, with the layers that
    this device has of the leaf.
    """
    value = values[leaf.norm]
    return mesh.own_part(value, leaf.split) if leaf.split.kept else value


# To JAX only norms are arrays. Everything else belongs to their structure.
jax.tree_util.register_pytree_node(
    Norms,
    lambda norms: ((norms.values,), norms._replace(values=())),
    lambda norms, children: norms._replace(values=children[0]),
)


class Plan(NamedTuple):
    """What is static of some norms."""

    leaves: tuple[Leaf, ...]
    size: int  # how many norms
    ord: Any = None  # the order: a number, "rms", "average" or None

    @property
    def is_split(self) -> bool:
        """Whether a norm needs the sums of several devices."""
        return any(leaf.split != Split() for leaf in self.leaves)


# The plan is static: only leaves are traced.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def norms_of(plan: Plan, arrays: list[Array]) -> list[Array]:
    """The norms of a plan, from one array for each of its leaves. A norm without leaves
    is 0.
    """
    dtype = squares.norm_dtype(arrays)
    if plan.ord == math.inf:
        return _largest(plan, arrays, dtype)
    if plan.ord not in OF_SQUARES:
        return _by_shares(plan, arrays, dtype)
    # Programs for GPU and TPU have float64 only where a leaf has 64 bits. A CPU joins
    # three sums too, in the dtype of the norm, of leaves that devices split.
    if dtype == np.float64 or plan.is_split:
        return _by_three_sums(plan, arrays, squares.three_sums)
    # One choice of the platform for all leaves, which is traced once.
    return squares.per_platform(
        arrays,
        cpu=partial(_in_float64, plan),
        gpu=partial(_on_a_gpu, plan),
        plain=partial(_on_a_tpu, plan),
    )


def _in_float64(plan: Plan, arrays: list[Array]) -> list[Array]:
    """The norms on a CPU: sums, means and roots in float64, rounded once. The square of
    no float32 number is beyond its range.
    """
    with jax.enable_x64(True):
        sums_of_leaves = []
        for array, leaf in zip(arrays, plan.leaves):
            sums_of_leaves.append((squares.sum_in_float64(array, leaf.dims),))
        zero = jnp.zeros((), np.float64)
        totals = _of_each_norm(plan, sums_of_leaves, (zero,), False, _by_tree)
        counts = _counts(plan, arrays, np.float64)
        return [_root(plan.ord, *total, n) for total, n in zip(totals, counts)]


@partial(jax.jit, static_argnums=0, inline=True)
def _root(order: Any, total: Array, count: ArrayLike) -> Array:
    """The norm of a sum of squares in float64."""
    norm = jnp.sqrt(total / count if isinstance(order, str) else total)
    if order == "average":
        # sqrt(sum / N) / sqrt(N) = sqrt(sum) / N
        norm = norm / count**0.5
    return lax.convert_element_type(norm, np.float32)


def _on_a_gpu(plan: Plan, arrays: list[Array]) -> list[Array]:
    """The norms on a GPU, which starts a kernel for each sum: small leaves of one norm
    become one vector.
    """
    separate: list[tuple[Array, Leaf]] = []
    small: dict[tuple[int, Any], list[tuple[Array, Leaf]]] = {}  # by norm and dtype
    for array, leaf in zip(arrays, plan.leaves):
        # Where jit splits leaves, a vector of them would take a collective.
        is_whole = leaf.dims is None and jax.typeof(array).sharding.mesh.empty
        is_small = isinstance(array.size, int) and array.size <= SMALL
        if is_whole and is_small and not jnp.iscomplexobj(array):
            small.setdefault((leaf.norm, array.dtype), []).append((array, leaf))
        else:
            separate.append((array, leaf))
    for (norm, _), pairs in small.items():
        if len(pairs) > 1:
            vector = jnp.concatenate([array.reshape(-1) for array, _ in pairs])
            pairs = [(vector, Leaf(norm))]
        separate += pairs
    joined_plan = plan._replace(leaves=tuple(leaf for _, leaf in separate))
    joined_arrays = [array for array, _ in separate]
    return _by_three_sums(
        joined_plan, joined_arrays, squares.sums_on_a_gpu, together=_by_tree
    )


def _on_a_tpu(plan: Plan, arrays: list[Array]) -> list[Array]:
    """The norms in plain `jnp`."""
    return _by_three_sums(plan, arrays, squares.three_reductions, together=_stacked)


def _by_three_sums(
    plan: Plan,
    arrays: list[Array],
    sums_of_leaf: Callable[..., Sums],
    together: Callable[..., Any] | None = None,
) -> list[Array]:
    """The norms, of three sums of squares of each leaf. `together` adds up those of
    several leaves.
    """
    dtype = squares.norm_dtype(arrays)
    sums_of_leaves = []
    # One of the three sums may overflow, at which jax_debug_infs would raise.
    with jax.debug_infs(False):
        for array, leaf in zip(arrays, plan.leaves):
            sums_of_leaves.append(sums_of_leaf(array, leaf.dims, dtype))
        zero = jnp.zeros((), dtype)
        totals = _joined(
            plan, sums_of_leaves, Sums(zero, zero, zero), together=together
        )
    sums_of_norms = [Sums(*sums) for sums in totals]
    if isinstance(plan.ord, str):
        counts = _counts(plan, arrays, dtype)
    else:
        counts = list(np.ones(plan.size, dtype))
    norms = []
    for sums, count in zip(sums_of_norms, counts):
        norms.append(squares.root_of(count, sums))
    if plan.size > FEW_NORMS:
        by_one_root = partial(_by_one_root, counts)
        norms = squares.per_platform(norms, sums_of_norms, gpu=by_one_root)
    if plan.ord == "average":
        # sqrt(sum / N) / sqrt(N) = sqrt(sum) / N
        norms = [norm / count**0.5 for norm, count in zip(norms, counts)]
    return norms


def own_norm(tree: Any) -> Array:
    """The norm of all arrays of a tree, of what a device has of them."""
    arrays = jax.tree.leaves(tree)
    leaves = (Leaf(norm=0),) * len(arrays)
    (norm,) = norms_of(Plan(leaves, size=1), arrays)
    return norm


def _by_one_root(
    counts: list[Any], norms: list[Array], sums_of_norms: list[Sums]
) -> list[Array]:
    """The norms again, all scalars by one root of a vector. XLA on a GPU would put the
    root of each into every kernel that takes all norms: a step with AGC took 1.5 times
    as long to compile for an H100 (`python -m benchmarks --only whole_step_compiled`).
    """
    scalars = [index for index, norm in enumerate(norms) if not norm.ndim]
    # Inside shard_map they may differ over different mesh axes.
    types = {jax.typeof(norms[index]) for index in scalars}
    if len(types) != 1:
        return norms
    stacks = []
    for field in Sums._fields:
        stacks.append(jnp.stack([getattr(sums_of_norms[i], field) for i in scalars]))
    stacked_counts = jnp.stack([counts[index] for index in scalars])
    roots = squares.root_of(stacked_counts, squares.written_by_a_gpu(stacks))
    norms = list(norms)
    for index, root in zip(scalars, list(roots)):
        norms[index] = root
    return norms


def _counts(plan: Plan, arrays: list[Array], dtype: Any) -> list[Any]:
    """How many numbers each norm sums on all devices, at least 1."""
    counts = [0] * plan.size
    for array, leaf in zip(arrays, plan.leaves):
        dims = range(array.ndim) if leaf.dims is None else leaf.dims
        size = math.prod(array.shape[dim] for dim in dims)
        counts[leaf.norm] += size * mesh.axes_size(leaf.split.summed)
    # A size of jax.export may be a symbol.
    numbers = [(np if isinstance(n, int) else jnp).asarray(n) for n in counts]
    return [number.astype(dtype).clip(1) for number in numbers]


# What a leaf adds to its norm: a tuple of arrays, such as its three sums.
Term = TypeVar("Term", bound=tuple[Array, ...])


def _joined(
    plan: Plan,
    terms: list[Term],
    zero: Term,
    *,
    largest: bool = False,
    together: Callable[..., Any] | None = None,
) -> list[Term]:
    """For each norm the terms of its leaves, added up over leaves and devices, or the
    largest. A norm without leaves has `zero`.
    """
    # XLA adds up the parts of a global array.
    if not plan.is_split:
        return _of_each_norm(plan, terms, zero, largest, together)
    axes_of_norms = _axes_of_norms(plan)
    terms = _on_each_device(plan, terms, axes_of_norms, largest)
    totals = _of_each_norm(plan, terms, zero, largest)
    arrays, treedef = jax.tree.flatten(totals)
    axes_of_arrays = []
    for mesh_axes in axes_of_norms:
        axes_of_arrays += [mesh_axes] * len(zero)
    collective = lax.pmax if largest else lax.psum
    return treedef.unflatten(mesh.joined(collective, arrays, axes_of_arrays))


def _of_each_norm(
    plan: Plan,
    terms: list[Term],
    zero: Term,
    largest: bool,
    together: Callable[..., Any] | None = None,
) -> list[Term]:
    """The terms of the leaves of each norm together."""
    together = together or _together
    terms_of_norms: list[list[Term]] = [[] for _ in range(plan.size)]
    for term, leaf in zip(terms, plan.leaves):
        terms_of_norms[leaf.norm].append(term)
    totals = []
    for terms_of_norm in terms_of_norms:
        totals.append(together(terms_of_norm, largest) if terms_of_norm else zero)
    return totals


def _axes_of_norms(plan: Plan) -> list[Names]:
    """Over which mesh axes each norm is joined. All norms but those of units are joined
    over the same ones, at once.
    """
    shared: set[str] = set()
    for leaf in plan.leaves:
        if not leaf.units_over:
            shared |= {*leaf.split.summed, *leaf.split.kept_names()}
    axes_of_norms = [tuple(sorted(shared))] * plan.size
    for leaf in plan.leaves:
        if leaf.units_over:
            axes_of_norms[leaf.norm] = tuple(sorted(leaf.split.summed))
    return axes_of_norms


def _on_each_device(
    plan: Plan, terms: list[Any], axes_of_norms: list[Names], largest: bool
) -> list[Any]:
    """The terms, prepared for one collective: layers of this device stand among zeros
    for those of others, and a term that all devices have is divided by their number.
    """
    prepared = []
    for term, leaf in zip(terms, plan.leaves):
        mesh_axes, split = axes_of_norms[leaf.norm], leaf.split
        if split.kept and not leaf.units_over:
            term = [mesh.at_own_place(array, split) for array in term]
        if not largest and not leaf.units_over:
            # psum adds a replicated value once for each device. Divided by their number
            # it counts once.
            replicated = {*mesh_axes} - {*split.summed, *split.kept_names()}
            copies = mesh.axes_size(replicated)
            if copies > 1:
                term = [array / copies for array in term]
        prepared.append([mesh.varying_over(array, mesh_axes) for array in term])
    return prepared


def _together(terms: list[Any], largest: bool) -> Any:
    """The terms of several leaves as one: their sum, or the largest."""
    if len(terms) == 1:
        return terms[0]
    by_tree = partial(_by_tree, largest=largest)
    stacked = partial(_stacked, largest=largest)
    terms = [tuple(term) for term in terms]
    return squares.per_platform(terms, cpu=by_tree, gpu=by_tree, plain=stacked)


def _by_tree(terms: list[Any], largest: bool) -> Any:
    """Adds up pairs of terms, in the kernel that needs the sum."""
    add = jnp.maximum if largest else jnp.add
    while len(terms) > 1:
        sums = []
        for left, right in zip(terms[::2], terms[1::2]):
            sums.append(tuple(add(x, y) for x, y in zip(left, right)))
        if len(terms) % 2:
            sums.append(terms[-1])
        terms = sums
    return terms[0]


def _stacked(terms: list[Any], largest: bool) -> Any:
    """Adds up the terms as a table. A TPU runs each add of a chain by itself."""
    while len(terms) > 1:
        totals = []
        for start in range(0, len(terms), TOGETHER):
            block = terms[start : start + TOGETHER]
            # [parts of a term, terms], as one vector.
            columns = []
            for part in zip(*block):
                columns += part
            # The barrier keeps XLA from making a chain of the sum of a stack.
            stack = lax.optimization_barrier(jnp.stack(columns))
            table = stack.reshape(-1, len(block))
            total = jnp.max(table, 1) if largest else jnp.sum(table, 1)
            totals.append(tuple(total))
        terms = totals
    return terms[0]


def _largest(plan: Plan, arrays: list[Array], dtype: Any) -> list[Array]:
    """The norms of order inf. As bits, numbers that are not negative sort like
    integers.
    """
    integer = np.int64 if dtype == np.float64 else np.int32
    terms = []
    for array, leaf in zip(arrays, plan.leaves):
        terms.append((squares.largest_bits(array, leaf.dims, dtype),))
    totals = _joined(plan, terms, (jnp.zeros((), integer),), largest=True)
    return [lax.bitcast_convert_type(bits, dtype) for (bits,) in totals]


def _added(plan: Plan, numbers: list[Array], dtype: Any) -> list[Array]:
    """For each norm the sum of one number for each of its leaves."""
    terms = [(number,) for number in numbers]
    return [total for (total,) in _joined(plan, terms, (jnp.zeros((), dtype),))]


def _by_shares(plan: Plan, arrays: list[Array], dtype: Any) -> list[Array]:
    """Divides by the largest number of each norm first, so that no power leaves the
    range. The division is a second read.
    """
    order, divisors = float(plan.ord), []
    for largest in _largest(plan, arrays, dtype):
        # 0, NaN and inf are not divided by, and come out of the sum as they are.
        divisible = (largest > 0) & (largest < jnp.inf)
        divisors.append(jnp.where(divisible, largest, jnp.ones_like(largest)))
    sums_of_leaves = []
    for array, leaf in zip(arrays, plan.leaves):
        share = divided(jnp.abs(array).astype(dtype), entry_of_leaf(leaf, divisors))
        # In [0, 1], and one of them is 1. A power that vanishes is too small to count.
        if order.is_integer():
            power = lax.integer_pow(share, int(order))
        else:
            power = share**order
        sums_of_leaves.append(plain_sum(power, leaf.dims))
    sums = _added(plan, sums_of_leaves, dtype)
    return [x * total ** (1 / order) for x, total in zip(divisors, sums)]


@norms_of.defjvp
def _derivative(plan: Plan, primals: Any, tangents: Any) -> Any:
    """d norm = sum (|x| / norm)^(p-1) d|x|, by hand: sqrt has no finite derivative at
    0, and squares may overflow.
    """
    (arrays,), (changes,) = primals, tangents
    norms = norms_of(plan, arrays)
    dtype = squares.norm_dtype(arrays)
    # What each x is divided by: the norm, and of an average the root mean square.
    lengths = norms
    divisors: list[Any] = [1] * plan.size
    if isinstance(plan.ord, str):
        # d rms = sum (x / rms) dx / n. An average is rms / sqrt(n), so it has n^1.5.
        divisors = _counts(plan, arrays, dtype)
    if plan.ord == "average":
        lengths = [norm * count**0.5 for norm, count in zip(norms, divisors)]
        divisors = [count * count**0.5 for count in divisors]
    terms, weights = [], []
    for array, change, leaf in zip(arrays, changes, plan.leaves):
        length = entry_of_leaf(leaf, lengths)
        if plan.ord in OF_SQUARES:
            # |x| d|x| = x dx, which has a second derivative at x = 0 as well.
            term = _slope(array, change, length)
        else:
            weight = _weight(plan.ord, jnp.abs(array).astype(dtype), length)
            term = weight * squares.tangent_of_modulus(array, change).astype(dtype)
            weights.append(weight)
        terms.append(jnp.sum(term, leaf.dims, keepdims=leaf.dims is not None))
    if plan.ord == math.inf:
        # A maximum is shared by all elements that are the largest.
        ties_of_leaves = []
        for weight, leaf in zip(weights, plan.leaves):
            ties_of_leaves.append(plain_sum(weight, leaf.dims))
        # Nothing is the largest where the norm is NaN: 0 / 1.
        ties = _added(plan, ties_of_leaves, dtype)
        divisors = [jnp.maximum(count, 1) for count in ties]
    totals = _added(plan, terms, dtype)
    return norms, [total / divisor for total, divisor in zip(totals, divisors)]


def _slope(array: Array, change: Array, norm: Array) -> Array:
    """x / norm * dx. Not by way of |x|, whose derivative at 0 is 0: the second
    derivative would be lost there.
    """
    if jnp.iscomplexobj(array):
        real = _slope(jnp.real(array), jnp.real(change), norm)
        return real + _slope(jnp.imag(array), jnp.imag(change), norm)
    # A norm of 0 has only zeros, whose derivative is then 0 / 1.
    unit = divided(array.astype(norm.dtype), jnp.where(norm > 0, norm, 1.0))
    return unit * change.astype(norm.dtype)


def _weight(order: Any, moduli: Array, norm: Array) -> Array:
    """The derivative of a norm by the moduli of a leaf. For order inf it is 1 for each
    of the largest.
    """
    if order == math.inf:
        return (moduli == norm).astype(moduli.dtype)
    share = divided(moduli, jnp.where(norm > 0, norm, 1.0))
    # Two wheres: at 0 a power below 1 does not exist, and the unused branch of a where
    # must stay finite as well.
    power = jnp.where(share > 0, share, 1.0) ** (float(order) - 1.0)
    return jnp.where(share > 0, power, 0.0)
