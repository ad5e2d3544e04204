"""Clipping of singular values. Each matrix keeps its singular vectors:

    X = U S V^H    ->    U shrink(S, c) V^H

    hard         min(s, c)                    the nearest matrix of spectral norm c
    smooth(2)    s / sqrt(1 + s^2 / c^2)      SPECTRA's
    normalize    c                            all directions alike, as Muon does

One rank-one part of a gradient, such as that of a single mislabelled batch, is cut down
while the others stay as they are. Scaling the whole matrix would shorten all of them.

    Svd              any shrink, as exact as the singular value decomposition, which is
                     slow on accelerators
    NewtonSchulz     hard and smooth(2), by matrix products alone

Reference: Jiang, Semenov, Stich, SPECTRA, 2026 (arXiv 2603.14315). Yukhimchuk et al.,
2026 (arXiv 2605.11838), for the hard form of gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from .._kernel import make_clipper
from .._norms import norms_of_tree
from .._state import limits_of
from .._trees import Stacked, clipped_leaves, put_back, static_numbers
from ..rules._constant import LimitTree
from ..shrinks import Shrink, hard, shrink_of, smooth
from ._spectrum import (
    SpectralNorm,
    clipped_by,
    in_one_dtype,
    method_of,
    spectra_of,
)


def clip_by_spectral_norm(
    max_norm: LimitTree,
    *,
    shrink: Shrink | None = None,
    method: str = "svd",
    steps: int | None = None,
    columns: Any = None,
    stacked: Stacked = None,
    nonfinite: str = "propagate",
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
        "svd"                      5e-6     2e-3     2e-2     1
        "newton_schulz"            4e-6     2e-4     2e-3     0.2      24 steps
        norm of the result         at most limit * (1 + 3e-6) for all of these

    They grow as eps * s_max, like those of every decomposition in float32. That of
    "svd" is LAPACK's, 16 eps of the largest singular value.

    Args:
      max_norm: a number at least 0, an array, a schedule, None to only measure, a rule
        of `optaxclip.rules` that learns from the largest singular value of each matrix,
        or a tree prefix of these.
      shrink: what each singular value becomes, of `optaxclip.shrinks`. None is `hard`.
        "newton_schulz" knows `hard` and `smooth(2)`.
      method: "svd" or "newton_schulz". Only the second has a derivative where singular
        values are equal.
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
    how = method_of(call, method, steps)
    # `_newton_schulz` makes both of polar factors. `smooth(2)` is cached, so it is
    # the same function each time.
    if method == "newton_schulz" and shrink not in (hard, smooth(2)):
        raise ValueError(
            f"{call}: method='newton_schulz' knows the shrinks hard and smooth(2), got "
            f"{shrink!r}: take method='svd'."
        )
    # The measure is a static argument of jitted functions, so it must be hashable.
    columns = static_numbers("columns", columns, call)
    stacked = static_numbers("stacked", stacked, call)
    measure = SpectralNorm(call, how, columns, stacked)
    options = {"shrink": shrink, "nonfinite": nonfinite}
    kernel = make_clipper(
        measure, max_norm, call=call, name="max_norm", **options
    )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        limit: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        tree = clipped_leaves(updates)
        # Each matrix is decomposed once, for its norm and for the clipped matrix.
        spectra = spectra_of(how, measure.matrices(tree))
        norms = in_one_dtype(measure.norms_of(tree, spectra))
        # The kernel computes limits, counts, and scales. With that vectors, broken
        # steps, and limits of 0 and inf are done.
        new: Any
        given = {"grad_norm": norms, "limit": limit}
        scaled, new = kernel.update(tree, state, params, **given)
        leaves, treedef = jax.tree.flatten(scaled)
        # The limits that the kernel found, which a rule or a schedule may change.
        limits = jax.tree.leaves(limits_of(new, norms_of_tree(norms, tree)))
        layers = tuple(measure.layers(tree))
        # With `hard` a matrix within its limit keeps its bits, those of `scaled`.
        shaped = clipped_by(how, shrink, layers, leaves, spectra, limits)
        return put_back(treedef.unflatten(shaped), updates), new

    return optax.GradientTransformationExtraArgs(kernel.init, update)


def spectral_norm(
    tree: Any,
    *,
    columns: Any = None,
    stacked: Stacked = None,
    method: str = "svd",
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
        of it, relatively, and up to m^(1 / 2^17) less where m singular values almost
        tie.

    Returns:
      A tree of the same structure: a scalar for each leaf (for stacked leaves an array
      with size 1 on all axes but those of layers), None for a leaf that does not count.

    Raises:
      ValueError: an unknown method, or a number of columns that a leaf does not have.

    Example:
      >>> print(optaxclip.spectral_norm(jnp.array([[3.0, 0.0], [4.0, 0.0]])))
      5.0
    """
    how = method_of("spectral_norm", method)
    measure = SpectralNorm("spectral_norm", how, columns, stacked)
    tree = clipped_leaves(tree)
    return measure.norms_of(tree, spectra_of(how, measure.matrices(tree)))
