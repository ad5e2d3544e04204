"""Batches for privacy, by Poisson sampling."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._checks import check_length, check_number, shown


class Drawn(NamedTuple):
    """A padded batch.

    Attributes:
      chosen: for each place, the number of an example in the data.
      mask: whether an example was drawn for this place, for `mask=`.
    """

    chosen: Array  # int32[places]
    mask: Array  # bool[places]


def draw(key: Array, share: float, *, examples: int, places: int) -> Drawn:
    """Draws a batch by Poisson sampling: each example joins with the same probability,
    whoever else does, and gets a random place of a padded batch.

    Where an example stands tells nothing of who else is there. So the batch without it
    is the batch in which `mask` leaves out its place, and the gradients of all others
    keep their bits: `sensitivity` of `clipped_grad` is proved for that.

    Args:
      key: a key of `jax.random`, another one for each step.
      share: the probability that an example joins, from 0 to 1. The account needs one
        above 0.
      examples: how many examples the data have.
      places: the size of the batch. If more examples are drawn, the last are left out,
        and the account must add the probability of that to delta. Take so many places
        that it is as good as impossible.

    Returns:
      A `Drawn`: `x[chosen]` is the batch, and `mask` goes to `clipped_grad`.

    Raises:
      ValueError: a share outside 0 to 1, fewer than one place, or more places than
        examples.
      TypeError: a share that is not a number, or examples or places that are no int.

    Example:
      >>> from optaxclip.per_example import draw
      >>> chosen, mask = draw(jax.random.key(0), 0.5, examples=6, places=5)
      >>> print(mask.sum(), chosen[mask])
      4 [1 4 2 3]

    Reference: Mironov, Talwar, Zhang, Renyi differential privacy of the sampled
    Gaussian mechanism, 2019 (arXiv 1908.10530).
    """
    check_number("draw: share", share, highest=1.0, is_scalar=True)
    check_length("draw: examples", examples)
    check_number("draw: places", places, lowest=1, highest=examples, is_scalar=True)
    for name, count in {"examples": examples, "places": places}.items():
        # JAX would refuse a float as the shape of an array, without its name.
        if not isinstance(count, (int, np.integer)):
            raise TypeError(
                f"draw: {name} must be an int, got {shown(count)}. Round it: "
                f"{name}=int({shown(count)})."
            )
    example_key, place_key = jax.random.split(key)
    # The threshold of random words is rounded down, so that no example joins more often
    # than `share` says.
    threshold = np.uint32(min(int(share * 2**32), 2**32 - 1))
    is_drawn = jax.random.bits(example_key, (examples,), np.uint32) < threshold
    # The examples that are drawn come first, then others fill up the batch.
    chosen = jnp.argsort(~is_drawn, stable=True)[:places]
    chosen = jax.random.permutation(place_key, chosen)
    return Drawn(chosen, is_drawn[chosen])
