"""Clipping of singular values: each matrix keeps its singular vectors, and no singular
value is longer than the limit.

    X = U S V^H    ->    U shrink(S, c) V^H          hard: min(s, c)          smooth(2):
                                                     s / sqrt(1 + s^2 / c^2)

One rank-one part of a gradient, such as that of a single mislabelled batch, is cut down
while the others stay as they are; scaling the whole matrix would shorten all of them.
`hard` gives the nearest matrix of spectral norm c; `smooth(2)` is SPECTRA's;
`normalize` gives every direction the same length, as Muon does.

    method "svd"             any shrink; as exact as the singular value decomposition,
                             which accelerators are slow at
    method "newton_schulz"   hard and smooth(2), by matrix products alone

The second is in `optaxclip.newton_schulz`.

Reference: Jiang, Semenov, Stich, SPECTRA, 2026 (arXiv 2603.14315); Yukhimchuk et al.,
2026 (arXiv 2605.11838) for the hard form of gradients.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from . import newton_schulz, prefix, sharding
from .._arguments import check_number
from .._core._kernel import clip_by
from .._norms._leaves import (
    Stacked,
    for_each_leaf,
    static_numbers,
    clipped_leaves,
    stacked_axes,
    put_back,
)
from .._clippers._newton_schulz import adjoint, product
from .._norms._norms import Measure, tensor_norm
from ..shrinks import Shrink, hard, smooth

METHODS = ("svd", "newton_schulz")
STEPS = 24  # of Newton-Schulz


def clip_by_spectral_norm(
    max_norm: Any,
    *,
    shrink: Shrink | None = None,
    method: str = "svd",
    steps: int | None = None,
    columns: Any = None,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Shortens the singular values of each matrix to at most `max_norm`, and keeps the
    singular vectors.

        limit 0          zeros
        limit None, inf  only measures: bit for bit the input
        norm <= limit    with `hard` bit for bit the input
        norm NaN or inf  the whole leaf becomes NaN (nonfinite="propagate")
        vector, scalar   the spectral norm is the L2 norm: clipped by that

    Computed in float32 (float64 for 64-bit leaves) and rounded once to the leaf's
    dtype, which may add its eps / 2 times the Frobenius norm. No error measured in
    float32, over spectra with gaps, ties and even spacing up to 256 x 1024, was larger
    than these, as spectral norms over the limit (they grow as eps * s_max, as every
    float32 decomposition's do):

        s_max / limit          10       1e3      1e4      1e6
        "svd"                  5e-6     2e-3     2e-2     1        16 eps of the
                                                          longest, LAPACK's
        "newton_schulz"        4e-6     2e-4     2e-3     0.2      in 24 steps, hard and
                                                          smooth(2)
        norm of the result     at most limit * (1 + 3e-6) for all of these

    Args:
      max_norm: a number at least 0, an array, a schedule, None to only measure, or a
        `Threshold` that learns from the largest singular value of each matrix.
      shrink: what becomes of each singular value: None or `hard`, `smooth(2)`,
        `normalize`, `drop`, or your own. "newton_schulz" knows `hard` and `smooth(2)`.
      method: "svd" or "newton_schulz". Only the second has a derivative where singular
        values are equal.
      steps: of Newton-Schulz, 24 where it is None. k steps resolve s_max / limit up to
        about 2.4^(k - 5); shorter singular values come out too short then, never too
        long. At least 1.
      columns: how many trailing axes of a leaf are its matrix's columns, all others its
        rows: 1 (None too) for kernels whose last axis is the output, convolutions too;
        2 for attention's (embed, heads, size). An int, a tree prefix of ints, or a
        function of the leaf's path and the leaf.
      stacked: how many leading axes of a leaf count layers (see `tensor_norm`); each
        layer is a matrix by itself.
      nonfinite: see `clip_by`.

    Returns:
      A transformation with a `ClipState`, read by `metrics`: norms are spectral norms,
      scales are of the largest singular value. Inside shard_map every device must hold
      whole matrices.

    Raises:
      TypeError, ValueError: a limit, method, shrink, or number of columns that cannot
        be.

    Example:
      >>> import optaxclip
      >>> grads = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
      >>> for method in ("svd", "newton_schulz"):
      ...     clipper = optaxclip.clip_by_spectral_norm(1.0, method=method)
      ...     updates, state = clipper.update(grads, clipper.init(grads))
      ...     print(f"{state.norm:.4f} {updates[0, 0]:.4f} {updates[1, 1]:.4f}")
      3.0000 1.0000 0.5000
      3.0000 1.0000 0.5000

    Reference: Jiang, Semenov, Stich, SPECTRA, 2026 (arXiv 2603.14315); Yukhimchuk et
    al., 2026 (arXiv 2605.11838).
    """
    call = "clip_by_spectral_norm"
    shrink = shrink or hard
    _check_method(call, method)
    steps = STEPS if steps is None else steps
    check_number(f"{call}: steps", steps, lowest=1)
    if method == "newton_schulz" and shrink not in (hard, smooth(2)):
        raise ValueError(
            f"{call}: method='newton_schulz' knows the shrinks hard and smooth(2), got "
            f"{shrink!r}: take method='svd'."
        )
    columns, stacked = (
        static_numbers("columns", columns, call),
        static_numbers("stacked", stacked, call),
    )
    measure = Measure(
        spectral_norm, (("columns", columns), ("stacked", stacked), ("method", method))
    )
    kernel = clip_by(
        measure, max_norm, shrink, nonfinite=nonfinite, argument=f"{call}: max_norm"
    )

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        tree = clipped_leaves(updates)
        views = _matrices(tree, columns, stacked, call)
        spectra = [_spectrum(method, view) for view in views]
        norms = _as_norms(tree, [norm for norm, _ in spectra], stacked, call)
        # The kernel asks the limits, counts, and scales: vectors, broken steps, and
        # limits of 0 and inf are done then.
        scaled, state = kernel.update(tree, state, params, grad_norm=norms)
        leaves, treedef = jax.tree.flatten(scaled)
        limits = jax.tree.leaves(
            jax.tree.map(
                lambda leaf, limit: None if leaf is None else limit,
                tree,
                state.limit,
                is_leaf=prefix.is_none,
            )
        )
        limits = [
            limit.reshape(*view.shape[:-2], 1, 1)
            for limit, view in zip(limits, views, strict=True)
        ]
        shaped = [
            _shape(shrink, method, steps, *each)
            for each in zip(leaves, views, spectra, limits)
        ]
        return put_back(treedef.unflatten(shaped), updates), state

    return optax.GradientTransformationExtraArgs(kernel.init, update)


def spectral_norm(
    tree: Any, *, columns: Any = None, stacked: Stacked = None, method: str = "svd"
) -> Any:
    """The largest singular value of each leaf.

    Args:
      tree: a pytree of arrays.
      columns, stacked: as in `clip_by_spectral_norm`.
      method: "svd", or "newton_schulz" for matrix products alone: within 4e-6 of it,
        relatively, and up to m^(1 / 2^17) less where m singular values almost tie.

    Returns:
      A tree of the same structure: a scalar for each leaf (shape (layers, 1, ...) where
      leaves are stacked), None where a leaf is not measured.

    Raises:
      ValueError: a method or a number of columns that cannot be.

    Example:
      >>> import optaxclip
      >>> print(optaxclip.spectral_norm(jnp.array([[3.0, 0.0], [4.0, 0.0]])))
      5.0
    """
    _check_method("spectral_norm", method)
    tree = clipped_leaves(tree)
    return _as_norms(
        tree,
        [
            _spectrum(method, view)[0]
            for view in _matrices(tree, columns, stacked, "spectral_norm")
        ],
        stacked,
        "spectral_norm",
    )


def _matrices(tree: Any, columns: Any, stacked: Stacked, call: str) -> list[jax.Array]:
    """Each leaf as matrices [layers, rows, columns] in at least float32; vectors and
    scalars as one row. An Explicit mesh may split layers, but no matrix.
    """
    views = []
    wanted = for_each_leaf(columns, tree, f"{call}: columns")
    for (path, leaf), skip, count in zip(
        jax.tree_util.tree_flatten_with_path(tree)[0],
        stacked_axes(stacked, tree, call),
        wanted,
    ):
        shape = jnp.shape(leaf)
        rank = len(shape) - skip
        count = min(rank, 1) if rank < 2 else 1 if count is None else count
        if rank >= 2 and not (isinstance(count, int) and 1 <= count < rank):
            raise ValueError(
                f"{call}: columns must be a number of trailing axes, from 1 to "
                f"{rank - 1} for the leaf {prefix.name(path)!r} of shape {shape}, got "
                f"{count!r}."
            )
        edge = len(shape) - count
        whole = gathered(jnp.asarray(leaf), skip)
        wide = whole.astype(np.promote_types(whole.dtype, jnp.float32))
        views.append(
            wide.reshape(
                *shape[:skip], math.prod(shape[skip:edge]), math.prod(shape[edge:])
            )
        )
    return views


def _as_norms(tree: Any, norms: list[jax.Array], stacked: Stacked, call: str) -> Any:
    """Norms of shape [layers, 1, 1] as the tree prefix of `tree` that the kernel
    expects.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [
        (*jnp.shape(leaf)[:skip], *[1] * (jnp.ndim(leaf) - skip)) if skip else ()
        for leaf, skip in zip(leaves, stacked_axes(stacked, tree, call))
    ]
    return treedef.unflatten(
        [norm.reshape(shape) for norm, shape in zip(norms, shapes)]
    )


@partial(jax.jit, static_argnums=0)
def _spectrum(method: str, x: jax.Array) -> tuple[jax.Array, Any]:
    """(the largest singular value of each matrix, what else is known of them), from one
    decomposition or bound.
    """
    if min(x.shape[-2:]) == 1:
        return tensor_norm(x, stacked=x.ndim - 2).reshape(*x.shape[:-2], 1, 1), ()
    peak = lax.stop_gradient(jnp.max(jnp.abs(x), (-2, -1), keepdims=True))
    # Divided by a power of 2, which rounds nothing, so that no square overflows; one of
    # 2^126 would not do, since its reciprocal, which XLA takes, is flushed to 0. Broken
    # matrices are not shown to the decomposition.
    whole = jnp.isfinite(peak) & (peak > 0)
    unit = jnp.where(
        whole,
        jnp.exp2(jnp.clip(jnp.floor(jnp.log2(jnp.where(whole, peak, 1.0))), -100, 100)),
        1.0,
    )
    x = jnp.where(jnp.isfinite(peak), x / unit, jnp.zeros_like(x))
    if method == "svd":
        u, s, v = jnp.linalg.svd(x, full_matrices=False)
        return jnp.where(jnp.isfinite(peak), s[..., None, :1] * unit, peak), (
            unit,
            u,
            s,
            v,
        )
    flat = x if x.shape[-2] <= x.shape[-1] else adjoint(x)
    norm, bound = newton_schulz.largest(flat)
    return jnp.where(jnp.isfinite(peak), norm * unit, peak), (unit, flat, bound)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _shape(
    shrink: Shrink,
    method: str,
    steps: int,
    scaled: jax.Array,
    x: jax.Array,
    spectrum: tuple[jax.Array, Any],
    limit: jax.Array,
) -> jax.Array:
    """One leaf with its singular values shrunk. `scaled` is what the kernel made of
    it.
    """
    norm, parts = spectrum
    if not parts:
        return scaled
    usual = jnp.isfinite(norm) & jnp.isfinite(limit)
    limit = jnp.where(usual, limit, 1.0)
    if method == "svd":
        unit, u, s, v = parts
        long = s[..., None, :] * unit
        short = shrink(long, jnp.broadcast_to(limit, long.shape))
        new, changed = product(u * short, v), jnp.any(short != long, -1, keepdims=True)
    else:
        unit, flat, bound = parts
        new = unit * newton_schulz.shrunk(
            flat, limit / unit, bound, steps, shrink is hard
        )
        new, changed = (
            new if flat.shape == x.shape else adjoint(new),
            (norm > limit) | (shrink is not hard),
        )
    new = jnp.where(changed, new, x).reshape(scaled.shape).astype(scaled.dtype)
    return jnp.where(
        (usual & changed).reshape(*x.shape[:-2], *[1] * (scaled.ndim - x.ndim + 2)),
        split_as(new, jax.typeof(scaled)),
        scaled,
    )


def _check_method(call: str, method: Any) -> None:
    if method not in METHODS:
        raise ValueError(
            f"{call}: method must be one of {', '.join(map(repr, METHODS))}, got "
            f"{method!r}."
        )
