"""Functions as arguments: what is one, and the form in which JAX takes it."""

from collections.abc import Callable
from typing import Any, TypeGuard

import jax
from jax.tree_util import Partial


def as_partial(function: Callable[..., Any]) -> Partial:
    """The function as a node of a pytree, so that JAX can carry it into a compiled
    call. A `Partial` stays as it is: wrapped again, its arrays would be static
    arguments, and each call would compile anew.
    """
    if isinstance(function, Partial):
        return function
    return Partial(with_hash(function))


def with_hash(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hashable stand-in: the function itself, or its bound `__call__`."""
    try:
        hash(function)
    except TypeError:
        # A dataclass with a `__call__` compares its fields and has no hash. Its bound
        # method has a hash, and equals only the method of the same object.
        return function.__call__
    return function


def is_function(x: object) -> TypeGuard[Callable[..., Any]]:
    """Whether it is a function. A tree with a `__call__` is one if all its leaves are
    functions, as in a wrapper of equinox. An equinox module with a limit in the place
    of each array is a tree of limits.
    """
    if not callable(x):
        return False
    # A `Partial` has the arguments that it binds as leaves.
    if isinstance(x, Partial):
        return True
    # A plain function is its own only leaf.
    leaves = jax.tree.leaves(x, is_leaf=lambda leaf: leaf is None)
    return all(callable(leaf) for leaf in leaves)
