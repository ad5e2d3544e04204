"""Batches for privacy, by Poisson sampling."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._arguments.checks import check_key, check_number, check_whole_number


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
      places: the size of the batch, at least share * examples. If more examples are
        drawn, the last are left out, and the account must add the probability of that
        to delta. Take so many places that it is as good as impossible.

    Returns:
      A `Drawn`: `x[chosen]` is the batch, and `mask` goes to `clipped_grad`.

    Raises:
      ValueError: a share outside 0 to 1, fewer places than one or than share *
        examples, more places than examples, counts that are not whole, or several
        keys.
      TypeError: something that is not a number, or not a key.

    Example:
      >>> from optaxclip.per_example import draw
      >>> chosen, mask = draw(jax.random.key(0), 0.5, examples=6, places=5)
      >>> print(mask.sum(), chosen[mask])
      4 [1 4 2 3]

    Reference: Mironov, Talwar, Zhang, Renyi differential privacy of the sampled
    Gaussian mechanism, 2019 (arXiv 1908.10530).
    """
    check_key("draw: key", key)
    check_number("draw: share", share, highest=1.0, is_scalar=True)
    check_whole_number("draw: examples", examples)
    check_whole_number("draw: places", places)
    # With fewer places about every second batch is cut off, and no account holds.
    expected = float(share) * int(examples)
    argument = f"draw: places for {expected:g} expected examples"
    check_number(argument, places, lowest=expected, highest=examples)
    example_key, place_key = jax.random.split(key)
    # The threshold of random words is rounded down, so that no example joins more often
    # than `share` says.
    threshold = int(float(share) * 2**32)  # float16 and int32 do not reach 2^32
    threshold = np.uint32(min(threshold, 2**32 - 1))
    words = jax.random.bits(example_key, (int(examples),), np.uint32)
    is_drawn = words < threshold
    # The examples that are drawn come first, then others fill up the batch.
    by_joining = jnp.argsort(~is_drawn, stable=True)
    chosen = by_joining[: int(places)]
    chosen = jax.random.permutation(place_key, chosen)
    return Drawn(chosen, is_drawn[chosen])
