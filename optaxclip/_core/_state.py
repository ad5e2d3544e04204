"""What a clipper keeps. Its fields are in blocks, as `_blocks` arranges them."""

import collections
import itertools
import json
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._norms import _prefix as prefix
from .._norms._in_blocks import are_rows
from ._placeholder import Form, OpenForm

# Of the norms in each block. Dicts of None have no leaves: optax.tree looks for leaves
# in every field, and would find strings.
Names = tuple[dict[str, None], ...]


class Entry(NamedTuple):
    """One block of a state: of all fields but `names` and `step`, one array each."""

    norm: jax.Array
    limit: jax.Array
    factor: jax.Array
    clipped: jax.Array
    clipped_recently: jax.Array
    nonfinite: jax.Array
    memory: Any


class ClipState(NamedTuple):
    """What a clipper knows after a step.

    All fields but `names` and `step` have a row for each norm: shape [] for the norm of
    everything, [N] for those of N tensors or groups, [N, ...] for N arrays of units or
    of stacked layers, and [...] for one such array. Norms of different shapes, or of
    different rules, are in a tuple of such arrays. `metrics(state)` and
    `state.by_name()` give them by name.

    Attributes:
      names: for each array, the names of its norms. They are no leaves.
      step: updates seen.
      norm: before clipping, in the last step.
      limit: what the norm was held against.
      factor: what the updates were multiplied by. 1 where nothing was done, 0 only
        where they were made 0. Within the normal numbers of its dtype.
      clipped: finite steps that changed the updates.
      clipped_recently: their share of about the last 100 steps.
      nonfinite: steps whose norm was NaN or inf.
      memory: what the rule remembers.
    """

    # The order of their arrays in JAX, as optax.tree takes it. Of donated arrays of one
    # form JAX gives the first to the first output. So the fields that a step does not
    # read come last: those before them get their own arrays, which XLA need not copy.
    names: Any
    step: jax.Array  # int32[]
    clipped: Any  # int32[N]
    clipped_recently: Any  # float32[N]
    nonfinite: Any  # int32[N]
    memory: Any  # arrays [N, ...]
    norm: Any  # float32[N]
    limit: Any  # float32[N]
    factor: Any  # float32[N]

    def by_name(self, *, layers: bool = False) -> dict[str, Entry]:
        """Returns what the state knows of each norm: its own `norm`, `limit`, `factor`,
        `clipped`, `clipped_recently`, `nonfinite` and `memory`.

        The name of a tensor is its path ("blocks/0/w"), that of a group its label, and
        that of the norm of everything is "".

        Args:
          layers: whether each layer of a stacked leaf, and each unit, has an entry of
            its own, named by its number: "blocks/w/0", or "blocks/w/0/3" for layer 0
            and expert 3. Otherwise they share one, of arrays.

        Raises:
          ValueError: a state of several models, as under `jax.vmap`, or a leaf with the
            name of a layer of another.
        """
        check_one_model("by_name: the state", "ClipState.by_name", self)
        found = {}
        for block, entry in zip(self.names, unpack(self)):
            rows = has_rows(block, jnp.shape(entry.norm))
            for row, name in enumerate(block):
                found[name] = _row(entry, row) if rows else entry
        if not layers:
            return found
        each = itertools.starmap(_entries_of_layers, found.items())
        entries = list(itertools.chain.from_iterable(each))
        check_names_of_layers("by_name", [name for name, _ in entries])
        return dict(entries)


_KEYS = [jax.tree_util.GetAttrKey(name) for name in ClipState._fields[1:]]


def _flatten(state: ClipState) -> tuple[list[Any], Form]:
    """The fields with their keys, and what is apart from them, for JAX."""
    form = state.names
    if not isinstance(form, OpenForm):
        names = tuple(map(tuple, form))
        form = Form(names, jax.tree.structure(state.memory))
    return list(zip(_KEYS, state[1:])), form


def _unflatten(form: Form, fields: Any) -> ClipState:
    state = ClipState(tuple(map(dict.fromkeys, form.names)), *fields)
    if not isinstance(form, OpenForm):
        return state
    if form.memory is None:  # not yet compared with a state
        return state._replace(names=form)
    filled = {
        name: form.fill(name, field) for name, field in state._asdict().items()
    }
    return ClipState(**filled)


# JAX would take each name in a NamedTuple for a leaf.
jax.tree_util.register_pytree_with_keys(ClipState, _flatten, _unflatten)


def _form_of(names: bytes) -> Form:
    return Form(tuple(map(tuple, json.loads(names))), None)


jax.export.register_pytree_node_serialization(
    ClipState,
    serialized_name="optaxclip.ClipState",
    serialize_auxdata=lambda form: json.dumps(form.names).encode(),
    deserialize_auxdata=_form_of,
)


def state_of_placeholder() -> ClipState:
    """A state with one leaf for each field, for `optax.tree_map_params`."""
    return ClipState(
        OpenForm(), *[jnp.zeros(())] * (len(ClipState._fields) - 1)
    )


def _row(entry: Entry, row: int) -> Entry:
    return jax.tree.map(lambda x: x[row], entry)


def check_one_model(argument: str, function: str, state: Any) -> None:
    """Raises for norms [members, tensors], which would be read as [tensors, units].

    `function` is what reads the state of one model.
    """
    shape = jnp.shape(state.step)
    if shape:
        raise ValueError(
            f"{argument} must be of one model, but its counter of steps has the shape "
            f"{shape}, as under jax.vmap or jax.pmap. Map over them, "
            f"jax.vmap(optaxclip.{function})(opt_state), or take one, "
            "jax.tree.map(lambda x: x[0], opt_state)."
        )


def has_rows(names: Collection[str], shape: tuple[int, ...]) -> bool:
    """Whether a block of this shape has a row for each name. Others are one norm."""
    # An array of one number, alone in its block, reads as a number too.
    return are_rows(names, () if shape == (1,) else shape)


def _entries_of_layers(name: str, entry: Entry) -> list[tuple[str, Entry]]:
    """(name, entry) of each layer."""
    shape = jnp.shape(entry.norm)
    if not shape:
        return [(name, entry)]
    names = names_of_layers(name, shape)
    rows = [operator.itemgetter(index) for index in np.ndindex(shape)]
    return [(name, jax.tree.map(row, entry)) for name, row in zip(names, rows)]


def names_of_layers(name: str, shape: tuple[int, ...]) -> list[str]:
    """The names of the entries of one norm, such as "blocks/w/0/3".

    Axes of size 1 are those that it sums, and have no number.
    """
    found = []
    for index in np.ndindex(shape):
        numbers = [str(i) for i, size in zip(index, shape) if size > 1] or [
            "0"
        ]
        found.append("/".join([name, *numbers]))
    return found


def check_names_of_layers(call: str, names: list[str]) -> None:
    """Raises where a leaf is called "w/0" and a stack "w" has a layer 0."""
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise ValueError(
                f"{call}: layers=True: two norms have the name {name!r}, that of a "
                "leaf and that of a layer of another leaf. Rename the leaf, or use "
                "layers=False."
            )


def pack(names: Names, step: jax.Array, entries: list[Entry]) -> ClipState:
    """The state of some blocks."""
    blocks = list(zip(*entries)) or [()] * len(Entry._fields)
    packed = [x[0] if len(entries) == 1 else tuple(x) for x in blocks]
    if not jax.tree.leaves(packed[-1]):
        packed[-1] = ()
    fields = dict(zip(Entry._fields, packed))
    return ClipState(names, step, **fields)


def unpack(state: ClipState) -> list[Entry]:
    """The blocks of a state."""
    count = len(state.names)
    # A single block is in no tuple.
    fields = [getattr(state, name) for name in Entry._fields]
    fields = [(x,) if count == 1 else x for x in fields]
    # Rules without a memory share one ().
    if not jax.tree.leaves(state.memory):
        fields[-1] = ((),) * count
    return [Entry(*each) for each in zip(*fields)]


def limits_of(state: ClipState, tree: Any) -> Any:
    """The limit of each leaf of a tree, from the state of a clipper of tensors."""
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    known = state.by_name()
    names = prefix.names([path for path, _ in entries], known)
    return treedef.unflatten([known[name].limit for name in names])
