"""States for `optax.tree_map_params`, which knows no parameters.

optax calls `init` with a placeholder, maps over the result and a real state together,
and rebuilds the result. How many norms there are depends on the parameters. So:

    init(placeholder)   one leaf for each field, and a form that is still open
    map with a state    JAX compares the forms: the open one becomes that of the state
    rebuild             each field is repeated as often as the form says
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(eq=False, repr=False)
class Form:
    """What a state is apart from its arrays: the names of its norms.

    The structure of the memory is known too, but not compared: a tree of axes or
    shardings may have one entry for all of it.
    """

    names: tuple[tuple[str, ...], ...]
    memory: Any

    # JAX compares the forms of two trees before it maps over them together.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, OpenForm):
            return other == self
        return isinstance(other, Form) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return repr(self.names)


class OpenForm(Form):
    """The form of the first state that it is compared with."""

    def __init__(self) -> None:
        super().__init__((), None)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Form) and not isinstance(other, OpenForm):
            # The names, and the structure of the memory, for `fill`.
            self.__dict__.update(other.__dict__)
        return isinstance(other, Form)

    # It changes after it was made, so all of them have one hash.
    def __hash__(self) -> int:
        return 0

    def fill(self, name: str, field: Any) -> Any:
        """A field of a state, repeated to the form that was found."""
        count = len(self.names)
        if name == "memory":  # It has a structure of its own.
            whole = [field] * self.memory.num_leaves
            same = jax.tree.structure(field) == self.memory
            return field if same else self.memory.unflatten(whole)
        # The step is one number for all norms.
        if name in ("names", "step") or count == 1:
            return field
        # A field that was mapped to itself is the state's tuple, a sharding one leaf.
        repeated = type(field) is tuple and len(field) == count
        return field if repeated else (field,) * count


def _placeholder_type() -> type:
    """The type of optax's placeholder, which has no public name."""
    # tree_map_params hands its placeholder to init, which notes the type.
    found: list[type] = []

    def init(params: Any) -> Any:
        found.append(type(params))
        return ()

    optax.tree_map_params(init, jnp.shape, ())
    return found[0]


PLACEHOLDER = _placeholder_type()
