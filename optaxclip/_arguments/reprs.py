"""How states, and calls that make clippers and rules, are shown.

state_repr   how a notebook shows a state
call_repr    how it shows the call that made a clipper or a rule
short_repr   how it shows an argument of such a call
has_numbers  whether the numbers of an array can be shown
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer

LONGEST_TEXT = 200  # characters of a state, or of a value in an error
LONGEST_FIELD = 60  # characters of one of its fields


def state_repr(self: Any) -> str:
    """The `repr` of a state. The rows that its `ROWS` name are shown by name."""
    # The first fields hold these rows. Most states have no `ROWS`.
    row_names: tuple[Any, ...] = getattr(self, "ROWS", ())
    rows_of_field = dict(zip(self._fields, row_names))
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


def call_repr(name: str, fields: dict[str, Any]) -> str:
    """A call with these arguments: short ones first, and cut if it is long."""
    texts = []
    for field, value in fields.items():
        if isinstance(value, tuple | dict) and not jax.tree.leaves(value):
            continue
        texts.append(f"{field}={_cut(short_repr(value), LONGEST_FIELD)}")
    texts.sort(key=lambda text: len(text) > LONGEST_FIELD / 2)
    return _cut(f"{name}({', '.join(texts)})", LONGEST_TEXT)


def short_repr(value: Any) -> str:
    """The `repr` of a tree, with the dtypes and shapes of arrays."""
    return repr(jax.tree.map(_ShortRepr, value, is_leaf=_has_own_repr))


def _has_own_repr(x: object) -> bool:
    """Whether it is shown as a whole: a function, a transformation or a rule."""
    return callable(x) or hasattr(x, "init")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 4]}...{text[-1]}"


ARRAYS = (Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
# Types of transformations that do not know the call that made them.
UNNAMED_TRANSFORMATIONS = (
    optax.GradientTransformation,
    optax.GradientTransformationExtraArgs,
)


class _ShortRepr(NamedTuple):
    """A leaf whose `repr` is short."""

    leaf: Any

    def __repr__(self) -> str:
        leaf = self.leaf
        if type(leaf) in UNNAMED_TRANSFORMATIONS:
            # The init of `optax.chain` is called "chain.<locals>.init_fn".
            name = getattr(leaf.init, "__qualname__", "transformation")
            return f"{name.partition('.')[0]}(...)"
        # A schedule within a range is a partial with the schedule as its last argument.
        while isinstance(leaf, partial):
            last = leaf.args[-1] if leaf.args else None
            leaf = last if callable(last) else leaf.func
        if callable(leaf):
            # A shrink such as `smooth(2)` has no name, and a repr of its own.
            is_plain = type(leaf).__repr__ is object.__repr__
            text = type(leaf).__name__ if is_plain else repr(leaf)
            return getattr(leaf, "__name__", text)
        # A tensor of torch has a dtype that NumPy does not know.
        if not isinstance(leaf, ARRAYS):
            return repr(leaf)
        # Keys are not numbers.
        is_number = jnp.issubdtype(leaf.dtype, jnp.number)
        is_large = leaf.ndim > 1 or leaf.size > 3
        if not is_number or is_large or not has_numbers(leaf):
            return f"{leaf.dtype}{list(leaf.shape)}"
        numbers = np.atleast_1d(np.asarray(leaf, leaf.dtype)).tolist()
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        texts = [f"{x:.4g}" if is_float else str(x) for x in numbers]
        return f"[{', '.join(texts)}]" if leaf.ndim else texts[0]
