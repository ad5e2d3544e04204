"""What one call of a function by `clipped_grad` or `explain_clipped_grad` is about."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _trees as prefix
from .._mesh import varying_as
from .._trees import check_leaves
from ._roles import Places, roles_of

# (params, example) -> (value, aux)
Loss = Callable[[Any, Any], tuple[jax.Array, Any]]


class Problem(NamedTuple):
    """A loss of one example, parameters, and a batch of examples."""

    of_one: Loss
    params: Any
    batch: Any
    size: int  # the number of examples

    def program(self) -> tuple[Any, Any]:
        """The program of the loss of one example, and the types of what it returns."""
        found = []

        def capture(params: Any, example: Any) -> jax.Array:
            traced = jax.make_jaxpr(self.of_one, return_shape=True)
            found.append(traced(params, example))
            return jnp.zeros(())

        # Inside vmap a batch has the types of its examples.
        jax.make_jaxpr(jax.vmap(capture, (None, 0)))(self.params, self.batch)
        return found[0]


class Question(NamedTuple):
    """A loss and the roles of its arguments, before it is called."""

    call: str
    loss: Callable[..., Any]
    argnums: Places
    shared_argnums: Places
    has_aux: bool

    def about(self, args: tuple[Any, ...]) -> Problem:
        """The problem that the arguments of a call pose."""
        roles = roles_of(self.call, self.argnums, self.shared_argnums, args)
        batch, size = roles.examples(self.call)
        params = _arrays(self.call, roles.taken(roles.params))
        params = jax.tree.map(partial(typed_as_varying, batch), params)

        def of_one(params: Any, example: Any) -> tuple[jax.Array, Any]:
            # Always with aux, so that all methods handle one form.
            found = roles.call(self.loss, params, example)
            self.check_returned(found)
            return found if self.has_aux else (found, None)

        return Problem(of_one, params, batch, size)

    def check_returned(self, found: Any) -> None:
        """Raises TypeError for what is no loss. Ghost clipping would take several
        numbers for their sum.
        """
        wanted, value = "a real scalar", found
        if self.has_aux:
            wanted = "(real scalar, aux), as has_aux=True says,"
            is_pair = isinstance(found, (tuple, list)) and len(found) == 2
            value = found[0] if is_pair else None
        if not _is_real_scalar(value):
            raise TypeError(
                f"{self.call}: loss must return {wanted} for each example, got "
                f"{_shown(found)}."
            )


def _arrays(call: str, params: Any) -> Any:
    """The parameters as arrays.

    Raises:
      TypeError: one that has no derivative.
    """
    check_leaves(params, f"{call}: ")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{call}: the parameters must have a float or complex dtype, but the "
                f"leaf {prefix.name(path)!r} is {dtype}. Give what is not learned in "
                "an argument of its own, named in shared_argnums."
            )
    return jax.tree.map(jnp.asarray, params)


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, float):
        return True
    dtype, shape = getattr(value, "dtype", bool), getattr(value, "shape", None)
    return shape == () and jnp.issubdtype(dtype, jnp.floating)


def _shown(found: Any) -> str:
    """Arrays by their types, since they are traced and have no values."""

    def type_of(x: Any) -> Any:
        return jax.typeof(x) if isinstance(x, jax.Array) else x

    return str(jax.tree.map(type_of, found))


def typed_as_varying(tree: Any, value: jax.Array) -> jax.Array:
    """The value, typed as differing between devices wherever the tree does.

    In shard_map the gradient by parameters of any other type comes summed over devices,
    and the examples in it cannot be told apart.
    """
    # Each leaf may differ along other mesh axes.
    for leaf in jax.tree.leaves(tree):
        value = varying_as(value, jax.typeof(leaf))
    return value


def check_unnamed(call: str, named: dict[str, Any]) -> None:
    """Raises TypeError for arguments of a loss that are given by name."""
    # Whether they are a batch or the same for all examples, nobody has said.
    for name in named:
        raise TypeError(
            f"{call}: the arguments of the loss must be given by position, as argnums "
            f"and shared_argnums count them, got {name}=. An option of the loss is set "
            f"before: functools.partial(loss, {name}=...)."
        )


def check_microbatch(call: str, microbatch: Any) -> None:
    """Raises ValueError for what is neither None nor a number of examples."""
    # A bool is an int in Python: True would be microbatches of 1.
    is_int = isinstance(microbatch, (int, np.integer))
    is_number = is_int and not isinstance(microbatch, bool)
    if microbatch is not None and not (is_number and microbatch >= 1):
        raise ValueError(
            f"{call}: microbatch must be a number of examples, at least 1, or None, "
            f"got {microbatch!r}."
        )
