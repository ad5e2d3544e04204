"""Clipping of singular values. Each matrix keeps its singular vectors:

    X = U S V^H    ->    U shrink(S, c) V^H

    hard         min(s, c)                    the nearest matrix of spectral norm c
    smooth(2)    s / sqrt(1 + s^2 / c^2)      SPECTRA's
    normalize    c                            all directions alike, as Muon does

One rank-one part of a gradient, such as that of a single mislabelled batch, is cut down
while the others stay as they are. Scaling the whole matrix would shorten all of them.

    svd              any shrink, as exact as the singular value decomposition, which is
                     slow on accelerators
    newton_schulz    hard and smooth(2), by matrix products alone

Leaves of one type and shape are stacked. So a program has one decomposition, or the
products of one matrix, for each shape, however many leaves there are.

Reference: Jiang, Semenov, Stich, SPECTRA, 2026 (arXiv 2603.14315). Yukhimchuk et al.,
2026 (arXiv 2605.11838), for the hard form of gradients.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .. import _trees as trees
from .._checks import Nonfinite, check_choice, check_known, check_length, shown
from .._kernel import make_clipper
from .._mesh import resharded, split_as
from .._norms import TensorNorm, static_numbers
from .._plan import Leaf, Norms
from .._state import ClipState
from .._sums import wide_dtype
from .._trees import Stacked, clipped_leaves, other_axes, put_back
from ..rules._limits import LimitTree
from ..rules._memory import root
from ..shrinks import Shrink, hard, shrink_of, smooth

Method = Literal["svd", "newton_schulz"]


def clip_by_spectral_norm(
    max_norm: LimitTree,
    *,
    shrink: Shrink | None = None,
    method: Method = "svd",
    steps: int | None = None,
    columns: Any = None,
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Clips the singular values of each matrix: U S V^H -> U min(S, max_norm) V^H.

    The singular vectors are kept.

    | spectral norm, limit      | updates become                                      |
    |---------------------------|-----------------------------------------------------|
    | limit 0                   | zeros                                               |
    | limit None or inf         | bit for bit the input                               |
    | norm at most the limit    | with `hard` bit for bit the input                   |
    | norm NaN or inf           | all NaN in this leaf (nonfinite="propagate")        |
    | leaf is a vector, scalar  | clipped by L2 norm, which is its spectral norm      |

    Computed in float32 (float64 for 64-bit leaves) and rounded once to the leaf's
    dtype, which may add its eps / 2 times the Frobenius norm. The largest errors that
    were measured in float32, as spectral norms divided by the limit, over spectra with
    gaps, ties and even spacing up to 256 x 1024:

        s_max / limit              10       1e3      1e4      1e6
        "svd"                      1e-5     2e-3     2e-2     1
        "newton_schulz"            4e-6     2e-4     2e-3     0.2      24 steps
        norm of the result         at most limit * (1 + 3e-6) for all of these

    They grow as eps * s_max, like those of every decomposition in float32. That of
    "svd" is LAPACK's, 16 eps of the largest singular value.

    Leaves of one type and shape are clipped as one stack. So compile time grows with
    the number of different shapes, and memory holds copies of a whole stack. For each
    shape of GPT-2 small XLA takes about a second of one core on a CPU or for an H100.
    For a TPU v5e it takes 80 with "newton_schulz", and 180 with "svd".

    Args:
      max_norm: a number at least 0, an array, a schedule, None to only measure, a rule
        of `optaxclip.rules` that learns from the largest singular value of each matrix,
        or a tree prefix of these.
      shrink: what each singular value becomes, of `optaxclip.shrinks`. None is `hard`.
        "newton_schulz" knows `hard` and `smooth(2)`.
      method: "svd" or "newton_schulz". Only "newton_schulz" has a derivative where
        singular values are equal. The derivative of that is right for `smooth(2)` only.
      steps: of Newton-Schulz, at least 1. None means 24, and 48 for 64-bit leaves. k
        steps resolve s_max / limit up to about 2.4^(k - 5). With fewer, singular values
        below the limit come out too small, never too large.
      columns: how many trailing axes of a leaf are the columns of its matrix. All
        others are its rows. None means 1, for kernels whose last axis is the output,
        convolutions too. 2 is for attention's (embed, heads, size). An int, a tree
        prefix of ints, or a function of the leaf's path and the leaf.
      stacked: which axes of a leaf count layers, each of which is a matrix: 1 for the
        leading axis, 2 for the two leading ones, (1,) for axis 1, a tree prefix of
        these, or a function of path and leaf.
      nonfinite: what becomes of a leaf whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it zero, "raise" raises FloatingPointError outside jit and is
        a `checkify.check` inside.

    Returns:
      A transformation with a `ClipState`, read by `metrics`. Its norms are spectral
      norms, and its factors are those of the largest singular value. Inside shard_map
      every device must hold whole matrices.

    Raises:
      ValueError: a negative or NaN limit, an unknown method, a shrink that the method
        does not know, fewer than 1 step, or a number of columns that a leaf does not
        have.
      TypeError: a limit or a number of steps that is not a number.

    Example:
      >>> grads = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
      >>> for method in ("svd", "newton_schulz"):
      ...     clipper = optaxclip.clip_by_spectral_norm(1.0, method=method)
      ...     updates, state = clipper.update(grads, clipper.init(grads))
      ...     print(f"{state.norm:.4f} {updates[0, 0]:.4f} {updates[1, 1]:.4f}")
      3.0000 1.0000 0.5000
      3.0000 1.0000 0.5000

    Reference: Jiang, Semenov, Stich, SPECTRA, 2026 (arXiv 2603.14315). Yukhimchuk et
    al., 2026 (arXiv 2605.11838).
    """
    call = "clip_by_spectral_norm"
    shrink = shrink_of(shrink, call)
    measure = _norm(call, method, columns, stacked)
    if steps is not None:
        check_known(f"{call}: steps", steps)
        check_length(f"{call}: steps", steps)
        steps = int(steps)
    # `smooth(2)` is cached, so it is the same function each time.
    if method == "newton_schulz" and shrink not in (hard, smooth(2)):
        raise ValueError(
            f"{call}: method='newton_schulz' knows the shrinks hard and smooth(2), got "
            f"{shown(shrink)}: take method='svd'."
        )
    options: Any = {"call": call, "name": "max_norm", "nonfinite": nonfinite}
    kernel = make_clipper(measure, max_norm, shrink=shrink, **options)

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        tree = clipped_leaves(updates, call)
        # A norm from elsewhere may be below the singular values.
        given.pop("grad_norm", None)
        # The kernel finds norms and limits, counts, and scales. With that vectors,
        # broken steps, and limits of 0 and inf are done.
        scaled, new = kernel.update(tree, state, params, **given)
        clipped = _clipped((measure, shrink, steps), tree, scaled, new)
        return put_back(clipped, updates), new

    return optax.GradientTransformationExtraArgs(kernel.init, update)


def spectral_norm(
    tree: Any, *, columns: Any = None, stacked: Stacked = None, method: Method = "svd"
) -> Any:
    """Returns the largest singular value of each leaf.

    Args:
      tree: a pytree of arrays.
      columns: how many trailing axes of a leaf are the columns of its matrix. All
        others are its rows. None means 1, for kernels whose last axis is the output. An
        int, a tree prefix of ints, or a function of the leaf's path and the leaf.
      stacked: which axes of a leaf count layers, each of which is a matrix: 1 for the
        leading axis, 2 for the two leading ones, (1,) for axis 1, a tree prefix of
        these, or a function of path and leaf.
      method: "svd", or "newton_schulz" for matrix products alone. That is within 4e-6
        of it, relatively, and up to m^(1 / 2^18) less where m singular values almost
        tie. Its second derivatives are not those of the norm.

    Returns:
      A tree of the same structure: a scalar for each leaf (for stacked leaves an array
      with size 1 on all axes but those of layers), None for a leaf that does not count.

    Raises:
      ValueError: an unknown method, or a number of columns that a leaf does not have.

    Example:
      >>> print(optaxclip.spectral_norm(jnp.array([[3.0, 0.0], [4.0, 0.0]])))
      5.0
    """
    measure = _norm("spectral_norm", method, columns, stacked)
    return measure(clipped_leaves(tree, "spectral_norm")).tree()


def _norm(call: str, method: str, columns: Any, stacked: Any) -> SpectralNorm:
    check_choice(f"{call}: method", method, get_args(Method))
    columns = static_numbers("columns", columns, call)
    stacked = static_numbers("stacked", stacked, call)
    return SpectralNorm(call, method, columns, stacked)


class SpectralNorm(NamedTuple):
    """The largest singular value of each leaf, or of each layer of a stacked leaf.

    Hashable, so that it can be a static argument.
    """

    call: str
    method: str
    columns: Any
    stacked: Any

    @partial(jax.jit, static_argnums=0)
    def __call__(self, tree: Any) -> Norms:
        leaves, groups = jax.tree.leaves(tree), self.groups(tree)
        # That of a vector is its L2 norm. Devices may hold different layers.
        axes = "auto" if self.stacked is None else None
        lengths = TensorNorm(stacked=self.stacked, mesh_axes=axes)(tree)
        norms = lengths.on_device()
        for group, numbers in groups.items():
            x = group.matrices([leaves[number] for number in numbers])
            peak = jnp.max(jnp.abs(x), (-2, -1), keepdims=True)
            x, unit = _divided(x, peak)
            if self.method == "svd":
                largest = jnp.linalg.svd(x, compute_uv=False)[..., :1, None]
            else:
                largest = largest_of(x)
            found = jnp.where(jnp.isfinite(peak), largest * unit, peak)
            for number, norm in zip(numbers, found):
                like = norms[number]
                norms[number] = norm.reshape(like.shape).astype(like.dtype)
        # Each device holds whole matrices: no norm is split over devices.
        whole = tuple(Leaf(number) for number in range(len(norms)))
        return lengths._replace(values=norms, leaves=whole)

    def groups(self, tree: Any) -> dict[Group, list[int]]:
        """The numbers of the leaves that are matrices, by how they are."""
        entries = jax.tree.leaves_with_path(tree)
        shapes = [jnp.shape(leaf) for _, leaf in entries]
        layers = trees.stacked_axes(self.stacked, tree, self.call, shapes)
        counts = trees.for_each_leaf(self.columns, tree, f"{self.call}: columns")
        groups: dict[Group, list[int]] = {}
        for number, (path, leaf) in enumerate(entries):
            shape, count = shapes[number], counts[number]
            inside = other_axes(layers[number], len(shape))
            rank = len(inside)
            if rank < 2:
                continue
            count = 1 if count is None else count
            if count not in range(1, rank):
                raise ValueError(
                    f"{self.call}: columns must be from 1 to {rank - 1} for the leaf "
                    f"{trees.name(path)!r} of shape {shape}, got {shown(count)}."
                )
            rows = math.prod(shape[axis] for axis in inside[:-count])
            columns = math.prod(shape[axis] for axis in inside[-count:])
            # A row or a column is a vector.
            if min(rows, columns) > 1:
                group = Group(jax.typeof(leaf), layers[number], rows, columns)
                groups.setdefault(group, []).append(number)
        return groups


class Group(NamedTuple):
    """Leaves of one type that are matrices in one way. They are one array."""

    kind: Any  # their type
    layers: tuple[int, ...]  # the axes that count layers
    rows: int
    columns: int

    def matrices(self, leaves: list[jax.Array]) -> jax.Array:
        """Matrices [leaves, *layers, rows, columns], in at least float32, transposed to
        have as many rows as columns or more.

        An Explicit mesh may split layers, but no matrix.
        """
        count, found = len(self.layers), []
        for leaf in leaves:
            x = jnp.moveaxis(leaf, self.layers, range(count))
            x = resharded(x, jax.typeof(x).sharding.spec[:count])
            found.append(x.reshape(*x.shape[:count], self.rows, self.columns))
        x = jnp.stack(found).astype(wide_dtype(found[0]))
        return adjoint(x) if self.rows < self.columns else x

    def leaf(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Matrices [*layers, rows, columns] as a leaf, typed like another."""
        x = adjoint(x) if self.rows < self.columns else x
        inside = other_axes(self.layers, like.ndim)
        sizes = [like.shape[axis] for axis in (*self.layers, *inside)]
        x = jnp.moveaxis(x.reshape(sizes), range(len(self.layers)), self.layers)
        return split_as(x.astype(like.dtype), jax.typeof(like))


# Jitted at module level, so that clippers with equal settings share a program.
@partial(jax.jit, static_argnums=0)
def _clipped(settings: Any, tree: Any, scaled: Any, state: ClipState) -> Any:
    """The tree with shrunk singular values. `scaled` is what the kernel returned."""
    measure, shrink, steps = settings
    entries = jax.tree.leaves_with_path(tree)
    by_name = state.by_name()
    names = trees.names([path for path, _ in entries], by_name)
    leaves, treedef = jax.tree.flatten(scaled)
    for group, numbers in measure.groups(tree).items():
        x = group.matrices([entries[number][1] for number in numbers])
        own = [by_name[names[number]] for number in numbers]
        # The norms and limits that the kernel found, [leaves, *layers, 1, 1].
        sizes = *x.shape[:-2], 1, 1
        norm = jnp.stack([entry.norm for entry in own]).reshape(sizes)
        limit = jnp.stack([entry.limit for entry in own]).reshape(sizes)
        x, unit = _divided(x, norm)
        usual = jnp.isfinite(norm) & jnp.isfinite(limit) & (norm > 0)
        norm = jnp.where(usual, norm, 1.0).astype(x.real.dtype)
        limit = jnp.where(usual, limit, 1.0).astype(x.real.dtype)
        if measure.method == "svd":
            u, s, v = jnp.linalg.svd(x, full_matrices=False)
            long = s[..., None, :] * unit
            short = shrink(long, jnp.broadcast_to(limit, long.shape))
            new = product(u * short, v)
        else:
            shares = limit / unit, norm / unit
            new = unit * shrunk_by_products(x, *shares, steps, is_hard=shrink is hard)
        # With `hard` a matrix within its limit keeps its bits.
        changed = usual & (norm > limit) if shrink is hard else usual
        known = group.matrices([leaves[number] for number in numbers])
        new = jnp.where(changed, new, known)
        for number, matrix in zip(numbers, new):
            leaves[number] = group.leaf(matrix, leaves[number])
    return treedef.unflatten(leaves)


def _divided(x: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Matrices over a power of 2 near their size, so that squares do not overflow, and
    this power. Those whose size is NaN or inf become zeros.
    """
    size = lax.stop_gradient(size).astype(x.real.dtype)
    finite = jnp.isfinite(size)
    # Powers of 2 round nothing. 2^126 is not one of them: XLA multiplies with its
    # reciprocal, which is flushed to 0.
    exponent = jnp.floor(jnp.log2(jnp.where(finite & (size > 0), size, 1.0)))
    # 125 of float32, whose numbers end at 2^128.
    most = int(jnp.finfo(x.dtype).maxexp) - 3
    unit = jnp.exp2(jnp.clip(exponent, -most, most))
    return jnp.where(finite, x / unit, jnp.zeros_like(x)), unit


# ------------------------------------------- singular values by matrix products alone
#
# The clipped matrices, by a hard or a smooth shrink, and the largest singular values.
#
# Both shrinks use the polar factor [Z; B] of a matrix with more rows than columns:
#
#     [cI; X]     = [Z; B] (X^H X + c^2 I)^(1/2)
#     B           has the singular values b = s / sqrt(s^2 + c^2)
#     Z           has the singular values z = c / sqrt(s^2 + c^2)
#
#     smooth(2)   c B = X (I + X^H X / c^2)^(-1/2)
#     hard        the singular values c b / max(b, z), where
#                 max(b, z)^2 = (1 + |1 - 2 z^2|) / 2, with |A| = A sign(A)
#
# The singular values of [cI; X] are at least c, so the iteration knows where to begin.
# Accuracy is lost with s_max / c. A root of the Gram matrix loses it with the square.
#
# All functions take matrices [..., rows, columns] with at least as many rows as
# columns, and numbers [..., 1, 1] for each of them.
#
# Reference: F. L. Cesista, Numerically stable spectral clipping via Newton-Schulz,
# 2025, for sign iterations. Chen, Chow, A stable scaling of Newton-Schulz for improving
# the sign function computation of a Hermitian matrix, 2014, for the scaling.

# The Gram matrix is raised to the power 2^17. Where m singular values almost tie, the
# largest is underestimated by m^(1 / 2^18).
SQUARINGS = 17
# By the bytes of a real number: as many as turn eps into 1, and some more.
STEPS = {4: 24, 8: 48}


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, whose factors are not rounded."""
    # By default accelerators round float32 factors to bfloat16 or TF32.
    return jnp.matmul(a, b, precision="highest")


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def largest_of(x: jax.Array) -> jax.Array:
    """The largest singular value of each matrix, [..., 1, 1]."""
    gram = product(adjoint(x), x)

    def square(_: int, power: jax.Array) -> jax.Array:
        power = product(power, power)
        trace = jnp.real(jnp.trace(power, axis1=-2, axis2=-1))[..., None, None]
        # Zeros stay zeros.
        return power / jnp.where(trace > 0, trace, 1.0)

    power = lax.fori_loop(0, SQUARINGS, square, lax.stop_gradient(gram))
    # A mean of the squared singular values in which the largest outweighs all others.
    # It is never above the largest.
    products = jnp.real(jnp.conj(power) * gram)
    mean = jnp.sum(products, (-2, -1), keepdims=True)
    return root(mean)


def shrunk_by_products(
    x: jax.Array, limit: Any, norm: Any, steps: int | None, *, is_hard: bool
) -> jax.Array:
    """Matrices with their singular values shrunk, by `hard` or by `smooth(2)`.

    `norm` is the largest of them. `steps` None is as many as the dtype needs.
    """
    # Above all singular values, also where `largest_of` underestimates them.
    bound = 1.001 * lax.stop_gradient(norm)
    steps = steps or STEPS[x.real.dtype.itemsize]
    # From 2^13 bound on nothing is shortened in float32, and [cI; X] would lose X.
    limit = jnp.minimum(limit, 2.0**13 * bound)
    highest = jnp.sqrt(bound**2 + limit**2)
    # Split as x is, on an Explicit mesh that splits layers.
    above = split_as(limit * _eye(x), jax.typeof(x))
    zx = jnp.concatenate([above, x], -2) / highest
    polar = _polar(zx, limit / highest, steps)
    columns = x.shape[-1]
    z, b = polar[..., :columns, :], polar[..., columns:, :]
    if is_hard:
        b = product(b, _inverse_of_largest(z, steps))
    return limit * b


def _inverse_of_largest(z: jax.Array, steps: int) -> jax.Array:
    """max(b, z)^-1 for Hermitian Z, where b^2 = 1 - z^2."""
    eye = _eye(z)
    difference = eye - 2 * product(z, adjoint(z))
    absolute = product(difference, _polar(difference, jnp.finfo(z.dtype).eps, steps))
    square = 0.5 * (eye + absolute)

    # The inverse root of what has eigenvalues in [1/2, 1]. Its error 1 - square y^2 is
    # 1/2 for y = 1, then 0.22, 0.04, 1e-3, 1e-6, 1e-12.
    def step(_: int, y: jax.Array) -> jax.Array:
        return 0.5 * product(y, 3 * eye - product(square, product(y, y)))

    inverse = lax.fori_loop(0, 4, step, 0.5 * (3 * eye - square))
    # What is not in reach of the steps counts as less than |1 - 2 z^2|, down to 0.
    return inverse / math.sqrt(1 + _in_reach(steps))


def _polar(x: jax.Array, lowest: Any, steps: int) -> jax.Array:
    """Turns every singular value in [lowest, 1] into 1, by the iteration
    x <- r x (3 - r^2 x^2) / 2. For a Hermitian matrix this is the sign.

    Singular values that are too small for so many steps come out below 1.
    """

    def step(carry: Any, _: None) -> Any:
        x, lowest = carry
        # The r that raises the lowest most. Near lowest = 0 it would send 1 to 0, and
        # 1 + eps below 0, so it is taken for 0.1 at least.
        low = jnp.maximum(lowest, 0.1)
        r = jnp.sqrt(3 / (1 + low + low**2))
        lowest = 0.5 * r * lowest * (3 - (r * lowest) ** 2)
        factor = 0.5 * r * (3 * _eye(x) - r**2 * product(adjoint(x), x))
        return (product(x, factor), lowest), None

    # For a lower one the iteration would not come to rest in time, and large singular
    # values would end anywhere.
    lowest = jnp.maximum(lax.stop_gradient(lowest), _in_reach(steps))
    return lax.scan(step, (x, lowest), length=steps)[0][0]


def _in_reach(steps: int) -> float:
    """The lowest singular value that so many steps turn into 1, to 4 eps of float64."""
    # Each multiplies small ones by 2.466, and the last four are for those near 1.
    return min(1.0, 2.46 ** (4.1 - steps))


def _eye(x: jax.Array) -> jax.Array:
    """An identity with as many columns and dimensions, for each matrix the same."""
    eye = jnp.eye(x.shape[-1], dtype=x.dtype)
    return jnp.expand_dims(eye, range(x.ndim - 2))
