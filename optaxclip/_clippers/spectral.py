"""Clipping of singular values. Each matrix keeps its singular vectors:

    X = U S V^H    ->    U shrink(S, c) V^H

    hard         min(s, c)                    the nearest matrix of spectral norm c
    smooth(2)    s / sqrt(1 + s^2 / c^2)      SPECTRA's
    normalize    c                            all directions alike, as Muon does

One rank-one part of a gradient, such as that of a single mislabelled batch, is cut down
while the others stay as they are. Scaling the whole matrix would shorten all of them.

    svd              any shrink, as exact as the singular value decomposition, which is
                     slow on accelerators
    newton_schulz    hard and smooth(2), by matrix products (singular_values.py)

Leaves of one type and shape are stacked. So a program has one decomposition, or the
products of one matrix, for each shape, however many leaves there are.

Reference: Jiang, Semenov, Stich, Enhancing LLM training via spectral clipping, 2026
(arXiv 2603.14315), for the smooth form. Yukhimchuk et al., Gradient clipping beyond
vector norms: a spectral approach for matrix-valued parameters, 2026 (arXiv 2605.11838),
for the hard form of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.core import ShapedArray
from jax.tree_util import KeyPath

from .. import _trees as trees
from .._arguments.checks import (
    Nonfinite,
    check_choice,
    check_concrete,
    check_whole_number,
    shown,
)
from .._arguments.prefixes import Prefix, for_each_leaf
from .._devices.mesh_types import resharded, resharded_as
from .._factors import shrunk_by
from .._norm_clipper import make_clipper
from .._norms.axes import ByPath, Stacked, check_no_bool, other_axes, stacked_axes
from .._norms.moduli import wide_dtype
from .._norms.norms import Norms, TensorNorm
from .._norms.options import static_axes
from .._norms.specs import LeafSpec
from .._state.state import ClipState
from .._trees import PyTree, leaves_to_clip, put_back
from ..rules._limits import LimitTree
from ..shrinks import Shrink, hard, shrink_of, smooth
from .singular_values import (
    adjoint,
    largest_singular_values,
    matmul,
    shrunk_by_products,
)

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

    The result is computed in float32 (float64 for 64-bit leaves) and rounded once to
    the leaf's dtype. This rounding may move it by eps / 2 of that dtype times its
    Frobenius norm. These are the largest errors measured in float32 with the default
    of 24 steps, for matrices up to 256 x 1024 whose singular values have gaps, ties or
    even spacing. Each is the spectral norm of the error, divided by the limit:

        s_max / limit              10       1e3      1e4      1e6
        "svd"                      1e-5     2e-3     2e-2     1
        "newton_schulz"            4e-6     2e-4     2e-3     0.2

    For all of these the spectral norm of the result was at most limit * (1 + 3e-6).
    Errors grow as eps * s_max, as in every decomposition in float32. The error
    of "svd" is LAPACK's, 16 eps of the largest singular value.

    Leaves of one type and shape are clipped as one stack. So compile time grows with
    the number of different shapes, and memory holds copies of a whole stack. To compile
    one shape of GPT-2 small takes one core about 1 s, for a CPU or an H100. For a TPU
    v5e it takes 80 s with "newton_schulz" and 180 s with "svd".

    Args:
      max_norm: a number at least 0, an array, a schedule, None to only measure, a rule
        of `optaxclip.rules` that learns from the largest singular value of each matrix,
        or a tree prefix of numbers and schedules.
      shrink: what each singular value becomes, of `optaxclip.shrinks`. None is `hard`.
        "newton_schulz" knows `hard` and `smooth(2)`. Singular values of at most eps *
        max(rows, columns) * norm may be rounding noise, and are never lengthened.
      method: "svd" or "newton_schulz". Where singular values of a matrix that is
        shrunk are equal, only "newton_schulz" has a derivative. In float32 the relative
        error of that derivative is at most 1e-5 with `smooth(2)`, and 1e-3 with `hard`.
        With `hard` it may reach 0.1 where a singular value is within 10% of the limit,
        and second derivatives may be wrong.
      steps: of Newton-Schulz, at least 1. None means 24, and 48 for 64-bit leaves. k
        steps resolve s_max / limit up to about 2.46^(k - 4.1). With fewer, singular
        values below the limit come out too small, never too large.
      columns: how many trailing axes of a leaf are the columns of its matrix. All
        others are its rows. None means 1, for kernels whose last axis is the output, of
        convolutions too. 2 is for the (embed, heads, size) of attention. An int, a tree
        prefix of ints, or a function of the leaf's path and the leaf.
      stacked: which axes of a leaf index its layers, each a matrix: 1 for the leading
        axis, or another form that `clip_by_tensor_norm` takes.
      nonfinite: what becomes of a tensor whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).

    Returns:
      A transformation with a `ClipState`, read by `metrics`. Its norms are spectral
      norms, and its factors are those of the largest singular value. Inside shard_map
      every device must hold whole matrices. Its `update` also takes `limit=`. It does
      not look at a `grad_norm=` that a chain is given.

    Raises:
      ValueError: a negative or NaN limit, an unknown method, a shrink that the method
        does not know, fewer than 1 step, `steps` beside "svd", or a number of columns
        that a leaf does not have.
      TypeError: a limit or a number of steps that is not a number.

    Example:
      >>> grads = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
      >>> for method in ("svd", "newton_schulz"):
      ...     clipper = optaxclip.clip_by_spectral_norm(1.0, method=method)
      ...     updates, state = clipper.update(grads, clipper.init(grads))
      ...     print(f"{state.norm:.4f} {updates[0, 0]:.4f} {updates[1, 1]:.4f}")
      3.0000 1.0000 0.5000
      3.0000 1.0000 0.5000

    Reference: Jiang, Semenov, Stich, Enhancing LLM training via spectral clipping, 2026
    (arXiv 2603.14315), whose method SPECTRA has the shrink `smooth(2)`. Yukhimchuk et
    al., Gradient clipping beyond vector norms: a spectral approach for matrix-valued
    parameters, 2026 (arXiv 2605.11838), for the hard form of gradients.
    """
    call = "clip_by_spectral_norm"
    shrink = shrink_of(shrink, call)
    measure = _checked_measure(call, method, columns, stacked)
    if steps is not None:
        check_concrete(f"{call}: steps", steps)
        check_whole_number(f"{call}: steps", steps)
        steps = int(steps)
        if method == "svd":
            raise ValueError(
                f"{call}: steps={steps} is for method='newton_schulz', and 'svd' takes "
                "none."
            )
    if method == "newton_schulz" and shrink not in (hard, smooth(2)):
        raise ValueError(
            f"{call}: method='newton_schulz' knows the shrinks hard and smooth(2), got "
            f"{shown(shrink)}: take method='svd'."
        )
    shrink_matrices = SpectralShrink(measure, shrink, steps)
    norm_clipper = make_clipper(
        measure, max_norm, call=call, shrink=shrink, nonfinite=nonfinite
    )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        tree = leaves_to_clip(updates, call)
        # A norm that the chain was given is not a spectral norm, and may be smaller.
        extra_args.pop("grad_norm", None)
        # `norm_clipper` computes norms and limits, counts, and multiplies each leaf by
        # one factor. That is all for vectors, zeros, broken norms, and limits of 0 or
        # inf. `shrink_matrices` replaces the other leaves.
        rescaled, new_state = norm_clipper.update(tree, state, params, **extra_args)
        if max_norm is None and extra_args.get("limit") is None:
            return updates, new_state
        return put_back(shrink_matrices(tree, rescaled, new_state), updates), new_state

    return optax.GradientTransformationExtraArgs(norm_clipper.init, update)


class SpectralShrink(NamedTuple):
    """Shrinks the singular values of each matrix of a tree.

    Hashable, so that it can be a static argument.
    """

    measure: SpectralNorm
    shrink: Shrink
    steps: int | None

    # Jitted in the class, so that clippers with equal settings share a program.
    @partial(jax.jit, static_argnums=0)
    def __call__(self, tree: PyTree, rescaled: Any, state: ClipState) -> Any:
        """The tree with shrunk singular values.

        Args:
          tree: the gradients.
          rescaled: the tree with each leaf multiplied by one factor.
          state: the state after this step, with its norms and limits.
        """
        gradients = jax.tree.leaves(tree)
        leaves, treedef = jax.tree.flatten(rescaled)
        entry_by_name = state.by_name()
        names = trees.unique_names(trees.leaf_paths(tree))
        entries = [entry_by_name[name] for name in names]
        for layout, indices in self.measure.indices_by_layout(tree).items():
            clipped = self._clipped(
                layout.stack(gradients, indices),
                rescaled=layout.stack(leaves, indices),
                norms=jnp.stack([entries[index].norm for index in indices]),
                limits=jnp.stack([entries[index].limit for index in indices]),
            )
            for index, matrices in zip(indices, clipped):
                leaves[index] = layout.unstack(matrices, like=leaves[index])
        return treedef.unflatten(leaves)

    def _clipped(
        self, matrices: Array, *, rescaled: Array, norms: Array, limits: Array
    ) -> Array:
        """Matrices [leaves, *layers, rows, columns], each with shrunk singular values,
        or as it was rescaled if that is all it needs. `norms` and `limits` have one
        number for each matrix.
        """
        shape = *matrices.shape[:-2], 1, 1
        norms = norms.reshape(shape)
        limits = limits.reshape(shape)
        # Zeros, broken matrices, and those with a limit of 0 or inf stay as they were
        # rescaled.
        has_norm = jnp.isfinite(norms) & (norms > 0)
        is_shrunk = has_norm & jnp.isfinite(limits) & (limits > 0)
        # With `hard` a matrix within its limit keeps its bits.
        if self.shrink is hard:
            is_shrunk = is_shrunk & (norms > limits)
        matrices = jnp.where(is_shrunk, matrices, _matrix_of_distinct_values(matrices))
        norms = jnp.where(is_shrunk, norms, 1.0)
        limits = jnp.where(is_shrunk, limits, 1.0)
        return jnp.where(is_shrunk, self._shrunk(matrices, norms, limits), rescaled)

    def _shrunk(self, matrices: Array, norms: Array, limits: Array) -> Array:
        """Matrices [..., rows, columns] with shrunk singular values. `norms` and
        `limits` are [..., 1, 1].
        """
        quotients, divisors = _divided_by_power_of_2(matrices, norms)
        limits = limits.astype(divisors.dtype)
        if self.measure.method == "svd":
            return self._shrunk_by_svd(quotients, divisors, limits)
        shrunk_quotients = shrunk_by_products(
            quotients,
            limits / divisors,
            norms.astype(divisors.dtype) / divisors,
            self.steps,
            is_hard=self.shrink is hard,
        )
        return divisors.astype(quotients.dtype) * shrunk_quotients

    def _shrunk_by_svd(self, quotients: Array, divisors: Array, limits: Array) -> Array:
        """The matrices quotients * divisors with shrunk singular values."""
        u, values_of_quotients, vh = jnp.linalg.svd(quotients, full_matrices=False)
        # [..., 1, values], the largest first
        singular_values = values_of_quotients[..., None, :] * divisors
        limits = jnp.broadcast_to(limits, singular_values.shape)
        shrunk_values = shrunk_by(
            self.shrink, singular_values, limits, self.measure.call
        )
        if self.shrink is not hard:
            # A singular value that LAPACK and NumPy's `matrix_rank` count as 0 may be
            # rounding noise, and its singular vectors too. `normalize` would bring it
            # to the limit.
            eps = jnp.finfo(singular_values.dtype).eps
            noise = eps * max(quotients.shape[-2:]) * singular_values[..., :1]
            not_lengthened = jnp.minimum(shrunk_values, singular_values)
            is_noise = singular_values <= noise
            shrunk_values = jnp.where(is_noise, not_lengthened, shrunk_values)
        return matmul(u * shrunk_values.astype(u.dtype), vh)


def _matrix_of_distinct_values(matrices: Array) -> Array:
    """A matrix [1, ..., rows, columns] of norm 1 whose singular values differ.

    It takes the place of matrices that are not shrunk. A decomposition has the
    derivative NaN where singular values are equal, as those of zeros are, and
    `jnp.where` passes on the NaN of a branch that it does not take.
    """
    rows, columns = matrices.shape[-2:]
    values = jnp.arange(columns, 0, -1)[None, :] / columns
    matrix = jnp.eye(rows, columns) * values
    return jnp.expand_dims(matrix.astype(matrices.dtype), range(matrices.ndim - 2))


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
      stacked: which axes of a leaf index its layers, each a matrix: 1 for the leading
        axis, or another form that `clip_by_tensor_norm` takes.
      method: "svd", or "newton_schulz" for matrix products alone. The second is within
        a relative 4e-6 of the first. Where m singular values almost tie, it is smaller
        by a factor of up to m^(1 / 2^18). Its second derivatives are not those of the
        norm.

    Returns:
      A tree of the same structure: a scalar for each leaf (for stacked leaves an array
      with size 1 on all axes but those of layers), None for a leaf that does not count.

    Raises:
      ValueError: an unknown method, or a number of columns that a leaf does not have.

    Example:
      >>> print(optaxclip.spectral_norm(jnp.array([[3.0, 0.0], [4.0, 0.0]])))
      5.0
    """
    measure = _checked_measure("spectral_norm", method, columns, stacked)
    return measure(leaves_to_clip(tree, "spectral_norm")).tree()


def _checked_measure(
    call: str, method: Method, columns: Columns, stacked: Stacked
) -> SpectralNorm:
    """The measure that these arguments describe.

    Raises:
      ValueError: an unknown method.
      TypeError: a bool or an array in `columns` or `stacked`.
    """
    check_choice(f"{call}: method", method, get_args(Method))
    # The value for a leaf is one int. So a tuple is a node of the tree.
    columns = static_axes(f"{call}: columns", columns, trees.is_none)
    stacked = static_axes(f"{call}: stacked", stacked)
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
        leaves = jax.tree.leaves(tree)
        # Vectors keep their L2 norm, which is their spectral norm. The squares of
        # leaves with layers are not summed over mesh axes (None), since each device may
        # hold other layers.
        mesh_axes = [None if axes else "auto" for axes in self.layer_axes(tree)]
        mesh_axes_by_path = Prefix(tuple(zip(trees.leaf_paths(tree), mesh_axes)))
        l2_measure = TensorNorm(
            self.call, stacked=self.stacked, mesh_axes=mesh_axes_by_path
        )
        l2_norms = l2_measure(tree)
        norms = l2_norms.local_values()
        for layout, indices in self.indices_by_layout(tree).items():
            matrices = layout.stack(leaves, indices)
            # The largest modulus stands for the spectral norm, which is not known yet
            # and at most sqrt(rows * columns) times as large. So no square overflows.
            moduli = jnp.abs(matrices)
            largest_moduli = jnp.max(moduli, (-2, -1), keepdims=True)
            quotients, divisors = _divided_by_power_of_2(matrices, largest_moduli)
            if self.method == "svd":
                singular_values = jnp.linalg.svd(quotients, compute_uv=False)
                quotient_norms = singular_values[..., :1, None]
            else:
                quotient_norms = largest_singular_values(quotients)
            spectral_norms = jnp.where(
                jnp.isfinite(largest_moduli), quotient_norms * divisors, largest_moduli
            )
            for index, norms_of_leaf in zip(indices, spectral_norms):
                l2_norm = norms[index]
                norms_of_leaf = norms_of_leaf.reshape(l2_norm.shape)
                norms[index] = norms_of_leaf.astype(l2_norm.dtype)
        # Each device holds whole matrices: no norm is split over devices.
        specs = tuple(
            LeafSpec(spec.norm_index, spec.summed_axes) for spec in l2_norms.specs
        )
        return l2_norms._replace(values=norms, specs=specs)

    def layer_axes(self, tree: PyTree) -> list[tuple[int, ...]]:
        """The axes of each leaf that count layers, in ascending order."""
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
        return stacked_axes(self.stacked, tree, self.call, shapes)

    def indices_by_layout(self, tree: PyTree) -> dict[MatrixLayout, list[int]]:
        """For each layout, the indices of the leaves that it reads as matrices."""
        columns = for_each_leaf(self.columns, tree, f"{self.call}: columns")
        layer_axes_of_leaves = self.layer_axes(tree)
        indices_by_layout: dict[MatrixLayout, list[int]] = {}
        for index, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
            shape = jnp.shape(leaf)
            layer_axes = layer_axes_of_leaves[index]
            matrix_axes = other_axes(layer_axes, len(shape))
            if len(matrix_axes) < 2:
                continue
            column_axis_count = 1 if columns[index] is None else columns[index]
            self._check_columns(column_axis_count, len(matrix_axes), path, shape)
            # The trailing axes are the columns, and all others the rows.
            sizes = [shape[axis] for axis in matrix_axes]
            row_count = math.prod(sizes[:-column_axis_count])
            column_count = math.prod(sizes[-column_axis_count:])
            # A matrix of one row or one column is a vector.
            if min(row_count, column_count) > 1:
                layout = MatrixLayout(
                    leaf_type=jax.typeof(leaf),
                    layer_axes=layer_axes,
                    row_count=row_count,
                    column_count=column_count,
                )
                indices_by_layout.setdefault(layout, []).append(index)
        return indices_by_layout

    def _check_columns(
        self,
        column_axis_count: Any,
        axis_count: int,
        path: KeyPath,
        shape: tuple[int, ...],
    ) -> None:
        """Raises ValueError unless a leaf has `column_axis_count` axes of columns, and
        at least one of rows. `axis_count` is how many axes it has, without those of
        layers.
        """
        check_no_bool(f"{self.call}: columns", column_axis_count)
        is_whole = isinstance(column_axis_count, (int, np.integer))
        if not is_whole or not 1 <= column_axis_count < axis_count:
            raise ValueError(
                f"{self.call}: columns must be a whole number from 1 to "
                f"{axis_count - 1} for the leaf {trees.path_name(path)!r} of shape "
                f"{shape}, got {shown(column_axis_count)}."
            )


class MatrixLayout(NamedTuple):
    """How leaves of one type are read as matrices."""

    leaf_type: ShapedArray
    layer_axes: tuple[int, ...]  # the axes that count layers, in ascending order
    row_count: int
    column_count: int

    def stack(self, leaves: list[Array], indices: list[int]) -> Array:
        """The leaves at these indices as matrices [leaves, *layers, rows, columns], in
        at least float32. They are transposed where rows are fewer than columns.
        """
        layer_axis_count = len(self.layer_axes)
        matrices_of_leaves = []
        for index in indices:
            x = jnp.moveaxis(leaves[index], self.layer_axes, range(layer_axis_count))
            # An Explicit mesh may split layers, but no matrix.
            x = resharded(x, jax.typeof(x).sharding.spec[:layer_axis_count])
            shape = *x.shape[:layer_axis_count], self.row_count, self.column_count
            matrices_of_leaves.append(x.reshape(shape))
        dtype = wide_dtype(matrices_of_leaves[0])
        matrices = jnp.stack(matrices_of_leaves).astype(dtype)
        return adjoint(matrices) if self.row_count < self.column_count else matrices

    def unstack(self, matrices: Array, like: Array) -> Array:
        """The leaf whose matrices these are, [*layers, rows, columns] as `stack` makes
        them. It has the shape, dtype and sharding of `like`.
        """
        if self.row_count < self.column_count:
            matrices = adjoint(matrices)
        matrix_axes = other_axes(self.layer_axes, like.ndim)
        sizes = [like.shape[axis] for axis in (*self.layer_axes, *matrix_axes)]
        layer_axis_count = len(self.layer_axes)
        leaf = matrices.reshape(sizes)
        leaf = jnp.moveaxis(leaf, range(layer_axis_count), self.layer_axes)
        return resharded_as(leaf.astype(like.dtype), jax.typeof(like))


def _divided_by_power_of_2(matrices: Array, norms: Array) -> tuple[Array, Array]:
    """(quotients, divisors): the matrices divided by powers of 2 near their norms, and
    these powers. Squares of the quotients do not overflow. Matrices whose norm is NaN
    or inf become zeros.
    """
    norms = lax.stop_gradient(norms).astype(matrices.real.dtype)
    is_finite = jnp.isfinite(norms)
    norms = jnp.where(is_finite & (norms > 0), norms, 1.0)
    info = jnp.finfo(norms.dtype)
    # A number rounded to no bits of mantissa is a power of 2, and division by it is
    # exact. `exp2` is off by 3e-6 on a CPU.
    powers = lax.reduce_precision(norms, int(info.nexp), 0)
    # Divisors end at 2^125 in float32. XLA multiplies by the reciprocal, and that of a
    # divisor above 2^126 is flushed to 0.
    largest = 2.0 ** (int(info.maxexp) - 3)
    divisors = jnp.clip(powers, 1 / largest, largest)
    quotients = matrices / divisors.astype(matrices.dtype)
    quotients = jnp.where(is_finite, quotients, jnp.zeros_like(matrices))
    return quotients, divisors
