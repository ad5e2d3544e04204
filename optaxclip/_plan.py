"""From the leaves of a tree to its norms, over all devices.

    Leaf       what is static of a leaf: which norm it belongs to, and what is summed
    Plan       all leaves, and the order of the norms
    norms_of   the norms of a plan, with their derivative
    Norms      the norms of a tree

Norms are right for every finite input: no square overflows or is lost. The derivative
is finite everywhere, and 0 at zero.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mesh as mesh
from . import _sums as squares
from ._mesh import Split
from ._sums import Dims, Sums, divided, plain_sum

# Terms that are added up at once. Of more a GPU would copy each in a kernel.
TOGETHER = 16
OF_SQUARES = (None, 2, "rms", "average")  # orders whose norm is a root of squares


class Leaf(NamedTuple):
    """What is static of a clipped leaf."""

    norm: Any  # the number of its norm, or None
    dims: Dims = None  # what that sums
    split: Split = Split()
    # The mesh axes that split its units: each device has the norms of its own.
    units_over: tuple[str, ...] = ()


class Norms(NamedTuple):
    """The norms of a tree."""

    # float[] for each norm, float[layers, 1, 1] for those of the layers of a stacked
    # leaf, on all devices, or float[1, units] for the units of a leaf on this device.
    each: list[Any]
    leaves: tuple[Leaf, ...]
    paths: tuple[Any, ...]  # of each norm: its key path in the tree of norms
    treedef: Any  # of the tree of norms, as norm functions return it
    units: tuple[int, ...] = ()  # the numbers of those that are of units
    noun: str = "leaf"  # what errors call that which has a norm
    allow_missing: bool = False  # whether limits may be for others

    def tree(self) -> Any:
        """The norms as a tree."""
        found = list(self.each)
        # A device gets back the norms of its own layers.
        for leaf in self.leaves:
            if leaf.norm is not None:
                found[leaf.norm] = beside(leaf, found)
        return self.treedef.unflatten(found)

    def from_tree(self, tree: Any) -> list[Any]:
        """Numbers like `each`, from a tree of them in the structure of `tree()`."""
        found = jax.tree.leaves(tree)
        for leaf in self.leaves:
            if leaf.norm is not None and leaf.split.kept:
                own = mesh.at_own_place(found[leaf.norm], leaf.split)
                found[leaf.norm] = lax.psum(own, leaf.split.kept_names())
        return found


def beside(leaf: Leaf, numbers: Sequence[Any]) -> Any:
    """The entry of a leaf in numbers like those of `Norms.each`, as it stands beside
    the leaf on this device.
    """
    own = numbers[leaf.norm]
    return mesh.own_part(own, leaf.split) if leaf.split.kept else own


# To JAX only norms are arrays. The rest belongs to their structure.
jax.tree_util.register_pytree_node(
    Norms,
    lambda norms: ((norms.each,), norms._replace(each=[])),
    lambda rest, each: rest._replace(each=each[0]),
)


class Plan(NamedTuple):
    """What is static of some norms."""

    leaves: tuple[Leaf, ...]
    size: int  # how many norms
    ord: Any = None  # the order: a number, "rms", "average" or None


# The plan is static: only leaves are traced.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def norms_of(plan: Plan, leaves: list[jax.Array]) -> list[jax.Array]:
    """The norms of a plan. One without leaves is 0."""
    dtype = squares.norm_dtype(leaves)
    if plan.ord == math.inf:
        return _largest(plan, leaves, dtype)
    if plan.ord not in OF_SQUARES:
        return _by_shares(plan, leaves, dtype)
    pairs = zip(leaves, plan.leaves)
    terms = [squares.three_sums(x, leaf.dims, dtype) for x, leaf in pairs]
    sums = _joined(plan, terms, Sums(*[jnp.zeros((), dtype)] * 3))
    counts: list[Any] = list(np.ones(plan.size, dtype))
    if isinstance(plan.ord, str):
        counts = _counts(plan, leaves, dtype)
    norms = [squares.root_of(n, three) for three, n in zip(sums, counts)]
    if plan.size > 1:
        norms = squares.per_platform(norms, sums, gpu=partial(_at_once, counts))
    if plan.ord == "average":
        # sqrt(sum / N) / sqrt(N) = sqrt(sum) / N
        norms = [norm / n**0.5 for norm, n in zip(norms, counts)]
    return norms


def own_norm(tree: Any) -> jax.Array:
    """The norm of all arrays of a tree, of what a device has of them."""
    leaves = jax.tree.leaves(tree)
    (norm,) = norms_of(Plan((Leaf(0),) * len(leaves), 1), leaves)
    return norm


def _at_once(counts: list[Any], norms: list[Any], sums: list[Sums]) -> list[Any]:
    """The norms again, all numbers by one root of a vector. XLA on a GPU would put the
    root of each into every kernel that takes all norms: a step with AGC took 1.5 times
    as long to compile for an H100 (`python -m benchmarks --only whole_step_compiled`).
    """
    numbers = [number for number, norm in enumerate(norms) if not norm.ndim]
    # Inside shard_map they may differ over different mesh axes.
    if len({jax.typeof(norms[number]) for number in numbers}) == 1:
        stacks = [jnp.stack(x) for x in zip(*(sums[number] for number in numbers))]
        own = jnp.stack([counts[number] for number in numbers])
        found = squares.root_of(own, squares.written_by_a_gpu(stacks))
        for number, norm in zip(numbers, list(found)):
            norms[number] = norm
    return norms


def _counts(plan: Plan, leaves: list[jax.Array], dtype: Any) -> list[Any]:
    """How many numbers each norm sums on all devices, at least 1."""
    counts = [0] * plan.size
    for x, leaf in zip(leaves, plan.leaves):
        summed = range(x.ndim) if leaf.dims is None else leaf.dims
        size = math.prod(x.shape[axis] for axis in summed)
        counts[leaf.norm] += size * mesh.axes_size(leaf.split.summed)
    # A size of jax.export may be a symbol.
    numbers = [(np if isinstance(n, int) else jnp).asarray(n) for n in counts]
    return [n.astype(dtype).clip(1) for n in numbers]


def _joined(
    plan: Plan, terms: list[Any], zeros: Any, *, largest: bool = False
) -> list[Any]:
    """The terms of the leaves of each norm, added up over leaves and devices, or the
    largest. A term is a tuple of arrays, and `zeros` that of no leaf.
    """
    # The parts of a global array are added by XLA.
    is_split = any(leaf.split != Split() for leaf in plan.leaves)
    over: list[tuple[str, ...]] = []
    if is_split:
        terms, over = _for_devices(plan, terms, largest)
    own: list[list[Any]] = [[] for _ in range(plan.size)]
    for term, leaf in zip(terms, plan.leaves):
        own[leaf.norm].append(term)
    norms = [_one(group, largest) if group else zeros for group in own]
    if not is_split:
        return norms
    flat, treedef = jax.tree.flatten(norms)
    names = np.repeat(np.arange(plan.size), len(zeros))
    collective = lax.pmax if largest else lax.psum
    found = mesh.joined(collective, flat, [over[place] for place in names])
    return treedef.unflatten(found)


def _for_devices(
    plan: Plan, terms: list[Any], largest: bool
) -> tuple[list[Any], list[tuple[str, ...]]]:
    """The terms as a collective takes them, and the mesh axes of each norm. All norms
    but those of units are joined over the same ones, at once.
    """
    every: set[str] = set()
    for leaf in plan.leaves:
        if not leaf.units_over:
            every |= {*leaf.split.summed, *leaf.split.kept_names()}
    names = tuple(sorted(every))
    over, found = [names] * plan.size, []
    for term, leaf in zip(terms, plan.leaves):
        split = leaf.split
        if leaf.units_over:
            over[leaf.norm] = tuple(sorted(split.summed))
        elif split.kept:
            term = [mesh.at_own_place(x, split) for x in term]
        if not largest and not leaf.units_over:
            differs = {*split.summed, *split.kept_names()}
            # psum adds a replicated value once for each device. Divided by their number
            # it counts once.
            copies = mesh.axes_size(set(names) - differs)
            term = [x / copies if copies > 1 else x for x in term]
        own = over[leaf.norm]
        found.append([mesh.varying_over(x, own) for x in term])
    return found, over


def _one(terms: list[Any], largest: bool) -> Any:
    """The terms of several leaves together."""
    while len(terms) > 1:
        fewer = []
        for start in range(0, len(terms), TOGETHER):
            some = terms[start : start + TOGETHER]
            # A TPU runs each add of a chain by itself, so numbers are stacked. The
            # barrier keeps XLA from making a chain of the sum of a stack.
            stack = jnp.stack(list(chain.from_iterable(zip(*some))))
            rows = lax.optimization_barrier(stack).reshape(-1, len(some))
            both = jnp.max(rows, 1) if largest else jnp.sum(rows, 1)
            fewer.append(list(both))
        terms = fewer
    return terms[0]


def _largest(plan: Plan, leaves: list[jax.Array], dtype: Any) -> list[Any]:
    pairs = zip(leaves, plan.leaves)
    bits = [(squares.largest_bits(x, leaf.dims, dtype),) for x, leaf in pairs]
    whole = np.int64 if dtype == np.float64 else np.int32
    found = _joined(plan, bits, (jnp.zeros((), whole),), largest=True)
    return [lax.bitcast_convert_type(x, dtype) for (x,) in found]


def _added(plan: Plan, terms: list[jax.Array], dtype: Any) -> list[jax.Array]:
    """Sums of one number for each norm."""
    pairs = [(term,) for term in terms]
    return [x for (x,) in _joined(plan, pairs, (jnp.zeros((), dtype),))]


def _by_shares(plan: Plan, leaves: list[jax.Array], dtype: Any) -> list[Any]:
    """Divides by the largest of each norm first, so that no power leaves the range.
    That is a second read.
    """
    p, safe = float(plan.ord), []
    for largest in _largest(plan, leaves, dtype):
        # 0, NaN and inf are not divided by, and come out of the sum as they are.
        divisible = (largest > 0) & (largest < jnp.inf)
        safe.append(jnp.where(divisible, largest, jnp.ones_like(largest)))
    terms = []
    for x, leaf in zip(leaves, plan.leaves):
        share = divided(jnp.abs(x).astype(dtype), beside(leaf, safe))
        # In [0, 1], and one of them is 1. A power that vanishes is too small to count.
        power = lax.integer_pow(share, int(p)) if p.is_integer() else share**p
        terms.append(plain_sum(power, leaf.dims))
    return [x * n ** (1 / p) for x, n in zip(safe, _added(plan, terms, dtype))]


@norms_of.defjvp
def _derivative(plan: Plan, primals: Any, tangents: Any) -> Any:
    """d norm = sum (|x| / norm)^(p-1) d|x|, by hand: sqrt has no finite derivative at
    0, and squares may overflow.
    """
    (leaves,), (changes,) = primals, tangents
    norms = norms_of(plan, leaves)
    dtype = squares.norm_dtype(leaves)
    whole, counts = norms, list[Any]([1] * plan.size)
    if isinstance(plan.ord, str):
        # norm = (sum |x|^p / n)^(1/p) has 1 / n before the sum. Of an average, which is
        # rms / sqrt(n), it has that twice.
        counts = _counts(plan, leaves, dtype)
    if plan.ord == "average":
        whole = [x * n**0.5 for x, n in zip(norms, counts)]
        counts = [n * n**0.5 for n in counts]
    terms, largest = [], []
    for x, change, leaf in zip(leaves, changes, plan.leaves):
        norm = beside(leaf, whole)
        if plan.ord in OF_SQUARES:
            # |x| d|x| = x dx, which has a second derivative at x = 0 as well.
            term = _slope(x, change, norm)
        else:
            weight = _weight(plan.ord, jnp.abs(x).astype(dtype), norm)
            term = weight * squares.tangent_of_modulus(x, change).astype(dtype)
            largest.append(weight)
        terms.append(jnp.sum(term, leaf.dims, keepdims=leaf.dims is not None))
    if plan.ord == math.inf:
        # A maximum is shared by all elements that are the largest.
        pairs = zip(largest, plan.leaves)
        numbers = _added(plan, [plain_sum(x, leaf.dims) for x, leaf in pairs], dtype)
        # Nothing is the largest where the norm is 0 or NaN: 0 / 1.
        counts = [jnp.maximum(number, 1) for number in numbers]
    moved = _added(plan, terms, dtype)
    return norms, [x / n for x, n in zip(moved, counts)]


def _slope(leaf: jax.Array, change: jax.Array, norm: jax.Array) -> jax.Array:
    """x / norm * dx. Without the modulus, whose derivative at 0 hides that of x."""
    if jnp.iscomplexobj(leaf):
        real = _slope(jnp.real(leaf), jnp.real(change), norm)
        return real + _slope(jnp.imag(leaf), jnp.imag(change), norm)
    # A norm of 0 has only zeros, whose derivative is then 0 / 1.
    unit = divided(leaf.astype(norm.dtype), jnp.where(norm > 0, norm, 1.0))
    return unit * change.astype(norm.dtype)


def _weight(ord: Any, size: jax.Array, norm: jax.Array) -> jax.Array:
    """The derivative of a norm by the moduli of a leaf. Of order inf 1 for each of the
    largest.
    """
    if ord == math.inf:
        # Zeros hit no norm of 0.
        return ((size == norm) & (norm > 0)).astype(size.dtype)
    share = divided(size, jnp.where(norm > 0, norm, 1.0))
    # Two wheres: at 0 a power below 1 does not exist, and the unused branch of a where
    # must stay finite as well.
    power = jnp.where(share > 0, share, 1.0) ** (float(ord) - 1.0)
    return jnp.where(share > 0, power, 0.0)
