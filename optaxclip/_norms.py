"""Norms of pytrees: global, of each tensor, of each unit, of each group.

    order p     (sum |x|^p)^(1/p)         p > 0, None means 2
    order inf   max |x|                   a NaN survives
    "rms"       sqrt(sum |x|^2 / N)
    "average"   sqrt(sum |x|^2) / N       TensorFlow's average norm

They are right for every finite input: no square overflows or is lost. The derivative is
finite everywhere, and 0 at zero.

A measure is a static description of what is measured together. Called on a tree of
clipped leaves it returns `Norms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mesh as mesh
from . import _sums as squares
from . import _trees as trees
from ._checks import check_known, shown
from ._mesh import MeshAxes, Split
from ._sums import Dims, Sums, as_float, divided, plain_sum
from ._trees import Axis, Stacked, clipped_leaves

Ord = float | Literal["rms", "average"] | None
# Terms that are added up at once. Of more a GPU would copy each in a kernel.
TOGETHER = 16
OF_SQUARES = (None, 2, "rms", "average")  # orders whose norm is a root of squares
ORDERS = "a number above 0, math.inf, 'rms' or 'average'"


# ------------------------------------------------------------------- norms of a tree


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


def norm_dtype(leaves: Any) -> Any:
    """The dtype of norms: float32, or float64 if a leaf has 64 bits."""
    # Of complex numbers that of their parts.
    bits = [jnp.finfo(leaf.dtype).bits for leaf in jax.tree.leaves(leaves)]
    return np.dtype(np.float64 if max(bits, default=32) == 64 else np.float32)


# The plan is static: only leaves are traced.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def norms_of(plan: Plan, leaves: list[jax.Array]) -> list[jax.Array]:
    """The norms of a plan. One without leaves is 0."""
    dtype = norm_dtype(leaves)
    if plan.ord == math.inf:
        return _largest(plan, leaves, dtype)
    if plan.ord not in OF_SQUARES:
        return _by_shares(plan, leaves, dtype)
    pairs = zip(leaves, plan.leaves)
    terms = [squares.three_sums(x, leaf.dims, dtype) for x, leaf in pairs]
    sums = _joined(plan, terms, Sums(*[jnp.zeros((), dtype)] * 3))
    counts = _counts(plan, leaves, dtype) if isinstance(plan.ord, str) else []
    if counts:
        # Divided before the root: a mean is finite even where the norm is not.
        sums = [Sums(*(x / n for x in three)) for three, n in zip(sums, counts)]
    norms = [squares.root_of(*three) for three in sums]
    if plan.size > 1:
        norms = squares.per_platform(norms, sums, gpu=_at_once)
    if plan.ord == "average":
        # sqrt(sum / N) / sqrt(N) = sqrt(sum) / N
        norms = [norm / n**0.5 for norm, n in zip(norms, counts)]
    return norms


def own_norm(tree: Any) -> jax.Array:
    """The norm of all arrays of a tree, of what a device has of them."""
    leaves = jax.tree.leaves(tree)
    (norm,) = norms_of(Plan((Leaf(0),) * len(leaves), 1), leaves)
    return norm


def _at_once(norms: list[Any], sums: list[Sums]) -> list[Any]:
    """The norms again, all numbers by one root of a vector. XLA on a GPU would put the
    root of each into every kernel that takes all norms: a step with AGC took 1.5 times
    as long to compile for an H100 (`python -m benchmarks --only whole_step_compiled`).
    """
    numbers = [number for number, norm in enumerate(norms) if not norm.ndim]
    # Inside shard_map they may differ over different mesh axes.
    if len({jax.typeof(norms[number]) for number in numbers}) == 1:
        stacks = [jnp.stack(x) for x in zip(*(sums[number] for number in numbers))]
        found = squares.root_of(*squares.written_by_a_gpu(stacks))
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
    numbers = [np if isinstance(n, int) else jnp for n in counts]
    pairs = zip(numbers, counts)
    return [kind.asarray(n).astype(dtype).clip(1) for kind, n in pairs]


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
    dtype = norm_dtype(leaves)
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


# -------------------------------------------------------------------------- measures


class Measure(Protocol):
    """What is measured together. Hashable, so that equal clippers share a program."""

    def __call__(self, tree: Any) -> Norms: ...


class GlobalNorm(NamedTuple):
    """One norm for all leaves together."""

    call: str = "global_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        leaves = list(map(jnp.asarray, jax.tree.leaves(tree)))
        splits = mesh.splits(self.mesh_axes, tree, [None] * len(leaves), self.call)
        found = tuple(Leaf(0, None, split) for split in splits)
        each = norms_of(Plan(found, 1, self.ord), leaves)
        # The empty path: its name is "".
        return Norms(each, found, ((),), jax.tree.structure(0))


class TensorNorm(NamedTuple):
    """One norm for each leaf, or for each layer of a stacked leaf."""

    call: str = "tensor_norm"
    ord: Ord = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        dims: list[Dims] = []
        # Layers keep their axes, and all others are summed: one norm for each layer.
        for axes, leaf in zip(_layers(self, tree), jax.tree.leaves(tree)):
            dims.append(trees.other_axes(axes, jnp.ndim(leaf)) if axes else None)
        return _norm_of_each_leaf(tree, dims, self, units=False)


class UnitwiseNorm(NamedTuple):
    """One norm for each unit: the weights that feed one output."""

    call: str = "unitwise_norm"
    ord: Ord = None
    axis: Any = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        shapes = mesh.whole_shapes(self.mesh_axes, tree, self.call)
        dims = trees.unit_axes(self.axis, _layers(self, tree), tree, self.call, shapes)
        return _norm_of_each_leaf(tree, dims, self, units=True)


class GroupNorm(NamedTuple):
    """One norm for all leaves that carry a label."""

    labels: Any  # a frozen tree prefix of labels, or a function that makes one
    call: str = "group_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"
    allow_missing: bool = False  # whether a label may have no leaf

    def __call__(self, tree: Any) -> Norms:
        leaves = list(map(jnp.asarray, jax.tree.leaves(tree)))
        missing = self.allow_missing
        argument = f"{self.call}: labels"
        # A function is called in each trace, so its labels may follow the tree.
        table = trees.static_labels(trees.labels_of(self.labels, tree), self.call)
        labels = trees.lookup(table, tree, argument, allow_missing=missing)
        trees.check_labels(f"{argument} must be", set(labels))
        splits = mesh.splits(self.mesh_axes, tree, [None] * len(leaves), self.call)
        # A label whose leaves are None or integers has a norm as well, which is 0.
        known = set(labels)
        if isinstance(self.labels, trees.Prefix):
            known |= {label for _, label in self.labels.entries}
        # The order in which JAX flattens a dict: 2 before 10.
        order = sorted(known)
        pairs = zip(labels, splits)
        found = tuple(Leaf(order.index(x), None, split) for x, split in pairs)
        each = norms_of(Plan(found, len(order), self.ord), leaves)
        # The name of a norm is its label.
        paths = tuple((jax.tree_util.DictKey(label),) for label in order)
        treedef = jax.tree.structure(dict.fromkeys(order, 0))
        return Norms(each, found, paths, treedef, (), "label", missing)


class OwnNorm(NamedTuple):
    """A norm function of the user's: from a tree to a tree prefix of norms."""

    norm: Callable[[Any], Any]
    call: str = "clip_by"

    def __call__(self, tree: Any) -> Norms:
        # Such as a Python number, or an integer, whose dtype holds no limit of 1.5.
        norms = jax.tree.map(as_float, self.norm(tree))
        return norms_of_tree(norms, tree, f"{self.call}: what norm returns")


# Jitted, so that the first update finds what `init` has traced. Inlined, since a call
# in its place is another program to XLA.
@partial(jax.jit, static_argnums=0, inline=True)
def measured(measure: Measure, tree: Any) -> Norms:
    """The norms of a tree."""
    return measure(tree)


def types_of(function: Callable[..., Any], *args: Any) -> Any:
    """The types of what a function returns.

    `jax.eval_shape` drops the shardings of a mesh that has both Explicit and Auto axes,
    as seen in JAX 0.10.2.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), program.out_avals)


def types_of_norms(measure: Any, tree: Any) -> Norms:
    """The types of the norms of a tree, before the first step."""
    # A state is often made outside the shard_map that it goes into, where no mesh axis
    # has a name. Norms of the user's, and the spectral norm, take no mesh axes.
    names = getattr(measure, "mesh_axes", None)
    is_free = isinstance(names, trees.Prefix) or names in ("auto", None)
    if not is_free and not mesh.manual_axes():
        measure = measure._replace(mesh_axes=None)
    return types_of(partial(measured, measure), tree)


def norms_of_tree(norms: Any, tree: Any, argument: str = "norms") -> Norms:
    """Norms that are given as a tree prefix of the updates.

    Raises:
      ValueError: norms that are no tree prefix of the updates.
    """
    # None as a norm leaves its part of the tree alone.
    flat, treedef = jax.tree.flatten(norms, is_leaf=trees.is_none)
    try:
        parts = treedef.flatten_up_to(tree)
    except (TypeError, ValueError):
        raise ValueError(
            f"{argument} must be a tree prefix of the updates, "
            f"{jax.tree.structure(tree)}, got {treedef}."
        ) from None
    leaves, number = [], 0
    for norm, part in zip(flat, parts):
        own = None if norm is None else number
        leaves += [Leaf(own)] * len(jax.tree.leaves(part))
        number += norm is not None
    entries, treedef = jax.tree.flatten_with_path(norms)
    paths = tuple(path for path, _ in entries)
    return Norms([norm for _, norm in entries], tuple(leaves), paths, treedef)


def norm_of_norms(norms: Norms) -> jax.Array:
    """The norm of all norms together, without a derivative."""
    leaves = [Leaf(0)] * len(norms.each)
    # Each device has the norms of its own units. All others are those of everything.
    for leaf in norms.leaves:
        if leaf.units_over:
            leaves[leaf.norm] = Leaf(0, None, Split(leaf.units_over))
    (total,) = norms_of(Plan(tuple(leaves), 1), norms.each)
    return lax.stop_gradient(total)


def _layers(measure: Any, tree: Any) -> list[tuple[int, ...]]:
    # Nothing is stacked: the common case, which looks at no leaf.
    if measure.stacked is None:
        return [()] * len(jax.tree.leaves(tree))
    # Inside shard_map a program sees the shapes of its device's parts.
    shapes = mesh.whole_shapes(measure.mesh_axes, tree, measure.call)
    return trees.stacked_axes(measure.stacked, tree, measure.call, shapes)


def _norm_of_each_leaf(
    tree: Any, dims: list[Dims], measure: Any, *, units: bool
) -> Norms:
    entries, treedef = jax.tree.flatten_with_path(tree)
    splits = mesh.splits(measure.mesh_axes, tree, dims, measure.call)
    leaves, of_units = [], []
    for number, (over, split) in enumerate(zip(dims, splits)):
        leaf = Leaf(number, over, split)
        # A vector that is taken whole has a number.
        if units and over is not None:
            of_units.append(number)
            leaf = Leaf(number, over, Split(split.summed), split.kept_names())
        leaves.append(leaf)
    plan = Plan(tuple(leaves), len(leaves), measure.ord)
    each = norms_of(plan, [jnp.asarray(leaf) for _, leaf in entries])
    paths = tuple(path for path, _ in entries)
    return Norms(each, plan.leaves, paths, treedef, tuple(of_units))


def check_measure(call: str, ord: Any, **numbers: Any) -> dict[str, Any]:
    """The options of a measure, checked and hashable.

    `numbers` are `mesh_axes`, and `axis`, `stacked` or `labels` where it has them.
    """
    options: dict[str, Any] = {"call": call, "ord": ord}
    for option, value in numbers.items():
        # Lists and dicts become tables of key paths, which have a hash.
        if option == "mesh_axes":
            # A name has a hash, and so has "auto".
            is_name = isinstance(value, str)
            value = value if is_name else mesh.static_axes(value, call)
        elif option == "labels":
            value = trees.static_labels(value, call)
        elif value is not None:
            value = trees.static_numbers(option, value, call)
        options[option] = value
    if ord in (None, "rms", "average"):
        return options
    # The order decides which program is compiled, so a traced one comes too late.
    check_known(f"{call}: ord", ord)
    is_number = isinstance(ord, (int, float, np.number, jax.Array))
    try:
        # True is an int in Python. As an order it is a slip.
        known = float(ord) if is_number and ord is not True else math.nan
    except (TypeError, OverflowError):  # an array, or 10**400
        known = math.nan
    if math.isnan(known) or known <= 0:
        raise ValueError(f"{call}: ord must be {ORDERS}, got {shown(ord)}.")
    # Static arguments must be hashable.
    if isinstance(ord, (np.number, jax.Array)):
        options["ord"] = known
    return options


# ------------------------------------------------------------------- public functions


def global_norm(tree: Any, *, ord: Ord = None, mesh_axes: MeshAxes = "auto") -> Any:
    """Returns the norm of all leaves together: (sum |x|^p)^(1/p).

    Complex values count by modulus. Integer, bool and float0 leaves, leaves without
    elements, None and `MaskedNode` do not count.

    Args:
      tree: a pytree of arrays.
      ord: the order p: a number above 0, `math.inf`, "rms" or "average". None means 2.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits). 0 for an empty tree.

    Raises:
      ValueError: an order that is not above 0, or a mesh axis that is not bound.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 2.0])}
      >>> print(optaxclip.global_norm(grads))
      5.477226
    """
    measure = GlobalNorm(**check_measure("global_norm", ord), mesh_axes=mesh_axes)
    return measure(clipped_leaves(tree)).each[0]


def tensor_norm(
    tree: Any, *, ord: Ord = None, stacked: Stacked = None, mesh_axes: MeshAxes = "auto"
) -> Any:
    """Returns the norm of each leaf: (sum |x|^p)^(1/p).

    Args:
      tree: a pytree of arrays.
      ord: the order p: a number above 0, `math.inf`, "rms" or "average". None means 2.
      stacked: which axes of a leaf count layers and are not part of one tensor. 1 is
        the leading axis, as `lax.scan` and `jax.vmap` stack layers, and 2 the two
        leading ones, such as layers and experts. A tuple names axes by position: (1,)
        is axis 1, as MaxText and T5X stack, and (-2,) the last but one. Also a tree
        prefix of these, with None for leaves that are not stacked, or a function of the
        leaf's path ("blocks/w") and the leaf. Leaves that share one value must have the
        same number of layers.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which stacked leaves that are split need.

    Returns:
      A tree of the same structure: a scalar for each leaf (for stacked leaves an array
      with size 1 on all axes but those of layers), None for a leaf that does not count.

    Raises:
      ValueError: an order that is not above 0, a mesh axis that is not bound, an axis
        in `stacked` that a leaf does not have, or leaves of one stack with different
        numbers of layers.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 0.0])}
      >>> print(optaxclip.tensor_norm(grads)["w"])
      5.0
    """
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    measure = TensorNorm(**check_measure("tensor_norm", ord), **numbers)
    # Leaves that do not count are None here, and so in the tree of norms.
    return measure(clipped_leaves(tree)).tree()


def unitwise_norm(
    tree: Any,
    *,
    axis: Axis = None,
    ord: Ord = None,
    stacked: Stacked = None,
    mesh_axes: MeshAxes = "auto",
) -> Any:
    """Returns the norm of each unit: of the weights that feed one output.

    Args:
      tree: a pytree of arrays.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a
        function of path and leaf. None chooses by shape, for kernels whose last axis is
        the output: all axes where at most one is longer than 1, otherwise those before
        the last (axis 0 alone at rank 3). In stacked leaves axes count within one
        layer.
      ord: the order: a number above 0, `math.inf`, "rms" or "average". None means 2.
      stacked: which axes of a leaf count layers: 1 for the leading axis, 2 for the two
        leading ones, (1,) for axis 1, a tree prefix of these, or a function of path and
        leaf.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which all leaves that are split need but
        vectors.

    Returns:
      A tree of the same structure, with the summed axes kept at size 1 (a scalar for a
      vector that is taken whole).

    Raises:
      ValueError: an order that is not above 0, an axis that a leaf does not have, a
        rank above 5 without `axis`, or a mesh axis that is not bound.

    Example:
      >>> print(optaxclip.unitwise_norm(jnp.array([[3.0, 1.0], [4.0, 0.0]])))
      [[5. 1.]]

    Reference: Brock et al., High-performance large-scale image recognition without
    normalization, 2021 (arXiv 2102.06171).
    """
    numbers = {"axis": axis, "stacked": stacked, "mesh_axes": mesh_axes}
    measure = UnitwiseNorm(**check_measure("unitwise_norm", ord), **numbers)
    return measure(clipped_leaves(tree)).tree()


def group_norm(
    tree: Any, labels: Any, *, ord: Ord = None, mesh_axes: MeshAxes = "auto"
) -> dict[Any, jax.Array]:
    """Returns one norm for each label, over all leaves that carry it.

    Args:
      tree: a pytree of arrays.
      labels: a tree prefix of labels, a function that makes one from the tree, as in
        `optax.partition`, or a function of a leaf's path ("blocks/w") and the leaf.
      ord: the order: a number above 0, `math.inf`, "rms" or "average". None means 2.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec.

    Returns:
      A dict from label to scalar.

    Raises:
      ValueError: an order that is not above 0, a leaf without a label, or a mesh axis
        that is not bound.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 0.0])}
      >>> norms = optaxclip.group_norm(grads, {"w": "matrix", "b": "vector"})
      >>> print(norms["matrix"], norms["vector"])
      5.0 1.0
    """
    # Leaves that do not count have labels too, whose norm may then be 0.
    found = trees.labels_of(labels, trees.unboxed(tree))
    options = check_measure("group_norm", ord, labels=found)
    return GroupNorm(**options, mesh_axes=mesh_axes)(clipped_leaves(tree)).tree()
