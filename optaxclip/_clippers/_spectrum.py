"""The singular values of matrices: by decomposition, or by products of matrices."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _trees as prefix
from .._checks import check_choice, check_known, check_length, held_in
from .._mesh import gathered, split_as
from .._modulus import wide_dtype
from .._norms import Norms, norms_of_tree, tensor_norm
from .._sums import norm_dtype
from .._trees import for_each_leaf, other_axes, stacked_axes
from ..shrinks import Shrink, hard
from . import _newton_schulz as newton_schulz
from ._tiles import exact_product


class Spectrum(NamedTuple):
    """What is known of the singular values of matrices [layers, rows, columns]."""

    norm: jax.Array  # float32[layers, 1, 1]: the largest of each matrix
    # float32[layers, 1, 1]: the powers of 2 that the matrices were divided by
    unit: jax.Array
    # What the method knows of the divided matrices. None for vectors, which need none.
    parts: Any = None


@dataclass(frozen=True)
class Svd:
    """Singular values by a singular value decomposition, of each leaf by itself."""

    def measure(self, xs: list[jax.Array]) -> list[tuple[jax.Array, Any]]:
        """For each leaf the largest singular values, and the decomposition."""
        found = []
        for x in xs:
            u, s, v = jnp.linalg.svd(x, full_matrices=False)
            found.append((s[..., None, :1], (u, s, v)))
        return found

    def shrunk(
        self, spectra: list[Spectrum], limits: list[jax.Array], shrink: Shrink
    ) -> list[tuple[jax.Array, jax.Array]]:
        """For each leaf the clipped matrices, and which of them have changed."""
        found = []
        for spectrum, limit in zip(spectra, limits):
            u, s, v = spectrum.parts
            long = s[..., None, :] * spectrum.unit
            short = shrink(long, jnp.broadcast_to(limit, long.shape))
            changed = jnp.any(short != long, -1, keepdims=True)
            found.append((exact_product(u * short, v), changed))
        return found


@dataclass(frozen=True)
class NewtonSchulz:
    """Singular values by matrix products alone, of all leaves together."""

    steps: int | None = None

    def measure(self, xs: list[jax.Array]) -> list[tuple[jax.Array, Any]]:
        """For each leaf the largest singular values, and the matrices with a bound for
        their singular values.
        """
        found = newton_schulz.largest(xs)
        return [(norm, (x, bound)) for x, (norm, bound) in zip(xs, found)]

    def shrunk(
        self, spectra: list[Spectrum], limits: list[jax.Array], shrink: Shrink
    ) -> list[tuple[jax.Array, jax.Array]]:
        """For each leaf the clipped matrices, and which of them have changed."""
        short = newton_schulz.shrunk(
            [spectrum.parts[0] for spectrum in spectra],
            [limit / one.unit for limit, one in zip(limits, spectra)],
            [spectrum.parts[1] for spectrum in spectra],
            steps=self.steps,
            is_hard=shrink is hard,
        )
        found = []
        for spectrum, limit, new in zip(spectra, limits, short):
            changed = (spectrum.norm > limit) | (shrink is not hard)
            found.append((spectrum.unit * new, changed))
        return found


Method = Svd | NewtonSchulz


METHODS = ("svd", "newton_schulz")


class SpectralNorm(NamedTuple):
    """The largest singular value of each leaf, or of each layer of a stacked leaf."""

    call: str
    method: Method
    columns: Any = None
    stacked: Any = None

    def __call__(self, tree: Any) -> Norms:
        spectra = spectra_of(self.method, self.matrices(tree))
        return norms_of_tree(in_one_dtype(self.norms_of(tree, spectra)), tree)

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

    def layers(self, tree: Any) -> list[tuple[int, ...]]:
        """For each leaf, the axes that count layers."""
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
        return stacked_axes(self.stacked, tree, self.call, shapes)

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
    check_choice(f"{call}: method", method, METHODS)
    if steps is not None:
        check_length(f"{call}: steps", steps)
        check_known(f"{call}: steps", steps)
        steps = int(steps)
    return Svd() if method == "svd" else NewtonSchulz(steps)


@partial(jax.jit, static_argnums=0)
def spectra_of(method: Method, xs: list[jax.Array]) -> list[Spectrum]:
    """What a method finds out about the singular values of the matrices of leaves."""
    divided = [_divided(x) for x in xs if min(x.shape[-2:]) > 1]
    measured = iter(zip(divided, method.measure([x for x, *_ in divided])))
    spectra = []
    for x in xs:
        if min(x.shape[-2:]) == 1:
            norm = tensor_norm(x, stacked=x.ndim - 2)
            norm = norm.reshape(*x.shape[:-2], 1, 1)
            spectra.append(Spectrum(norm, jnp.ones_like(norm)))
            continue
        (_, unit, peak), (largest, parts) = next(measured)
        norm = jnp.where(jnp.isfinite(peak), largest * unit, peak)
        spectra.append(Spectrum(norm, unit, parts))
    return spectra


def _divided(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Matrices whose squares do not overflow, what they were divided by, and the
    largest element of each. Those with NaN or inf become zeros.
    """
    peak = lax.stop_gradient(jnp.max(jnp.abs(x), (-2, -1), keepdims=True))
    finite = jnp.isfinite(peak)
    usual = finite & (peak > 0)
    # Powers of 2 round nothing. 2^126 is not one of them: XLA multiplies with its
    # reciprocal, which is flushed to 0.
    exponent = jnp.floor(jnp.log2(jnp.where(usual, peak, 1.0)))
    # 100 of float32, whose numbers end at 2^128, and 996 of float64.
    most = int(jnp.finfo(x.dtype).maxexp) - 28
    unit = jnp.where(usual, jnp.exp2(jnp.clip(exponent, -most, most)), 1.0)
    return jnp.where(finite, x / unit, jnp.zeros_like(x)), unit, peak


@partial(jax.jit, static_argnums=(0, 1, 2))
def clipped_by(
    method: Method,
    shrink: Shrink,
    layers: tuple[tuple[int, ...], ...],
    scaled: list[jax.Array],
    spectra: list[Spectrum],
    limits: list[jax.Array],
) -> list[jax.Array]:
    """Leaves with shrunk singular values. `scaled` is what the kernel returned."""
    found = list(scaled)
    own = [
        i for i, spectrum in enumerate(spectra) if spectrum.parts is not None
    ]
    spectra = [spectra[i] for i in own]
    held, usual = [], []
    for i, spectrum in zip(own, spectra):
        limit = held_in(spectrum.norm.dtype, limits[i])
        limit = limit.reshape(spectrum.norm.shape)
        usual.append(jnp.isfinite(spectrum.norm) & jnp.isfinite(limit))
        held.append(jnp.where(usual[-1], limit, 1.0))
    shrunk = method.shrunk(spectra, held, shrink)
    for i, (new, changed), is_usual in zip(own, shrunk, usual):
        found[i] = _chosen(layers[i], is_usual & changed, new, scaled[i])
    return found


def _chosen(
    axes: tuple[int, ...], chosen: jax.Array, new: jax.Array, scaled: jax.Array
) -> jax.Array:
    """A leaf with the matrices [..., rows, columns] that are chosen for new ones."""
    inside = other_axes(axes, scaled.ndim)
    layers_first = [scaled.shape[axis] for axis in (*axes, *inside)]
    new = new.reshape(layers_first).astype(scaled.dtype)
    new = jnp.moveaxis(new, range(len(axes)), axes)
    chosen = jnp.expand_dims(chosen[..., 0, 0], inside)
    return jnp.where(chosen, split_as(new, jax.typeof(scaled)), scaled)
