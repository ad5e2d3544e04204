"""The kernel: measure, limit, shrink.

    measure    how long is it?        updates -> norms
    limit      how long may it be?    norms, memory -> limits
    shrink     what if it is longer?  norms, limits -> new norms

`make_clipper` joins the three into an optax transformation and does the rest once for
all of them: zero, NaN, counters, state.

Under jit the updates are read once for the norms and multiplied where the optimizer
reads them. Without jit the whole update is one compiled call.
"""

from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._arguments import (
    NONFINITE,
    check_choice,
    check_number,
    check_scalar,
    number_for_jit,
)
from .._norms._in_blocks import Norms, in_blocks
from .._norms._leaves import clipped_leaves, put_back
from .._norms._measures import (
    GlobalNorm,
    Measure,
    measured,
    norm_of_norms,
    without_devices,
)
from .._norms._types import split_as, types_of
from .._optimizers import check_params
from ..rules._constant import rule_of, rules_of
from ..rules._rule import Rule, further_norms, is_rule
from ..shrinks import Shrink, hard, shrink_of
from ._blocks import (
    arrangement,
    first_blocks,
    rule_of_block,
    rules_of_norms,
)
from ._factors import factor_between, multiply, zero_where_zero
from ._inputs import (
    check_windows,
    first_instead,
    given_numbers,
    leaves_of,
    params_of,
)
from ._limits import can_clip, limit_of
from ._nonfinite import raise_nonfinite
from ._placeholder import PLACEHOLDER
from ._shares import moving_average
from ._shrunk import shrunk_by
from ._state import ClipState, Entry, pack, state_of_placeholder


class Settings(NamedTuple):
    """What is static in a clipper. Clippers with equal settings share a program."""

    call: str  # the function that the user called
    argument: str  # its limit: "clip_by_global_norm: max_norm"
    measure: Measure
    shrink: Shrink
    nonfinite: str
    no_limit: bool  # the limit is None, known before any program is traced
    rules: Any  # the structure of the rules, whose numbers are not static
    with_params: bool  # whether a rule needs the norms of the weights
    with_total: bool  # whether a rule needs the norm of everything


def make_clipper(
    measure: Measure,
    limit: Any,
    *,
    call: str,
    name: str,
    shrink: Shrink | str | None = None,
    eps: ArrayLike | None = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper. `call` and `name` are what errors call it and its limit."""
    check_choice(f"{call}: nonfinite", nonfinite, NONFINITE)
    if eps is not None:
        check_number(f"{call}: eps", eps)
        check_scalar(f"{call}: eps", eps)
        eps = number_for_jit(eps)
    # None is `hard`. A factory such as `smooth` is the shrink with its defaults.
    shrink = shrink_of(shrink, call)
    argument, no_limit = f"{call}: {name}", limit is None
    # One norm takes one limit. Others take a tree prefix of limits.
    one_norm = isinstance(measure, GlobalNorm)
    rules = (rule_of if one_norm else rules_of)(limit, argument)
    each_rule = jax.tree.leaves(rules, is_leaf=is_rule)
    numbers, structure = jax.tree.flatten(rules)
    settings = Settings(
        call,
        argument,
        measure,
        shrink,
        nonfinite,
        no_limit,
        structure,
        with_params=any(map(attrgetter("needs_params"), each_rule)),
        with_total=any(map(attrgetter("needs_total"), each_rule)),
    )
    init = partial(_first_state, settings, rules, each_rule)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        grad_norm: Any = None,
        limit: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        if not isinstance(state, ClipState):
            begin = partial(init, updates)
            state = first_instead(call, state, rules, begin)
        given = given_numbers(call, grad_norm, limit)
        tree = leaves_of(call, updates, params, warn=not no_limit)
        # Weights that no rule looks at would only be another argument of the program.
        weights = None
        if settings.with_params:
            weights = params_of(call, tree, params)
        clipped, new = _update(
            settings, numbers, eps, tree, state, weights, given
        )
        # Outside the jitted update: a compiled program cannot raise.
        if nonfinite == "raise":
            raise_nonfinite(call, measure, new, tree)
        return put_back(clipped, updates), new

    return optax.GradientTransformationExtraArgs(init, update)


def _first_state(
    settings: Settings, rules: Any, each_rule: list[Rule], params: Any
) -> ClipState:
    # optax.tree_map_params calls init without parameters.
    if isinstance(params, PLACEHOLDER):
        return state_of_placeholder()
    check_windows(settings.call, each_rule)
    measure = settings.measure
    if not jax.sharding.get_abstract_mesh().manual_axes:
        # A state is often made outside the shard_map that it goes into.
        measure = without_devices(measure)
    tree = clipped_leaves(params, settings.call)
    norms = types_of(partial(measured, measure), tree)
    of_norm = rules_of_norms(rules, norms, settings.argument)
    names, entries = first_blocks(norms, of_norm)
    return pack(names, jnp.zeros((), jnp.int32), entries)


# Jitted at module level, so that clippers with equal settings share one compilation,
# even when they are built again in every step.
@partial(jax.jit, static_argnums=0)
def _update(
    settings: Settings,
    numbers: list[Any],
    eps: Any,
    tree: Any,
    state: ClipState,
    params: Any,
    given: tuple[Any, Any],
) -> tuple[Any, ClipState]:
    """One update: measure, limit, shrink."""
    # 1. Measure. `grad_norm` replaces what was measured.
    norms = measured(settings.measure, tree)
    if given[0] is not None:
        norms = norms._replace(
            blocks=_given("grad_norm", given[0], norms, settings)
        )
    # 2. Limit. From here on numbers are in the blocks of the state.
    rules = settings.rules.unflatten(numbers)
    fit = arrangement(norms, state, settings.call)
    blocks = fit.arrange(norms)
    of_norm = rules_of_norms(rules, norms, settings.argument, state.names)
    weights: list[Any] = [None] * len(blocks)
    if settings.with_params:
        check_params(settings.call, params)
        weights = fit.arrange(measured(settings.measure, params))
    total = norm_of_norms(norms) if settings.with_total else None
    limits, memories = [], []
    for source, block, norm, entry, weight in zip(
        fit.sources, state.names, blocks, fit.old, weights
    ):
        limit, memory = entry.limit, entry.memory
        # Of a block that is missing in this step no rule is asked.
        if source.numbers:
            rule = rule_of_block(of_norm, source, block, norm, settings.call)
            further = further_norms(rule, weight, total)
            asked = rule, norm, memory, state.step, *further
            limit, memory = limit_of(*asked, argument=settings.argument)
        limits.append(limit)
        memories.append(memory)
    if given[1] is not None:
        own = _given("limit", given[1], norms, settings)
        limits = fit.arrange(norms._replace(blocks=own))
        # Below 0 it counts as 0, as a limit of the clipper's own.
        limits = [jnp.maximum(limit, 0) for limit in limits]
    # 3. Shrink.
    found = zip(fit.old, blocks, limits, memories)
    decided = [_decide(settings, eps, state.step, *each) for each in found]
    roots = [root for root, _ in decided]
    entries = [entry for _, entry in decided]
    updates = tree
    # Multiplied by 1, they would be other values to XLA, and read again by the next
    # clipper of a chain.
    if given[1] is not None or not settings.no_limit:
        # The roots are in the blocks of the state, where rows differ from this step's.
        norms = norms._replace(places=fit.places)
        updates = multiply(tree, norms, roots)
        if settings.nonfinite == "zero":
            updates = zero_where_zero(updates, norms, roots)
    # Stays at the largest int32 instead of becoming negative.
    step = jnp.asarray(optax.safe_increment(state.step))
    return updates, pack(state.names, step, fit.keep_missing(entries))


# Jitted, so that it is traced once for all blocks of one shape. Inlined, since a call
# in its place is another program to XLA: of AGC a TPU v5e would move 8 % more.
@partial(jax.jit, static_argnums=0, inline=True)
def _decide(
    settings: Settings,
    eps: Any,
    step: jax.Array,
    old: Entry,
    norm: jax.Array,
    limit: jax.Array,
    memory: Any,
) -> tuple[jax.Array, Entry]:
    """For one block the root of its factor, and its entry after this step."""
    known = can_clip(norm, limit)
    long = norm if eps is None else norm + jnp.asarray(eps).astype(norm.dtype)
    # A limit of inf clips nothing, and a rule without a limit yet gives inf.
    off = limit == jnp.inf
    shrunk = shrunk_by(settings.shrink, norm, long, limit, settings.call)
    # The new norm of a broken step. NaN makes the root NaN, and the updates with it.
    instead = 0.0 if settings.nonfinite == "zero" else jnp.nan
    if jax.tree.leaves(memory):
        # A rule that has no limit yet still lets no broken step through.
        short = jnp.where(known, jnp.where(off, long, shrunk), instead)
    else:
        # An infinite limit that was set only measures. Equal norms leave updates alone.
        short = jnp.where(off, 1.0, jnp.where(known, shrunk, instead))
        long = jnp.where(off, 1.0, long)
    root, reported = factor_between(long, short)
    changed = known & (short != long)
    if eps is not None or settings.shrink is not hard:
        # Zeros stay zeros, whatever eps or the shrink make of their norm.
        zero = known & (norm == 0)
        changed, reported = changed & ~zero, jnp.where(zero, 1.0, reported)
    recently = moving_average(old.clipped_recently, changed, step)
    entry = Entry(
        norm=norm.astype(old.norm.dtype),
        limit=limit.astype(old.limit.dtype),
        factor=reported.astype(old.factor.dtype),
        clipped=old.clipped + changed.astype(jnp.int32),
        clipped_recently=recently,
        nonfinite=old.nonfinite + (~known).astype(jnp.int32),
        memory=memory,
    )
    return root, entry


def _given(
    argument: str, tree: Any, norms: Norms, settings: Settings
) -> list[jax.Array]:
    """Norms or limits of the user's, in blocks, once they are seen to fit."""
    # In the structure in which the norm functions return norms.
    wanted, found = norms.shapes(), jax.tree.map(jnp.shape, tree)
    if jax.tree.structure(tree) != norms.treedef or found != wanted:
        raise ValueError(
            f"{settings.call}: {argument} must have the structure and shapes of the "
            f"norms that it measures, {wanted}, got {found}."
        )
    blocks = in_blocks(jax.tree.leaves(tree), norms.places)
    pairs = zip(blocks, norms.blocks)
    # In the dtype and sharding of what was measured, so that the state keeps its types.
    return [split_as(x.astype(y.dtype), jax.typeof(y)) for x, y in pairs]
