"""What an update is given: state, updates and params, before anything is computed."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from . import _trees as prefix
from ._checks import (
    check_limit,
    check_state,
    is_function,
    is_without_state,
    number_for_jit,
)
from ._limits import BEGIN_ANEW
from ._state import ClipState
from ._trees import clipped_leaves, unboxed
from .rules._constant import Constant
from .rules._rule import Rule, further_norms, is_rule


def check_windows(call: str, rules: list[Rule]) -> None:
    """Raises for a window whose length is not known when the state is made."""
    for rule in rules:
        # A window's length is the shape of its memory, so it cannot be traced.
        if isinstance(getattr(rule, "window", None), Tracer):
            raise TypeError(
                f"{call}: window must be known when the state is made: under jit and "
                "inject_hyperparams name it in static_args."
            )


def begins_anew(call: str, state: Any, numbers: Any) -> bool:
    """Whether there is no state, as in a clipper of optax, and none is needed.

    Raises:
      TypeError: a schedule is among the limits, which cannot tell its step.
    """
    if not is_without_state(state):
        return False
    # A schedule counts steps in the state, and would stay at step 0 without one.
    if any(map(callable, jax.tree.leaves(numbers, is_leaf=is_function))):
        raise TypeError(_no_state(call, state, "follows a schedule of steps"))
    return True


def first_instead(
    call: str, state: Any, rules: Any, begin: Callable[[], ClipState]
) -> ClipState:
    """The first state in the place of what is none, as a clipper of optax has it.

    Raises:
      TypeError: the state of another transformation, or no state for a limit that
        depends on earlier steps.
    """
    if not begins_anew(call, state, rules):
        check_state(call, state, ClipState)
    # Only the memory of a rule that learns must not begin anew in every step.
    first = begin()
    if jax.tree.leaves(first.memory):
        raise TypeError(_no_state(call, state, "learns from earlier norms"))
    if any(map(_reads_step, jax.tree.leaves(rules, is_leaf=is_rule))):
        raise TypeError(_no_state(call, state, "depends on the step"))
    return first


def _reads_step(rule: Rule) -> bool:
    """Whether a rule without a memory has another limit in another step."""
    # A schedule, which has another error.
    if isinstance(rule, Constant):
        return False
    norm = jnp.zeros(())

    def update(step: jax.Array) -> Any:
        further = further_norms(rule, norm, norm)
        return rule.update(norm, rule.init(norm), step, *further)[0]

    program = jax.make_jaxpr(update)(jnp.zeros((), jnp.int32)).jaxpr
    (step,) = program.invars
    read = itertools.chain(
        program.outvars, *(equation.invars for equation in program.eqns)
    )
    return any(variable is step for variable in read)


def given_numbers(call: str, grad_norm: Any, limit: Any) -> tuple[Any, Any]:
    """The norms and the limits that an update is given, as JAX can carry them.

    Raises:
      TypeError, ValueError: a known limit that could not be the clipper's own.
    """

    def checked(number: Any) -> Any:
        # What is in an array is not asked, since that would wait for its device.
        if not isinstance(number, jax.Array):
            check_limit(f"{call}: limit", number)
        return number_for_jit(number)

    return jax.tree.map(number_for_jit, grad_norm), jax.tree.map(
        checked, limit
    )


def _no_state(call: str, state: Any, why: str) -> str:
    return (
        f"{call}: its limit {why}, so update needs the state of the step before, got "
        f"{state}. Begin with state = clipper.init(params), and hand on the state that "
        "update returns. To clip once, to a fixed limit, call "
        "optaxclip.clip_grads(grads, max_norm)."
    )


def leaves_of(call: str, updates: Any, params: Any, *, warn: bool) -> Any:
    """The clipped leaves of what must be gradients alone.

    `warn`: whether integers alone, which are not clipped, are worth a warning.

    Raises:
      TypeError: a leaf that is not an array, or a tuple of gradients and something
        else, as `jax.value_and_grad`, `has_aux` and `clipped_grad` return them.
    """
    # Norms and losses beside gradients would be taken for more of them.
    if {"grads", "factors"} <= set(getattr(updates, "_fields", ())):
        raise TypeError(
            f"{call}: updates must be the gradients alone, got a "
            f"{type(updates).__name__}: hand over its grads."
        )
    tree = clipped_leaves(updates, call)
    # A NamedTuple is a tree. A plain pair may be (value, grads).
    if type(updates) is tuple and len(updates) == 2 and params is not None:
        _check_alone(call, updates, jax.tree.structure(params))
    if warn and not jax.tree.leaves(tree):
        _warn_of_integers(call, updates)
    return tree


def _check_alone(call: str, updates: tuple[Any, Any], wanted: Any) -> None:
    # params may be a pair as well, of two arrays for example.
    if jax.tree.structure(updates) == wanted:
        return
    for place, each in enumerate(updates):
        # The gradients are the one of the two that looks like params.
        if jax.tree.structure(each) == wanted:
            raise TypeError(
                f"{call}: updates must be the gradients alone, got a tuple of two in "
                f"which updates[{place}] has the structure of params. "
                "jax.value_and_grad returns (value, grads), and has_aux (grads, aux)."
            )


def _warn_of_integers(call: str, updates: Any) -> None:
    """Warns where nothing is clipped because all numbers are integers."""
    # Updates without any leaf, as of a model without weights, are no mistake.
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        # An int of Python has no dtype. A bool is one too, but no number to clip.
        dtype = (
            type(leaf) if type(leaf) is int else getattr(leaf, "dtype", bool)
        )
        if jnp.issubdtype(dtype, jnp.integer) and jnp.size(leaf):
            warnings.warn(
                f"{call}: nothing is clipped, since no leaf of the updates has a float "
                f"or complex dtype. The leaf {prefix.name(path)!r} is {_shown(dtype)}: "
                "make it float32.",
                # The line that called update.
                stacklevel=4,
            )
            return


def check_kept(call: str, tree: Any, kept: Any) -> None:
    """Raises ValueError for a clipped leaf of which the state keeps nothing, or an
    array of another shape.
    """
    updates, form = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=prefix.is_none
    )
    try:
        # None may stand for a part of the tree, all of which is missing then.
        known = form.flatten_up_to(kept)
    except (TypeError, ValueError):
        raise ValueError(
            f"{call}: state was made for the leaves {_paths(kept)}, but the updates "
            f"have {_paths(tree)}. {BEGIN_ANEW}"
        ) from None
    for (path, leaf), own in zip(updates, known):
        if leaf is None:
            continue
        if own is None:
            kind = _shown(getattr(leaf, "dtype", type(leaf)))
            raise ValueError(
                f"{call}: the update of the leaf {prefix.name(path)!r} is {kind}, but "
                "what init was given for it has no float or complex dtype. Make that "
                "float32, or give None for the update."
            )
        if jnp.shape(leaf) != jnp.shape(own):
            raise ValueError(
                f"{call}: state was made for the leaf {prefix.name(path)!r} of shape "
                f"{jnp.shape(own)}, but its update has {jnp.shape(leaf)}. {BEGIN_ANEW}"
            )


def _paths(tree: Any) -> str:
    return prefix.shown(
        path for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    )


def check_imaginary(
    call: str, one: tuple[str, Any], other: tuple[str, Any]
) -> None:
    """Raises ValueError for a leaf that is complex in one tree and real in another.

    Both trees have a name, and None where they have no leaf.
    """
    entries = jax.tree_util.tree_flatten_with_path(
        one[1], is_leaf=prefix.is_none
    )
    own = jax.tree.leaves(other[1], is_leaf=prefix.is_none)
    for (path, leaf), real in zip(entries[0], own):
        if leaf is None or real is None or not jnp.iscomplexobj(leaf):
            continue
        if not jnp.iscomplexobj(real):
            raise ValueError(
                f"{call}: the leaf {prefix.name(path)!r} is complex in the {one[0]}, "
                f"so it must be in the {other[0]} too, got "
                f"{_shown(getattr(real, 'dtype', type(real)))}."
            )


def _shown(kind: Any) -> str:
    """A dtype, or the type of a Python number."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def params_of(call: str, tree: Any, params: Any) -> Any:
    """The weights of the clipped leaves, as `values_of` finds them. None for None."""
    return None if params is None else values_of(call, "params", tree, params)


def values_of(call: str, argument: str, tree: Any, values: Any) -> Any:
    """The values of the clipped leaves, such as weights, found by their paths.

    So they may be in another kind of mapping than the updates, and have more entries.

    Raises:
      ValueError: a leaf without a value, or with one of another shape.
      TypeError: values that are integers.
    """
    # A FrozenDict of params and a dict of updates have the same paths.
    table = dict(jax.tree_util.tree_flatten_with_path(unboxed(values))[0])
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        # Entries without updates, such as frozen weights, are not used.
        if path not in table:
            raise ValueError(
                f"{call}: {argument} has no value for the leaf {prefix.name(path)!r} "
                f"of the updates: it has {prefix.shown(table)}."
            )
        value = table[path]
        if jnp.shape(value) != jnp.shape(leaf):
            raise ValueError(
                f"{call}: {argument} has the shape {jnp.shape(value)} for the leaf "
                f"{prefix.name(path)!r}, and the updates have {jnp.shape(leaf)}."
            )
        kind, own = (getattr(x, "dtype", type(x)) for x in (value, leaf))
        # Weights that are integers would have no norm, while their updates have one.
        if not jnp.issubdtype(kind, jnp.inexact):
            raise TypeError(
                f"{call}: {argument} must have a float or complex dtype for the leaf "
                f"{prefix.name(path)!r}, whose update is {_shown(own)}, got "
                f"{_shown(kind)}. Make it float32, or give None for that update."
            )
        found.append(value)
    return jax.tree.structure(tree).unflatten(found)
