"""The singular values of matrices: by decomposition, or by products of matrices."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arguments import check_number, held_in
from .._norms import _prefix as prefix
from .._norms._in_blocks import Norms, norms_of_tree
from .._norms._leaves import (
    for_each_leaf,
)
from .._norms._modulus import norm_dtype, wide_dtype
from .._norms._norms import tensor_norm
from .._norms._stacked import Axes, other_axes, stacked_axes
from .._norms._types import gathered, split_as
from ..shrinks import Shrink, hard
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
        self,
        spectrum: "Spectrum",
        x: jax.Array,
        limit: jax.Array,
        shrink: Shrink,
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
        self,
        spectrum: "Spectrum",
        x: jax.Array,
        limit: jax.Array,
        shrink: Shrink,
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
        spectra = [spectrum_of(self.method, x) for x in self.matrices(tree)]
        return norms_of_tree(in_one_dtype(self.norms_of(tree, spectra)), tree)

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
        for (path, leaf), axes, count in zip(
            entries, self.layers(tree), counts
        ):
            skip = len(axes)
            columns = self._columns_of(path, jnp.shape(leaf), skip, count)
            whole = gathered(jnp.moveaxis(leaf, axes, range(skip)), skip)
            edge = whole.ndim - columns
            sizes = (
                math.prod(whole.shape[skip:edge]),
                math.prod(whole.shape[edge:]),
            )
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
        is_whole = isinstance(count, (int, np.integer))
        if not (is_whole and 1 <= count < rank):
            raise ValueError(
                f"{self.call}: columns must be a number of trailing axes, from 1 to "
                f"{rank - 1} for the leaf {prefix.name(path)!r} of shape {shape}, got "
                f"{count!r}."
            )
        return int(count)

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


def in_one_dtype(norms: Any) -> Any:
    """Norms in one dtype, since the state has one vector for those of all leaves."""
    dtype = norm_dtype(norms)
    return jax.tree.map(lambda norm: norm.astype(dtype), norms)


def method_of(call: str, method: Any, steps: int | None = None) -> Method:
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
def spectrum_of(method: Method, x: jax.Array) -> Spectrum:
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
def clipped_leaf(
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
