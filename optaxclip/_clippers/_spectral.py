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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.core import ShapedArray
from jax.typing import ArrayLike

from .. import _trees as trees
from .._axes import ByPath, Stacked, other_axes, stacked_axes
from .._checks import Nonfinite, check_choice, check_known, check_length, shown
from .._kernel import make_clipper
from .._mesh_types import resharded, resharded_as
from .._moduli import wide_dtype
from .._norms import Norms, TensorNorm
from .._options import static_axes
from .._prefixes import for_each_leaf
from .._reduce import LeafSpec
from .._state import ClipState
from .._trees import PyTree, clipped_leaves, put_back
from ..rules._limits import LimitTree
from ..rules._memory import root
from ..shrinks import Shrink, hard, shrink_of, smooth

Method = Literal["svd", "newton_schulz"]
# An int, a tree prefix of ints, or a function of path and leaf.
Columns: TypeAlias = "int | Mapping[Any, Columns] | Sequence[Columns] | ByPath | None"


def clip_by_spectral_norm(
    max_norm: LimitTree,
    *,
    shrink: Shrink | None = None,
    method: Method = "svd",
    steps: int | None = None,
    columns: Columns = None,
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

    They grow as eps * s_max, like those of every decomposition in float32. The error
    of "svd" is LAPACK's, 16 eps of the largest singular value.

    Leaves of one type and shape are clipped as one stack. So compile time grows with
    the number of different shapes, and memory holds copies of a whole stack. For each
    shape of GPT-2 small XLA takes about a second of one core on a CPU or for an H100.
    For a TPU v5e it takes 80 with "newton_schulz", and 180 with "svd".

    Args:
      max_norm: a number at least 0, an array, a schedule, None to only measure, a rule
        of `optaxclip.rules` that learns from the largest singular value of each matrix,
        or a tree prefix of numbers and schedules.
      shrink: what each singular value becomes, of `optaxclip.shrinks`. None is `hard`.
        "newton_schulz" knows `hard` and `smooth(2)`.
      method: "svd" or "newton_schulz". Only "newton_schulz" has a derivative where
        singular values are equal. This derivative is right for `smooth(2)` only.
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
      every device must hold whole matrices. Its `update` also takes `limit=`. It does
      not look at a `grad_norm=` that a chain is given.

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
    measure = _measure(call, method, columns, stacked)
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
    kernel = make_clipper(
        measure, max_norm, call=call, shrink=shrink, nonfinite=nonfinite
    )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        tree = clipped_leaves(updates, call)
        # The chain's norm from elsewhere is none of singular values, and may be below
        # them.
        extra_args.pop("grad_norm", None)
        # The kernel finds norms and limits, counts, and scales each leaf. Vectors,
        # zeros, broken steps, and limits of 0 and inf need no more than that.
        scaled, new_state = kernel.update(tree, state, params, **extra_args)
        clipped = _with_shrunk_values(measure, shrink, steps, tree, scaled, new_state)
        return put_back(clipped, updates), new_state

    return optax.GradientTransformationExtraArgs(kernel.init, update)


def spectral_norm(
    tree: PyTree,
    *,
    columns: Columns = None,
    stacked: Stacked = None,
    method: Method = "svd",
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
      method: "svd", or "newton_schulz" for matrix products alone. The second is within
        a relative 4e-6 of the first, and up to m^(1 / 2^18) less where m singular
        values almost tie. Its second derivatives are not those of the norm.

    Returns:
      A tree of the same structure: a scalar for each leaf (for stacked leaves an array
      with size 1 on all axes but those of layers), None for a leaf that does not count.

    Raises:
      ValueError: an unknown method, or a number of columns that a leaf does not have.

    Example:
      >>> print(optaxclip.spectral_norm(jnp.array([[3.0, 0.0], [4.0, 0.0]])))
      5.0
    """
    measure = _measure("spectral_norm", method, columns, stacked)
    return measure(clipped_leaves(tree, "spectral_norm")).tree()


def _measure(
    call: str, method: Method, columns: Columns, stacked: Stacked
) -> SpectralNorm:
    """The measure of these arguments, which are checked."""
    check_choice(f"{call}: method", method, get_args(Method))
    # A tuple is a node of the tree, as `columns` has one number for each leaf.
    columns = static_axes("columns", columns, call, is_value=trees.is_none)
    stacked = static_axes("stacked", stacked, call)
    return SpectralNorm(call, method, columns, stacked)


class SpectralNorm(NamedTuple):
    """The largest singular value of each leaf, or of each layer of a stacked leaf.

    Hashable, so that it can be a static argument.
    """

    call: str
    method: Method
    columns: Any
    stacked: Any

    @partial(jax.jit, static_argnums=0)
    def __call__(self, tree: PyTree) -> Norms:
        # Before the norms, since errors of `layouts` name the function that the user
        # called.
        layouts = self.layouts(tree)
        leaves = jax.tree.leaves(tree)
        # Vectors keep their L2 norm, which is their spectral norm. Norms of layers are
        # not joined over devices, which may hold different layers.
        mesh_axes = "auto" if self.stacked is None else None
        l2_norms = TensorNorm(stacked=self.stacked, mesh_axes=mesh_axes)(tree)
        values = l2_norms.local_values()
        for layout, indices in layouts.items():
            matrices = layout.stack([leaves[index] for index in indices])
            peaks = jnp.max(jnp.abs(matrices), (-2, -1), keepdims=True)
            quotients, divisors = _divided(matrices, peaks)
            if self.method == "svd":
                largest = jnp.linalg.svd(quotients, compute_uv=False)[..., :1, None]
            else:
                largest = largest_singular_values(quotients)
            spectral_norms = jnp.where(jnp.isfinite(peaks), largest * divisors, peaks)
            for index, spectral_norm in zip(indices, spectral_norms):
                l2_norm = values[index]
                spectral_norm = spectral_norm.reshape(l2_norm.shape)
                values[index] = spectral_norm.astype(l2_norm.dtype)
        # Each device holds whole matrices: no norm is split over devices.
        specs = tuple(LeafSpec(norm_index=index) for index in range(len(values)))
        return l2_norms._replace(values=values, specs=specs)

    def layouts(self, tree: PyTree) -> dict[Layout, list[int]]:
        """The indices of the leaves that are matrices, by their layout."""
        entries = jax.tree.leaves_with_path(tree)
        shapes = [jnp.shape(leaf) for _, leaf in entries]
        layers_of_leaves = stacked_axes(self.stacked, tree, self.call, shapes)
        columns = for_each_leaf(self.columns, tree, f"{self.call}: columns")
        layouts: dict[Layout, list[int]] = {}
        for index, (path, leaf) in enumerate(entries):
            shape = shapes[index]
            layer_axes = layers_of_leaves[index]
            matrix_axes = other_axes(layer_axes, len(shape))
            rank = len(matrix_axes)
            if rank < 2:
                continue
            column_axes = 1 if columns[index] is None else columns[index]
            if column_axes not in range(1, rank):
                raise ValueError(
                    f"{self.call}: columns must be from 1 to {rank - 1} for the leaf "
                    f"{trees.name(path)!r} of shape {shape}, got {shown(column_axes)}."
                )
            row_count = math.prod(shape[axis] for axis in matrix_axes[:-column_axes])
            column_count = math.prod(shape[axis] for axis in matrix_axes[-column_axes:])
            # A matrix of one row or one column is a vector.
            if min(row_count, column_count) > 1:
                leaf_type = jax.typeof(leaf)
                layout = Layout(leaf_type, layer_axes, row_count, column_count)
                layouts.setdefault(layout, []).append(index)
        return layouts


class Layout(NamedTuple):
    """How leaves of one type are read as matrices."""

    leaf_type: ShapedArray
    layer_axes: tuple[int, ...]  # the axes that count layers
    rows: int
    columns: int

    def stack(self, leaves: list[Array]) -> Array:
        """The leaves as matrices [leaves, *layers, rows, columns], in at least float32,
        transposed where they would have fewer rows than columns.

        An Explicit mesh may split layers, but no matrix.
        """
        layer_rank = len(self.layer_axes)
        matrices_of_leaves = []
        for leaf in leaves:
            x = jnp.moveaxis(leaf, self.layer_axes, range(layer_rank))
            x = resharded(x, jax.typeof(x).sharding.spec[:layer_rank])
            shape = *x.shape[:layer_rank], self.rows, self.columns
            matrices_of_leaves.append(x.reshape(shape))
        dtype = wide_dtype(matrices_of_leaves[0])
        matrices = jnp.stack(matrices_of_leaves).astype(dtype)
        return adjoint(matrices) if self.rows < self.columns else matrices

    def unstack(self, matrices: Array, like: Array) -> Array:
        """One leaf out of a stack, [*layers, rows, columns], typed like another."""
        if self.rows < self.columns:
            matrices = adjoint(matrices)
        matrix_axes = other_axes(self.layer_axes, like.ndim)
        sizes = [like.shape[axis] for axis in (*self.layer_axes, *matrix_axes)]
        layer_rank = len(self.layer_axes)
        leaf = jnp.moveaxis(matrices.reshape(sizes), range(layer_rank), self.layer_axes)
        return resharded_as(leaf.astype(like.dtype), jax.typeof(like))


# Jitted at module level, so that clippers with equal settings share a program.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _with_shrunk_values(
    measure: SpectralNorm,
    shrink: Shrink,
    steps: int | None,
    tree: PyTree,
    scaled: Any,
    state: ClipState,
) -> Any:
    """The tree with shrunk singular values. `scaled` and `state` are what the kernel
    returned for it.
    """
    entries = jax.tree.leaves_with_path(tree)
    entry_by_name = state.by_name()
    names = trees.unique_names([path for path, _ in entries], entry_by_name)
    gradients = [gradient for _, gradient in entries]
    leaves, treedef = jax.tree.flatten(scaled)
    for layout, indices in measure.layouts(tree).items():
        matrices = layout.stack([gradients[index] for index in indices])
        # The norms and limits that the kernel found, [leaves, *layers, 1, 1].
        entries_of_state = [entry_by_name[names[index]] for index in indices]
        shape = *matrices.shape[:-2], 1, 1
        norms = jnp.stack([entry.norm for entry in entries_of_state]).reshape(shape)
        limits = jnp.stack([entry.limit for entry in entries_of_state]).reshape(shape)
        quotients, divisors = _divided(matrices, norms)
        # Zeros, broken matrices, and limits of 0 and inf are as the kernel left them.
        has_norm = jnp.isfinite(norms) & (norms > 0)
        is_shrunk = has_norm & jnp.isfinite(limits) & (limits > 0)
        norms = jnp.where(is_shrunk, norms, 1.0).astype(quotients.real.dtype)
        limits = jnp.where(is_shrunk, limits, 1.0).astype(quotients.real.dtype)
        if measure.method == "svd":
            u, singular_values, vh = jnp.linalg.svd(quotients, full_matrices=False)
            long = singular_values[..., None, :] * divisors
            short = shrink(long, jnp.broadcast_to(limits, long.shape))
            shrunk = matmul(u * short, vh)
        else:
            shrunk = divisors * shrunk_by_products(
                quotients,
                limits / divisors,
                norms / divisors,
                steps,
                is_hard=shrink is hard,
            )
        # With `hard` a matrix within its limit keeps its bits.
        if shrink is hard:
            is_shrunk = is_shrunk & (norms > limits)
        scaled_matrices = layout.stack([leaves[index] for index in indices])
        clipped = jnp.where(is_shrunk, shrunk, scaled_matrices)
        for index, matrices_of_leaf in zip(indices, clipped):
            leaves[index] = layout.unstack(matrices_of_leaf, leaves[index])
    return treedef.unflatten(leaves)


def _divided(matrices: Array, sizes: Array) -> tuple[Array, Array]:
    """Matrices divided by a power of 2 near their size, so that squares do not
    overflow, and these powers. Matrices whose size is NaN or inf become zeros.
    """
    sizes = lax.stop_gradient(sizes).astype(matrices.real.dtype)
    is_finite = jnp.isfinite(sizes)
    sizes = jnp.where(is_finite & (sizes > 0), sizes, 1.0)
    info = jnp.finfo(sizes.dtype)
    # A number without digits behind its first is a power of 2, by which a division
    # rounds nothing. On a CPU `exp2` is off by 3e-6.
    powers = lax.reduce_precision(sizes, int(info.nexp), 0)
    # Divisors end at 2^125 in float32: XLA multiplies by the reciprocal, which above
    # 2^126 is flushed to 0.
    largest = 2.0 ** (int(info.maxexp) - 3)
    divisors = jnp.clip(powers, 1 / largest, largest)
    quotients = jnp.where(is_finite, matrices / divisors, jnp.zeros_like(matrices))
    return quotients, divisors


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
# Accuracy is lost with s_max / c. A root of the Gram matrix would lose it with the
# square of that.
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
# Steps that turn eps into 1, and some more, by the bytes of a real number.
POLAR_STEPS = {4: 24, 8: 48}


def matmul(a: Array, b: Array) -> Array:
    """a @ b, with factors that are not rounded."""
    # By default accelerators round float32 factors to bfloat16 or TF32.
    return jnp.matmul(a, b, precision="highest")


def adjoint(x: Array) -> Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def largest_singular_values(x: Array) -> Array:
    """The largest singular value of each matrix, [..., 1, 1]."""
    gram = matmul(adjoint(x), x)

    def square(_: int, power: Array) -> Array:
        power = matmul(power, power)
        trace = jnp.real(jnp.trace(power, axis1=-2, axis2=-1))
        trace = trace[..., None, None]
        # Zeros stay zeros.
        return power / jnp.where(trace > 0, trace, 1.0)

    power = lax.fori_loop(0, SQUARINGS, square, lax.stop_gradient(gram))
    # This mean of the squared singular values, in which the largest outweighs all
    # others, is never above the largest.
    products = jnp.real(jnp.conj(power) * gram)
    mean = jnp.sum(products, (-2, -1), keepdims=True)
    return root(mean)


def shrunk_by_products(
    x: Array, limit: Array, norm: Array, steps: int | None, *, is_hard: bool
) -> Array:
    """Matrices with their singular values shrunk, by `hard` or by `smooth(2)`.

    `norm` is their largest singular value. `steps` None means as many as the dtype
    needs.
    """
    # The bound is above all singular values, also where `largest_singular_values`
    # underestimates.
    bound = 1.001 * lax.stop_gradient(norm)
    steps = steps or POLAR_STEPS[x.real.dtype.itemsize]
    # Above 2^13 times the bound, 2^28 in float64, a limit shortens by less than the
    # dtype shows. The square of a limit without bound would overflow.
    far = 2.0 ** (int(jnp.finfo(bound.dtype).nmant) // 2 + 2)
    limit = jnp.minimum(limit, far * bound)
    largest = jnp.sqrt(bound**2 + limit**2)
    # On an Explicit mesh that splits layers, [cI] must be split as X is.
    limit_eye = resharded_as(limit * _eye(x), jax.typeof(x))
    limit_eye_and_x = jnp.concatenate([limit_eye, x], -2) / largest
    polar = _polar(limit_eye_and_x, limit / largest, steps)
    columns = x.shape[-1]
    z = polar[..., :columns, :]
    b = polar[..., columns:, :]
    if is_hard:
        b = matmul(b, _inverse_of_largest(z, steps))
    return limit * b


def _inverse_of_largest(z: Array, steps: int) -> Array:
    """max(b, z)^-1 for Hermitian Z, where b^2 = 1 - z^2."""
    eye = _eye(z)
    difference = eye - 2 * matmul(z, adjoint(z))
    absolute = matmul(difference, _polar(difference, jnp.finfo(z.dtype).eps, steps))
    square = 0.5 * (eye + absolute)

    # The inverse root of a matrix with eigenvalues in [1/2, 1]. The error 1 - square
    # y^2 is 1/2 for y = 1, then 0.22, 0.04, 1e-3, 1e-6, 1e-12, 1e-24.
    def step(_: int, y: Array) -> Array:
        return 0.5 * matmul(y, 3 * eye - matmul(square, matmul(y, y)))

    # The first step, from y = 1, multiplies no matrices.
    more_steps = 4 if z.real.dtype.itemsize == 4 else 5
    inverse = lax.fori_loop(0, more_steps, step, 0.5 * (3 * eye - square))
    # Where so few polar steps do not suffice, `absolute` is below |1 - 2 z^2|, down to
    # 0.
    return inverse / math.sqrt(1 + _lowest_in_reach(steps))


def _polar(x: Array, lowest: ArrayLike, steps: int) -> Array:
    """Turns all singular values in [lowest, 1] into 1, by the iteration
    x <- r x (3 - r^2 x^2) / 2. For a Hermitian matrix this is the sign.

    Singular values that are too small for so many steps come out below 1.
    """

    def step(carry: Any, _: None) -> Any:
        x, lowest = carry
        # This r raises the lowest most. That of a lowest near 0 would send 1 to 0, and
        # 1 + eps below 0, so r is computed from 0.1 at least.
        low = jnp.maximum(lowest, 0.1)
        r = jnp.sqrt(3 / (1 + low + low**2))
        lowest = 0.5 * r * lowest * (3 - (r * lowest) ** 2)
        gram = matmul(adjoint(x), x)
        factor = 0.5 * r * (3 * _eye(x) - r**2 * gram)
        return (matmul(x, factor), lowest), None

    # Below this reach `lowest` would keep r large up to the last step, and singular
    # values near 1 would end anywhere.
    lowest = jnp.maximum(lax.stop_gradient(lowest), _lowest_in_reach(steps))
    (polar, _), _ = lax.scan(step, (x, lowest), length=steps)
    return polar


def _lowest_in_reach(steps: int) -> float:
    """The lowest singular value that so many steps turn into 1, to 4 eps of float64."""
    # A step multiplies small singular values by 2.466. The last four steps are for
    # those near 1.
    return min(1.0, 2.46 ** (4.1 - steps))


def _eye(x: Array) -> Array:
    """The identity matrix [1, ..., columns, columns] for matrices [..., columns]."""
    eye = jnp.eye(x.shape[-1], dtype=x.dtype)
    return jnp.expand_dims(eye, range(x.ndim - 2))
