"""The optimizer of a released step: it sees one layer at a time.

Weights and the optimizer's state are entries of one dict, by their paths. An entry with
the path and the shape of a leaf follows it: a layer is given its slice. All others are
numbers that all layers share, such as counters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import KeyPath, keystr

from .._jaxpr import runs
from .._trees import PyTree, listed
from .stacks import Entries, LayerSlice, is_float, layer_of

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

# What the paths of weights begin with.
PARAMS = "[0]"
# The states of optimizers that add up gradients.
ACCUMULATOR_STATES = (optax.MultiStepsState, optax.ApplyEvery)


def arrays_by_path(params_and_state: PyTree) -> Entries:
    """Weights and state by their paths as text, which can be sorted."""
    entries = jax.tree.leaves_with_path(params_and_state)
    return {keystr(path): entry for path, entry in entries}


def tree_from_entries(params_and_state: PyTree, entries: Entries) -> Any:
    """The tree with these entries."""
    return jax.tree.map_with_path(
        lambda path, _: entries[keystr(path)], params_and_state
    )


class Optimizer(NamedTuple):
    """An optimizer of some leaves of params."""

    transformation: optax.GradientTransformationExtraArgs
    names: dict[str, str]  # of all leaves of params, as errors call them
    structure: Any  # of params

    def tree_of(self, leaves: Entries) -> PyTree:
        """Params with some leaves, and None in the place of the others."""
        return self.structure.unflatten([leaves.get(key) for key in self.names])

    def abstract_params_and_state(self, leaves: Entries) -> tuple[PyTree, PyTree]:
        """Shapes and dtypes of params with some leaves, and of the state for them."""
        return jax.eval_shape(
            lambda params: (params, self.transformation.init(params)),
            self.tree_of(leaves),
        )

    def updated(self, entries: Entries, grads: Entries) -> Entries:
        """The new entries of the leaves that have gradients, and of the counters that
        layers share.
        """
        tree = self.abstract_params_and_state(grads)
        params, state = tree_from_entries(tree, entries)
        updates, state = self.transformation.update(self.tree_of(grads), state, params)
        return arrays_by_path((optax.apply_updates(params, updates), state))

    def leaf_of_entry(self, leaves: Entries) -> dict[str, str | None]:
        """Which leaf each entry follows. None: all layers share it."""
        leaf_of_entry = {}
        params_and_state = self.abstract_params_and_state(leaves)
        for path, entry in jax.tree.leaves_with_path(params_and_state):
            leaf = _leaf_at_end(path, leaves)
            if leaf is not None and entry.shape != jnp.shape(leaves[leaf]):
                leaf = None
            leaf_of_entry[keystr(path)] = leaf if is_float(entry) else None
        return leaf_of_entry


def _leaf_at_end(path: KeyPath, leaves: Entries) -> str | None:
    """The leaf whose path is the end of a path. The longest one counts, since the path
    of a leaf may end with the path of another.
    """
    for start in range(len(path) + 1):
        leaf = PARAMS + keystr(path[start:])
        if leaf in leaves:
            return leaf
    return None


# ---------------------------------------------------------------------------- checks


def check_optimizer(
    optimizer: Optimizer, leaves: Entries, slice_of_leaf: dict[str, LayerSlice]
) -> None:
    """Refuses an optimizer whose result for one layer differs from its result for the
    stack.

    Raises:
      ValueError: it adds up gradients, keeps something that has no entry for each
        layer, or mixes leaves.
    """
    whole_entries = arrays_by_path(optimizer.abstract_params_and_state(leaves))
    leaves = leaves | jax.eval_shape(lambda: layer_of(leaves, slice_of_leaf, layer=0))
    tree = optimizer.abstract_params_and_state(leaves)
    _check_no_sums(tree)
    entries = arrays_by_path(tree)
    different = whole_entries.keys() ^ entries.keys()
    if different:
        raise ValueError(
            "release: the state of optimizer must have the same entries for any number "
            f"of layers, but {listed(different)} depends on it."
        )
    leaf_of_entry = optimizer.leaf_of_entry(leaves)
    for key, entry in entries.items():
        if leaf_of_entry[key] is None:
            _check_shared(key, entry, whole_entries[key])
    updated = jax.make_jaxpr(optimizer.updated, return_shape=True)
    traced, new_entries = updated(entries, leaves)
    # JAX sorts the keys of a dict.
    inputs = [*sorted(entries), *sorted(leaves)]
    leaves_reduced = set()
    for part in _parts(traced.jaxpr, inputs, sorted(entries)):
        (key,) = part.outputs
        leaf = leaf_of_entry[key]
        leaves_read = {leaf_of_entry[entry] for entry in part.inputs}
        leaves_read -= {leaf}
        others = {optimizer.names[x] for x in leaves_read if x is not None}
        if others:
            raise ValueError(
                "release: optimizer must treat each array by itself, but its "
                f"{optimizer.names.get(key, key)!r} depends on {listed(others)}. In "
                "the place of clips and skips set max_norm and nonfinite here."
            )
        dtype, new_dtype = entries[key].dtype, new_entries[key].dtype
        if leaf in slice_of_leaf and new_dtype != dtype:
            raise ValueError(
                "release: optimizer must keep the dtypes of its state, but update "
                f"makes {new_dtype} of {key!r}, which is {dtype} at first."
            )
        if leaf in slice_of_leaf and _sums_up(part.jaxpr):
            leaves_reduced.add(optimizer.names[leaf])
    if leaves_reduced:
        warnings.warn(
            "release: optimizer looks at all numbers of "
            f"{listed(leaves_reduced)} together. Here it sees one layer at a time, so "
            "that the run is not that of the usual step, but of one with a list of "
            "layers in place of a stack.",
            stacklevel=3,
        )


class Part(NamedTuple):
    """A program with what some of its outputs need."""

    jaxpr: Jaxpr
    inputs: list[str]
    outputs: list[str]


def _parts(jaxpr: Jaxpr, inputs: list[str], outputs: list[str]) -> Iterator[Part]:
    """A program for each output alone. JAX sees into calls and branches.

    Outputs are halved until each is alone, since the program of a half is half as long.
    One by one from the whole program would be quadratic in the leaves.
    """
    if len(outputs) == 1:
        yield Part(jaxpr, inputs, outputs)
        return
    middle = len(outputs) // 2
    for half in (outputs[:middle], outputs[middle:]):
        needed, is_read = dce_jaxpr(jaxpr, [output in half for output in outputs])
        inputs_read = [x for x, flag in zip(inputs, is_read) if flag]
        yield from _parts(needed, inputs_read, half)


def _check_no_sums(state: PyTree) -> None:
    for node in jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(x, ACCUMULATOR_STATES)
    ):
        if isinstance(node, ACCUMULATOR_STATES):
            raise ValueError(
                "release: optimizer must not add up gradients, as one with the state "
                f"{type(node).__name__} does. A gradient that is gone cannot be added "
                "to: give step the whole batch."
            )


def _check_shared(key: str, entry: Any, whole: Any) -> None:
    """Refuses an entry of the state that layers neither share nor have a slice of."""
    is_key = jnp.issubdtype(entry.dtype, jax.dtypes.extended)
    # `jax.random.PRNGKey` makes uint32[2]. Other arrays may be shared: the coefficients
    # of muon are float32[3].
    is_legacy_key = entry.dtype == jnp.uint32 and entry.shape != ()
    if is_key or is_legacy_key or entry.shape != whole.shape:
        raise ValueError(
            "release: the state of optimizer must be numbers, and arrays of the shape "
            f"of a leaf, but {key!r} is {whole.dtype}{list(whole.shape)}. Random keys "
            "and factored moments are not: take adafactor(factored=False)."
        )


def _sums_up(jaxpr: Jaxpr) -> bool:
    """Whether a program makes fewer numbers of an array, as a norm does."""
    for equation in jaxpr.eqns:
        for primitive in ("reduce_sum", "reduce_max", "dot_general"):
            if runs(primitive, equation):
                return True
    return False
