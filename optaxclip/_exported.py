"""States that `jax.export` can write to a file, with the program that takes them, and
that a notebook shows in two lines.
"""

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
        if isinstance(value, tuple | dict) and not value:
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
