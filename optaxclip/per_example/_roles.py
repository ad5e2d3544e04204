"""Which arguments of a loss are differentiated, shared by all examples, or a batch."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _trees as prefix

# As in jax.grad: for an int the gradient is a tree, for (0,) a tuple of one.
Places = int | Sequence[int]


class Roles(NamedTuple):
    """The arguments of one call, by role. Every argument has one."""

    params: Places  # as the user gave it, since an int asks for no tuple
    batch: tuple[int, ...]
    args: tuple[Any, ...]

    def taken(self, places: Places) -> Any:
        """The arguments at these places: one, or a tuple of several."""
        if isinstance(places, int):
            return self.args[places]
        return tuple(self.args[place] for place in places)

    def call(self, loss: Any, params: Any, example: tuple[Any, ...]) -> Any:
        """The loss of one example. Shared arguments are as they were given."""
        # What is shared may be a function, which jax.vmap could not take.
        args = list(self.args)
        several = [params] if isinstance(self.params, int) else params
        for place, value in zip(_listed(self.params), several):
            args[place] = value
        for place, value in zip(self.batch, example):
            args[place] = value
        return loss(*args)

    def examples(self, call: str) -> tuple[tuple[Any, ...], int]:
        """The batch as arrays, and the number of examples."""
        # [("argument 1 at 'x'", array), ...], for errors to name.
        entries = []
        for place in self.batch:
            found = jax.tree_util.tree_flatten_with_path(self.args[place])[0]
            entries += [(_name(place, path), leaf) for path, leaf in found]
        size = _size(entries, call)
        return jax.tree.map(jnp.asarray, self.taken(self.batch)), size


def roles_of(
    call: str, argnums: Places, shared_argnums: Places, args: tuple[Any, ...]
) -> Roles:
    """The roles of the arguments of one call.

    Raises:
      ValueError: a place that the call does not have, or one in two roles.
    """
    count = len(args)
    argnums = _ints(f"{call}: argnums", argnums)
    shared_argnums = _ints(f"{call}: shared_argnums", shared_argnums)
    roles = {"argnums": argnums, "shared_argnums": shared_argnums}
    taken: list[int] = []
    for name, places in roles.items():
        for place in _listed(places):
            if not -count <= place < count:
                raise ValueError(
                    f"{call}: {name}={places!r}, but the function was called with "
                    f"{count} positional arguments."
                )
            # Of three arguments -1 and 2 are the same.
            if place % count in taken:
                raise ValueError(
                    f"{call}: argnums={argnums!r} and shared_argnums="
                    f"{shared_argnums!r} must be different arguments."
                )
            taken.append(place % count)
    batch = tuple(place for place in range(count) if place not in taken)
    return Roles(argnums, batch, args)


def _size(entries: list[tuple[str, Any]], call: str) -> int:
    """The size that the first axes of the whole batch share."""
    if not entries:
        raise ValueError(
            f"{call}: there is no batch: every argument is in argnums or "
            "shared_argnums, or has no arrays."
        )
    # An array without axes is mostly a number for all, or a single random key.
    for name, leaf in entries:
        if not jnp.shape(leaf):
            raise ValueError(
                f"{call}: {name} is a batch, whose first axis counts examples, but "
                f"has no axis: {_shown(leaf)}. Name an argument that is the same for "
                "all examples in shared_argnums. Give a random key for each example: "
                "jax.random.split(key, batch)."
            )
    sizes = {name: jnp.shape(leaf)[0] for name, leaf in entries}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(
            f"{call}: the first axes of the batch count examples and must have one "
            f"size, but {shown}. Name an argument that is the same for all examples "
            "in shared_argnums."
        )
    size = next(iter(sizes.values()))
    # For a step without examples there is the mask: all False gives zeros.
    if size == 0:
        raise ValueError(
            f"{call}: the batch is empty: give at least one example, masked if need be."
        )
    return size


def _ints(argument: str, places: Any) -> Places:
    """NumPy's ints as Python's, which decide whether the gradient is a tuple."""
    try:
        if not isinstance(places, (tuple, list)):
            return operator.index(places)
        return tuple(map(operator.index, places))
    except TypeError:
        raise TypeError(
            f"{argument} must be an int or a tuple of ints, got {places!r}."
        ) from None


def _listed(places: Places) -> list[int]:
    return [places] if isinstance(places, int) else list(places)


def _name(place: int, path: Any) -> str:
    """An array of an argument as a user reads it."""
    inside = prefix.name(path)
    # "argument 1 at 'x'", or "argument 2" for one that is an array itself.
    return f"argument {place}" + (f" at {inside!r}" if inside else "")


def _shown(leaf: Any) -> str:
    """The type of an array, or the value of what is none."""
    # "key<fry>[]" or "float32[]" of arrays, "0.25" of a Python number.
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return f"{leaf.dtype}[]" if is_array else repr(leaf)
