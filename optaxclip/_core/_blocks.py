"""How the norms of a step are arranged in the blocks of a state.

Norms of one shape that share a rule are one block. A leaf that is None in one step has
no norm there. Its row in the blocks of that step is 0, and the state keeps what it
knew.
"""

from collections.abc import Collection, Iterable
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from .._arguments import check_shape, held_in
from .._norms import _prefix as prefix
from .._norms._in_blocks import Norms, Place, are_rows, entry_at
from .._norms._types import typed_as
from ..rules._constant import Constant
from ..rules._joined import Joined
from ..rules._rule import Rule, is_rule
from ._limits import BEGIN_ANEW, check_first_memory
from ._state import ClipState, Entry, Names, unpack


class Source(NamedTuple):
    """Where a block of the state comes from."""

    numbers: list[int]  # the norms in it that this step has
    put: list[int] | None  # the rows where they go, None for the whole block
    rows: bool  # whether it has rows, and is not one norm


class Arrangement(NamedTuple):
    """From the blocks of a step to the blocks of a state."""

    sources: list[Source]
    old: list[Entry]  # the blocks of the state
    places: list[Place]  # of each norm of this step, in the state's blocks

    def arrange(self, norms: Norms) -> list[jax.Array]:
        """Numbers of this step in the blocks of the state. Missing ones are 0."""
        arranged = []
        for source, old in zip(self.sources, self.old):
            # Norms that this step does not have are 0, from which no rule learns.
            block = jnp.zeros_like(old.norm)
            if source.numbers:
                block = _taken(norms, source)
            if source.numbers and source.put is not None:
                rows = jnp.array(source.put)
                block = jnp.zeros_like(old.norm).at[rows].set(block)
            arranged.append(block)
        return arranged

    def keep_missing(self, new: list[Entry]) -> list[Entry]:
        """The new entries of norms that this step has, and the old ones of the rest."""
        found = []
        for source, one, other in zip(self.sources, new, self.old):
            if not source.numbers:
                one = other
            elif source.put is not None:
                one = _put_rows(source.put, one, other)
            found.append(one)
        return found


def arrangement(norms: Norms, state: ClipState, call: str) -> Arrangement:
    """How norms fit into a state.

    Raises:
      ValueError: a norm that the state does not have, or has in another shape.
    """
    # Matched by name, not by place: a leaf may be None in this step.
    known = set(chain.from_iterable(state.names))
    own = prefix.names(norms.paths, known)
    number_of = {name: number for number, name in enumerate(own)}
    entries = unpack(state)
    # A state of more names is right, as some may be missing. One of fewer is not.
    if not set(number_of) <= known or len(entries) != len(state.names):
        raise ValueError(
            f"{call}: state was made for norms of {_shown(known)}, but the updates "
            f"have norms of {_shown(number_of)}. {BEGIN_ANEW}"
        )
    sources, places = [], list(norms.places)
    for block, old in zip(state.names, entries):
        present = [row for row, name in enumerate(block) if name in number_of]
        numbers = [number_of[name] for name in block if name in number_of]
        # None spares a scatter in a step that has all leaves.
        put = None if len(present) == len(block) else present
        rows = len(block) > 1
        for number, row in zip(numbers, present):
            shape = norms.shape(number)
            rows = are_rows(block, shape)
            places[number] = Place(len(sources), row if rows else None)
            # A block of the state has a row for each name, missing ones too.
            shape = (len(block),) * rows + shape
            held = jnp.shape(old.norm)
            if held != shape:
                raise ValueError(
                    f"{call}: state was made for norms of shape {held} where the "
                    f"updates have norms of shape {shape}. {BEGIN_ANEW}"
                )
        sources.append(Source(numbers, put, rows))
    return Arrangement(sources, entries, places)


def _put_rows(rows: list[int], new: Any, old: Any) -> Any:
    """The old arrays with some rows of the new ones."""
    where = jnp.array(rows)
    return jax.tree.map(lambda a, b: b.at[where].set(a[where]), new, old)


def _taken(norms: Norms, source: Source) -> jax.Array:
    """The norms of a source as one block."""
    places = [norms.places[number] for number in source.numbers]
    if not source.rows:
        return entry_at(norms.blocks, places[0])
    block, rows = norms.blocks[places[0].block], [row for _, row in places]
    if None in rows or len({place.block for place in places}) > 1:
        # Other leaves are missing, or split in other ways, than when the state began.
        return jnp.stack([entry_at(norms.blocks, place) for place in places])
    # All of them as they are, which spares a gather.
    if rows == list(range(len(block))):
        return block
    return block[jnp.array(rows)]


def rules_of_norms(
    rules: Any,
    norms: Norms,
    argument: str,
    names: Iterable[Iterable[str]] = (),
) -> list[Rule]:
    """The rule of each norm, from one rule or a tree prefix of rules.

    `names` are those of the state, some of which may have no norm in this step.

    Raises:
      ValueError: a norm without a rule, a rule without a norm, or an array that is not
        one number for each entry of a norm.
    """
    numbers = list(range(len(norms.places)))
    if isinstance(rules, Rule):
        found = [rules] * len(numbers)
    else:
        table = prefix.freeze(rules, is_rule)
        # A missing leaf is a hole in the tree of norms. A missing label leaves none.
        if norms.noun == "label" and names:
            table = _of_present(table, norms, names)
        # Rules are placed on the tree of norms, whose leaves are their numbers here.
        found = prefix.lookup(
            table, norms.treedef.unflatten(numbers), argument, norms.noun
        )
    for number, rule in zip(numbers, found):
        for shape in _shapes(rule):
            check_shape(shape, norms.shape(number), argument)
    return found


def _of_present(
    table: prefix.Prefix, norms: Norms, names: Iterable[Iterable[str]]
) -> prefix.Prefix:
    """The entries of a table without those of labels that are missing in this step."""
    missing = {name for block in names for name in block}
    missing -= set(prefix.names(norms.paths))
    entries = [x for x in table.entries if prefix.name(x[0]) not in missing]
    return prefix.Prefix(tuple(entries))


def rule_of_block(
    rules: list[Rule],
    source: Source,
    names: Collection[str],
    norm: jax.Array,
    call: str,
) -> Rule:
    """The rule of a block. Different constant limits become a vector.

    Raises:
      ValueError: different rules for norms that were one block of other rules.
    """
    own = [rules[number] for number in source.numbers]
    if len({id(rule) for rule in own}) == 1:
        return own[0]
    limits = [rule.limit for rule in own if _is_constant(rule)]
    if len(limits) < len(own):
        raise ValueError(
            f"{call}: state has one block for {_shown(names)}, whose limits are now "
            f"different schedules or rules, with a block each. {BEGIN_ANEW}"
        )
    # [1.0, 2.0] for two constant limits. Of units each limit may be an array.
    limits = [held_in(norm.dtype, limit) for limit in limits]
    each = [jnp.broadcast_to(limit, norm.shape[1:]) for limit in limits]
    block = jnp.stack(each)
    if source.put is not None:
        # keep_missing drops the limits of 0.
        block = jnp.zeros_like(norm).at[jnp.array(source.put)].set(block)
    return Constant(block)


def first_blocks(norms: Norms, rules: list[Rule]) -> tuple[Names, list[Entry]]:
    """The names and the entries of a first state, from the types of norms.

    Norms of one shape and rule are a block. Constant limits count as one rule.
    """
    names = prefix.names(norms.paths)
    blocks: dict[Any, list[int]] = {}
    for number, (rule, place) in enumerate(zip(rules, norms.places)):
        # One rule for everything is one object, and one block. A schedule is no number,
        # so it does not join the constant limits.
        shared = "constant" if _is_constant(rule) else id(rule)
        blocks.setdefault((place.block, shared), []).append(number)
    named = tuple(
        {names[i]: None for i in numbers} for numbers in blocks.values()
    )
    # The first norm stands for all: a block has one kind of rule and one type.
    entries = [
        _first_entry(norms, rules[numbers[0]], numbers, own)
        for numbers, own in zip(blocks.values(), named)
    ]
    return named, entries


def _first_entry(
    norms: Norms, rule: Rule, numbers: list[int], names: Collection[str]
) -> Entry:
    """The entry of a block of some norms."""
    place, shape = norms.places[numbers[0]], norms.shape(numbers[0])
    kind = norms.blocks[place.block]
    rows = are_rows(names, shape)
    # An array that has its rule for itself was a row among the norms.
    skip = int(place.row is not None and not rows)
    shape = (len(numbers), *shape) if rows else shape
    before = typed_as(jnp.zeros(shape, kind.dtype), kind, skip)
    # A rule may return the very array that it is given.
    memory = jax.tree.map(jnp.asarray, rule.init(before))
    check_first_memory(rule, memory, shape)
    entry = Entry(
        norm=jnp.zeros(shape, kind.dtype),
        # No limit before the first step.
        limit=jnp.full(shape, jnp.inf, kind.dtype),
        factor=jnp.ones(shape, kind.dtype),
        clipped=jnp.zeros(shape, jnp.int32),
        clipped_recently=jnp.zeros(shape, jnp.float32),
        nonfinite=jnp.zeros(shape, jnp.int32),
        memory=memory,
    )
    return typed_as(entry, kind, skip)


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


def _shown(names: Any) -> str:
    return (
        "everything"
        if set(names) == {""}
        else prefix.listed(names) or "nothing"
    )
