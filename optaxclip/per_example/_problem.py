"""One call of a function that `clipped_grad` or `explain_clipped_grad` made: its
arguments and their roles, and the traced loss.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .. import _trees as trees
from .._arguments.checks import function_name, shown
from .._devices import mesh as _mesh
from .._devices import mesh_types
from .._devices.mesh import AxisNames, MeshAxes, listed
from .._devices.mesh_types import varying
from .._jaxpr import CASTS_OVER_DEVICES, source_line
from .._trees import PyTree
from ._work import equations_of

# As in jax.grad: for an int the gradient is a tree, for (0,) a tuple of one.
Argnums = int | Sequence[int]
# With these values of `vmap_method` a callback sees one example at a time. With None
# JAX itself refuses arguments of the callback that depend on the example. An equation
# that is not a callback has None as well.
ONE_BY_ONE = (None, "sequential", "sequential_unrolled")
HINT_FOR_SPLIT_TABLES = (
    "an Explicit mesh axis splits a parameter, but not the batch. In the loss look up "
    "rows of such a table by table.at[rows].get(out_sharding=jax.sharding."
    "PartitionSpec()), or make the axis Auto."
)


class Problem(NamedTuple):
    """A loss of one example, parameters, and a batch of examples.

    | fields | set by |
    |---|---|
    | call, loss, params, batch, is_present, shared | `Signature.problem_of` |
    | limits, groups, divisor | `clipped_grad` |
    | explicit_devices | `on_each_device`, on a mesh with Explicit axes |
    | axes_of_params, batch_axes, program, result_types, gradient | `Signature.traced` |
    """

    call: str  # the function that the user called, for errors
    # (params, example, shared) -> (value, aux)
    loss: Callable[[PyTree, PyTree, list[Any]], tuple[jax.Array, PyTree]]
    params: PyTree
    batch: tuple[PyTree, ...]
    is_present: jax.Array  # bool[batch]: not masked
    shared: list[Any]  # arguments that are the same for all examples
    # For each parameter, the mesh axes over which its gradient is split
    axes_of_params: Sequence[AxisNames] = ()
    limits: Any = None  # `Limits`, of `max_norm`. None in `explain_clipped_grad`
    groups: Sequence[int] = ()  # for each parameter, the index of its limit
    divisor: Any = None  # of the sum of the clipped gradients. None: a sum, no mean
    explicit_devices: int = 1  # how many devices of an Explicit mesh share the batch
    # Inside shard_map and pmap: the mesh axes along which examples differ
    batch_axes: AxisNames = ()
    # `ClosedJaxpr` of the loss of one example, and the types of its results
    program: Any = None
    result_types: PyTree = None
    # `ClosedJaxpr` of its gradient. Backward rules of the user's are only in here
    gradient: Any = None

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

    def traced_loss(self, params: PyTree, example: PyTree) -> tuple[jax.Array, PyTree]:
        """The loss of one example, and aux. It runs `program` instead of `loss`, so
        that each compilation calls the user's function once.
        """
        outputs = jaxpr_as_fun(self.program)(*jax.tree.leaves((params, example)))
        return jax.tree.unflatten(jax.tree.structure(self.result_types), outputs)


class Signature(NamedTuple):
    """A loss and the roles of its arguments, before it is called."""

    call: str
    loss: Callable[..., Any]
    argnums: Argnums
    shared_argnums: Argnums
    has_aux: bool
    mesh_axes: MeshAxes  # the user's: over which parameters are split

    def problem_of(self, args: tuple[Any, ...], mask: Any = None) -> Problem:
        """The problem of a call with these arguments.

        Raises:
          TypeError, ValueError: arguments that do not fit the roles.
        """
        count = len(args)
        param_places = self._places("argnums", self.argnums, count)
        shared_places = self._places("shared_argnums", self.shared_argnums, count)
        named_places = {*param_places, *shared_places}
        if len(named_places) < len(param_places) + len(shared_places):
            raise ValueError(
                f"{self.call}: argnums={shown(self.argnums)} and shared_argnums="
                f"{shown(self.shared_argnums)} must be different arguments."
            )
        # All other arguments are the batch.
        batch_places = [place for place in range(count) if place not in named_places]
        size = self._example_count({place: args[place] for place in batch_places})
        batch = tuple(args[place] for place in batch_places)
        all_params = tuple(args[place] for place in param_places)
        is_one_param = not isinstance(self.argnums, Sequence)
        is_present = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
        if is_present.dtype != bool or is_present.shape != (size,):
            raise ValueError(
                f"{self.call}: mask must be bool[{size}], one for each example, got "
                f"{is_present.dtype}{list(is_present.shape)}."
            )
        places_by_role = [*param_places, *batch_places, *shared_places]

        def loss_of_roles(
            params: PyTree, example: PyTree, shared: list[Any]
        ) -> tuple[jax.Array, PyTree]:
            param_args = [params] if is_one_param else params
            arg_at = dict(zip(places_by_role, [*param_args, *example, *shared]))
            returned = self.loss(*(arg_at[place] for place in range(count)))
            # Always with aux, so that all methods handle one form.
            return returned if self.has_aux else (returned, None)

        return Problem(
            self.call,
            loss_of_roles,
            params=self._arrays(all_params[0] if is_one_param else all_params),
            batch=jax.tree.map(jnp.asarray, batch),
            is_present=is_present,
            # Not an argument of jax.vmap, since it may be a function.
            shared=[args[place] for place in shared_places],
        )

    def traced(self, problem: Problem) -> Problem:
        """The problem on one device, with the mesh axes that split parameters and the
        batch, and with the traced loss, which is checked.

        Raises:
          TypeError: a loss that is not one real number.
          ValueError: mesh axes that contradict types, or a loss in which one example
            sees others.
        """
        axes_of_params = self._axes_of_params(problem.params, problem.batch)
        problem = problem._replace(
            params=mesh_types.varying_as_any_of(problem.params, problem.batch),
            axes_of_params=axes_of_params,
            batch_axes=_batch_axes(problem.batch, axes_of_params),
        )

        def loss_of_one(params: PyTree, example: PyTree) -> tuple[jax.Array, PyTree]:
            return problem.loss(params, example, problem.shared)

        program, result_types = self._program_of(problem, loss_of_one)
        self._check_program(program, problem.batch_axes)
        problem = problem._replace(program=program, result_types=result_types)
        # A rule of jax.custom_jvp or jax.custom_vjp is a program in the gradient only.
        # JAX refuses a loss that is not one real number.
        gradient_of_one = jax.grad(problem.traced_loss, has_aux=True)
        gradient, _ = self._program_of(problem, gradient_of_one)
        self._check_program(gradient, problem.batch_axes)
        return problem._replace(gradient=gradient)

    def _program_of(
        self, problem: Problem, function: Callable[[PyTree, PyTree], PyTree]
    ) -> tuple[ClosedJaxpr, PyTree]:
        """The program of a function of the parameters and one example, and the types of
        its results. Adds a hint to the errors of the loss.
        """
        programs = []

        def record_program(params: PyTree, example: PyTree) -> jax.Array:
            make_program = jax.make_jaxpr(function, return_shape=True)
            programs.append(make_program(params, example))
            return jnp.zeros(())

        # Inside vmap the batch looks like one example. JAX takes its axis away from the
        # types of keys, shardings and mesh axes too.
        record_of_batch = jax.vmap(record_program, (None, 0))
        try:
            jax.make_jaxpr(record_of_batch)(problem.params, problem.batch)
        except Exception as error:
            # A loss that was written for a batch may index an axis that is missing.
            shapes = [list(leaf.shape[1:]) for leaf in jax.tree.leaves(problem.batch)]
            hint = (
                f"{function_name(self.loss)} gets one example, without the batch axis: "
                f"arrays of shape {', '.join(map(str, shapes))}. It must return one "
                "real number, or (value, aux) with has_aux=True."
            )
            # JAX has no public name for its error.
            if "out_sharding" in str(error):
                hint = HINT_FOR_SPLIT_TABLES
            error.add_note(f"{self.call}: {hint}")
            raise
        return programs[0]

    def _axes_of_params(self, params: PyTree, batch: PyTree) -> list[AxisNames]:
        """For each parameter, the mesh axes over which its gradient is split."""
        axes_of_params = []
        for split in _mesh.splits(self.mesh_axes, params, self.call):
            # Along mesh axes of the batch devices hold gradients of different examples,
            # and not parts of one.
            names = set(split.names) - varying(batch)
            axes_of_params.append(tuple(sorted(names)))
        return axes_of_params

    def _check_program(self, program: ClosedJaxpr, batch_axes: AxisNames) -> None:
        """Raises ValueError for a loss in which one example sees others: those of its
        own batch, of other devices, or of an outer `jax.vmap`.
        """
        equations = equations_of(program)
        # Devices may share the work on one example along mesh axes that do not split
        # the batch, also along those of a shard_map in the loss. Names that are not
        # mesh axes are of an outer jax.vmap.
        safe_axes = set(mesh_types.manual_axes())
        for eqn in equations:
            if eqn.primitive.name == "shard_map":
                safe_axes.update(eqn.params["mesh"].axis_names)
        safe_axes -= set(batch_axes)
        for eqn in equations:
            self._check_examples(eqn)
            self._check_devices(eqn, safe_axes)

    def _check_examples(self, eqn: JaxprEqn) -> None:
        """Raises ValueError for an equation that jax.vmap runs on the whole batch."""
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
            f"{self.call}: the loss of one example has a {name}{source_line(eqn)}, "
            "which sees the whole batch: one example could change the gradients of all "
            f"others, and no limit would bound what it does. {cure}"
        )

    def _check_devices(self, eqn: JaxprEqn, safe_axes: set[str]) -> None:
        """Raises ValueError for an equation that joins values along an axis that is not
        safe.
        """
        joined = _joined_axes(eqn) - safe_axes
        if joined:
            raise ValueError(
                f"{self.call}: the loss of one example has a {eqn.primitive} over "
                f"{listed(joined)}{source_line(eqn)}. Over axes that split the batch "
                "gather parameters before the call, and add up gradients after it. In "
                "pmap and with check_vma=False every mesh axis that mesh_axes does not "
                "name counts as one that splits the batch: name those that split "
                "parameters."
            )

    def _places(self, option: str, argnums: Argnums, count: int) -> list[int]:
        """The places that an option names among the `count` arguments of a call, from
        0 to `count` - 1.
        """
        places = places_in(argnums)
        if not all(-count <= place < count for place in places):
            raise ValueError(
                f"{self.call}: {option}={shown(argnums)}, but the function was called "
                f"with {count} positional arguments."
            )
        # Of three arguments -1 and 2 are the same.
        return [place % count for place in places]

    def _example_count(self, batch_args: dict[int, PyTree]) -> int:
        """The number of examples: the size that the first axes of the batch share."""
        sizes: dict[str, Any] = {}
        for place, tree in batch_args.items():
            for path, leaf in jax.tree.leaves_with_path(tree):
                # "argument 1 at 'x'", or "argument 2" for one that is an array itself.
                name = f"argument {place}"
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


def places_in(argnums: Argnums) -> list[int]:
    """The places of arguments that an option names, from an int or several."""
    entries = argnums if isinstance(argnums, Sequence) else [argnums]
    return [operator.index(entry) for entry in entries]


def _batch_axes(batch: PyTree, axes_of_params: Sequence[AxisNames]) -> AxisNames:
    """The mesh axes along which devices have different examples. Without types of
    shard_map these are assumed to be all axes that split no parameter.
    """
    manual = mesh_types.manual_axes()
    if mesh_types.has_types(manual):
        return tuple(sorted(varying(batch)))
    return tuple(sorted(set(manual).difference(*axes_of_params)))


def _joined_axes(eqn: JaxprEqn) -> set[str]:
    """The named axes along which an equation joins values."""
    if eqn.primitive.name in ("axis_index", *CASTS_OVER_DEVICES):
        return set()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    # The axes of a sum on one device are numbers.
    return {name for name in _mesh.names_in(axes) if isinstance(name, str)}


def check_function(argument: str, value: object) -> None:
    """Raises TypeError for a value that is not a function, such as gradients."""
    if not callable(value):
        raise TypeError(
            f"{argument} must be a function, got {shown(value)}. To clip one tree of "
            "gradients call optaxclip.clip_grads(grads, max_norm)."
        )
