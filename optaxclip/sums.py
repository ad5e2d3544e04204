"""The arithmetic of norms: sums of powers over groups of leaves, safe for every finite
input.

A group is a list of leaves that share one norm; `dims` are the dimensions of each of
its leaves that are summed (None: all, and none is kept); `spread` says over which
devices each leaf is split.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .sharding import Split, all_max, all_sum

Dims = tuple[int, ...] | None
DIRECT = (
    1.0,
    2.0,
    3.0,
    4.0,
)  # orders whose powers of any float32 number stay far inside the range of float64
LARGE = (
    2**16
    # elements of a leaf from which on a CPU tries float32 first; below, there is little
    # to win and much to compile
)


@partial(jax.custom_jvp[list[jax.Array]], nondiff_argnums=(0, 1, 2))
def p_norms(
    p: float,
    dims: tuple[Dims, ...],
    spread: tuple[tuple[Split, ...], ...],
    groups: list[list[jax.Array]],
) -> list[jax.Array]:
    """(sum |x|^p)^(1/p) of each group, max |x| for p = inf, 0 for a group without
    leaves.
    """
    full = [place for place, group in enumerate(groups) if group]
    norms = (
        _norms_of(
            p,
            [dims[i] for i in full],
            [list(spread[i]) for i in full],
            [groups[i] for i in full],
        )
        if full
        else []
    )
    found = dict(zip(full, norms))
    return [
        found.get(place, jnp.zeros((), jnp.float32)) for place in range(len(groups))
    ]


@p_norms.defjvp
def _p_norms_jvp(p, dims, spread, primals, tangents):
    """d norm = sum (|x| / norm)^(p-1) d|x|. Written by hand, since sqrt has no finite
    derivative at 0 and the squares may overflow.
    """
    norms = p_norms(p, dims, spread, *primals)
    tangent_norms = [jnp.zeros_like(norm) for norm in norms]
    full = [place for place, group in enumerate(primals[0]) if group]
    weights = _weights(
        p,
        [dims[i] for i in full],
        [list(spread[i]) for i in full],
        [norms[i] for i in full],
        [primals[0][i] for i in full],
    )
    partials = []
    for place, of_group in zip(full, weights):
        leaves, changes = primals[0][place], tangents[0][place]
        terms = [
            _slope(leaf, change, norms[place])
            if p == 2
            else weight * _along(leaf, change)
            for weight, leaf, change in zip(of_group, leaves, changes)
        ]
        partials.append(
            [
                jnp.sum(term, dims[place], keepdims=dims[place] is not None).astype(
                    norms[place].dtype
                )
                for term in terms
            ]
        )
    for place, total in zip(
        full, all_sum(partials, [list(spread[i]) for i in full]) if full else []
    ):
        tangent_norms[place] = total
    return norms, tangent_norms


def _slope(leaf: jax.Array, change: jax.Array, norm: jax.Array) -> jax.Array:
    """x / norm * dx. Without the modulus, whose derivative at 0 hides that of x."""
    wide = np.promote_types(leaf.dtype, norm.dtype)
    unit = _share(leaf.astype(wide), jnp.where(norm > 0, norm, 1.0))
    return jnp.real(jnp.conj(unit) * change.astype(wide)).astype(norm.dtype)


def _weights(
    p: float,
    dims: list[Dims],
    spread: list[list[Split]],
    norms: list[jax.Array],
    groups: list[list[jax.Array]],
) -> list[list[jax.Array]]:
    """The derivative of each norm with respect to each modulus."""
    sizes = [
        [jnp.abs(leaf).astype(norm.dtype) for leaf in group]
        for norm, group in zip(norms, groups)
    ]
    if p == np.inf:  # shared by all that are the largest
        hits = [
            [((size == norm) & (norm > 0)).astype(norm.dtype) for size in group]
            for norm, group in zip(norms, sizes)
        ]
        counts = (
            all_sum(
                [
                    [jnp.sum(hit, over, keepdims=over is not None) for hit in group]
                    for group, over in zip(hits, dims)
                ],
                spread,
            )
            if hits
            else []
        )
        return [
            [hit / jnp.maximum(count, 1) for hit in group]
            for group, count in zip(hits, counts)
        ]
    # Two wheres: at 0 neither the quotient nor, for p < 1, its power exists, and the
    # unused branch of a where must stay finite as well.
    shares = [
        [_share(size, jnp.where(norm > 0, norm, 1.0)) for size in group]
        for norm, group in zip(norms, sizes)
    ]
    return [
        [
            jnp.where(share > 0, jnp.where(share > 0, share, 1.0) ** (p - 1.0), 0.0)
            for share in group
        ]
        for group in shares
    ]


def _norms_of(
    p: float, dims: list[Dims], spread: list[list[Split]], groups: list[list[jax.Array]]
) -> list[jax.Array]:
    if p == np.inf:
        return _largest(dims, spread, groups)

    def summed_in(wide: Any, groups: list[list[jax.Array]]) -> list[jax.Array]:
        return _roots(p, dims, spread, groups, wide)

    # A TPU has no float64: what XLA puts in its place is slow and has the range of
    # float32.
    norms = lax.platform_dependent(
        groups,
        tpu=partial(summed_in, np.float32),
        default=partial(summed_in, np.float64),
    )
    # Without the barrier XLA copies the sum over all leaves into the kernel of every
    # leaf: at 2,000 leaves that is a tenth of the compile time. Each has its own, since
    # a barrier over several would type them all as differing between devices where one
    # does.
    return [lax.optimization_barrier(norm) for norm in norms]


def _roots(
    p: float,
    dims: list[Dims],
    spread: list[list[Split]],
    groups: list[list[jax.Array]],
    wide: Any,
) -> list[jax.Array]:
    """(sum |x|^p)^(1/p) with sums in the dtype `wide`, or wider where a leaf is."""
    dtypes = [norm_dtype(group) for group in groups]
    if (
        p in DIRECT
        and wide == np.float64
        and all(dtype == np.float32 for dtype in dtypes)
    ):
        return _wide_roots(p, dims, spread, groups, [np.float64] * len(groups))
    # Where powers could leave the range, the values are divided by the largest first,
    # which costs a second read.
    largest = all_max(
        [
            [_most(over, dtype, leaf) for leaf in group]
            for group, over, dtype in zip(groups, dims, dtypes)
        ],
        spread,
    )
    divisors = [_divisor(most) for most in largest]
    shares = [
        [_share_of(leaf, divisor) for leaf in group]
        for group, divisor in zip(groups, divisors)
    ]
    roots = _wide_roots(
        p, dims, spread, shares, [np.promote_types(wide, dtype) for dtype in dtypes]
    )
    return [divisor * root for divisor, root in zip(divisors, roots)]


def _wide_roots(
    p: float,
    dims: list[Dims],
    spread: list[list[Split]],
    groups: list[list[jax.Array]],
    wides: list[Any],
) -> list[jax.Array]:
    with jax.enable_x64(
        True
    ):  # for these operations only, whatever the program around them uses
        partials = [
            [_sum_of_powers(p, over, wide, leaf) for leaf in group]
            for group, over, wide in zip(groups, dims, wides)
        ]
        roots = [
            jnp.sqrt(total) if p == 2 else total ** (1.0 / p)
            for total in all_sum(partials, spread)
        ]
        return [
            lax.convert_element_type(root, norm_dtype(group))
            for root, group in zip(roots, groups)
        ]


# The work on one leaf or one norm is jitted, because it is traced once then for all of
# one shape: a model of 2,000 leaves has a dozen shapes.


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sum_of_powers(p: float, over: Dims, wide: Any, leaf: jax.Array) -> jax.Array:
    def in_wide(leaf: jax.Array) -> jax.Array:
        return jnp.sum(_power(p, leaf, wide), over, keepdims=over is not None)

    if (
        p == 2
        and wide == np.float64
        and leaf.dtype == np.float32
        and isinstance(leaf.size, int)  # jax.export has symbolic sizes
        and leaf.size >= LARGE
        and _is_right_in_float32(over, leaf)
    ):
        return lax.platform_dependent(
            leaf, cpu=partial(_squares_on_cpu, over, in_wide), default=in_wide
        )
    return in_wide(leaf)


def _is_right_in_float32(over: Dims, leaf: jax.Array) -> bool:
    """What was seen of XLA on CPU: its sums in float32 are right to 3e-7, but not for
    many dimensions (1.2e-5 at rank 17), nor, in JAX 0.10.2, over the rows of more than
    32,768 columns (4e-6 for 4,096 rows).
    """
    columns = 1 if over is None or leaf.ndim - 1 in over else leaf.shape[-1]
    return leaf.ndim <= 4 and columns <= 2**15


def _squares_on_cpu(
    over: Dims, in_float64: Callable[[jax.Array], jax.Array], leaf: jax.Array
) -> jax.Array:
    """The sum of squares in float32, for half the time of float64, and in float64 only
    where squares have left the range of float32. A GPU would have to wait for the
    choice.
    """

    @jax.custom_batching.custom_vmap
    def of_one(leaf: jax.Array) -> jax.Array:
        x = lax.optimization_barrier(
            leaf
        )  # without it XLA makes one product of these squares and Adam's, and keeps it
        totals = jnp.sum(x * x, over, keepdims=over is not None)
        lost = (
            leaf.size // totals.size * 2.0**-126
        )  # what squares too small for float32 can add up to
        return lax.cond(
            jnp.all((totals > 2.0**26 * lost) & (totals < jnp.inf)),
            lambda leaf: totals.astype(np.float64),
            in_float64,
            leaf,
        )

    @of_one.def_vmap
    def of_many(
        axis_size: int, in_batched: list[bool], leaves: jax.Array
    ) -> tuple[jax.Array, bool]:  # where a choice would be both
        with jax.enable_x64(True):  # the rule is called later than the function
            return jax.vmap(in_float64)(leaves), True

    return of_one(leaf)


def _power(p: float, leaf: jax.Array, wide: Any) -> jax.Array:
    """|x|^p in the dtype `wide`."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return (
            _power(p, jnp.real(leaf), wide) + _power(p, jnp.imag(leaf), wide)
            if p == 2
            else _power(p, jnp.abs(leaf), wide)
        )
    if p in DIRECT:
        # Converted before it is squared: that keeps it exact, and apart from the
        # float32 copy that an optimizer makes of 16-bit gradients.
        x = lax.convert_element_type(leaf if p == 2 else jnp.abs(leaf), wide)
        return lax.integer_pow(x, int(p))
    return lax.convert_element_type(jnp.abs(leaf) ** p, wide)


def _largest(
    dims: list[Dims], spread: list[list[Split]], groups: list[list[jax.Array]]
) -> list[jax.Array]:
    """max |x| of each group. NaN is counted apart, since a maximum over several devices
    drops it.
    """
    dtypes = [norm_dtype(group) for group in groups]
    maxima = all_max(
        [
            [_most_and_nans(over, dtype, leaf) for leaf in group]
            for group, over, dtype in zip(groups, dims, dtypes)
        ],
        spread,
    )
    return [_most_or_nan(most_and_nans) for most_and_nans in maxima]


@jax.jit
def _most_or_nan(most_and_nans: jax.Array) -> jax.Array:
    most, nans = most_and_nans
    return jnp.where(nans > 0, jnp.nan, most)


@jax.jit
def _divisor(most: jax.Array) -> jax.Array:
    return jnp.where((most > 0) & (most < jnp.inf), most, 1.0)


@partial(jax.jit, static_argnums=(0, 1))
def _most_and_nans(over: Dims, dtype: Any, leaf: jax.Array) -> jax.Array:
    # XLA on CPU reads through a maximum or a sum without a copy only while nothing is
    # compared or selected in it. So NaN is found by a sum of zeros: 0 / (1 + inf) is 0,
    # 0 / (1 + NaN) is not.
    x = _real_of(leaf)
    broken = jnp.isnan(jnp.sum(0 / (1 + x * x), over, keepdims=over is not None))
    return jnp.stack(
        [jnp.where(broken, 0, _most(over, dtype, leaf)), broken.astype(dtype)]
    )


@partial(jax.jit, static_argnums=(0, 1))
def _most(over: Dims, dtype: Any, leaf: jax.Array) -> jax.Array:
    """max |x|, from which XLA on CPU drops a NaN."""
    x = _real_of(leaf)
    axes = tuple(range(x.ndim)) if over is None else over
    most = lax.max(lax.reduce_max(x, axes), -lax.reduce_min(x, axes))
    return (most if over is None else lax.expand_dims(most, axes)).astype(dtype)


def _real_of(leaf: jax.Array) -> jax.Array:
    """Real numbers of the same moduli."""
    return jnp.abs(leaf) if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else leaf


@jax.jit
def _share_of(leaf: jax.Array, divisor: jax.Array) -> jax.Array:
    return _share(jnp.abs(leaf).astype(divisor.dtype), divisor)


@jax.custom_jvp
def _share(size: jax.Array, whole: jax.Array) -> jax.Array:
    """size / whole. XLA multiplies an array by the reciprocal of a scalar, which
    flushes to 0 above 2^126; so large numbers come down first.
    """
    down = jnp.where(whole > 1, 0.125, 1.0).astype(whole.dtype)
    return size * down / (whole * down)


@_share.defjvp
def _share_jvp(primals, tangents):
    """d(s/w) = (ds - (s/w) dw) / w. The rule of division itself squares w, which is 0
    below 1e-19.
    """
    size, whole = primals
    share = _share(size, whole)
    return share, _share(tangents[0] - share * tangents[1], whole)


def direction(x: jax.Array) -> jax.Array:
    """x / |x|, 0 at 0; of an infinite complex number that of its infinite part. The
    modulus itself may be beyond the range of the dtype.
    """
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.sign(x)
    parts = jnp.real(x), jnp.imag(x)
    infinite = jnp.isinf(parts[0]) | jnp.isinf(parts[1])
    parts = [
        jnp.where(jnp.isinf(part), jnp.sign(part), jnp.where(infinite, 0 * part, part))
        for part in parts
    ]
    longer = jnp.maximum(*map(jnp.abs, parts))
    real, imag = (part / jnp.where(longer == 0, 1.0, longer) for part in parts)
    # Where both are 0 the root has no derivative, so it is not taken of 0.
    return lax.complex(real, imag) / jnp.sqrt(
        jnp.where(longer == 0, 1.0, real * real + imag * imag)
    )


def _along(leaf: jax.Array, change: jax.Array) -> jax.Array:
    """What a change of the leaf changes of its modulus."""
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return (jnp.sign(leaf) * change).astype(_real(leaf))
    return jnp.real(jnp.conj(direction(leaf)) * change)


def _real(leaf: jax.Array) -> Any:
    return jnp.finfo(leaf.dtype).dtype


def norm_dtype(group: list[jax.Array]) -> Any:
    """float32, or float64 when a leaf has 64 bits."""
    return np.promote_types(
        np.float32,
        np.float64 if any(_real(leaf) == np.float64 for leaf in group) else np.float32,
    )
