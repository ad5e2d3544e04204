"""The derivative of a norm by each element, by hand.

    d norm = sum (|x| / norm)^(p-1) d|x|

sqrt has no finite derivative at 0, and squares may overflow.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ._groups import Layout, add_up, scatter, sum_over
from ._modulus import divided


def slope(leaf: jax.Array, change: jax.Array, norm: jax.Array) -> jax.Array:
    """x / norm * dx. Without the modulus, whose derivative at 0 hides that of x."""
    if jnp.iscomplexobj(leaf):
        real = slope(jnp.real(leaf), jnp.real(change), norm)
        return real + slope(jnp.imag(leaf), jnp.imag(change), norm)
    # A norm of 0 has only zeros, whose derivative is then 0 / 1.
    unit = divided(leaf.astype(norm.dtype), jnp.where(norm > 0, norm, 1.0))
    return unit * change.astype(norm.dtype)


def weights_of(
    p: float,
    layout: Layout,
    norms: list[jax.Array],
    groups: list[list[jax.Array]],
) -> list[list[jax.Array]]:
    """The derivative of each norm by each modulus."""
    if p == np.inf:
        return _shared_by_largest(layout, norms, groups)
    found = []
    for norm, group in zip(norms, groups):
        safe = jnp.where(norm > 0, norm, 1.0)
        shares = [divided(jnp.abs(x).astype(norm.dtype), safe) for x in group]
        found.append([_power_of_share(p - 1.0, share) for share in shares])
    return found


def _power_of_share(power: float, share: jax.Array) -> jax.Array:
    # Two wheres: at 0 a power below 1 does not exist, and the unused branch of a where
    # must stay finite as well.
    return jnp.where(share > 0, jnp.where(share > 0, share, 1.0) ** power, 0.0)


def _shared_by_largest(
    layout: Layout, norms: list[jax.Array], groups: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    """The derivative of a maximum, shared by all elements that are the largest."""
    hits: list[list[jax.Array]] = []
    for norm, group in zip(norms, groups):
        sizes = [jnp.abs(x).astype(norm.dtype) for x in group]
        # Zeros hit no norm of 0, so that their derivative is 0 as in every other order.
        hits.append(
            [((x == norm) & (norm > 0)).astype(norm.dtype) for x in sizes]
        )
    terms = []
    for hit, part in zip(hits, layout):
        terms.append([sum_over(x, part.dims) for x in hit])
    dtype = norms[0].dtype if norms else np.float32
    counts = scatter(add_up([terms], layout, dtype)[0], layout)
    shared = []
    for hit, n in zip(hits, counts):
        # Nothing is the largest where the norm is 0 or NaN: 0 / 1.
        shared.append([x / jnp.maximum(n, 1) for x in hit])
    return shared
