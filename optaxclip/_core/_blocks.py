"""How the norms of a step are arranged in the blocks of a state.

    scalar norms that share a rule    one block, a vector
    a norm that is an array           a block of its own

A leaf that is None in one step has no norm there. Its entry in the blocks of that step
is 0, and the state keeps what it knew.
"""

from dataclasses import fields
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from .._arguments import held_in
from .._norms import _prefix as prefix
from .._norms._in_blocks import Norms, Place
from .._norms._types import typed_as
from ..rules._constant import Constant
from ..rules._joined import Joined
from ..rules._rule import Rule, is_rule
from ._limits import BEGIN_ANEW, check_shape
from ._state import Entry


class Source(NamedTuple):
    """Where a block of the state comes from."""

    block: int | None  # the block of this step, None if all of it is missing
    take: list[int] | None  # its rows, None for all as they are
    put: list[int] | None  # where they go, None for the whole block
    numbers: list[int]  # the norms in it


class Arrangement(NamedTuple):
    """From the blocks of a step to the blocks of a state."""

    sources: list[Source]
    kept: list[Any]  # arrays in the form of the state's blocks

    def arrange(self, blocks: list[jax.Array]) -> list[jax.Array]:
        """Numbers of this step in the blocks of the state. Missing ones are 0."""
        arranged = []
        for source, old in zip(self.sources, self.kept):
            # Norms that this step does not have are 0, from which no rule learns.
            block = jnp.zeros_like(old)
            if source.block is not None:
                block = blocks[source.block]
                block = (
                    block
                    if source.take is None
                    else block[jnp.array(source.take)]
                )
                if source.put is not None:
                    block = (
                        jnp.zeros_like(old).at[jnp.array(source.put)].set(block)
                    )
            arranged.append(block)
        return arranged

    def places(self, norms: Norms) -> list[Place]:
        """Where each norm of this step is in the blocks of the state."""
        places = [Place(0, None)] * len(norms.places)
        for block, source in enumerate(self.sources):
            # [a, b, c] in the state and b missing in this step: put is [0, 2].
            rows = source.put or range(len(source.numbers))
            for number, row in zip(source.numbers, rows):
                is_array = norms.places[number].row is None
                places[number] = Place(block, None if is_array else row)
        return places

    def keep_missing(self, new: list[Any], old: list[Any]) -> list[Any]:
        """The new entries of norms that this step has, and the old ones of the rest."""
        found = []
        for source, one, other in zip(self.sources, new, old):
            if source.block is None:
                one = other
            elif source.put is not None:
                one = _put_rows(source.put, one, other)
            found.append(one)
        return found


def arrangement(
    norms: Norms, names: list[list[str]], kept: list[Any], call: str
) -> Arrangement:
    """How norms fit into a state whose blocks have these names.

    Raises:
      ValueError: a norm that the state does not have, or has in another shape.
    """
    # Matched by name, not by place: a leaf may be None in this step.
    known = {name for block in names for name in block}
    own = prefix.names_of_known(norms.paths, known)
    number_of = {name: number for number, name in enumerate(own)}
    # A state of more names is right, as some may be missing. One of fewer is not.
    if not set(number_of) <= known or len(names) != len(kept):
        raise ValueError(
            f"{call}: state was made for norms of {_shown(known)}, but the updates "
            f"have norms of {_shown(number_of)}. {BEGIN_ANEW}"
        )
    sources = []
    for block, old in zip(names, kept):
        numbers = [number_of[name] for name in block if name in number_of]
        sources.append(_source(norms, block, numbers, number_of))
        if numbers:
            _check_old(norms, numbers[0], old, len(block), call)
    return Arrangement(sources, kept)


def _put_rows(rows: list[int], new: Any, old: Any) -> Any:
    """The old arrays with some rows of the new ones."""
    where = jnp.array(rows)
    return jax.tree.map(lambda a, b: b.at[where].set(a[where]), new, old)


def _source(
    norms: Norms,
    block: list[str],
    numbers: list[int],
    number_of: dict[str, int],
) -> Source:
    # No leaf of this block has updates in this step.
    if not numbers:
        return Source(None, None, None, [])
    place = norms.places[numbers[0]]
    # A norm of units or layers is a block of its own, as it is.
    if place.row is None:
        return Source(place.block, None, None, numbers)
    rows = [norms.places[number].row or 0 for number in numbers]
    all_rows = list(range(norms.blocks[place.block].shape[0]))
    present = [
        position for position, name in enumerate(block) if name in number_of
    ]
    # None spares a gather, or a scatter, in a step that has all leaves.
    take = None if rows == all_rows else rows
    put = None if len(present) == len(block) else present
    return Source(place.block, take, put, numbers)


def _check_old(
    norms: Norms, number: int, old: Any, count: int, call: str
) -> None:
    place = norms.places[number]
    # A vector of the state has a row for each name, missing ones too.
    shape = norms.blocks[place.block].shape if place.row is None else (count,)
    if jnp.shape(old) != shape:
        raise ValueError(
            f"{call}: state was made for norms of shape {jnp.shape(old)} where the "
            f"updates have norms of shape {shape}. {BEGIN_ANEW}"
        )


def rules_of_norms(
    rules: Any,
    norms: Norms,
    argument: str,
    part: str = "leaf",
    names: list[list[str]] | None = None,
) -> list[Rule]:
    """The rule of each norm, from one rule or a tree prefix of rules.

    `part` is what errors call that which has a norm. `names` are those of the state,
    some of which may have no norm in this step.

    Raises:
      ValueError: a norm without a rule, a rule without a norm, or an array that is not
        one number for each entry of a norm.
    """
    numbers = list(range(len(norms.places)))
    if is_rule(rules):
        found = [rules] * len(numbers)
    else:
        table = prefix.freeze(rules, is_rule)
        # A missing leaf is a hole in the tree of norms. A missing label leaves none.
        if part == "label" and names:
            table = _of_present(table, norms, names)
        # Rules are placed on the tree of norms, whose leaves are their numbers here.
        found = prefix.lookup(
            table, norms.treedef.unflatten(numbers), argument, part
        )
    for rule, place in zip(found, norms.places):
        own = norms.blocks[place.block].shape if place.row is None else ()
        for shape in _shapes(rule):
            check_shape(shape, own, argument)
    return found


def _of_present(
    table: prefix.Prefix, norms: Norms, names: list[list[str]]
) -> prefix.Prefix:
    """The entries of a table without those of labels that are missing in this step."""
    missing = {name for block in names for name in block}
    missing -= set(prefix.names(norms.paths))
    entries = [x for x in table.entries if prefix.name(x[0]) not in missing]
    return prefix.Prefix(tuple(entries))


def names_by_rule(rules: list[Rule], norms: Norms) -> list[list[str]]:
    """The names of the norms in each block: scalar norms with one rule together.

    Constant limits count as one rule.
    """
    blocks: dict[Any, list[str]] = {}
    for name, rule, place in zip(
        prefix.names(norms.paths), rules, norms.places
    ):
        # One rule for everything is one object, and one block. A schedule is no number,
        # so it does not join the constant limits.
        shared = "constant" if _is_constant(rule) else id(rule)
        key = (
            ("array", place.block) if place.row is None else ("scalars", shared)
        )
        blocks.setdefault(key, []).append(name)
    return list(blocks.values())


def rule_of_block(
    rules: list[Rule],
    source: Source,
    names: list[str],
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
    # [1.0, 2.0] for two constant limits.
    limits = [held_in(norm.dtype, limit) for limit in limits]
    vector = jnp.stack(limits)
    if source.put is not None:
        # keep_missing drops the limits of 0.
        vector = jnp.zeros_like(norm).at[jnp.array(source.put)].set(vector)
    return Constant(vector)


def first_entry(norms: Norms, rules: list[Rule], names: list[str]) -> Entry:
    """A block of the first state, from the types of norms."""
    # The first norm stands for all: a block has one kind of rule and one type.
    number = prefix.names(norms.paths).index(names[0])
    place = norms.places[number]
    kind = norms.blocks[place.block]
    shape = kind.shape if place.row is None else (len(names),)

    def filled(value: Any, dtype: Any) -> jax.Array:
        return typed_as(jnp.full(shape, value, dtype), kind)

    memory = rules[number].init(filled(0, kind.dtype))
    memory = jax.tree.map(lambda x: typed_as(jnp.asarray(x), kind), memory)
    return Entry(
        norm=filled(0, kind.dtype),
        # No limit before the first step.
        limit=filled(jnp.inf, kind.dtype),
        factor=filled(1, kind.dtype),
        clipped=filled(0, jnp.int32),
        clipped_recently=filled(0, jnp.float32),
        nonfinite=filled(0, jnp.int32),
        memory=memory,
    )


def _is_constant(rule: Rule) -> TypeGuard[Constant]:
    return isinstance(rule, Constant) and not callable(rule.limit)


def _shapes(rule: Rule) -> list[Any]:
    """The shapes of the numbers of a rule."""
    if isinstance(rule, Joined):
        return [shape for each in rule.rules for shape in _shapes(each)]
    values = [getattr(rule, field.name) for field in fields(rule)]
    return [value.shape for value in values if hasattr(value, "shape")]


def _shown(names: Any) -> str:
    return (
        "everything"
        if set(names) == {""}
        else prefix.listed(names) or "nothing"
    )
