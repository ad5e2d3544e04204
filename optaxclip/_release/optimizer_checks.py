"""Refuses an optimizer that would not update a layer as it updates a stack of layers.

`init` traces one update of weights with one layer in each stack. The program of the
update says what the new value of each entry depends on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxpr import runs_primitive_like
from .._trees import listed
from .optimizers import Optimizer, arrays_by_path
from .stacks import Entries, LayerSlice, layer_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr

# The primitives that norms begin with.
REDUCTIONS = ("reduce_sum", "reduce_max", "dot_general")


class EntryProgram(NamedTuple):
    """The program of the new value of one entry."""

    path: str  # of the entry
    inputs: list[str]  # the paths of the entries and gradients that it reads
    jaxpr: Jaxpr


def check_optimizer(
    optimizer: Optimizer, weights: Entries, slice_of_leaf: dict[str, LayerSlice]
) -> None:
    """Refuses an optimizer that does not treat each layer by itself.

    Warns of one that looks at all numbers of a leaf together.

    Raises:
      TypeError: it wants more than gradients, state and params, or a gradient of
        every leaf.
      ValueError: it keeps something that has no entry for each layer or whose dtype an
        update changes, or mixes leaves.
    """
    layer = jax.eval_shape(lambda: layer_of(weights, slice_of_leaf, layer=0))
    weights_of_one_layer = weights | layer
    entries = arrays_by_path(optimizer.abstract_params_and_state(weights_of_one_layer))
    leaf_of_entry = optimizer.leaf_of_entry(weights_of_one_layer)
    entries_of_stacks = arrays_by_path(optimizer.abstract_params_and_state(weights))
    for path, entry in entries.items():
        if leaf_of_entry[path] is None:
            _check_shared_entry(path, entry, entries_of_stacks.get(path))

    trace = jax.make_jaxpr(optimizer.updated, return_shape=True)
    traced, new_entries = _traced_update(trace, entries, weights_of_one_layer)
    _check_dtypes(entries, new_entries)
    # JAX sorts the keys of a dict.
    inputs = [*sorted(entries), *sorted(weights_of_one_layer)]
    reduced_leaves = set()
    for program in _entry_programs(traced.jaxpr, inputs, sorted(entries)):
        _check_one_leaf(program, leaf_of_entry, optimizer.name_of_leaf)
        leaf_path = leaf_of_entry[program.path]
        if leaf_path in slice_of_leaf and _reduces(program.jaxpr):
            reduced_leaves.add(optimizer.name_of_leaf[leaf_path])
    # A step calls it for each stack, with None in the place of all other leaves.
    _traced_update(trace, entries, layer)
    if reduced_leaves:
        warnings.warn(
            f"release: optimizer looks at all numbers of {listed(reduced_leaves)} "
            "together. Here it sees one layer at a time, so that the run is not that "
            "of the usual step, but of one with a list of layers in place of a stack.",
            stacklevel=3,
        )


def _traced_update(
    trace: Callable[..., Any], entries: Entries, grads: Entries
) -> tuple[ClosedJaxpr, Entries]:
    """The program of an update by these gradients, and types of the new entries."""
    try:
        return trace(entries, grads)
    except Exception as error:
        # Such as `reduce_on_plateau`, which wants the value of the loss.
        raise TypeError(
            "release: optimizer is called with gradients, state and params alone, and "
            f"with None in the place of some leaves. It raised: {error}"
        ) from error


def _check_shared_entry(path: str, entry: Array, entry_of_stacks: Array | None) -> None:
    """Refuses an entry that follows no leaf, and is not the same for all layers."""
    is_key = jnp.issubdtype(entry.dtype, jax.dtypes.extended)
    # `jax.random.PRNGKey` makes uint32[2]. Other arrays may be shared: the coefficients
    # of muon are float32[3].
    is_legacy_key = entry.dtype == jnp.uint32 and entry.shape != ()
    has_same_shape = (
        entry_of_stacks is not None and entry_of_stacks.shape == entry.shape
    )
    if is_key or is_legacy_key or not has_same_shape:
        raise ValueError(
            "release: the state of optimizer must be numbers, and arrays of the shape "
            f"of a leaf, for any number of layers, but {path!r} is "
            f"{entry.dtype}{list(entry.shape)}. Random keys and factored moments are "
            "not. Adafactor has none with factored=False."
        )


def _check_dtypes(entries: Entries, new_entries: Entries) -> None:
    """Refuses a state that has another dtype after an update, as moments in bfloat16
    have if the decay is a float32 array.
    """
    for path, entry in entries.items():
        new_dtype = new_entries[path].dtype
        if new_dtype != entry.dtype:
            raise ValueError(
                "release: optimizer must keep the dtypes of its state, but "
                f"{path!r} is {entry.dtype} before an update and {new_dtype} after it. "
                "Give decays as Python numbers, not as arrays. With "
                "optax.inject_hyperparams name them in static_args: "
                "('b1', 'b2', 'eps', 'eps_root') for Adam."
            )


def _check_one_leaf(
    program: EntryProgram,
    leaf_of_entry: dict[str, str | None],
    name_of_leaf: dict[str, str],
) -> None:
    """Refuses an entry whose new value depends on other leaves than its own."""
    leaf_path = leaf_of_entry[program.path]
    other_names = set()
    for path in program.inputs:
        leaf_read = leaf_of_entry[path]
        if leaf_read not in (None, leaf_path):
            other_names.add(name_of_leaf[leaf_read])
    if not other_names:
        return
    name = name_of_leaf.get(program.path, program.path)
    if leaf_path is None:
        raise ValueError(
            "release: optimizer must keep no number that depends on gradients, unless "
            f"each weight has one of its own, but {name!r} depends on "
            f"{listed(other_names)}."
        )
    raise ValueError(
        f"release: optimizer must treat each array by itself, but its {name!r} depends "
        f"on {listed(other_names)}. In the place of clips and skips set max_norm and "
        "nonfinite here."
    )


def _reduces(jaxpr: Jaxpr) -> bool:
    """Whether a program makes fewer numbers of an array, as a norm does."""
    return any(runs_primitive_like(REDUCTIONS, equation) for equation in jaxpr.eqns)


def _entry_programs(
    jaxpr: Jaxpr, inputs: list[str], outputs: list[str]
) -> Iterator[EntryProgram]:
    """The program of each output alone. JAX sees into calls and branches.

    Outputs are halved until each is alone, since the program of a half is half as long.
    One by one from the whole program would be quadratic in the leaves.
    """
    if len(outputs) == 1:
        yield EntryProgram(outputs[0], inputs, jaxpr)
        return
    middle = len(outputs) // 2
    for half in (outputs[:middle], outputs[middle:]):
        needed, is_read = dce_jaxpr(jaxpr, [output in half for output in outputs])
        inputs_read = [path for path, flag in zip(inputs, is_read) if flag]
        yield from _entry_programs(needed, inputs_read, half)
