"""What a clipper knows after a step, and how the norms of a step fit into it.

All fields are vectors with one entry for each norm. The names of the entries are no
arrays: they belong to the structure of the state. Norms that share a rule are a part of
the vectors, with a dict of names and a memory of its own. The units of a leaf are a
part by themselves. A leaf that is None in one step has no norm there, and the state
keeps what it knew.
"""

import json
from collections import namedtuple
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _mesh as mesh
from . import _trees as trees
from ._checks import BEGIN_ANEW, check_shape, held_in
from ._exported import Form, state_repr
from ._plan import Norms
from .rules._limits import Constant, Joined
from .rules._rule import Rule, call_name, is_rule

# The names of the norms of each part, and those of the layers of stacked leaves:
# ({"w": {"0": None, "1": None}, "b": None},). Dicts of None have no leaves: optax.tree
# looks for leaves in every field, and would find strings.
Part = Mapping[str, Mapping[str, None] | None]
Names = tuple[Part, ...]
ALL: Names = ({"": None},)  # one norm of everything
# What a state knows of one norm.
OF_NORM = "norm limit factor clipped clipped_recently nonfinite units_clipped memory"
Entry = namedtuple("Entry", OF_NORM)


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
      nonfinite: steps whose norm was NaN or inf, or whose limit was NaN.
      memory: what the rules remember: a tuple with one memory for each rule.
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
    memory: Any  # for each rule arrays [N, ...]
    norm: Any  # float32[N]
    limit: Any  # float32[N]
    factor: Any  # float32[N]
    units_clipped: Any = ()  # float32[N]

    __repr__ = state_repr

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
        values = [getattr(self, name) for name in Entry._fields]
        if self.names == ALL:
            return {"": Entry(*values[:-1], *self.memory)}
        parts = with_layers(self, "by_name") if layers else counts_of(self)
        found, start = {}, 0
        for part, memory in zip(parts, self.memory):
            stop = start + sum(count or 1 for count in part.values())
            of_part = jax.tree.map(itemgetter(slice(start, stop)), values[:-1])
            whole, row = Entry._make([*of_part, memory]), 0
            for name, count in part.items():
                rows = row if count is None else slice(row, row + count)
                found[name] = jax.tree.map(itemgetter(rows), whole)
                row += count or 1
            start = stop
        return found


class RecordState(ClipState):
    """What `record_norm` knows after a step: a `ClipState` whose limits are inf. By its
    type `metrics` tells it from the state of a clipper.
    """


def counts_of(state: ClipState) -> list[dict[str, int | None]]:
    """How many entries each name of a state has. None for a number."""
    known, found = 0, []
    for part in state.names:
        for layers in part.values():
            known += 1 if layers is None else len(layers)
    for part in state.names:
        counts: dict[str, int | None] = {}
        for name, layers in part.items():
            # Of arrays that a norm function of the user's returned each device may
            # have a part.
            count = len(layers or ()) * state.norm.size // known
            counts[name] = None if layers is None else count
        found.append(counts)
    return found


def sizes_of(state: ClipState, layers: bool) -> dict[str, int]:
    """How many entries each name of a state has, for `metrics`. With `layers` each
    layer has a name of its own.
    """
    parts = with_layers(state, "metrics") if layers else counts_of(state)
    entries = chain.from_iterable(part.items() for part in parts)
    return {name: count or 1 for name, count in entries}


def with_layers(state: ClipState, call: str) -> list[dict[str, int | None]]:
    """The names of all entries, such as "w/0/3" for layer 0 and expert 3 of "w".

    Raises:
      ValueError: a leaf is called "w/0", and a stack "w" has a layer 0.
    """
    found, seen = [], set[str]()
    for part, counts in zip(state.names, counts_of(state)):
        every = []
        for name, layers in part.items():
            if layers is None:
                every.append(name)
            else:
                every += [f"{name}/{layer}" for layer in layers][: counts[name]]
        if len({*every, *seen}) < len(every) + len(seen):
            raise ValueError(
                f"{call}: layers=True: a leaf of {trees.listed(part)} has the name of "
                "a layer of another leaf. Rename it, or use layers=False."
            )
        seen.update(every)
        found.append(dict.fromkeys(every))
    return found


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


def clip_states(tree: Any) -> list[ClipState]:
    """All states of clippers in the state of an optimizer."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ClipState))
    return [x for x in found if isinstance(x, ClipState)]


# ----------------------------------------------------------- the norms of a step


class Group(NamedTuple):
    """Norms that share a rule."""

    part: int  # of the state
    numbers: list[int]  # of the norms of this step
    is_unit: bool
    is_one: bool  # one number, or the units of one leaf, and no vector
    # In its part. None: all of them. 0: the units of a leaf, which are a part.
    own_rows: Any
    rows: Any = None  # int[]: of its entries, among all of the state

    def vector(self, each: list[Any]) -> Any:
        """The norms as one array, or other numbers like them."""
        own = [each[i] for i in self.numbers]
        return own[0] if self.is_one else concatenated(own)

    def put(self, memory: Any, new: Any) -> Any:
        """The memory of the part, with a new one of these norms."""
        rows = self.own_rows
        if rows is None:
            return new
        if isinstance(rows, int):
            return jax.tree.map(itemgetter(None), new)
        return jax.tree.map(lambda x, y: x.at[rows].set(y), memory, new)


def concatenated(arrays: list[jax.Array]) -> jax.Array:
    """All numbers of some arrays as one vector, whole on each device of an Explicit
    mesh.
    """
    if not arrays:
        return jnp.zeros(0, jnp.float32)
    # A vector has one type.
    if not jax.sharding.get_abstract_mesh().empty:
        arrays = mesh.typed_as_varying(arrays, list(map(mesh.resharded, arrays)))
    flat = [x.reshape(-1) for x in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def groups_of(norms: Norms, state: ClipState, call: str) -> list[Group]:
    """The groups of the norms of a step, matched by name with a state.

    Raises:
      ValueError: a norm that the state does not have, or with other layers.
    """
    known = set().union(*state.names)
    own = trees.names(norms.paths, known)
    number_of = {name: number for number, name in enumerate(own)}
    has_units = bool(norms.units) and not jax.tree.leaves(state.units_clipped)
    # A state of more names is right, as some may be missing. One of fewer is not.
    if has_units or not set(number_of) <= known:
        raise ValueError(
            f"{call}: state was made for norms of {_shown(known)}, but the updates "
            f"have norms of {'units in ' * has_units}{_shown(number_of)}. {BEGIN_ANEW}"
        )
    found, start = [], 0
    for part, counts in enumerate(counts_of(state)):
        numbers, rows, first = [], [], start
        for name, count in counts.items():
            stop = start + (count or 1)
            if name in number_of:
                number = number_of[name]
                size = norms.values[number].size
                if number not in norms.units and size != stop - start:
                    raise ValueError(
                        f"{call}: state was made for {stop - start} norms in {name!r}, "
                        f"but the updates have {size}. {BEGIN_ANEW}"
                    )
                numbers.append(number)
                rows += range(start, stop)
            start = stop
        if numbers:
            group = group_of(norms, state.names, part, numbers)
            group = group._replace(rows=np.array(rows))
            if len(rows) < start - first:
                group = group._replace(own_rows=group.rows - first)
            found.append(group)
    return found


def group_of(norms: Norms, names: Names, part: int, numbers: list[int]) -> Group:
    """All norms of a part."""
    is_unit, is_all = numbers[0] in norms.units, names == ALL
    own_rows = 0 if is_unit and not is_all else None
    return Group(part, numbers, is_unit, is_unit or is_all, own_rows)


def rules_of_norms(
    rules: Any, norms: Norms, argument: str, names: Names = ()
) -> list[Rule]:
    """The rule of each norm, from one rule or a tree prefix of rules.

    `names` are those of the state, some of which may have no norm in this step.

    Raises:
      ValueError: a norm without a rule, or a rule without a norm.
    """
    if isinstance(rules, Rule):
        return [rules] * len(norms.values)
    table = trees.freeze(rules, is_rule)
    # A missing leaf is a hole in the tree of norms. A missing label leaves none.
    if norms.noun == "label" and names:
        missing = set().union(*names) - set(trees.names(norms.paths))
        kept = [x for x in table.entries if trees.name(x[0]) not in missing]
        table = trees.Prefix(tuple(kept))
    return trees.lookup_paths(
        table,
        norms.paths,
        set(norms.holes),
        argument=argument,
        part=norms.noun,
        allow_missing=norms.allow_missing,
    )


def shared_rule(rules: list[Rule], group: Group, norms: Norms, call: str) -> Rule:
    """The rule of a group. Different constant limits become a vector, and so does an
    array, which is one number for each layer of each leaf.

    Raises:
      ValueError: different rules for norms that shared one before.
    """
    own = [rules[number] for number in group.numbers]
    shape_of = [norms.values[number].shape for number in group.numbers]
    if len({id(rule) for rule in own}) == 1:
        if group.is_one or not _shapes(own[0]):
            return own[0]
        return jax.tree.map(partial(_spread, shape_of), own[0], is_leaf=callable)
    limits = [rule.limit for rule in own if isinstance(rule, Constant)]
    if len(limits) < len(own) or any(map(callable, limits)):
        raise ValueError(
            f"{call}: state has one part for norms whose limits are now different "
            f"schedules or rules, with a part each. {BEGIN_ANEW}"
        )
    dtype = norms.values[group.numbers[0]].dtype
    each = []
    for limit, shape in zip(limits, shape_of):
        each.append(jnp.broadcast_to(held_in(dtype, limit), shape))
    return Constant(concatenated(each))


def _spread(shapes: list[Any], number: Any) -> Any:
    # A schedule, and a scalar, is for all norms.
    if callable(number) or not jnp.ndim(number):
        return number
    return concatenated([jnp.broadcast_to(number, shape) for shape in shapes])


# What the fields are before the first step. None: the dtype of the norms.
FIRST = {
    "clipped": (0, np.int32),
    "clipped_recently": (0, np.float32),
    "nonfinite": (0, np.int32),
    "norm": (0, None),
    "limit": (np.inf, None),
    "factor": (1, None),
    "units_clipped": (0, np.float32),
}


def first_state(norms: Norms, rules: list[Rule], argument: str) -> ClipState:
    """The state before the first step, from the types of norms.

    Raises:
      ValueError: an array in a rule that is not one number for each entry of a norm.
    """
    each = [mesh.typed_as(jnp.zeros(x.shape, x.dtype), x) for x in norms.values]
    names: dict[Any, dict[str, Any]] = {}
    numbers: dict[Any, list[int]] = {}
    found = enumerate(trees.names(norms.paths))

    # Those of units last, by how many there are, as a step finds them.
    def units_of(entry: tuple[int, str]) -> int:
        return norms.values[entry[0]].size if entry[0] in norms.units else 0

    for number, name in sorted(found, key=units_of):
        norm, rule = norms.values[number], rules[number]
        for shape in _shapes(rule):
            check_shape(shape, norm.shape, argument)
        # One rule for everything is one object, and one part. All constant limits are
        # one rule. A schedule is no number, so it is none of them. Norms that devices
        # have for themselves are a part apart from those that are the same on all.
        is_number = isinstance(rule, Constant) and not callable(rule.limit)
        kind: Any = "constant" if is_number else id(rule)
        kind, layers = (kind, norm.manual_axis_type), None
        if number in norms.units:
            kind = "units", number
        elif norm.shape:
            layers = dict.fromkeys(_layer_names(norm.shape))
        names.setdefault(kind, {})[name] = layers
        numbers.setdefault(kind, []).append(number)
    parts = tuple(names.values())
    entries, memory = [], []
    for part, own in enumerate(numbers.values()):
        group = group_of(norms, parts, part, own)
        norm, rule = group.vector(each), rules[own[0]]
        # A rule may return the very array that it is given.
        first = jax.tree.map(jnp.asarray, rule.init(norm))
        for leaf in jax.tree.leaves(first):
            if leaf.shape[: norm.ndim] != norm.shape:
                raise ValueError(
                    f"{call_name(type(rule))}: init must return arrays whose first "
                    f"axes are those of the norm, {norm.shape}, got the shape "
                    f"{leaf.shape}."
                )
        # Zeros that a rule made of a shape have no type of a mesh.
        first = mesh.typed_as(first, jax.typeof(norm))
        if group.is_unit:
            first = group.put((), first)
            over = mesh.varying(norm) - set(units_over(norms, group))
            shape = () if parts == ALL else (1,)
            norm = mesh.varying_over(jnp.zeros(shape, norm.dtype), over)
        entries.append(norm)
        memory.append(first)
    norm = entries[0] if parts == ALL else concatenated(entries)
    filled = {}
    for name, (value, dtype) in FIRST.items():
        filled[name] = jnp.full_like(norm, value, dtype)
    if not norms.units:
        filled["units_clipped"] = ()
    step = jnp.zeros((), jnp.int32)
    return ClipState(parts, step, memory=tuple(memory), **filled)


def _layer_names(shape: tuple[int, ...]) -> list[str]:
    """The names of the layers of a norm, such as "0/3" for layer 0 and expert 3."""
    found = []
    for index in np.ndindex(shape):
        # Axes of size 1 are those that a norm sums, and have no number.
        numbers = [str(i) for i, size in zip(index, shape) if size > 1]
        found.append("/".join(numbers) or "0")
    return found


def units_over(norms: Norms, group: Group) -> tuple[str, ...]:
    """The mesh axes that split the units of a leaf."""
    return next(x for x in norms.leaves if x.norm == group.numbers[0]).units_over


def _shapes(rule: Rule) -> list[Any]:
    """The shapes of the arrays of a rule. A number fits every norm."""
    if isinstance(rule, Joined):
        return list(chain.from_iterable(map(_shapes, rule.rules)))
    # A plain field, of a rule of the user's, may be an array of any shape.
    checked = [field for field in fields(rule) if "check" in field.metadata]
    values = [getattr(rule, field.name) for field in checked]
    return [value.shape for value in values if getattr(value, "shape", ())]


def _shown(names: Iterable[str]) -> str:
    if set(names) == {""}:
        return "everything"
    return trees.listed(names) or "nothing"


# ------------------------------------------------------------------- the form for JAX


_KEYS = [jax.tree_util.GetAttrKey(name) for name in ClipState._fields[1:]]


def _flatten(state: ClipState) -> tuple[list[Any], Form]:
    """The fields with their keys, and what is apart from them, for JAX."""
    fields = list(zip(_KEYS, state[1:]))
    if isinstance(state.names, Form):
        return fields, state.names
    units = bool(jax.tree.leaves(state.units_clipped))
    return fields, Form(state.names, jax.tree.structure(state.memory), units)


def _unflatten(kind: type[ClipState], form: Form, fields: Any) -> ClipState:
    noted = form.noted or form
    if noted.names is None:
        return kind(form, *fields)
    state = kind(noted.names, *fields)
    if noted is form:
        return state
    # One sharding for all of the memory becomes one for each of its arrays.
    memory = state.memory
    if jax.tree.structure(memory) != noted.memory:
        memory = noted.memory.unflatten([memory] * noted.memory.num_leaves)
    units = state.units_clipped if noted.units else ()
    return state._replace(memory=memory, units_clipped=units)


for kind in (ClipState, RecordState):
    # JAX would take each name in a NamedTuple for a leaf.
    jax.tree_util.register_pytree_with_keys(kind, _flatten, partial(_unflatten, kind))
    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"optaxclip.{kind.__name__}",
        serialize_auxdata=lambda form: json.dumps(form.names).encode(),
        deserialize_auxdata=lambda names: Form(tuple(json.loads(names))),
    )


def state_of_placeholder() -> ClipState:
    """A state with one leaf for each field, for `optax.tree_map_params`."""
    return ClipState(Form(None), *(jnp.zeros(()) for _ in _KEYS))
