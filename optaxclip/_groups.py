"""How the norms of a step fit into a state, and which rule each has.

Norms that share a rule are a group: numbers are joined to one vector, and the units of
a leaf are a group of their own. A group is a part of the state. A leaf that is None in
one step has no norm there, and the state keeps what it knew.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from . import _trees as trees
from ._checks import check_shape, held_in
from ._limits import BEGIN_ANEW, check_first_memory
from ._mesh import resharded, split_as, typed_as, varying, varying_over
from ._norms import Norms
from ._state import ClipState, Names, counts_of, is_vector, one_memory
from .rules._constant import Constant
from .rules._joined import Joined
from .rules._rule import Rule, is_rule


class Group(NamedTuple):
    """Norms that share a rule."""

    part: int  # of the state
    rows: np.ndarray  # of its entries, among all of the state
    own_rows: np.ndarray | None  # in its part. None: all of them
    numbers: list[int]  # of the norms of this step
    is_unit: bool
    is_all: bool  # the only group of a state of numbers

    @property
    def is_one(self) -> bool:
        """Whether it is one number, or the units of one leaf, and no vector."""
        return self.is_unit or self.is_all

    def vector(self, each: list[Any]) -> Any:
        """The norms as one array, or other numbers like them."""
        own = [each[i] for i in self.numbers]
        return own[0] if self.is_one else concatenated(own)

    def apart(self, vector: jax.Array, each: list[Any]) -> list[jax.Array]:
        """The entries of such an array, one for each norm."""
        if self.is_one:
            return [vector]
        found, start = [], 0
        for number in self.numbers:
            norm = each[number]
            some = vector[start : start + norm.size]
            found.append(split_as(some.reshape(norm.shape), jax.typeof(norm)))
            start += norm.size
        return found

    def taken(self, memory: Any) -> Any:
        """The memory of these norms, out of that of the part."""
        if self.is_unit and not self.is_all:
            return jax.tree.map(lambda x: x[0], memory)
        if self.own_rows is None:
            return memory
        return jax.tree.map(lambda x: x[self.own_rows], memory)

    def put(self, memory: Any, new: Any) -> Any:
        """The memory of the part, with a new one of these norms."""
        if self.is_unit and not self.is_all:
            return jax.tree.map(lambda x: x[None], new)
        if self.own_rows is None:
            return new
        rows = self.own_rows
        return jax.tree.map(lambda x, y: x.at[rows].set(y), memory, new)


def concatenated(arrays: list[jax.Array]) -> jax.Array:
    """All numbers of some arrays as one vector, whole on each device of an Explicit
    mesh.
    """
    # A vector has one type.
    if not arrays:
        return jnp.zeros(0, jnp.float32)
    names = set().union(*map(varying, arrays))
    flat = [varying_over(resharded(x).reshape(-1), names) for x in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def groups_of(norms: Norms, state: ClipState, call: str) -> list[Group]:
    """The groups of the norms of a step, matched by name with a state.

    Raises:
      ValueError: a norm that the state does not have, or with other layers.
    """
    known = set().union(*state.names)
    own = trees.names(norms.paths, known)
    number_of = {name: number for number, name in enumerate(own)}
    # A state of more names is right, as some may be missing. One of fewer is not.
    if not set(number_of) <= known:
        raise ValueError(
            f"{call}: state was made for norms of {_shown(known)}, but the updates "
            f"have norms of {_shown(number_of)}. {BEGIN_ANEW}"
        )
    found, start, counts = [], 0, counts_of(state)
    for part, names in enumerate(state.names):
        numbers, rows, first = [], [], start
        for name in names:
            count = counts[part][name] or 1
            if name in number_of:
                number = number_of[name]
                _check_size(norms, number, name, count, call)
                numbers.append(number)
                rows += range(start, start + count)
            start += count
        if numbers:
            is_unit = norms.is_unit(numbers[0])
            is_all = not is_vector(state.names)
            where = np.array(rows)
            inside = None if len(rows) == start - first else where - first
            group = Group(part, where, inside, numbers, is_unit, is_all)
            found.append(group)
    return found


def _check_size(
    norms: Norms, number: int, name: str, count: int, call: str
) -> None:
    size = norms.each[number].size
    if not norms.is_unit(number) and size != count:
        raise ValueError(
            f"{call}: state was made for {count} norms in {name!r}, but the updates "
            f"have {size}. {BEGIN_ANEW}"
        )


def layer_names(norms: Norms, number: int) -> tuple[str, ...] | None:
    """The names of the layers of a norm, such as "0/3" for layer 0 and expert 3. None
    for a number, and for units, of which a state keeps a summary.
    """
    shape = norms.each[number].shape
    if not shape or norms.is_unit(number):
        return None
    found = []
    for index in np.ndindex(shape):
        # Axes of size 1 are those that a norm sums, and have no number.
        numbers = [str(i) for i, size in zip(index, shape) if size > 1]
        found.append("/".join(numbers) or "0")
    return tuple(found)


def rules_of_norms(
    rules: Any, norms: Norms, argument: str, names: Names = ()
) -> list[Rule]:
    """The rule of each norm, from one rule or a tree prefix of rules.

    `names` are those of the state, some of which may have no norm in this step.

    Raises:
      ValueError: a norm without a rule, a rule without a norm, or an array that is not
        one number for each entry of a norm.
    """
    numbers = list(range(len(norms.each)))
    found = [rules] * len(numbers)
    if not is_rule(rules):
        table = trees.freeze(rules, is_rule)
        # A missing leaf is a hole in the tree of norms. A missing label leaves none.
        if norms.noun == "label" and names:
            missing = set().union(*names) - set(trees.names(norms.paths))
            entries = table.entries
            kept = [x for x in entries if trees.name(x[0]) not in missing]
            table = trees.Prefix(tuple(kept))
        # Rules are placed on the tree of norms, whose leaves are their numbers here.
        tree = norms.treedef.unflatten(numbers)
        found = trees.lookup(table, tree, argument, norms.noun)
    for norm, rule in zip(norms.each, found):
        for shape in _shapes(rule):
            check_shape(shape, norm.shape, argument)
    return found


def shared_rule(
    rules: list[Rule], group: Group, norms: Norms, call: str
) -> Rule:
    """The rule of a group. Different constant limits become a vector.

    Raises:
      ValueError: different rules for norms that shared one before.
    """
    own = [rules[number] for number in group.numbers]
    shape_of = [norms.each[number].shape for number in group.numbers]
    is_same = len({id(rule) for rule in own}) == 1
    # An array of a rule is one number for each layer of each leaf.
    if is_same and (group.is_one or not _shapes(own[0])):
        return own[0]
    limits = [rule.limit for rule in own if _is_constant(rule)]
    if len(limits) < len(own):
        raise ValueError(
            f"{call}: state has one part for norms whose limits are now different "
            f"schedules or rules, with a part each. {BEGIN_ANEW}"
        )
    dtype = norms.each[group.numbers[0]].dtype
    each = []
    for limit, shape in zip(limits, shape_of):
        each.append(jnp.broadcast_to(held_in(dtype, limit), shape))
    return Constant(concatenated(each))


def first_state(norms: Norms, rules: list[Rule]) -> ClipState:
    """The state before the first step, from the types of norms."""
    each = [typed_as(jnp.zeros(x.shape, x.dtype), x) for x in norms.each]
    norms = norms._replace(each=each)
    numbers = range(len(each))
    size = sum(1 if norms.is_unit(i) else each[i].size for i in numbers)
    zero = jnp.zeros((), jnp.int32)
    bare = ClipState(_first_names(norms, rules), zero, *[()] * 7)
    bare = bare._replace(norm=np.zeros(size))
    entries, memory = [], []
    for group in groups_of(norms, bare, ""):
        norm = group.vector(each)
        rule = rules[group.numbers[0]]
        # A rule may return the very array that it is given.
        first = jax.tree.map(jnp.asarray, rule.init(norm))
        check_first_memory(rule, first, norm.shape)
        memory.append(group.put((), first))
        if group.is_unit:
            over = varying(norm) - set(kept_names(norms, group))
            shape = () if group.is_all else (1,)
            norm = varying_over(jnp.zeros(shape, norm.dtype), over)
        entries.append(norm)
    is_number = not is_vector(bare.names)
    norm = entries[0] if is_number else concatenated(entries)

    def filled(value: float, dtype: Any) -> jax.Array:
        return typed_as(jnp.full(norm.shape, value, dtype), jax.typeof(norm))

    return bare._replace(
        clipped=filled(0, jnp.int32),
        clipped_recently=filled(0, jnp.float32),
        nonfinite=filled(0, jnp.int32),
        memory=one_memory(memory),
        norm=filled(0, norm.dtype),
        # No limit before the first step.
        limit=filled(jnp.inf, norm.dtype),
        factor=filled(1, norm.dtype),
        units_clipped=filled(0, jnp.float32) if norms.units else (),
    )


def _first_names(norms: Norms, rules: list[Rule]) -> Names:
    own = trees.names(list(norms.paths))
    parts: dict[Any, dict[str, Any]] = {}
    for number, rule in enumerate(rules):
        # One rule for everything is one object, and one part. All constant limits are
        # one rule. A schedule is no number, so it is none of them.
        kind: Any = "constant" if _is_constant(rule) else id(rule)
        if norms.is_unit(number):
            kind = "units", number
        layers = layer_names(norms, number)
        layers = layers and dict.fromkeys(layers)
        parts.setdefault(kind, {})[own[number]] = layers
    return tuple(parts.values())


def kept_names(norms: Norms, group: Group) -> tuple[str, ...]:
    """The mesh axes that split the units of a leaf."""
    (number,) = group.numbers
    leaf = next(x for x in norms.leaves if x.norm == number)
    return leaf.split.kept_names()


def _is_constant(rule: Rule) -> TypeGuard[Constant]:
    return isinstance(rule, Constant) and not callable(rule.limit)


def _shapes(rule: Rule) -> list[Any]:
    """The shapes of the arrays of a rule. A number fits every norm."""
    if isinstance(rule, Joined):
        return [shape for each in rule.rules for shape in _shapes(each)]
    # A plain field, of a rule of the user's, may be an array of any shape.
    checked = [field for field in fields(rule) if "check" in field.metadata]
    values = [getattr(rule, field.name) for field in checked]
    return [value.shape for value in values if getattr(value, "shape", ())]


def _shown(names: Iterable[str]) -> str:
    if set(names) == {""}:
        return "everything"
    return trees.listed(names) or "nothing"
