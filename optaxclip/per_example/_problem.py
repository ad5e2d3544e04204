"""One call of a function that `clipped_grad` or `explain_clipped_grad` made: its
arguments and their roles.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _trees as trees
from .._arguments.checks import shown
from .._devices.mesh import MeshAxes
from .._trees import PyTree
from ._limits import Limits

# As in jax.grad: for an int the gradient is a tree, for (0,) a tuple of one.
Argnums = int | Sequence[int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """A loss of one example, parameters, a batch of examples, and their limits. It is a
    pytree, which `on_each_device` splits over devices.
    """

    call: str  # the function that the user called, for errors
    # (params, example, shared) -> (value, aux)
    loss: Callable[[PyTree, PyTree, list[Any]], tuple[jax.Array, PyTree]]
    params: PyTree
    batch: tuple[PyTree, ...]
    is_present: jax.Array  # bool[batch]: not masked
    shared: list[Any]  # arguments that are the same for all examples
    limits: Limits
    groups: list[int]  # for each parameter, the index of its limit
    divisor: jax.Array | None  # of the sum. None: a sum, no mean
    explicit_devices: int  # how many devices of an Explicit mesh share the batch

    @property
    def size(self) -> int:
        """How many examples are in the batch of this device, masked ones too."""
        return self.is_present.size

    @property
    def gradient_size(self) -> int:
        """How many numbers a gradient has."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def is_sum(self) -> bool:
        """Whether the clipped gradients are added up, and not averaged."""
        return self.divisor is None

    @property
    def has_symbolic_sizes(self) -> bool:
        """Whether a size is a symbol of `jax.export`, with which JAX cannot count."""
        for leaf in jax.tree.leaves((self.params, self.batch)):
            if not all(isinstance(size, int) for size in leaf.shape):
                return True
        return False


class Signature(NamedTuple):
    """What `clipped_grad` knows before the function that it made is called: a loss, the
    roles of its arguments, and the limits.
    """

    call: str
    loss: Callable[..., Any]
    argnums: Argnums
    shared_argnums: Argnums
    has_aux: bool
    mesh_axes: MeshAxes  # the user's: over which parameters are split
    limits: Limits
    is_mean: bool

    def problem_of(self, args: tuple[Any, ...], mask: Any = None) -> Problem:
        """The problem of a call with these arguments.

        Raises:
          TypeError, ValueError: arguments that do not fit the roles or the limits.
        """
        count = len(args)
        param_argnums = self._argnums("argnums", self.argnums, count)
        shared_argnums = self._argnums("shared_argnums", self.shared_argnums, count)
        named_argnums = {*param_argnums, *shared_argnums}
        if len(named_argnums) < len(param_argnums) + len(shared_argnums):
            raise ValueError(
                f"{self.call}: argnums={shown(self.argnums)} and shared_argnums="
                f"{shown(self.shared_argnums)} must be different arguments."
            )
        # All other arguments are the batch.
        batch_argnums = [i for i in range(count) if i not in named_argnums]
        size = self._example_count({argnum: args[argnum] for argnum in batch_argnums})
        batch = tuple(args[argnum] for argnum in batch_argnums)
        all_params = tuple(args[argnum] for argnum in param_argnums)
        is_one_param = not isinstance(self.argnums, Sequence)
        is_present = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
        if is_present.dtype != bool or is_present.shape != (size,):
            raise ValueError(
                f"{self.call}: mask must be bool[{size}], one for each example, got "
                f"{is_present.dtype}{list(is_present.shape)}."
            )
        argnums_by_role = [*param_argnums, *batch_argnums, *shared_argnums]

        def loss_of_roles(
            params: PyTree, example: PyTree, shared: list[Any]
        ) -> tuple[jax.Array, PyTree]:
            param_args = [params] if is_one_param else params
            args_by_role = [*param_args, *example, *shared]
            arg_by_argnum = dict(zip(argnums_by_role, args_by_role))
            returned = self.loss(*(arg_by_argnum[i] for i in range(count)))
            # Always with aux, so that all methods handle one form.
            return returned if self.has_aux else (returned, None)

        params = self._arrays(all_params[0] if is_one_param else all_params)
        batch = jax.tree.map(jnp.asarray, batch)
        groups = self.limits.groups_of(params)
        divisor = None
        if self.is_mean:
            # Broken examples too. A batch that is all masked gives 0 / 1.
            divisor = jnp.maximum(jnp.sum(is_present, dtype=jnp.int32), 1)
        return Problem(
            self.call,
            loss_of_roles,
            params=params,
            batch=batch,
            is_present=is_present,
            # Not an argument of jax.vmap, since it may be a function.
            shared=[args[argnum] for argnum in shared_argnums],
            limits=self.limits,
            groups=groups,
            divisor=divisor,
            explicit_devices=1,
        )

    def _argnums(self, option: str, argnums: Argnums, count: int) -> list[int]:
        """The arguments that an option names, of the `count` arguments of a call, as
        numbers from 0 to `count` - 1.
        """
        entries = argnums_list(argnums)
        if not all(-count <= entry < count for entry in entries):
            raise ValueError(
                f"{self.call}: {option}={shown(argnums)}, but the function was called "
                f"with {count} positional arguments."
            )
        # Of three arguments -1 and 2 are the same.
        return [entry % count for entry in entries]

    def _example_count(self, batch_args: dict[int, PyTree]) -> int:
        """The number of examples: the size that the first axes of the batch share."""
        sizes: dict[str, Any] = {}
        for argnum, tree in batch_args.items():
            for path, leaf in jax.tree.leaves_with_path(tree):
                # "argument 1 at 'x'", or "argument 2" for one that is an array itself.
                name = f"argument {argnum}"
                if path:
                    name += f" at {trees.path_name(path)!r}"
                # An array without axes is mostly a number for all, or one random key.
                shape = jnp.shape(leaf)
                sizes[name] = shape[0] if shape else "no axis"
        size = next(iter(sizes.values()), 0)
        is_same = set(sizes.values()) == {size}
        # For a step without examples a user masks a whole batch.
        if not is_same or size in (0, "no axis"):
            text = ", ".join(f"{name} has {length}" for name, length in sizes.items())
            raise ValueError(
                f"{self.call}: the arrays of the batch must have the same size along "
                "axis 0, the number of examples, at least 1, but "
                f"{text or 'there is no batch'}. Name an argument that is the same for "
                "all examples in shared_argnums. Give a random key for each example: "
                "jax.random.split(key, batch)."
            )
        return size

    def _arrays(self, params: PyTree) -> PyTree:
        """The parameters as arrays. Raises TypeError for a leaf without a gradient."""
        trees.check_leaves(self.call, params)
        arrays = jax.tree.map(jnp.asarray, params)
        for path, array in jax.tree.leaves_with_path(arrays):
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                leaf = "they are"
                if path:
                    leaf = f"the leaf {trees.path_name(path)!r} is"
                raise TypeError(
                    f"{self.call}: the parameters must have a float or complex dtype, "
                    f"but {leaf} {array.dtype}. Give what is not learned in an "
                    "argument of its own, named in shared_argnums."
                )
        return arrays


def argnums_list(argnums: Argnums) -> list[int]:
    """The arguments that an option names, as a list of ints also for one int."""
    entries = argnums if isinstance(argnums, Sequence) else [argnums]
    return [operator.index(entry) for entry in entries]


def check_function(argument: str, value: object) -> None:
    """Raises TypeError for a value that is not a function, such as gradients."""
    if not callable(value):
        raise TypeError(
            f"{argument} must be a function, got {shown(value)}. To clip one tree of "
            "gradients call optaxclip.clip_grads(grads, max_norm)."
        )
