"""Refuses an optimizer that would not update a layer as it updates a stack of layers.

`init` traces one update of weights with one layer in each stack. The program of the
update says which old entries and gradients each new entry depends on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import compress
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxpr import runs_primitive_like
from .._trees import listed
from .optimizers import LeafOptimizer, arrays_by_path, changed_type
from .program import Program, variables
from .stacks import Entries, layer_of

# Norms, medians and running sums use primitives whose names begin so. Not all of
# "reduce_": `reduce_precision` rounds each number by itself.
REDUCTIONS = (
    "reduce_sum",
    "reduce_prod",
    "reduce_max",
    "reduce_min",
    "reduce_and",
    "reduce_or",
    "arg",
    "cum",
    "dot_general",
    "sort",
    "top_k",
)


def check_optimizer(
    optimizer: LeafOptimizer, weights: Entries, program: Program
) -> None:
    """Raises for an optimizer that does not treat each leaf of a stack by itself.
    Leaves outside of stacks are updated together, and may be mixed.

    Warns of an optimizer that looks at several numbers of a leaf together, which may
    be of several layers.

    Raises:
      TypeError: its update needs further arguments, or fails if some leaves have no
        gradient.
      ValueError: its state has an array that neither follows a leaf nor is the same
        for all layers. Or an update changes entries, shapes or dtypes. Or the update of
        a leaf depends on other leaves.
    """
    slice_of_leaf = program.slice_of_leaf
    layer = jax.eval_shape(lambda: layer_of(weights, slice_of_leaf, layer_number=0))
    one_layer_weights = weights | layer
    entries = arrays_by_path(optimizer.abstract_params_and_state(one_layer_weights))
    # By the shapes of all layers, as in a step.
    leaf_of_entry = optimizer.leaf_of_entry(weights)

    # First check: what follows no leaf is the same for one layer and for all.
    all_layers_entries = arrays_by_path(optimizer.abstract_params_and_state(weights))
    for path, entry in entries.items():
        # With one layer, a state may have other entries than with all.
        if leaf_of_entry.get(path) is None:
            _check_shared(path, entry, all_layers_entries.get(path))

    # Second check: an update keeps entries, shapes and dtypes.
    # Traced with weights in the place of gradients, which have the same types.
    traced, new_entries = _traced_update(optimizer, entries, one_layer_weights)
    _check_new_state(new_entries, wanted_entries=entries)

    # Third check: new weights and moments of a leaf of a stack depend on no other leaf,
    # and all other new entries on no leaf of a stack.
    # The order of the jaxpr's outputs and inputs: JAX sorts the keys of a dict.
    output_paths = sorted(entries)
    input_paths = output_paths + sorted(one_layer_weights)
    update = _UpdateProgram(
        traced.jaxpr,
        output_paths,
        leaf_of_input=[leaf_of_entry[path] for path in input_paths],
    )
    names_of_reduced = set()
    for program_of_entry in update.of_each_entry():
        (path,) = program_of_entry.output_paths
        leaf_path = leaf_of_entry[path]
        wrong_leaves = program_of_entry.leaves_read - {leaf_path}
        if leaf_path is None or leaf_path not in slice_of_leaf:
            wrong_leaves &= slice_of_leaf.keys()
        elif program_of_entry.has_reduction:
            names_of_reduced.add(optimizer.name_of_leaf[leaf_path])
        if wrong_leaves:
            names = listed(optimizer.name_of_leaf[leaf] for leaf in wrong_leaves)
            raise ValueError(_mixing_error(optimizer, path, leaf_path, names))

    # Fourth check: as in a step, an update gets gradients of one stack, and None in the
    # place of all others.
    for stack in program.stacks.values():
        grads = {path: layer[path] for path in stack.slice_of_leaf}
        _traced_update(optimizer, entries, grads)

    if names_of_reduced:
        warnings.warn(
            "release: optimizer looks at several numbers of "
            f"{listed(names_of_reduced)} together. Here it sees one layer at a time. "
            "If it joins numbers of several layers in the usual step, the run is not "
            "that of the usual step, but of one with a list of layers in place of a "
            "stack.",
            stacklevel=3,
        )


class _UpdateProgram(NamedTuple):
    """A traced update. Its inputs are entries and gradients."""

    jaxpr: Jaxpr
    output_paths: list[str]  # of the new entries
    # The leaf whose weight, moment or gradient it is. None: all layers share the input.
    leaf_of_input: list[str | None]

    def of_each_entry(self) -> Iterator[_UpdateProgram]:
        """The program of each new entry, with the inputs that it reads.

        It is halved again and again. For 200 leaves, to take each entry from the whole
        program takes seconds.
        """
        count = len(self.output_paths)
        if count == 1:
            yield self
            return
        first_half = [index < count // 2 for index in range(count)]
        second_half = [not flag for flag in first_half]
        for are_needed in (first_half, second_half):
            jaxpr, are_read = dce_jaxpr(self.jaxpr, are_needed)
            half = _UpdateProgram(
                jaxpr,
                list(compress(self.output_paths, are_needed)),
                list(compress(self.leaf_of_input, are_read)),
            )
            yield from half.of_each_entry()

    @property
    def leaves_read(self) -> set[str]:
        """The leaves whose weights, moments or gradients it reads."""
        return {path for path in self.leaf_of_input if path is not None}

    @property
    def has_reduction(self) -> bool:
        """Whether it looks at several numbers of a weight, moment or gradient
        together. A learning rate may be a sum over the parts of its schedule.
        """
        from_leaves = set()
        for var, leaf_path in zip(self.jaxpr.invars, self.leaf_of_input):
            if leaf_path is not None:
                from_leaves.add(var)
        for equation in self.jaxpr.eqns:
            if from_leaves.intersection(variables(equation.invars)):
                if runs_primitive_like(REDUCTIONS, equation):
                    return True
                from_leaves.update(equation.outvars)
        return False


def _traced_update(
    optimizer: LeafOptimizer, entries: Entries, grads: Entries
) -> tuple[ClosedJaxpr, Entries]:
    """The program of an update by these gradients, and types of the new entries."""
    return jax.make_jaxpr(optimizer.entries_after_update, return_shape=True)(
        entries, grads
    )


def _check_shared(path: str, entry: Array, entry_of_all_layers: Array | None) -> None:
    """Raises for an entry that follows no leaf, and is not the same for all layers.

    `entry` is made for one layer in each stack, `entry_of_all_layers` for all.
    """
    is_shared = (
        entry_of_all_layers is not None and entry_of_all_layers.shape == entry.shape
    )
    is_key = jnp.issubdtype(entry.dtype, jax.dtypes.extended)
    # `jax.random.PRNGKey` makes uint32[2]. Other arrays may be shared: the
    # coefficients of muon are float32[3].
    is_legacy_key = is_shared and entry.dtype == jnp.uint32 and entry.shape != ()
    if is_key or is_legacy_key:
        reason = " All layers would draw the same numbers from it."
    elif is_shared:
        return
    elif not jnp.issubdtype(entry.dtype, jnp.inexact):
        # Layers return their new entries in the place of cotangents, and cotangents are
        # no integers.
        reason = (
            " Integers and bools of each layer cannot pass through the backward pass."
        )
    elif ".v_row" in path or ".v_col" in path:
        reason = " adafactor(factored=False) has no such array."
    else:
        reason = ""
    raise ValueError(
        "release: the state of optimizer must be numbers that all layers share, or "
        f"float arrays shaped like a leaf, but {path!r} is "
        f"{entry.dtype}{list(entry.shape)}.{reason}"
    )


def _check_new_state(new_entries: Entries, wanted_entries: Entries) -> None:
    """Raises if weights and state have other entries, shapes or dtypes after an update.

    A state that begins as None gains entries. A learning rate for each layer, in an
    array, gives one layer the shape of all. Moments in bfloat16 become float32 if the
    decay is a float32 array.
    """
    change = changed_type(new_entries, wanted_entries)
    if change:
        raise ValueError(
            "release: optimizer must keep the entries, shapes and dtypes of weights "
            f"and state, but after an update {change}. Let init return what update "
            "returns, with zeros for what is not known yet. Give no number for each "
            "layer in an array. Give decays as Python numbers, and with "
            "optax.inject_hyperparams name them in static_args: ('b1', 'b2', 'eps', "
            "'eps_root') for Adam."
        )


def _mixing_error(
    optimizer: LeafOptimizer, path: str, leaf_path: str | None, wrong_names: str
) -> str:
    """The text of an error: the new entry at a path, which follows a leaf or none,
    wrongly depends on other leaves.
    """
    if leaf_path is None:
        return (
            "release: optimizer must keep no number that depends on gradients, unless "
            f"each weight has one of its own, but {path!r} depends on {wrong_names}."
        )
    return (
        "release: optimizer must treat each array by itself, but its "
        f"{optimizer.name_of_leaf[leaf_path]!r} depends on {wrong_names}. If it clips "
        "or skips, leave that out, and set max_norm and nonfinite here."
    )
