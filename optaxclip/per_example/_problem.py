"""What one call of a function by `clipped_grad` or `explain_clipped_grad` is about:
which arguments of a loss are differentiated, shared by all examples, or a batch.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _mesh
from .. import _trees as prefix
from .._checks import shown
from .._jaxpr import every_equation
from .._mesh import MeshAxes, Names, listed, varying
from .._trees import check_leaves

# As in jax.grad: for an int the gradient is a tree, for (0,) a tuple of one.
Places = int | Sequence[int]
# The values of `vmap_method` by which a callback sees one example at a time. With None
# JAX raises an error where what it is called with depends on the example.
ONE_BY_ONE = (None, "sequential", "sequential_unrolled")


class Problem(NamedTuple):
    """A loss of one example, parameters, and a batch of examples."""

    # (params, example, shared) -> (value, aux)
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    params: Any
    batch: tuple[Any, ...]
    present: jax.Array  # bool[batch]: not masked
    shared: list[Any]  # arguments that are the same for all examples
    # For each parameter, the mesh axes over which its gradient is split
    splits: Sequence[Names] = ()
    limits: Sequence[Any] = ()  # the numbers of `max_norm`
    divisor: Any = 1  # of the sum of the clipped gradients
    devices: int = 1  # that share the batch, of which this has a part
    # The program of the loss of one example, and the types of what it returns. Known on
    # the device.
    program: Any = None
    returned: Any = None

    def of_one(self, params: Any, example: Any) -> tuple[jax.Array, Any]:
        """The loss of one example, and aux."""
        return self.loss(params, example, self.shared)

    def traced(self, of_one: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        """The program of a function of the parameters and one example, and the types of
        what it returns.
        """
        found = []

        def capture(params: Any, example: Any) -> jax.Array:
            program = jax.make_jaxpr(of_one, return_shape=True)
            found.append(program(params, example))
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
    mesh_axes: MeshAxes = "auto"

    def about(self, args: tuple[Any, ...], mask: Any = None) -> Problem:
        """The problem that the arguments of a call pose, for `on_device`.

        Raises:
          TypeError, ValueError: arguments that do not fit the roles.
        """
        learned = self._listed("argnums", len(args))
        shared = self._listed("shared_argnums", len(args))
        taken = {*learned, *shared}
        if len(taken) < len(learned) + len(shared):
            raise ValueError(
                f"{self.call}: argnums={shown(self.argnums)} and shared_argnums="
                f"{shown(self.shared_argnums)} must be different arguments."
            )
        places = [k for k in range(len(args)) if k not in taken]
        size = self._size({place: args[place] for place in places})
        batch = jax.tree.map(jnp.asarray, tuple(args[k] for k in places))
        is_tree = not isinstance(self.argnums, (tuple, list))

        def loss(params: Any, example: Any, rest: Any) -> tuple[jax.Array, Any]:
            several = [params] if is_tree else params
            each = dict(zip([*learned, *places, *shared], [*several, *example, *rest]))
            found = self.loss(*[each[place] for place in range(len(each))])
            self._check_returned(found)
            # Always with aux, so that all methods handle one form.
            return found if self.has_aux else (found, None)

        present = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
        if present.dtype != bool or present.shape != (size,):
            raise ValueError(
                f"{self.call}: mask must be bool[{size}], one for each example, got "
                f"{present.dtype}{list(present.shape)}."
            )
        params = self._arrays([args[place] for place in learned], is_tree)
        # Not an argument of jax.vmap, since it may be a function.
        rest = [args[place] for place in shared]
        return Problem(loss, params, batch, present, rest)

    def on_device(self, problem: Problem) -> Problem:
        """The problem, with its program, and the mesh axes along which devices differ
        here.

        Raises:
          ValueError: mesh axes that contradict types, or a loss that joins devices or
            examples.
        """
        params, batch = problem.params, problem.batch
        splits = self._splits(params, batch)
        params = _mesh.typed_as_varying(batch, params)
        problem = problem._replace(params=params, splits=splits)
        program, returned = problem.traced(problem.of_one)
        self._check_program(program, batch)
        # Rules of jax.custom_jvp and jax.custom_vjp are functions in the loss. Only in
        # its gradient are they programs.
        gradient, _ = problem.traced(jax.grad(problem.of_one, has_aux=True))
        self._check_program(gradient, batch)
        return problem._replace(program=program, returned=returned)

    def _splits(self, params: Any, batch: Any) -> list[Names]:
        """For each parameter, the mesh axes over which its gradient is split."""
        shared = varying(batch)
        leaves = jax.tree.leaves(params)
        if isinstance(self.mesh_axes, str) and self.mesh_axes == "auto":
            # Along axes of the batch devices hold gradients of different examples.
            found = [varying(leaf) - shared for leaf in leaves]
        else:
            each = _mesh.splits(self.mesh_axes, params, [None] * len(leaves), self.call)
            found = [frozenset(split.summed) for split in each]
        for names in found:
            if names & shared:
                raise ValueError(
                    f"{self.call}: mesh_axes={self.mesh_axes!r} names "
                    f"{listed(names & shared)}, which splits the batch, so that a "
                    "device has examples of its own. Gather the parameters first."
                )
        return [tuple(sorted(names)) for names in found]

    def _check_program(self, program: Any, batch: Any) -> None:
        """Raises ValueError for what joins examples, or devices in a way that norms of
        examples are not known.
        """
        manual = _mesh.manual_axes()
        mesh_axes = varying(batch)
        if self.mesh_axes == "auto" and not _mesh.has_types(manual):
            # Nothing says which mesh axes split parameters, and which the batch.
            mesh_axes = frozenset(manual)
        for outer in program.jaxpr.eqns:
            for eqn in every_equation(outer):
                self._check_examples(eqn)
                self._check_devices(eqn, mesh_axes)

    def _check_examples(self, eqn: Any) -> None:
        """Raises ValueError for an equation to which jax.vmap shows the whole batch."""
        name = eqn.primitive.name
        method = eqn.params.get("vmap_method")
        if name == "custom_vmap_call":
            cure = "Call the function without jax.custom_batching."
        elif method not in ONE_BY_ONE:
            name = f"{name} with vmap_method={method!r}"
            cure = "Take vmap_method='sequential'."
        else:
            return
        raise ValueError(
            f"{self.call}: the loss of one example has a {name}, which sees the whole "
            "batch: one example could change the gradients of all others, and no limit "
            f"would bound what it does. {cure}"
        )

    def _check_devices(self, eqn: Any, mesh_axes: Iterable[str]) -> None:
        """Raises ValueError for an equation that joins devices along these axes."""
        joined = _joined_axes(eqn).intersection(mesh_axes)
        if joined:
            raise ValueError(
                f"{self.call}: the loss of one example has a {eqn.primitive} over "
                f"{listed(joined)}. Over axes that split the batch gather parameters "
                "before the call, and add up gradients after it. In pmap and with "
                "check_vma=False mesh_axes='auto' knows no others: name them, or give "
                "None if nothing else is split."
            )

    def _listed(self, role: str, count: int) -> list[int]:
        """The places of the arguments with a role."""
        places = getattr(self, role)
        several = places if isinstance(places, (tuple, list)) else [places]
        found = list(map(operator.index, several))
        if not all(-count <= place < count for place in found):
            raise ValueError(
                f"{self.call}: {role}={shown(places)}, but the function was called "
                f"with {count} positional arguments."
            )
        # Of three arguments -1 and 2 are the same.
        return [place % count for place in found]

    def _size(self, batch: dict[int, Any]) -> int:
        """The number of examples: the size that the first axes of the batch share."""
        sizes: dict[str, Any] = {}
        for place, tree in batch.items():
            for path, leaf in jax.tree.leaves_with_path(tree):
                # "argument 1 at 'x'", or "argument 2" for one that is an array itself.
                at = f" at {prefix.name(path)!r}" if path else ""
                # An array without axes is mostly a number for all, or one random key.
                shape = jnp.shape(leaf)
                sizes[f"argument {place}{at}"] = shape[0] if shape else "no axis"
        size, *others = set(sizes.values()) or {0}
        # For a step without examples there is the mask: all False gives zeros.
        if others or size in (0, "no axis"):
            found = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise ValueError(
                f"{self.call}: the first axes of the batch count examples and must "
                f"have one size, at least 1, but {found or 'there is no batch'}. Name "
                "an argument that is the same for all examples in shared_argnums. Give "
                "a random key for each example: jax.random.split(key, batch)."
            )
        return size

    def _arrays(self, params: list[Any], is_tree: bool) -> Any:
        """The parameters as arrays: one tree, or a tuple of several."""
        tree = params[0] if is_tree else tuple(params)
        check_leaves(tree, f"{self.call}: ")
        for path, leaf in jax.tree.leaves_with_path(tree):
            dtype = jnp.asarray(leaf).dtype
            if not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(
                    f"{self.call}: the parameters must have a float or complex dtype, "
                    f"but the leaf {prefix.name(path)!r} is {dtype}. Give what is not "
                    "learned in an argument of its own, named in shared_argnums."
                )
        return jax.tree.map(jnp.asarray, tree)

    def _check_returned(self, found: Any) -> None:
        """Raises TypeError for what is no loss. Ghost clipping would take several
        numbers for their sum.
        """
        wanted, value = "a real scalar", found
        if self.has_aux:
            wanted = "(real scalar, aux), as has_aux=True says,"
            is_pair = isinstance(found, (tuple, list)) and len(found) == 2
            value = found[0] if is_pair else None
        kind = getattr(value, "shape", None), getattr(value, "dtype", bool)
        is_real = kind[0] == () and jnp.issubdtype(kind[1], jnp.floating)
        if not (is_real or isinstance(value, float)):
            raise TypeError(
                f"{self.call}: loss must return {wanted} for each example, got "
                f"{shown(found)}."
            )


def _joined_axes(eqn: Any) -> set[str]:
    """The mesh axes along which an equation joins values of several devices."""
    if eqn.primitive.name in ("axis_index", "pvary", "pcast"):
        return set()
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    # Of a sum on one device the axes are numbers.
    return {name for name in _mesh.names_in(found) if isinstance(name, str)}


def check_function(argument: str, value: Any) -> None:
    """Raises TypeError for what is not a function, such as a tree of gradients."""
    if not callable(value):
        raise TypeError(
            f"{argument} must be a function, got {shown(value)}. To clip one tree of "
            "gradients call optaxclip.clip_grads(grads, max_norm)."
        )
