"""The kernel: measure, limit, shrink.

    measure    how long is it?        updates -> norms
    limit      how long may it be?    norms, memory -> limits
    shrink     what if it is longer?  norms, limits -> new norms

`make_clipper` joins the three into an optax transformation and does the rest once for
all of them: zero, NaN, counters, state.

Under jit the updates are read once for the norms and multiplied where the optimizer
reads them. Without jit the whole update is one compiled call.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from . import _trees as trees
from ._checks import (
    BEGIN_ANEW,
    NONFINITE,
    begins_anew,
    check_choice,
    check_limit,
    check_number,
    check_params,
    check_returned,
    check_shape,
    check_state,
    held_in,
    no_state,
    number_for_jit,
    shown,
)
from ._factors import factor_between, multiply, roots_of_numbers
from ._mesh import Split, at_own_place, split_as, typed_as
from ._names import OF_UPDATE
from ._norms import (
    GlobalNorm,
    Measure,
    Norms,
    measured,
    norm_of_norms,
    types_of_norms,
)
from ._state import (
    PLACEHOLDER,
    ClipState,
    Group,
    concatenated,
    first_state,
    groups_of,
    memories,
    moving_average,
    one_memory,
    rules_of_norms,
    shared_rule,
    state_of_placeholder,
    units_over,
)
from ._sums import written_by_a_gpu
from .rules._constant import rule_of, rules_of
from .rules._memory import count_up, keep_where
from .rules._rule import Rule, call_name, further_norms, is_rule
from .shrinks import Shrink, hard, shrink_of, shrunk_by


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
        check_number(f"{call}: eps", eps, is_scalar=True)
        eps = number_for_jit(eps)
    # None is `hard`. A factory such as `smooth` is the shrink with its defaults.
    shrink = shrink_of(shrink, call)
    argument = f"{call}: {name}"
    # One norm takes one limit. Others take a tree prefix of limits.
    is_one = isinstance(measure, GlobalNorm) or isinstance(limit, Rule)
    rules = (rule_of if is_one else rules_of)(limit, argument)
    each_rule = [rules] if is_one else jax.tree.leaves(rules, is_leaf=is_rule)
    numbers, structure = jax.tree.flatten(rules)
    no_limit = limit is None
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
        **others: Any,
    ) -> tuple[Any, Any]:
        for wrong in OF_UPDATE["limit"].intersection(others):
            raise TypeError(
                f"{call}: update has no argument {wrong!r}: the limit of one step is "
                "limit. Call update(grads, state, params, limit=...)."
            )
        if not isinstance(state, ClipState):
            begin = partial(init, updates)
            state = _first_instead(call, state, rules, begin)
        for number in jax.tree.leaves(limit):
            # What is in an array is not asked, since that would wait for its device.
            if not isinstance(number, jax.Array):
                check_limit(f"{call}: limit", number)
        given = jax.tree.map(number_for_jit, (grad_norm, limit))
        tree = trees.gradients_of(call, updates, params)
        if not no_limit and not jax.tree.leaves(tree):
            trees.warn_of_integers(call, updates)
        # Weights that no rule looks at would only be another argument of the program.
        weights = None
        if settings.with_params:
            check_params(call, params)
            weights = trees.values_of(call, "params", tree, params)
        clipped, new = _update(settings, numbers, eps, tree, state, weights, given)
        # Outside the jitted update: a compiled program cannot raise.
        if nonfinite == "raise":
            _raise_nonfinite(call, measure, new, tree)
        return trees.put_back(clipped, updates), new

    return optax.GradientTransformationExtraArgs(init, update)


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
    """One update."""
    # 1. Measure. `grad_norm` replaces what was measured.
    norms = measured(settings.measure, tree)
    if given[0] is not None:
        own = _given("grad_norm", given[0], norms, settings)
        norms = norms._replace(each=own)
    # 2. Limit. Norms that share a rule are one vector from here on.
    rules = settings.rules.unflatten(numbers)
    asked = _ask(settings, rules, norms, state, params, given[1])
    # 3. Shrink.
    decided = []
    for own in asked:
        made = _decide(settings, own.learns, eps, own.norm, own.limit)
        decided.append(made)
    updates = tree
    # Multiplied by 1, they would be other values to XLA, and read again by the next
    # clipper of a chain.
    if given[1] is not None or not settings.no_limit:
        roots = _roots(settings, eps, norms, asked, decided)
        is_zero = settings.nonfinite == "zero"
        updates = multiply(tree, norms, roots, zero=is_zero)
    return updates, _next_state(settings, eps, state, norms, asked, decided)


def _first_state(
    settings: Settings, rules: Any, each_rule: list[Rule], params: Any
) -> ClipState:
    # optax.tree_map_params calls init without parameters.
    if isinstance(params, PLACEHOLDER):
        return state_of_placeholder()
    for rule in each_rule:
        # A window's length is the shape of its memory, so it cannot be traced.
        if isinstance(getattr(rule, "window", None), Tracer):
            raise TypeError(
                f"{settings.call}: window must be known when the state is made: under "
                "jit and inject_hyperparams name it in static_args."
            )
    tree = trees.clipped_leaves(params, settings.call)
    norms = types_of_norms(settings.measure, tree)
    of_norm = rules_of_norms(rules, norms, settings.argument)
    return first_state(norms, of_norm, settings.argument)


def _first_instead(
    call: str, state: Any, rules: Any, begin: Callable[[], ClipState]
) -> ClipState:
    """The first state in the place of what is none, as a clipper of optax has it.

    Raises:
      TypeError: the state of another transformation, or no state for a limit that
        depends on earlier steps.
    """
    if not begins_anew(call, state, rules):
        check_state(call, state, ClipState)
    first = begin()
    # The memory of a rule that learns must not begin anew in every step.
    if jax.tree.leaves(first.memory):
        raise TypeError(no_state(call, state, "learns from earlier norms"))
    return first


# ----------------------------------------------------------------------- 2. limits


class Asked(NamedTuple):
    """The limits of a group."""

    group: Group
    norm: jax.Array
    limit: jax.Array
    limits: list[jax.Array]  # of each norm by itself
    memory: Any
    learns: bool
    is_relative: bool  # whether the rule compares norms with those of weights


def _ask(
    settings: Settings,
    rules: Any,
    norms: Norms,
    state: ClipState,
    params: Any,
    given: Any,
) -> list[Asked]:
    each = norms.each
    of_norm = rules_of_norms(rules, norms, settings.argument, state.names)
    weights: Any = None
    total: Any = None
    if settings.with_params:
        weights = measured(settings.measure, params).each
    if settings.with_total:
        total = norm_of_norms(norms)
    if given is not None:
        # Below 0 it counts as 0, as a limit of the clipper's own.
        given = _given("limit", given, norms, settings)
        given = [jnp.maximum(limit, 0) for limit in given]
    ask = partial(limit_of, argument=settings.argument)
    found, memory_of = [], memories(state)
    for group in groups_of(norms, state, settings.call):
        rule = shared_rule(of_norm, group, norms, settings.call)
        memory, norm = memory_of[group.part], group.vector(each)
        learns = bool(jax.tree.leaves(memory))
        if learns:
            memory = group.taken(memory)
        is_relative = rule.needs_params
        if is_relative and not learns:
            # Each by itself, so that no leaf waits until all weights are measured.
            limits = []
            for i in group.numbers:
                further = further_norms(rule, weights[i], total)
                asked = ask(rule, each[i], memory, state.step, *further)
                limits.append(asked[0])
            limit = limits[0] if group.is_one else concatenated(limits)
        else:
            weight = group.vector(weights) if is_relative else None
            further = further_norms(rule, weight, total)
            limit, memory = ask(rule, norm, memory, state.step, *further)
            limits = [limit] if group.is_one else group.apart(limit, each)
        if given is not None:
            limits = [given[i] for i in group.numbers]
            limit = group.vector(given)
        kind = learns, is_relative
        found.append(Asked(group, norm, limit, limits, memory, *kind))
    return found


def _given(
    argument: str, tree: Any, norms: Norms, settings: Settings
) -> list[jax.Array]:
    """Norms or limits of the user's, once they are seen to fit."""
    # In the structure in which the norm functions return norms.
    wanted, found = norms.shapes(), jax.tree.map(jnp.shape, tree)
    if jax.tree.structure(tree) != norms.treedef or found != wanted:
        raise ValueError(
            f"{settings.call}: {argument} must have the structure and shapes of the "
            f"norms that it measures, {wanted}, got {found}."
        )
    pairs = zip(norms.from_tree(tree), norms.each)
    # In the dtype and sharding of what was measured, so that the state keeps its types.
    return [split_as(x.astype(y.dtype), jax.typeof(y)) for x, y in pairs]


@partial(jax.jit, static_argnames=("argument", "signed"))
def limit_of(
    rule: Rule,
    norm: jax.Array,
    memory: Any,
    step: jax.Array,
    *further: Any,
    argument: str,
    signed: bool = False,
) -> tuple[jax.Array, Any]:
    """Asks a rule: (limit, memory).

    `further` is what `further_norms` gives. The limit has the norm's dtype and shape,
    and is at least 0. NaN, inf and 0 leave the memory unchanged. `signed`: the value is
    a loss rather than a norm, so it and its limit may be 0 or negative.

    Raises:
      ValueError: the memory of another rule, or a limit that does not fit the norm.
    """
    asked = _checked_memory(rule, norm, memory, argument)
    # stop_gradient: limits have no derivative by the updates.
    answer = rule.update(lax.stop_gradient(norm), asked, step, *further)
    limit, new = _checked_answer(rule, answer, asked)
    check_returned(argument, limit)
    if jnp.shape(limit) != norm.shape:
        check_shape(jnp.shape(limit), norm.shape, argument)
    # A limit beyond the norm's dtype is its largest number: inf would not clip.
    limit = held_in(norm.dtype, limit)
    # A schedule may fall below 0, which counts as 0.
    if not signed:
        limit = jnp.maximum(limit, 0)
    limit = typed_as(jnp.broadcast_to(limit, norm.shape), jax.typeof(norm))
    if not jax.tree.leaves(memory):
        return limit, memory
    learns = can_clip(norm, limit)
    if not signed:
        learns = learns & (norm > 0)
    return limit, keep_where(learns, new, memory)


def can_clip(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """Whether the norm is finite, and its limit a number."""
    # Only NaN differs from itself. `~isnan` is two operations on a TPU.
    return jnp.isfinite(norm) & (limit == limit)


def _checked_memory(rule: Rule, norm: jax.Array, memory: Any, argument: str) -> Any:
    """The memory in the form of the rule's own.

    Raises for the memory of another rule. The length of a window is not compared: under
    jit it is a traced number.
    """
    # A rule without an `init` of its own, such as a constant limit, remembers nothing.
    if type(rule).init is Rule.init and not jax.tree.leaves(memory):
        return ()
    known = jax.tree.map(
        lambda x: 1 if isinstance(x, Tracer) and not x.ndim else x, rule
    )
    wanted = jax.eval_shape(known.init, norm)
    # A state keeps () in place of any memory without arrays.
    if not jax.tree.leaves((wanted, memory)):
        return wanted
    if jax.tree.structure(wanted) != jax.tree.structure(memory):
        raise ValueError(
            f"{argument.partition(':')[0]}: state was made with another rule. "
            f"{call_name(type(rule))} remembers {_form(wanted)}, and the state has "
            f"{_form(memory)}. {BEGIN_ANEW}"
        )
    return memory


def _checked_answer(rule: Rule, answer: Any, memory: Any) -> tuple[Any, Any]:
    """(limit, memory), as a rule of the user's may not return them."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise TypeError(
            f"{call_name(type(rule))}: update must return (limit, memory), got "
            f"{shown(answer)}."
        )
    # What a rule without arrays returns as its memory is not kept.
    if not jax.tree.leaves(memory):
        return answer[0], memory
    wanted, found = map(jax.tree.structure, (memory, answer[1]))
    if wanted != found:
        raise ValueError(
            f"{call_name(type(rule))}: update must return a memory in the structure of "
            f"the one it got, {wanted}, got {found}."
        )
    return answer[0], answer[1]


def _form(tree: Any) -> Any:
    if not jax.tree.leaves(tree):
        return "nothing"
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


# ----------------------------------------------------------------------- 3. shrink


class Decided(NamedTuple):
    """What becomes of norms, elementwise."""

    root: jax.Array
    factor: jax.Array
    clipped: jax.Array  # bool
    known: jax.Array  # bool: neither norm nor limit is broken


# Jitted, so that it is traced once for all norms of one shape. Inlined, since a call in
# its place is another program to XLA.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _decide(
    settings: Settings,
    learns: bool,
    eps: Any,
    norm: jax.Array,
    limit: jax.Array,
) -> Decided:
    known = can_clip(norm, limit)
    long = norm if eps is None else norm + jnp.asarray(eps).astype(norm.dtype)
    # A limit of inf clips nothing, and a rule without a limit yet gives inf.
    off = limit == jnp.inf
    shrunk = shrunk_by(settings.shrink, norm, long, limit, settings.call)
    # The new norm of a broken step. NaN makes the root NaN, and the updates with it.
    instead = 0.0 if settings.nonfinite == "zero" else jnp.nan
    if learns:
        # A rule that has no limit yet still lets no broken step through.
        short = jnp.where(known, jnp.where(off, long, shrunk), instead)
    else:
        # An infinite limit that was set only measures. Equal norms leave updates alone.
        short = jnp.where(off, 1.0, jnp.where(known, shrunk, instead))
        long = jnp.where(off, 1.0, long)
    root, factor = factor_between(long, short)
    clipped = known & (short != long)
    if eps is not None or settings.shrink is not hard:
        # Zeros stay zeros, whatever eps or the shrink make of their norm.
        zero = known & (norm == 0)
        clipped, factor = clipped & ~zero, jnp.where(zero, 1.0, factor)
    return Decided(root, factor, clipped, known)


def _roots(
    settings: Settings,
    eps: Any,
    norms: Norms,
    asked: list[Asked],
    decided: list[Decided],
) -> list[Any]:
    """The root of each norm, in the shape of the norm."""
    roots: list[Any] = [None] * len(norms.each)
    for own, (root, *_) in zip(asked, decided):
        found = [root]
        if not own.group.is_one:
            alone = partial(_roots_alone, settings, eps, norms, own)
            kinds = [jax.typeof(norms.each[i]) for i in own.group.numbers]
            found = roots_of_numbers(root, kinds, alone)
        for number, x in zip(own.group.numbers, found):
            roots[number] = x
    return roots


def _roots_alone(
    settings: Settings, eps: Any, norms: Norms, own: Asked
) -> list[jax.Array]:
    roots = []
    for number, limit in zip(own.group.numbers, own.limits):
        pair = norms.each[number], limit
        roots.append(_decide(settings, own.learns, eps, *pair).root)
    return roots


# ------------------------------------------------------------------------ the state


class Column(NamedTuple):
    """What the state learns of some norms."""

    norm: jax.Array
    limit: jax.Array
    factor: jax.Array
    clipped: jax.Array  # bool
    broken: jax.Array  # bool
    share: jax.Array  # of the units that were clipped


def _next_state(
    settings: Settings,
    eps: Any,
    state: ClipState,
    norms: Norms,
    asked: list[Asked],
    decided: list[Decided],
) -> ClipState:
    columns, memory = [], list(memories(state))
    for own, made in zip(asked, decided):
        clipped, share = made.clipped, made.clipped.astype(jnp.float32)
        column = Column(own.norm, own.limit, made.factor, clipped, ~made.known, share)
        if own.group.is_unit:
            column = _summary(settings, eps, norms, own, made)
        columns.append(column)
        part = own.group.part
        if own.learns:
            memory[part] = own.group.put(memory[part], own.memory)
    # Stays at the largest int32 instead of becoming negative.
    step = jnp.asarray(optax.safe_increment(state.step))
    if not columns:
        return state._replace(step=step)
    new = columns[0]
    if len(columns) > 1:
        new = Column(*(concatenated(list(x)) for x in zip(*columns)))
    rows = np.concatenate([own.group.rows for own in asked])
    # Norms that are missing in this step keep what was known of them.
    is_whole = rows.size == state.norm.size
    old = state.clipped, state.clipped_recently, state.nonfinite
    if not is_whole:
        old = [x[rows] for x in old]
    clipped, recently, nonfinite = old
    fields = {
        "clipped_recently": moving_average(recently, new.share, state.step),
        "clipped": count_up(clipped, new.clipped),
        "nonfinite": count_up(nonfinite, new.broken),
        "norm": new.norm,
        "limit": new.limit,
        "factor": new.factor,
    }
    if norms.units:
        fields["units_clipped"] = new.share
    for name, value in fields.items():
        known = getattr(state, name)
        value = value.astype(known.dtype)
        fields[name] = value if is_whole else known.at[rows].set(value)
    return state._replace(step=step, memory=one_memory(memory), **fields)


def _summary(
    settings: Settings, eps: Any, norms: Norms, own: Asked, made: Decided
) -> Column:
    """Of the units of a leaf, in one pass: how far the furthest is above its limit, and
    the share that was clipped.
    """
    norm, limit = own.norm, own.limit
    info = jnp.finfo(norm.dtype)
    # A limit of 0 would hide all differences, so it counts as tiny.
    least = 2.0**-60
    ratio = jnp.minimum(norm / jnp.maximum(limit, least), info.max)
    # Where nothing has a limit, the largest of these is that of the longest norm.
    ratio = jnp.where(limit == jnp.inf, -1 / norm, ratio)
    # A broken unit is the furthest.
    ratio = jnp.where(made.known, ratio, jnp.inf)
    # Limits that follow weights differ, and count as 1.
    if own.is_relative:
        limit = jnp.ones_like(limit)
    clipped = made.clipped.astype(norm.dtype)
    ratio, clipped = written_by_a_gpu((ratio, clipped))
    numbers = jnp.stack([jnp.max(ratio), jnp.min(limit), jnp.mean(clipped)])
    kept = units_over(norms, own.group)
    if kept:
        # Each device knows its own units.
        place = Split(kept=(kept, ()))
        every = lax.psum(at_own_place(numbers[None], place), kept)
        ratios, limits, shares = every.T
        numbers = jnp.max(ratios), jnp.min(limits), jnp.mean(shares)
    ratio, limit, share = numbers
    norm = jnp.where(ratio < 0, -1 / ratio, ratio * jnp.maximum(limit, least))
    broken = ratio == jnp.inf
    norm = jnp.where(broken, jnp.nan, norm)
    one = _decide(settings, own.learns, eps, norm, limit)
    share = share.astype(jnp.float32)
    column = Column(norm, limit, one.factor, one.clipped, broken, share)
    if own.group.own_rows is None:
        return column
    return Column(*(x[None] for x in column))


# ----------------------------------------------------------------------------- once


def clip_once(
    tree: Any,
    limit: Any,
    measure: Measure,
    *,
    call: str,
    name: str,
    eps: ArrayLike = 0.0,
    nonfinite: str = "propagate",
    grad_norm: Any = None,
) -> tuple[Any, Any]:
    """Clips every norm of a tree to at most `limit`, with no state to carry.

    Returns:
      The tree, and its norms before clipping, without eps, as `ClipState.norm` holds
      them: for one norm of everything a scalar.

    Raises:
      TypeError: a schedule or a rule, which without a state would stay at its first
        step.
    """
    if callable(limit) or is_rule(limit):
        raise TypeError(
            f"{call}: {name} must be a number, got {shown(limit)}. A schedule or a "
            "rule needs a state, which optaxclip.clip_by_global_norm(limit) has."
        )
    options = {"eps": eps, "nonfinite": nonfinite}
    # Built in each call. Settings are compared by value, so nothing compiles anew.
    clipper = make_clipper(measure, limit, call=call, name=name, **options)
    # A fixed limit remembers nothing, so each call begins with a new state.
    state: Any = clipper.init(tree)
    clipped, state = clipper.update(tree, state, grad_norm=grad_norm)
    return clipped, state.norm


def _raise_nonfinite(call: str, measure: Any, state: ClipState, updates: Any) -> None:
    """Raises FloatingPointError for a norm that is NaN or inf, and names the leaves.

    Under jit it is a `checkify.check`.
    """
    finite = jnp.all(jnp.isfinite(state.norm))
    # ord=None means 2.
    order = getattr(measure, "ord", None) or 2
    text = f"{call}: the norm of order {order} of the updates is not finite"
    # A traced value is not known, so only a check of the running program can fail.
    if isinstance(finite, Tracer):
        from jax.experimental import checkify

        checkify.check(finite, text)
    elif not finite:
        parts = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
            # int waits for each leaf, which only a step that failed has to do.
            with jax.enable_x64(True):
                count = int(jnp.sum(~jnp.isfinite(leaf), dtype=np.int64))
            if count:
                name = trees.name(path)
                parts.append(f"{name!r}: {count} of {leaf.size} values are NaN or inf")
        all_finite = "All values are finite: the norm is too large for its dtype."
        raise FloatingPointError(f"{text}. {'; '.join(parts) or all_finite}")
