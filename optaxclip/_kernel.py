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
from inspect import unwrap
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from . import _checks as checks
from . import _mesh as mesh
from . import _state as states
from . import _trees as trees
from ._checks import Nonfinite, shown
from ._exported import PLACEHOLDER
from ._factors import factor_between, multiply, roots_of_numbers, shrunk_by
from ._names import OF_UPDATE
from ._norms import GlobalNorm, Measure, measured, norm_of_norms, types_of
from ._plan import Norms
from ._state import ClipState, Group
from ._sums import written_by_a_gpu
from .rules._limits import check_one_limit, rule_of, rules_of
from .rules._memory import count_up, in_place, moving_average
from .rules._rule import Rule, further_norms, is_rule, limit_of
from .shrinks import Shrink, shrink_of


class Settings(NamedTuple):
    """What is static in a clipper. Clippers with equal settings share a program."""

    call: str  # the function that the user called
    argument: str  # its limit: "clip_by_global_norm: max_norm"
    measure: Measure
    shrink: Shrink
    nonfinite: Nonfinite
    no_limit: bool  # the limit is None, known before any program is traced
    rules: Any  # the structure of the rules, whose numbers are not static
    with_params: bool  # whether a rule needs the norms of the weights
    # Whether a rule has a schedule. JAX would keep what that holds, such as a model, in
    # the caches of our jits. So within a jit of the user's we call none.
    has_schedule: bool


def make_clipper(
    measure: Measure,
    limit: Any,
    *,
    call: str,
    name: str = "max_norm",
    shrink: Shrink | str | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper. `call` and `name` are what errors call it and its limit."""
    checks.check_choice(f"{call}: nonfinite", nonfinite, checks.NONFINITE)
    checks.check_number(f"{call}: eps", eps, is_scalar=True)
    eps = checks.number_for_jit(eps)
    # None is `hard`. A factory such as `smooth` is the shrink with its defaults.
    shrink = shrink_of(shrink, call)
    argument = f"{call}: {name}"
    # One norm takes one limit. Others take a tree prefix of limits.
    if isinstance(measure, GlobalNorm):
        check_one_limit(argument, limit)
    is_one = isinstance(measure, GlobalNorm) or isinstance(limit, Rule)
    rules = (rule_of if is_one else rules_of)(limit, argument)
    each_rule = [rules] if is_one else jax.tree.leaves(rules, is_leaf=is_rule)
    numbers, structure = jax.tree.flatten(rules)
    settings = Settings(
        call,
        argument,
        measure,
        shrink,
        nonfinite,
        limit is None,
        structure,
        with_params=any(map(attrgetter("needs_params"), each_rule)),
        has_schedule=any(map(callable, jax.tree.leaves(rules, is_leaf=callable))),
    )

    def init(params: Any) -> ClipState:
        # optax.tree_map_params calls init without parameters.
        if isinstance(params, PLACEHOLDER):
            return states.state_of_placeholder()
        own: Any = measure
        # A state is often made outside the shard_map that it goes into, where no mesh
        # axis has a name. Norms of the user's, and the spectral norm, take none.
        names = getattr(measure, "mesh_axes", None)
        is_free = isinstance(names, trees.Prefix) or names in ("auto", None)
        if not is_free and not mesh.manual_axes():
            own = own._replace(mesh_axes=None)
        norms = types_of(partial(measured, own), trees.clipped_leaves(params, call))
        of_norm = states.rules_of_norms(rules, norms, argument)
        return states.first_state(norms, of_norm, argument)

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
        # None, as for a clipper of optax, begins anew.
        if not checks.begins_anew(call, state, rules):
            checks.check_state(call, state, ClipState)
        else:
            given, state = state, init(updates)
            # The memory of a rule that learns must not begin anew in every step.
            if jax.tree.leaves(state.memory):
                why = "learns from earlier norms"
                raise TypeError(checks.no_state(call, given, why))
        for number in jax.tree.leaves(grad_norm):
            checks.check_given_norm(f"{call}: grad_norm", number)
        for number in jax.tree.leaves(limit):
            # As of a norm, what is in an array is not asked.
            if not isinstance(number, jax.Array):
                checks.check_limit(f"{call}: limit", number)
        given = jax.tree.map(checks.number_for_jit, (grad_norm, limit))
        tree = trees.gradients_of(call, updates, params)
        if not settings.no_limit and not jax.tree.leaves(tree):
            trees.warn_of_integers(call, updates)
        # Weights that no rule looks at would only be another argument of the program.
        weights = trees.weights_of(call, tree, params) if settings.with_params else None
        is_inside = settings.has_schedule and isinstance(state.step, Tracer)
        run = unwrap(_update) if is_inside else _update
        clipped, new = run(settings, numbers, eps, tree, state, weights, given)
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
        norms = norms._replace(values=_given("grad_norm", given[0], norms, settings))
    # 2. Limit. Norms that share a rule are one vector from here on.
    asked = _ask(settings, numbers, norms, state, params, given[1])
    # 3. Shrink. Clippers with other rules share these programs.
    settings = settings._replace(rules=None)
    decided = [(x, _decide(settings, x.learns, eps, x.norm, x.limit)) for x in asked]
    updates = tree
    # Multiplied by 1, they would be other values to XLA, and read again by the next
    # clipper of a chain.
    if given[1] is not None or not settings.no_limit:
        roots: list[Any] = [None] * len(norms.values)
        for own, made in decided:
            found = [made.root]
            if not own.group.is_one:
                each = [norms.values[i] for i in own.group.numbers]
                decide = partial(_decide, settings, own.learns, eps)
                found = roots_of_numbers(made.root, each, own.limits, decide)
            for number, root in zip(own.group.numbers, found):
                roots[number] = root
        updates = multiply(tree, norms, roots, zero=settings.nonfinite == "zero")
    return updates, _next_state(settings, eps, state, norms, decided)


# ----------------------------------------------------------------------- 2. limits


class Asked(NamedTuple):
    """The limits of a group."""

    group: Group
    norm: jax.Array
    limit: jax.Array
    limits: list[jax.Array]  # of each norm by itself
    memory: Any
    learns: bool


def _ask(
    settings: Settings,
    numbers: list[Any],
    norms: Norms,
    state: ClipState,
    params: Any,
    given: Any,
) -> list[Asked]:
    each, rules = norms.values, settings.rules.unflatten(numbers)
    of_norm = states.rules_of_norms(rules, norms, settings.argument, state.names)
    weights = measured(settings.measure, params).values if settings.with_params else []
    needs_total = any(map(attrgetter("needs_total"), of_norm))
    total = norm_of_norms(norms) if needs_total else None
    if given is not None:
        # Below 0 it counts as 0, as a limit of the clipper's own.
        given = [jnp.maximum(x, 0) for x in _given("limit", given, norms, settings)]
    asking = unwrap(limit_of) if settings.has_schedule else limit_of
    ask = partial(asking, argument=settings.argument)
    found = []
    for group in states.groups_of(norms, state, settings.call):
        rule = states.shared_rule(of_norm, group, norms, settings.call)
        memory, norm = state.memory[group.part], group.vector(each)
        learns = bool(jax.tree.leaves(memory))
        if group.own_rows is not None:
            memory = jax.tree.map(itemgetter(group.own_rows), memory)
        is_relative = rule.needs_params
        weight = group.vector(weights) if is_relative else None
        limits = []
        if is_relative and not learns and not group.is_one:
            # For a TPU each by itself, so that no leaf waits until all weights are
            # measured. XLA drops them elsewhere.
            for i in group.numbers:
                further = further_norms(rule, weights[i], total)
                limits.append(ask(of_norm[i], each[i], memory, state.step, *further)[0])
        further = further_norms(rule, weight, total)
        limit, memory = ask(rule, norm, memory, state.step, *further)
        if not limits:
            kinds = [jax.typeof(each[i]) for i in group.numbers]
            limits = [limit] if group.is_one else mesh.entries_of(limit, kinds)
        if given is not None:
            limits = [given[i] for i in group.numbers]
            limit = group.vector(given)
        found.append(Asked(group, norm, limit, limits, memory, learns))
    return found


def _given(
    argument: str, tree: Any, norms: Norms, settings: Settings
) -> list[jax.Array]:
    """Norms or limits of the user's, once they are seen to fit."""
    if isinstance(tree, Norms):
        # From within the library: a node of the user's that checks its arrays would
        # refuse norms.
        numbers = tree.values
    else:
        # In the structure in which the norm functions return norms.
        shapes_of_norms = jax.tree.map(jnp.shape, jax.eval_shape(norms.tree))
        shapes = jax.tree.map(jnp.shape, tree)
        if jax.tree.structure(tree) != norms.treedef or shapes != shapes_of_norms:
            raise ValueError(
                f"{settings.call}: {argument} must have the structure and shapes of "
                f"the norms that it measures, {shapes_of_norms}, got {shapes}."
            )
        numbers = norms.on_all_devices(jax.tree.leaves(tree))
    pairs = zip(numbers, norms.values)
    # In the dtype and sharding of what was measured, so that the state keeps its types.
    return [mesh.split_as(x.astype(y.dtype), jax.typeof(y)) for x, y in pairs]


# ----------------------------------------------------------------------- 3. shrink


class Decided(NamedTuple):
    """What becomes of norms, elementwise."""

    root: jax.Array
    factor: jax.Array
    clipped: jax.Array  # bool
    known: jax.Array  # bool: neither norm nor limit is broken


Pair = tuple[Asked, Decided]


# Jitted, so that it is traced once for all norms of one shape. Inlined, since a call in
# its place is another program to XLA.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _decide(
    settings: Settings, learns: bool, eps: Any, norm: jax.Array, limit: jax.Array
) -> Decided:
    known = jnp.isfinite(norm) & (limit == limit)
    long = norm + jnp.asarray(eps).astype(norm.dtype)
    shrunk = shrunk_by(settings.shrink, long, limit, settings.call)
    # The new norm of a broken step. NaN makes the root NaN, and the updates with it.
    instead = 0.0 if settings.nonfinite == "zero" else jnp.nan
    # A rule that has no limit yet, and gives inf, still lets no broken step through.
    short = jnp.where(known, shrunk, instead)
    if not learns:
        # An infinite limit that was set only measures. Equal norms leave updates alone.
        off = limit == jnp.inf
        short, long = (jnp.where(off, 1.0, x) for x in (short, long))
    root, factor = factor_between(long, short)
    # Zeros stay zeros, whatever eps or the shrink make of their norm.
    zero = known & (norm == 0)
    clipped = known & (short != long) & ~zero
    return Decided(root, jnp.where(zero, 1.0, factor), clipped, known)


# ------------------------------------------------------------------------ the state

# What it keeps of each norm of a step.
KEPT = ("norm", "limit", "factor", "clipped", "nonfinite", "units_clipped")


def _next_state(
    settings: Settings, eps: Any, state: ClipState, norms: Norms, decided: list[Pair]
) -> ClipState:
    whole = list[Pair]()
    # Of leaves whose rule does not learn, and does.
    units: tuple[list[Pair], list[Pair]] = [], []
    for own, made in decided:
        (units[own.learns] if own.group.is_unit else whole).append((own, made))
    parts = [
        (own.group.rows, own.norm, own.limit, made, made.clipped) for own, made in whole
    ]
    parts += [_summaries(settings, eps, norms, some) for some in units if some]
    step, found = count_up(state.step), []
    if not parts:
        return state._replace(step=step)
    for _, norm, limit, made, share in parts:
        share = share.astype(jnp.float32)
        found.append((norm, limit, made.factor, made.clipped, ~made.known, share))
    columns = map(list, zip(*found))
    join = states.concatenated if len(found) > 1 else itemgetter(0)
    new: dict[str, Any] = dict(zip(KEPT, map(join, columns)))
    rows = np.concatenate([part[0] for part in parts])
    # Norms that are missing in this step keep what was known of them.
    is_whole = np.array_equal(rows, range(state.norm.size))
    old = state.clipped, state.clipped_recently, state.nonfinite
    clipped, recently, nonfinite = old if is_whole else [x[rows] for x in old]
    share = new["units_clipped"] if norms.units else new.pop("units_clipped")
    new["clipped_recently"] = moving_average(recently, share, step)
    new["clipped"] = count_up(clipped, new["clipped"])
    new["nonfinite"] = count_up(nonfinite, new["nonfinite"])
    for name, value in new.items():
        was = getattr(state, name)
        value = value.astype(was.dtype)
        value = value.reshape(was.shape) if is_whole else was.at[rows].set(value)
        new[name] = in_place(value, was)
    memory = list(state.memory)
    for own, _ in decided:
        if own.learns:
            part = own.group.part
            memory[part] = own.group.put(memory[part], own.memory)
    return state._replace(step=step, memory=tuple(memory), **new)


def _summaries(
    settings: Settings, eps: Any, norms: Norms, leaves: list[Pair]
) -> tuple[Any, jax.Array, jax.Array, Decided, jax.Array]:
    """What a state keeps of the units of each leaf, with its rows: norm and limit of
    the one that is furthest above its limit, what becomes of it, and the share of those
    that were clipped.
    """
    tables, rows = [], []
    # Leaves of as many units are looked at together.
    alike: dict[Any, list[Any]] = {}
    for own, _ in leaves:
        kind = jax.typeof(own.norm), states.units_over(norms, own.group)
        alike.setdefault(kind, []).append((own.group.rows, own.norm, own.limit))
    for (_, kept), some in alike.items():
        own_rows, *pair = zip(*some)
        norm, limit = written_by_a_gpu(list(map(jnp.stack, pair)))
        made = _decide(settings, leaves[0][0].learns, eps, norm, limit)
        most = jnp.finfo(norm.dtype).max
        # A limit of 0 would hide all differences, so it counts as tiny.
        ratio = jnp.minimum(norm / jnp.maximum(limit, 2.0**-60), most)
        # Where nothing has a limit, the largest of these is that of the longest norm.
        ratio = jnp.where(limit == jnp.inf, jnp.maximum(-1 / norm, -most), ratio)
        # A broken unit is the furthest.
        ratio = jnp.where(made.known, ratio, jnp.inf)
        columns = ratio, norm, limit, made.factor, made.clipped.astype(norm.dtype)
        # JAX cannot differentiate a reduction of columns some of which are constant.
        table = _furthest(range(1, norm.ndim), *lax.stop_gradient(columns))
        count = norm.size // len(some) * mesh.axes_size(kept)
        if kept:
            # Each device knows its own units.
            split = mesh.Split(kept=((), (), kept))
            own = mesh.at_own_place(jnp.stack(table)[..., None], split)
            table = _furthest((1,), *lax.psum(own, kept))
        tables.append([*table[:-1], table[-1] / count])
        rows += own_rows
    ratio, norm, limit, factor, share = map(jnp.concatenate, zip(*tables))
    known = ratio < jnp.inf
    made = Decided(factor, factor, known & (share > 0), known)
    return np.concatenate(rows), norm, limit, made, share


def _furthest(axes: Any, *columns: jax.Array) -> list[jax.Array]:
    """The rows with the largest number in the first column, along some axes, but with
    the sum of the last column.
    """
    # On a mesh one reduction of all columns would take a collective for each.
    if not mesh.is_on_one_device(columns[0]):
        most = jnp.max(columns[0], axes, keepdims=True)
        beside = [jnp.where(columns[0] == most, x, -jnp.inf) for x in columns[:-1]]
        return [*(jnp.max(x, axes) for x in beside), jnp.sum(columns[-1], axes)]
    lowest, *zeros = (x.dtype.type(0) for x in columns)
    start = lowest - np.inf, *zeros
    return list(lax.reduce(columns, start, _further, axes))


def _further(one: Any, other: Any) -> Any:
    # Of rows that are level the one with the longer norm, as on a mesh.
    is_first = (one[0] > other[0]) | (one[0] == other[0]) & (one[1] >= other[1])
    found = [lax.select(is_first, x, y) for x, y in zip(one, other)]
    return *found[:-1], one[-1] + other[-1]


# ----------------------------------------------------------------------------- once


def clip_once(
    tree: Any,
    limit: Any,
    measure: Measure,
    *,
    call: str,
    name: str,
    grad_norm: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Clips every norm of a tree to at most `limit`, with no state to carry. `options`
    are those of `make_clipper`.

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
    # Built in each call. Settings are compared by value, so nothing compiles anew.
    clipper = make_clipper(measure, limit, call=call, name=name, **options)
    # A state may hold a limit of inf, at which jax_debug_infs would raise.
    with jax.debug_infs(False):
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
        for path, leaf in jax.tree.leaves_with_path(updates):
            # int waits for each leaf, which only a step that failed has to do.
            with jax.enable_x64(True):
                count = int(jnp.sum(~jnp.isfinite(leaf), dtype=np.int64))
            if count:
                name = trees.name(path)
                parts.append(f"{name!r}: {count} of {leaf.size} values are NaN or inf")
        all_finite = "All values are finite: the norm is too large for its dtype."
        raise FloatingPointError(f"{text}. {'; '.join(parts) or all_finite}")
