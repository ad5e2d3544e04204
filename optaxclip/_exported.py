"""What other libraries see of states and calls.

exported           a decorator: `jax.export` finds a state by its name
state_repr         how a notebook shows a state
call_repr          how it shows the call that made a clipper or a rule
has_numbers        whether the numbers of an array can be shown
PLACEHOLDER_TYPES  what `optax.tree_map_params` hands to `init` in the place of params
"""

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer

T = TypeVar("T")
LONGEST = 200  # characters of a state
LONGEST_FIELD = 60  # characters of one of its fields


def _types_of_placeholder() -> tuple[type, ...]:
    """The types of what `optax.tree_map_params` hands to `init`: one, or none in an
    optax that hands over nothing of its own.
    """
    types = []

    def init(placeholder: object) -> tuple[()]:
        types.append(type(placeholder))
        return ()

    optax.tree_map_params(init, jnp.shape, ())
    return tuple(types)


PLACEHOLDER_TYPES = _types_of_placeholder()


def exported(state: type[T]) -> type[T]:
    """Makes `jax.export` know a NamedTuple by its name, and gives it `state_repr`."""
    # `jax.export` knows no NamedTuple by itself: `serialize()` would raise.
    jax.export.register_namedtuple_serialization(
        state, serialized_name=f"optaxclip.{state.__name__}"
    )
    state.__repr__ = state_repr
    return state


def state_repr(self: Any) -> str:
    """The `repr` of a state. Of a field in its `ROWS` the rows are shown by name."""
    rows_of_field = dict(getattr(self, "ROWS", ()))
    fields = {}
    for field, value in self._asdict().items():
        rows = rows_of_field.get(field, ())
        if rows and has_numbers(value):
            fields |= {row: getattr(self, row) for row in rows}
        else:
            fields[field] = value
    return call_repr(type(self).__name__, fields)


def has_numbers(array: object) -> bool:
    """Whether its numbers can be shown. Types and traced, donated and remote arrays
    have none here.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return True
    if not isinstance(array, Array) or isinstance(array, Tracer):
        return False
    return array.is_fully_addressable and not array.is_deleted()


# Transformations that do not know the call that made them.
WITHOUT_CALL = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)


def call_repr(name: str, fields: dict[str, Any]) -> str:
    """A call with these arguments: short ones first, and cut if it is long."""
    texts = []
    for field, value in fields.items():
        if isinstance(value, tuple | dict) and not jax.tree.leaves(value):
            continue
        text = repr(jax.tree.map(_Short, value, is_leaf=_is_function_or_clipper))
        texts.append(f"{field}={_cut(text, LONGEST_FIELD)}")
    texts.sort(key=lambda text: len(text) > LONGEST_FIELD / 2)
    return _cut(f"{name}({', '.join(texts)})", LONGEST)


def _is_function_or_clipper(x: object) -> bool:
    return callable(x) or isinstance(x, optax.GradientTransformation)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 4]}...{text[-1]}"


class _Short(NamedTuple):
    """A leaf whose `repr` is short."""

    leaf: Any

    def __repr__(self) -> str:
        leaf = self.leaf
        if type(leaf) in WITHOUT_CALL:
            # The init of `optax.chain` is called "chain.<locals>.init_fn".
            name = getattr(leaf.init, "__qualname__", "transformation")
            return f"{name.partition('.')[0]}(...)"
        # A schedule within a range is a partial with the schedule as its last argument.
        while isinstance(leaf, partial):
            last = leaf.args[-1] if leaf.args else None
            leaf = last if callable(last) else leaf.func
        if callable(leaf):
            return getattr(leaf, "__name__", type(leaf).__name__)
        if not hasattr(leaf, "dtype"):
            return repr(leaf)
        # Keys are no numbers.
        is_number = jnp.issubdtype(leaf.dtype, jnp.number)
        is_large = leaf.ndim > 1 or leaf.size > 3
        if not is_number or is_large or not has_numbers(leaf):
            return f"{leaf.dtype}{list(leaf.shape)}"
        numbers = np.atleast_1d(np.asarray(leaf, leaf.dtype)).tolist()
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        texts = [f"{x:.4g}" if is_float else str(x) for x in numbers]
        return f"[{', '.join(texts)}]" if leaf.ndim else texts[0]
