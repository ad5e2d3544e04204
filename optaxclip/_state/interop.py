"""What other libraries see of states.

exported        a decorator: `jax.export` finds a state by its name
is_placeholder  whether `optax.tree_map_params` calls `init`, without params
"""

from typing import TypeVar

import jax

from .._arguments.reprs import state_repr

T = TypeVar("T")


def is_placeholder(params: object) -> bool:
    """Whether `optax.tree_map_params` calls `init`, with an object of its own."""
    # optax.MaskedNode and the states of optax are tuples, and may be params.
    is_of_optax = type(params).__module__.startswith("optax.")
    return is_of_optax and not isinstance(params, tuple)


def exported(state: type[T]) -> type[T]:
    """Makes `jax.export` know a NamedTuple by its name, and gives it `state_repr`."""
    # `jax.export` knows no NamedTuple by itself: `serialize()` would raise.
    jax.export.register_namedtuple_serialization(
        state, serialized_name=f"optaxclip.{state.__name__}"
    )
    state.__repr__ = state_repr
    return state
