"""What a clipper knows after a step, and the form of that for JAX.

All fields are vectors with one entry for each norm. The names of the entries are no
arrays: they belong to the structure of the state. Norms that share a rule are a part of
the vectors, with a dict of names and a memory of its own.
"""

import collections
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import _trees as trees

# The names of the norms of each part, and those of the layers of stacked leaves:
# ({"w": {"0": None, "1": None}, "b": None},). Dicts of None have no leaves: optax.tree
# looks for leaves in every field, and would find strings.
Part = Mapping[str, Mapping[str, None] | None]
Names = tuple[Part, ...]
ALL: Names = ({"": None},)  # one norm of everything


class Entry(NamedTuple):
    """What a state knows of one norm."""

    norm: Any
    limit: Any
    factor: Any
    clipped: Any
    clipped_recently: Any
    nonfinite: Any
    units_clipped: Any
    memory: Any


class ClipState(NamedTuple):
    """What a clipper knows after a step.

    All fields but `names`, `step` and `memory` have an entry for each norm: shape [N],
    or [] for one norm of everything. Each layer of a stacked leaf is a norm. Of the
    units of a leaf the state keeps a summary: norm, limit and factor are those of the
    unit that is furthest above its limit. `metrics(state)` and `state.by_name()` give
    the entries by name.

    Attributes:
      names: of the norms. They are no leaves.
      step: updates seen.
      clipped: finite steps that changed the updates. Of units, steps in which one was
        changed at least.
      clipped_recently: their share of about the last 100 steps. Of units, the mean of
        `units_clipped`.
      nonfinite: steps whose norm was NaN or inf.
      memory: what the rule remembers. Norms of several rules have a tuple of memories.
      norm: before clipping, in the last step.
      limit: what the norm was held against.
      factor: what the updates were multiplied by. 1 where nothing was done, 0 only
        where they were made 0. Within the normal numbers of its dtype.
      units_clipped: the share of the units of each leaf that the last step changed. ()
        in clippers without units.
    """

    # The order of their arrays in JAX, as optax.tree takes it. Of donated arrays of one
    # form JAX gives the first to the first output. So the fields that a step does not
    # read come last: those before them get their own arrays, which XLA need not copy.
    names: Any
    step: Any  # int32[]
    clipped: Any  # int32[N]
    clipped_recently: Any  # float32[N]
    nonfinite: Any  # int32[N]
    memory: Any  # arrays [N, ...]
    norm: Any  # float32[N]
    limit: Any  # float32[N]
    factor: Any  # float32[N]
    units_clipped: Any = ()  # float32[N]

    def by_name(self, *, layers: bool = False) -> dict[str, Entry]:
        """Returns what the state knows of each norm: its own `norm`, `limit`, `factor`,
        `clipped`, `clipped_recently`, `nonfinite`, `units_clipped` and `memory`.

        The name of a tensor is its path ("blocks/0/w"), that of a group its label, and
        that of the norm of everything is "".

        Args:
          layers: whether each layer of a stacked leaf has an entry of its own, named by
            its number: "blocks/w/0", or "blocks/w/0/3" for layer 0 and expert 3.
            Otherwise the layers of a leaf share one, of vectors.

        Raises:
          ValueError: a state of several models, as under `jax.vmap`, or a leaf with the
            name of a layer of another.
        """
        check_one_model("by_name: the state", "ClipState.by_name", self)
        fields = [getattr(self, name) for name in Entry._fields[:-1]]
        if not is_vector(self.names):
            return {"": Entry._make([*fields, self.memory])}
        parts = counts_of(self)
        if layers:
            parts = with_layers(self, "by_name")
        found, start = {}, 0
        for part, memory in zip(parts, memories(self)):
            first = start
            for name, count in part.items():
                rows, inside = start, start - first
                if count is not None:
                    rows = slice(start, start + count)
                    inside = slice(start - first, start - first + count)
                own = jax.tree.map(lambda x, rows=rows: x[rows], fields)
                memory_of = jax.tree.map(
                    lambda x, rows=inside: x[rows], memory
                )
                found[name] = Entry._make([*own, memory_of])
                start += 1 if count is None else count
        return found


def counts_of(state: ClipState) -> list[dict[str, int | None]]:
    """How many entries each name of a state has. None for a number."""
    named = [layers for part in state.names for layers in part.values()]
    known = sum(1 if layers is None else len(layers) for layers in named)
    found = []
    for part in state.names:
        counts: dict[str, int | None] = {}
        for name, layers in part.items():
            # Of arrays that a norm function of the user's returned each device may
            # have a part.
            count = len(layers or ()) * state.norm.size // known
            counts[name] = None if layers is None else count
        found.append(counts)
    return found


def with_layers(state: ClipState, call: str) -> list[dict[str, int | None]]:
    """The names of all entries, such as "w/0/3" for layer 0 and expert 3 of "w".

    Raises:
      ValueError: a leaf is called "w/0", and a stack "w" has a layer 0.
    """
    found, seen = [], collections.Counter[str]()
    for part, counts in zip(state.names, counts_of(state)):
        every = []
        for name, layers in part.items():
            count = counts[name]
            if count is None:
                every.append(name)
                continue
            every += [f"{name}/{number}" for number in list(layers)[:count]]
        seen.update(every)
        found.append(dict.fromkeys(every))
    for name, count in seen.items():
        if count > 1:
            raise ValueError(
                f"{call}: layers=True: two norms have the name {name!r}, that of a "
                "leaf and that of a layer of another leaf. Rename the leaf, or use "
                "layers=False."
            )
    return found


def is_vector(names: Names) -> bool:
    """Whether the fields are vectors, and not numbers."""
    return tuple(map(dict, names)) != ALL


def memories(state: ClipState) -> tuple[Any, ...]:
    """The memory of each part."""
    count = len(state.names)
    # Rules without a memory share one ().
    if not jax.tree.leaves(state.memory):
        return ((),) * count
    return (state.memory,) if count == 1 else tuple(state.memory)


def one_memory(memories: list[Any]) -> Any:
    """The memories of all parts, as a state keeps them."""
    if not jax.tree.leaves(memories):
        return ()
    return memories[0] if len(memories) == 1 else tuple(memories)


def count_up(counter: jax.Array, happened: Any = True) -> jax.Array:
    """The counter after a step. It stays at the largest int32."""
    more = counter < jnp.iinfo(counter.dtype).max
    return counter + (happened & more).astype(counter.dtype)


def moving_average(
    old: jax.Array, new: jax.Array, step: jax.Array, reach: int = 100
) -> jax.Array:
    """The moving average of a number after step number `step`, counted from 0.

    It is the mean of all steps while these are at most `reach`, so it needs no
    correction for its start.
    """
    count = jnp.minimum(step, reach - 1).astype(jnp.float32) + 1
    return old + (new.astype(jnp.float32) - old) / count


def check_one_model(argument: str, function: str, state: Any) -> None:
    """Raises for vectors [members, N], which would be read as [N, members].

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


def limits_of(state: ClipState, norms: Any) -> Any:
    """The limits that a state has for some norms, as a tree."""
    known = state.by_name()
    limits = []
    for name, norm in zip(trees.names(list(norms.paths), known), norms.each):
        limits.append(known[name].limit.reshape(norm.shape))
    return norms.tree(limits)


# ------------------------------------------------------------------- the form for JAX
#
# `optax.tree_map_params` calls `init` with a placeholder, maps over the result and a
# real state together, and rebuilds the result. Which names there are depends on the
# parameters. So:
#
#     init(placeholder)   one leaf for each field, and a form that is still open
#     map with a state    JAX compares the forms: the open one notes that of the state
#     rebuild             with the names that were noted


@dataclass(eq=False, repr=False)
class Form:
    """What a state is apart from its arrays. Only the names of norms are compared: a
    tree of shardings may have one entry for all of the memory, and devices may hold
    different layers.
    """

    names: tuple[Any, ...] | None  # None: open
    memory: Any = None  # its structure
    units: bool = False
    noted: "Form | None" = None  # that of the state beside an open one

    # JAX compares the forms of two trees before it maps over them together.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Form):
            return False
        for one, two in ((self, other), (other, self)):
            if one.names is None and two.names is not None:
                one.noted = two
        return None in (self.names, other.names) or self.heads == other.heads

    @property
    def heads(self) -> list[list[str]]:
        return [[name for name, _ in part] for part in self.names or ()]

    # An open form equals any other.
    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return repr(self.names)


_KEYS = [jax.tree_util.GetAttrKey(name) for name in ClipState._fields[1:]]


def _flatten(state: ClipState) -> tuple[list[Any], Form]:
    """The fields with their keys, and what is apart from them, for JAX."""
    if isinstance(state.names, Form):
        return list(zip(_KEYS, state[1:])), state.names
    names = []
    for part in state.names:
        inner = (x if x is None else tuple(x) for x in part.values())
        names.append(tuple(zip(part, inner)))
    memory = jax.tree.structure(state.memory)
    units = bool(jax.tree.leaves(state.units_clipped))
    form = Form(tuple(names), memory, units)
    return list(zip(_KEYS, state[1:])), form


def _unflatten(form: Form, fields: Any) -> ClipState:
    noted = form.noted or form
    if noted.names is None:
        return ClipState(form, *fields)
    names = []
    for part in noted.names:
        inner = {name: x and dict.fromkeys(x) for name, x in part}
        names.append(inner)
    state = ClipState(tuple(names), *fields)
    if noted is form:
        return state
    # One sharding for all of the memory becomes one for each of its arrays.
    memory = state.memory
    if jax.tree.structure(memory) != noted.memory:
        memory = noted.memory.unflatten([memory] * noted.memory.num_leaves)
    units = state.units_clipped if noted.units else ()
    return state._replace(memory=memory, units_clipped=units)


# JAX would take each name in a NamedTuple for a leaf.
jax.tree_util.register_pytree_with_keys(ClipState, _flatten, _unflatten)


def _form_of(names: bytes) -> Form:
    parts = []
    for part in json.loads(names):
        parts.append(tuple((name, x and tuple(x)) for name, x in part))
    return Form(tuple(parts))


jax.export.register_pytree_node_serialization(
    ClipState,
    serialized_name="optaxclip.ClipState",
    serialize_auxdata=lambda form: json.dumps(form.names).encode(),
    deserialize_auxdata=_form_of,
)


def _placeholder_type() -> type:
    """The type of optax's placeholder, which has no public name."""
    # tree_map_params hands its placeholder to init, which notes the type.
    found: list[type] = []

    def init(params: Any) -> Any:
        found.append(type(params))
        return ()

    optax.tree_map_params(init, jnp.shape, ())
    return found[0]


PLACEHOLDER = _placeholder_type()


def state_of_placeholder() -> ClipState:
    """A state with one leaf for each field, for `optax.tree_map_params`."""
    count = len(ClipState._fields) - 1
    return ClipState(Form(None), *[jnp.zeros(())] * count)
