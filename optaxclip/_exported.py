"""What a state is to others: to `jax.export`, to `optax.tree_map_params`, and to a
notebook, which shows it in two lines.

`optax.tree_map_params` calls `init` with a placeholder, maps over the result and a real
state together, and rebuilds the result. Which names there are depends on the
parameters. So:

    init(placeholder)   one leaf for each field, and a form that is still open
    map with a state    JAX compares the forms: the open one notes that of the state
    rebuild             with the names that were noted
"""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

T = TypeVar("T")
LONGEST = 200  # characters of a state, and of its fields
LONGEST_FIELD = 60


@dataclass(eq=False)
class Form:
    """What a state is apart from its arrays. Only the names of norms are compared: a
    tree of shardings may have one entry for all of the memory, and devices may hold a
    share of the layers.
    """

    names: tuple[Any, ...] | None  # None: open
    memory: Any = None  # its structure
    units: bool = False
    noted: "Form | None" = None  # that of the state beside an open one

    # JAX compares the forms of two trees before it maps over them together.
    def __eq__(self, other: Any) -> bool:
        # All states of a run share the object.
        if self.names is other.names:
            return True
        for one, two in ((self, other), (other, self)):
            if one.names is None and two.names is not None:
                one.noted = two
        if self.names is None or other.names is None:
            return True
        # In order.
        if list(map(list, self.names)) != list(map(list, other.names)):
            return False
        one, two = self.counts(), other.counts()
        return all(map(_is_share, one, two)) or all(map(_is_share, two, one))

    def counts(self) -> list[int]:
        """The layers of each name, 0 for a number."""
        return [len(x or ()) for part in self.names or () for x in part.values()]

    # An open form equals any other.
    def __hash__(self) -> int:
        return 0


def _is_share(count: int, whole: int) -> bool:
    return count == whole or (0 < count < whole and whole % count == 0)


# The type of optax's placeholder, which has no public name. `tree_map_params` hands it
# to `init`, which notes the type.
_found: list[type] = []
optax.tree_map_params(lambda x: _found.append(type(x)) or (), jnp.shape, ())
PLACEHOLDER = _found[0]


def exported(state: type[T]) -> type[T]:
    """Tells JAX the name of a NamedTuple, by which it is read back."""
    # `jax.export` knows no NamedTuple by itself: `serialize()` would raise.
    jax.export.register_namedtuple_serialization(
        state, serialized_name=f"optaxclip.{state.__name__}"
    )
    state.__repr__ = state_repr
    return state


def state_repr(self: Any) -> str:
    """The `repr` of a state."""
    fields = self._asdict()
    names = fields.pop("names", None)
    # Those of norms are the keys of dicts of None.
    if isinstance(names, tuple):
        fields["names"] = list(chain(*names))
    return call_repr(type(self).__name__, fields)


def call_repr(name: str, fields: dict[str, Any]) -> str:
    """A call with these arguments: numbers first, and cut at the end if it is long."""
    texts = []
    for field, value in fields.items():
        if isinstance(value, tuple | dict) and not jax.tree.leaves(value):
            continue
        text = repr(jax.tree.map(_Short, value, is_leaf=_is_whole))
        texts.append(f"{field}={_cut(text, LONGEST_FIELD)}")
    texts.sort(key=lambda text: len(text) > LONGEST_FIELD / 2)
    return _cut(f"{name}({', '.join(texts)})", LONGEST)


def _is_whole(x: Any) -> bool:
    return callable(x) or isinstance(x, optax.GradientTransformation)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 4]}...{text[-1]}"


class _Short(NamedTuple):
    """A leaf whose `repr` is short."""

    leaf: Any

    def __repr__(self) -> str:
        leaf = self.leaf
        # A schedule within a range is a partial with the schedule as its last argument.
        while isinstance(leaf, partial):
            last = leaf.args[-1] if leaf.args else None
            leaf = last if callable(last) else leaf.func
        if callable(leaf):
            return getattr(leaf, "__name__", type(leaf).__name__)
        if not hasattr(leaf, "dtype"):
            return repr(leaf)
        kind = f"{leaf.dtype}{list(leaf.shape)}"
        # Keys are no numbers.
        is_number = jnp.issubdtype(leaf.dtype, jnp.number)
        if not is_number or leaf.ndim > 1 or leaf.size > 3:
            return kind
        # Donated, traced and remote numbers, and types, are not here.
        try:
            numbers = np.atleast_1d(np.asarray(leaf, leaf.dtype)).tolist()
        except (RuntimeError, TypeError):
            return kind
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        texts = [f"{x:.4g}" if is_float else str(x) for x in numbers]
        return f"[{', '.join(texts)}]" if leaf.ndim else texts[0]
