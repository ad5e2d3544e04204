"""States that `jax.export` can write to a file, with the program that takes them."""

from typing import TypeVar

import jax

T = TypeVar("T")


def exported(state: type[T]) -> type[T]:
    """Tells JAX the name of a NamedTuple, by which it is read back."""
    # `jax.export` knows no NamedTuple by itself: `serialize()` would raise.
    jax.export.register_namedtuple_serialization(
        state, serialized_name=f"optaxclip.{state.__name__}"
    )
    return state
