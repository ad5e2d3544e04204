"""Refuses an optimizer that would do something else to a layer than to the stack.

`init` traces one update, of a tree in which the stack is one layer long. The program
says what the new value of each entry depends on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxpr import runs
from .._trees import PyTree, listed
from .optimizers import Optimizer, arrays_by_path
from .stacks import Entries, LayerSlice, layer_of

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

# The states of optimizers that add up gradients.
ACCUMULATOR_STATES = (optax.MultiStepsState, optax.ApplyEvery)
# How norms begin.
REDUCTIONS = ("reduce_sum", "reduce_max", "dot_general")


def check_optimizer(
    optimizer: Optimizer, weights: Entries, slice_of_leaf: dict[str, LayerSlice]
) -> None:
    """Refuses an optimizer that does not treat each layer by itself.

    Warns of one that looks at all numbers of a leaf together.

    Raises:
      ValueError: it adds up gradients, keeps something that has no entry for each
        layer, mixes leaves, or changes the dtypes of its state.
    """
    entries_of_stacks = arrays_by_path(optimizer.abstract_params_and_state(weights))
    layer = jax.eval_shape(lambda: layer_of(weights, slice_of_leaf, layer=0))
    weights_of_layer = weights | layer
    tree = optimizer.abstract_params_and_state(weights_of_layer)
    entries = arrays_by_path(tree)
    leaf_of_entry = optimizer.leaf_of_entry(weights_of_layer)
    _check_accumulators(tree)
    _check_shared_entries(entries, entries_of_stacks, leaf_of_entry)

    traced, new_entries = jax.make_jaxpr(optimizer.updated, return_shape=True)(
        entries, weights_of_layer
    )
    # JAX sorts the keys of a dict.
    inputs = [*sorted(entries), *sorted(weights_of_layer)]
    reduced_leaves = set()
    for part in _parts(traced.jaxpr, inputs, sorted(entries)):
        leaf = leaf_of_entry[part.output]
        leaves_read = {leaf_of_entry[path] for path in part.inputs}
        _check_one_leaf(optimizer, part.output, leaves_read - {leaf, None})
        if leaf in slice_of_leaf:
            _check_dtype(part.output, entries, new_entries)
            if _reduces(part.jaxpr):
                reduced_leaves.add(optimizer.names[leaf])
    if reduced_leaves:
        warnings.warn(
            f"release: optimizer looks at all numbers of {listed(reduced_leaves)} "
            "together. Here it sees one layer at a time, so that the run is not that "
            "of the usual step, but of one with a list of layers in place of a stack.",
            stacklevel=3,
        )


def _check_accumulators(tree: PyTree) -> None:
    """Refuses an optimizer that adds up the gradients of several steps."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ACCUMULATOR_STATES))
    for node in nodes:
        if isinstance(node, ACCUMULATOR_STATES):
            raise ValueError(
                "release: optimizer must not add up gradients, as one with the state "
                f"{type(node).__name__} does. A gradient that is gone cannot be added "
                "to: give step the whole batch."
            )


def _check_shared_entries(
    entries: Entries, entries_of_stacks: Entries, leaf_of_entry: dict[str, str | None]
) -> None:
    """Refuses a state with an entry that layers neither share nor have a part of."""
    for path in sorted(entries.keys() | entries_of_stacks.keys()):
        entry = entries.get(path)
        entry_of_stacks = entries_of_stacks.get(path)
        is_in_both = entry is not None and entry_of_stacks is not None
        if is_in_both and leaf_of_entry[path] is not None:
            continue
        if is_in_both and _can_be_shared(entry, entry_of_stacks):
            continue
        wrong = entry if entry_of_stacks is None else entry_of_stacks
        raise ValueError(
            "release: the state of optimizer must be numbers, and arrays of the shape "
            f"of a leaf, for any number of layers, but {path!r} is "
            f"{wrong.dtype}{list(wrong.shape)}. Random keys and factored moments are "
            "not: take adafactor(factored=False)."
        )


def _can_be_shared(entry: Any, entry_of_stacks: Any) -> bool:
    """Whether an entry of the state is the same for any number of layers."""
    is_key = jnp.issubdtype(entry.dtype, jax.dtypes.extended)
    # `jax.random.PRNGKey` makes uint32[2]. Other arrays may be shared: the coefficients
    # of muon are float32[3].
    is_legacy_key = entry.dtype == jnp.uint32 and entry.shape != ()
    return entry.shape == entry_of_stacks.shape and not is_key and not is_legacy_key


def _check_one_leaf(
    optimizer: Optimizer, path: str, other_leaves: set[str | None]
) -> None:
    """Refuses an entry whose new value depends on other leaves than its own."""
    if other_leaves:
        names = {optimizer.names[leaf] for leaf in other_leaves if leaf is not None}
        raise ValueError(
            "release: optimizer must treat each array by itself, but its "
            f"{optimizer.names.get(path, path)!r} depends on {listed(names)}. In the "
            "place of clips and skips set max_norm and nonfinite here."
        )


def _check_dtype(path: str, entries: Entries, new_entries: Entries) -> None:
    """Refuses an entry of a layer whose new value cannot be written in its place."""
    dtype = entries[path].dtype
    new_dtype = new_entries[path].dtype
    if new_dtype != dtype:
        raise ValueError(
            "release: optimizer must keep the dtypes of its state, but update makes "
            f"{new_dtype} of {path!r}, which is {dtype} at first."
        )


def _reduces(jaxpr: Jaxpr) -> bool:
    """Whether a program makes fewer numbers of an array, as a norm does."""
    for equation in jaxpr.eqns:
        for primitive in REDUCTIONS:
            if runs(primitive, equation):
                return True
    return False


class Part(NamedTuple):
    """The program of one new entry."""

    output: str
    inputs: list[str]  # that it reads
    jaxpr: Jaxpr


def _parts(jaxpr: Jaxpr, inputs: list[str], outputs: list[str]) -> Iterator[Part]:
    """The program of each output alone. JAX sees into calls and branches.

    Outputs are halved until each is alone, since the program of a half is half as long.
    One by one from the whole program would be quadratic in the leaves.
    """
    if len(outputs) == 1:
        yield Part(outputs[0], inputs, jaxpr)
        return
    middle = len(outputs) // 2
    for half in (outputs[:middle], outputs[middle:]):
        needed, is_read = dce_jaxpr(jaxpr, [output in half for output in outputs])
        inputs_read = [x for x, flag in zip(inputs, is_read) if flag]
        yield from _parts(needed, inputs_read, half)
