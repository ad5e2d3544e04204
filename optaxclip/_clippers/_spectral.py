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

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._arguments import check_number, held_in
from .._core._kernel import make_clipper
from .._core._state import limits_of
from .._norms import _prefix as prefix
from .._norms._leaves import (
    clipped_leaves,
    for_each_leaf,
    put_back,
    static_numbers,
)
from .._norms._measures import Norms, norms_of_tree
from .._norms._modulus import norm_dtype, wide_dtype
from .._norms._norms import tensor_norm
from .._norms._stacked import Axes, Stacked, other_axes, stacked_axes
from .._norms._types import gathered, split_as
from .._other_names import with_our_names
from ..shrinks import Shrink, hard, shrink_of, smooth
from . import _newton_schulz as newton_schulz
from ._newton_schulz import adjoint, product

STEPS = 24  # of Newton-Schulz


@dataclass(frozen=True)
class Svd:
    """Singular values by a singular value decomposition."""

    def measure(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """The largest singular value of each matrix, and the decomposition."""
        u, s, v = jnp.linalg.svd(x, full_matrices=False)
        return s[..., None, :1], (u, s, v)

    def shrunk(
        self, spectrum: "Spectrum", x: jax.Array, limit: jax.Array, shrink: Shrink
    ) -> tuple[jax.Array, jax.Array]:
        """The clipped matrices, and which of them have changed."""
        u, s, v = spectrum.parts
        long = s[..., None, :] * spectrum.unit
        short = shrink(long, jnp.broadcast_to(limit, long.shape))
        return product(u * short, v), jnp.any(short != long, -1, keepdims=True)


@dataclass(frozen=True)
class NewtonSchulz:
    """Singular values by matrix products alone."""

    steps: int = STEPS

    def measure(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """The largest singular value of each matrix, and the matrices lying flat with a
        bound for their singular values.
        """
        flat = x if x.shape[-2] <= x.shape[-1] else adjoint(x)
        norm, bound = newton_schulz.largest(flat)
        return norm, (flat, bound)

    def shrunk(
        self, spectrum: "Spectrum", x: jax.Array, limit: jax.Array, shrink: Shrink
    ) -> tuple[jax.Array, jax.Array]:
        """The clipped matrices, and which of them have changed."""
        flat, bound = spectrum.parts
        form = {"steps": self.steps, "is_hard": shrink is hard}
        limit_of_flat = limit / spectrum.unit
        short = newton_schulz.shrunk(flat, limit_of_flat, bound, **form)
        new = spectrum.unit * short
        changed = (spectrum.norm > limit) | (shrink is not hard)
        return (new if flat.shape == x.shape else adjoint(new)), changed


Method = Svd | NewtonSchulz
METHODS = ("svd", "newton_schulz")


class Spectrum(NamedTuple):
    """What is known of the singular values of matrices [..., rows, columns]."""

    norm: jax.Array  # float32[..., 1, 1]: the largest of each matrix
    # float32[..., 1, 1]: the powers of 2 that the matrices were divided by
    unit: jax.Array
    # What the method knows of the divided matrices. None for vectors, which need none.
    parts: Any = None


class SpectralNorm(NamedTuple):
    """The largest singular value of each leaf, or of each layer of a stacked leaf."""

    call: str
    method: Method
    columns: Any = None
    stacked: Any = None

    def __call__(self, tree: Any) -> Norms:
        spectra = [_spectrum(self.method, x) for x in self.matrices(tree)]
        return norms_of_tree(_in_one_dtype(self.norms_of(tree, spectra)), tree)

    def without_devices(self) -> "SpectralNorm":
        return self

    def matrices(self, tree: Any) -> list[jax.Array]:
        """Each leaf as matrices [layers, rows, columns] in at least float32.

        Vectors and scalars are one row. An Explicit mesh may split layers, but no
        matrix.
        """
        found = []
        counts = for_each_leaf(self.columns, tree, f"{self.call}: columns")
        entries = jax.tree_util.tree_flatten_with_path(tree)[0]
        for (path, leaf), axes, count in zip(entries, self.layers(tree), counts):
            skip = len(axes)
            columns = self._columns_of(path, jnp.shape(leaf), skip, count)
            whole = gathered(jnp.moveaxis(leaf, axes, range(skip)), skip)
            edge = whole.ndim - columns
            sizes = math.prod(whole.shape[skip:edge]), math.prod(whole.shape[edge:])
            shape = *whole.shape[:skip], *sizes
            found.append(whole.astype(wide_dtype(whole)).reshape(shape))
        return found

    def layers(self, tree: Any) -> list[Axes]:
        """For each leaf, the axes that count layers."""
        return stacked_axes(self.stacked, tree, self.call)

    def _columns_of(
        self, path: Any, shape: tuple[int, ...], skip: int, count: Any
    ) -> int:
        """How many trailing axes of a leaf are the columns of its matrix."""
        rank = len(shape) - skip
        if rank < 2:
            return rank
        count = 1 if count is None else count
        if not (isinstance(count, int) and 1 <= count < rank):
            raise ValueError(
                f"{self.call}: columns must be a number of trailing axes, from 1 to "
                f"{rank - 1} for the leaf {prefix.name(path)!r} of shape {shape}, got "
                f"{count!r}."
            )
        return count

    def norms_of(self, tree: Any, spectra: list[Spectrum]) -> Any:
        """The norms as `tensor_norm` shapes them."""
        leaves, treedef = jax.tree.flatten(tree)
        norms = []
        for leaf, axes, spectrum in zip(leaves, self.layers(tree), spectra):
            norm = spectrum.norm[..., 0, 0]
            if axes:
                norm = jnp.expand_dims(norm, other_axes(axes, jnp.ndim(leaf)))
            norms.append(norm)
        return treedef.unflatten(norms)


@with_our_names
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
      steps: of Newton-Schulz, at least 1. None means 24. k steps resolve s_max / limit
        up to about 2.4^(k - 5). With fewer, small singular values come out too small,
        never too large.
      columns: how many trailing axes of a leaf are the columns of its matrix. All
        others are its rows. None means 1, for kernels whose last axis is the output,
        convolutions too. 2 is for attention's (embed, heads, size). An int, a tree
        prefix of ints, or a function of the leaf's path and the leaf.
      stacked: which axes of a leaf count layers (see `tensor_norm`). Each layer is a
        matrix.
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
    how = _method(call, method, steps)
    if method == "newton_schulz" and shrink not in (hard, smooth(2)):
        raise ValueError(
            f"{call}: method='newton_schulz' knows the shrinks hard and smooth(2), got "
            f"{shrink!r}: take method='svd'."
        )
    columns = static_numbers("columns", columns, call)
    stacked = static_numbers("stacked", stacked, call)
    measure = SpectralNorm(call, how, columns, stacked)
    options = {"shrink": shrink, "nonfinite": nonfinite}
    kernel = make_clipper(measure, max_norm, call=call, name="max_norm", **options)

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        tree = clipped_leaves(updates)
        matrices = measure.matrices(tree)
        spectra = [_spectrum(how, x) for x in matrices]
        norms = _in_one_dtype(measure.norms_of(tree, spectra))
        # The kernel computes limits, counts, and scales. With that vectors, broken
        # steps, and limits of 0 and inf are done.
        new: Any
        scaled, new = kernel.update(tree, state, params, grad_norm=norms)
        leaves, treedef = jax.tree.flatten(scaled)
        limits = jax.tree.leaves(limits_of(new, tree))
        layers = measure.layers(tree)
        each = zip(layers, leaves, matrices, spectra, limits, strict=True)
        shaped = [_clipped_leaf(how, shrink, *one) for one in each]
        return put_back(treedef.unflatten(shaped), updates), new

    return optax.GradientTransformationExtraArgs(kernel.init, update)


@with_our_names
def spectral_norm(
    tree: Any, *, columns: Any = None, stacked: Stacked = None, method: str = "svd"
) -> Any:
    """Returns the largest singular value of each leaf.

    Args:
      tree: a pytree of arrays.
      columns: how many trailing axes of a leaf are the columns of its matrix. All
        others are its rows. None means 1, for kernels whose last axis is the output. An
        int, a tree prefix of ints, or a function of the leaf's path and the leaf.
      stacked: which axes of a leaf count layers (see `tensor_norm`). Each layer is a
        matrix.
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
    how = _method("spectral_norm", method)
    measure = SpectralNorm("spectral_norm", how, columns, stacked)
    tree = clipped_leaves(tree)
    return measure.norms_of(tree, [_spectrum(how, x) for x in measure.matrices(tree)])


def _in_one_dtype(norms: Any) -> Any:
    """Norms in one dtype, since the state has one vector for those of all leaves."""
    dtype = norm_dtype(norms)
    return jax.tree.map(lambda norm: norm.astype(dtype), norms)


def _method(call: str, method: Any, steps: int | None = None) -> Method:
    """The method of this name."""
    if method not in METHODS:
        raise ValueError(
            f"{call}: method must be one of {', '.join(map(repr, METHODS))}, got "
            f"{method!r}."
        )
    steps = STEPS if steps is None else steps
    check_number(f"{call}: steps", steps, lowest=1)
    return Svd() if method == "svd" else NewtonSchulz(steps)


@partial(jax.jit, static_argnums=0)
def _spectrum(method: Method, x: jax.Array) -> Spectrum:
    """What a method finds out about the singular values of some matrices."""
    if min(x.shape[-2:]) == 1:
        norm = tensor_norm(x, stacked=x.ndim - 2)
        norm = norm.reshape(*x.shape[:-2], 1, 1)
        return Spectrum(norm, jnp.ones_like(norm))
    peak = lax.stop_gradient(jnp.max(jnp.abs(x), (-2, -1), keepdims=True))
    finite = jnp.isfinite(peak)
    usual = finite & (peak > 0)
    # Divided by a power of 2, which rounds nothing, so that no square overflows. It is
    # not 2^126, whose reciprocal, with which XLA multiplies, is flushed to 0.
    exponent = jnp.floor(jnp.log2(jnp.where(usual, peak, 1.0)))
    unit = jnp.where(usual, jnp.exp2(jnp.clip(exponent, -100, 100)), 1.0)
    # Matrices with NaN or inf are not decomposed.
    x = jnp.where(finite, x / unit, jnp.zeros_like(x))
    largest, parts = method.measure(x)
    return Spectrum(jnp.where(finite, largest * unit, peak), unit, parts)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _clipped_leaf(
    method: Method,
    shrink: Shrink,
    axes: Axes,
    scaled: jax.Array,
    x: jax.Array,
    spectrum: Spectrum,
    limit: jax.Array,
) -> jax.Array:
    """A leaf with its singular values shrunk. `scaled` is what the kernel returned."""
    if spectrum.parts is None:
        return scaled
    limit = held_in(spectrum.norm.dtype, limit).reshape(spectrum.norm.shape)
    usual = jnp.isfinite(spectrum.norm) & jnp.isfinite(limit)
    limit = jnp.where(usual, limit, 1.0)
    new, changed = method.shrunk(spectrum, x, limit, shrink)
    inside = other_axes(axes, scaled.ndim)
    layers_first = [scaled.shape[axis] for axis in (*axes, *inside)]
    new = jnp.where(changed, new, x).reshape(layers_first).astype(scaled.dtype)
    new = jnp.moveaxis(new, range(len(axes)), axes)
    chosen = jnp.expand_dims((usual & changed)[..., 0, 0], inside)
    return jnp.where(chosen, split_as(new, jax.typeof(scaled)), scaled)
