"""The state before the first step."""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .. import _trees as trees
from .._arguments.checks import check_shape
from .._devices import mesh, mesh_types
from .._norms.axes import other_axes
from .._norms.norms import Norms
from .._norms.specs import LeafSpec
from .._norms.sums import Axes
from .._trees import PyTree, Shape
from ..rules._rule import Rule, call_name
from . import blocks
from .state import ClipState, LayerNames, Names, StateRows, state_of_rows


def first_state(norms: Norms, rules: list[Rule], argument: str) -> ClipState:
    """The state before the first step, from the types of norms and their rules.

    Raises:
      ValueError: an array in a rule that is not one number for each entry of a norm.
    """
    norm_names = trees.unique_names(norms.paths)
    rule_of_name = dict(zip(norm_names, rules))
    # The norms before the first step.
    zeros_of_name: dict[str, Array] = {}
    for name, norm in zip(norm_names, norms.values):
        for shape in blocks.shapes_of_array_limits(rule_of_name[name]):
            check_shape(argument, shape, norm.shape)
        zeros = jnp.zeros(norm.shape, norm.dtype)
        zeros_of_name[name] = mesh_types.typed_as(zeros, norm)
    spec_of_name = _spec_of_name(norms, norm_names)
    names = _names_of_state(zeros_of_name, spec_of_name)
    whole_leaves = [name for name in norm_names if name not in names.unit_leaves]
    zeros_of_leaves = [zeros_of_name[name] for name in whole_leaves]
    memory_of_leaves: PyTree = ()
    if whole_leaves:
        rules_of_leaves = [rule_of_name[name] for name in whole_leaves]
        memory_of_leaves = _memory_of_leaves(rules_of_leaves, zeros_of_leaves, names)
    memories = [memory_of_leaves]
    zero_per_entry = [*zeros_of_leaves]
    for name in names.unit_leaves:
        memories.append(_first_memory(rule_of_name[name], zeros_of_name[name]))
        zero_per_entry.append(_zero_of_units(zeros_of_name[name], spec_of_name[name]))
    # An empty tree has no norm, and its state one entry.
    if not zero_per_entry:
        zero_per_entry = [jnp.zeros((), jnp.float32)]
    if names.is_global:
        row_of_zeros = zero_per_entry[0]
    else:
        row_of_zeros = blocks.concatenated(zero_per_entry)
    rows = _first_rows(row_of_zeros)
    return state_of_rows(names, rows, tuple(memories), row_of_zeros.dtype)


def _zero_of_units(zeros: Array, spec: LeafSpec) -> Array:
    """The one zero by which a row of zeros shows a leaf with units, from a zero for
    each of its units.
    """
    # Units differ between the devices that these mesh axes split them over. The state
    # keeps one unit of all, so its entry does not vary over these axes.
    mesh_axes = mesh_types.varying(zeros).difference(spec.mesh_axes_of_units)
    zero = jnp.zeros((), zeros.dtype)
    return mesh_types.varying_over(zero, mesh_axes)


def _spec_of_name(norms: Norms, names: list[str]) -> dict[str, LeafSpec]:
    """How a leaf enters the norm of a name. Of a group any leaf will do: its norm has
    neither layers nor units. A label without a leaf is missing.
    """
    spec_of_name = {}
    for spec in norms.specs:
        if spec.norm_index is not None:
            spec_of_name[names[spec.norm_index]] = spec
    return spec_of_name


def _names_of_state(
    zeros_of_name: Mapping[str, Array], spec_of_name: Mapping[str, LeafSpec]
) -> Names:
    """The names of the norms and of their layers. Leaves with units stand last."""
    layer_names_of_norm: dict[str, LayerNames] = {}
    unit_leaves_of_shape: dict[Shape, list[str]] = {}
    for name, zeros in zeros_of_name.items():
        spec = spec_of_name.get(name, LeafSpec(norm_index=None))
        if spec.has_units:
            shape = mesh.global_shape(zeros.shape, spec.mesh_axes_of_kept)
            unit_leaves_of_shape.setdefault(shape, []).append(name)
        else:
            layer_names_of_norm[name] = _layer_names(zeros.shape, spec.summed_axes)
    # Leaves whose units have one shape are reduced together, so they are neighbors. The
    # shape over all devices counts. So a state made inside shard_map has the order of
    # one made outside, and its checkpoint may be restored into that.
    unit_leaves = dict.fromkeys(itertools.chain(*unit_leaves_of_shape.values()))
    return Names(layer_names_of_norm | unit_leaves, unit_leaves)


def _first_rows(zeros: Array) -> StateRows:
    """The rows before the first step, from a row of zeros."""
    no_steps = jnp.zeros_like(zeros, jnp.int32)
    return StateRows(
        step=no_steps,
        clipped=no_steps,
        nonfinite=no_steps,
        norm=zeros,
        limit=jnp.full_like(zeros, np.inf),
        factor=jnp.ones_like(zeros),
        clipped_recently=zeros,
        units_clipped=zeros,
    )


def _memory_of_leaves(rules: list[Rule], zeros: list[Array], names: Names) -> PyTree:
    """What the rules of all whole leaves remember before the first step. `zeros` stand
    for the norm of each leaf.
    """
    rule = rules[0]
    if names.is_global:
        return _first_memory(rule, zeros[0])
    # If rules differ they are fixed limits, which have no memory. An array among them
    # fits its own leaf only, so it is not made into a vector.
    if all(other_rule is rule for other_rule in rules):
        rule = blocks.rule_of_vector(rule, zeros)
    return _first_memory(rule, blocks.concatenated(zeros))


def _first_memory(rule: Rule, norm: Array) -> PyTree:
    """What a rule remembers before the first step. `norm` is zeros."""
    # A rule may return the very array that it is given, and a donated state must not
    # have one array twice.
    memory = jax.tree.map(jnp.array, rule.init(norm))
    for leaf in jax.tree.leaves(memory):
        if leaf.shape[: norm.ndim] != norm.shape:
            raise ValueError(
                f"{call_name(type(rule))}: init must return arrays whose first axes "
                f"are those of the norm, {norm.shape}, got the shape {leaf.shape}."
            )
    # A rule may write `jnp.zeros(norm.shape)`, which loses the sharding of the norm.
    return mesh_types.typed_as(memory, jax.typeof(norm))


def _layer_names(shape: tuple[int, ...], summed_axes: Axes) -> LayerNames:
    """The names of the layers of a norm, such as "0/3" for layer 0 and expert 3. None
    for a norm without layers. An axis that the norm sums has no number.
    """
    if not shape:
        return None
    # The norm function of a user does not say what it sums.
    if summed_axes is None:
        summed_axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    kept_axes = other_axes(summed_axes, len(shape))
    names = []
    for index in np.ndindex(shape):
        numbers = [str(index[axis]) for axis in kept_axes]
        names.append("/".join(numbers) or "0")
    return dict.fromkeys(names)
