"""The kernel: measure, limit, shrink.

    measure    how long is it?        updates -> norms
    limit      how long may it be?    norms, memory -> limits
    shrink     what if it is longer?  norms, limits -> new norms

`make_clipper` joins the three into an optax transformation and does the rest once for
all of them: zero, NaN, counters, state.

Under jit the updates are read once for the norms and multiplied where the optimizer
reads them. Without jit the whole update is one compiled call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from . import _blocks as blocks
from . import _checks as checks
from . import _mesh as mesh
from . import _trees as trees
from ._blocks import Block
from ._checks import Nonfinite, shown
from ._exported import PLACEHOLDER
from ._factors import factor_between, multiply, roots_of_numbers, shrunk_by
from ._names import OF_UPDATE
from ._norms import GlobalNorm, Measure, measured, norm_of_norms, types_of
from ._packed import Packed, PyTree, packed
from ._plan import Norms
from ._state import ClipState, state_of_placeholder
from ._sums import written_by_a_gpu
from .rules._limits import check_limits_of_parts, check_one_limit, rule_of, rules_of
from .rules._memory import count_up, in_place, moving_average
from .rules._rule import Rule, further_norms, is_rule, limit_of, limit_of_jitted
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
    with_total: bool  # whether a rule needs the norm of all norms
    # Whether a rule has a schedule. JAX would keep what that holds, such as a model, in
    # the caches of our jits. So within a jit of the user's we call none.
    has_schedule: bool


class Given(NamedTuple):
    """What an update is told in the place of what the clipper finds."""

    grad_norm: PyTree = None
    limit: PyTree = None


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
    argument = f"{call}: {name}"
    # One norm takes one limit. Others take a tree prefix of limits.
    if isinstance(measure, GlobalNorm):
        check_one_limit(argument, limit)
    if isinstance(measure, GlobalNorm) or isinstance(limit, Rule):
        rules: Any = rule_of(limit, argument)
    else:
        rules = rules_of(limit, argument)
        check_limits_of_parts(argument, rules)
    rule_list = jax.tree.leaves(rules, is_leaf=is_rule)
    numbers, structure = jax.tree.flatten(rules)
    leaves = jax.tree.leaves(rules, is_leaf=callable)
    settings = Settings(
        call=call,
        argument=argument,
        measure=measure,
        # None is `hard`. A factory such as `smooth` is the shrink with its defaults.
        shrink=shrink_of(shrink, call),
        nonfinite=nonfinite,
        no_limit=limit is None,
        rules=structure,
        with_params=any(rule.needs_params for rule in rule_list),
        with_total=any(rule.needs_total for rule in rule_list),
        has_schedule=any(callable(leaf) for leaf in leaves),
    )

    def init(params: PyTree) -> ClipState:
        # optax.tree_map_params calls init without parameters.
        if isinstance(params, PLACEHOLDER):
            return state_of_placeholder()
        first_measure: Any = measure
        # A state is often made outside the shard_map that it goes into, where no mesh
        # axis has a name. Norms of the user's, and the spectral norm, take none.
        mesh_axes = getattr(measure, "mesh_axes", None)
        is_free = isinstance(mesh_axes, trees.Prefix) or mesh_axes in ("auto", None)
        if not is_free and not mesh.manual_axes():
            first_measure = first_measure._replace(mesh_axes=None)
        tree = trees.clipped_leaves(params, call)
        norms = types_of(partial(measured, first_measure), tree)
        rules_by_norm = blocks.rules_of_norms(rules, norms, argument)
        return blocks.first_state(norms, rules_by_norm, argument)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        grad_norm: PyTree = None,
        limit: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, ClipState]:
        for wrong in OF_UPDATE["limit"].intersection(extra_args):
            raise TypeError(
                f"{call}: update has no argument {wrong!r}: the limit of one step is "
                "limit. Call update(grads, state, params, limit=...)."
            )
        # None, as for a clipper of optax, begins anew.
        if checks.begins_anew(call, state, rules):
            no_state = state
            state = init(updates)
            # The memory of a rule that learns must not begin anew in every step.
            if jax.tree.leaves(state.memory):
                why = "learns from earlier norms"
                raise TypeError(checks.no_state(call, no_state, why))
        else:
            checks.check_state(call, state, ClipState)
        for number in jax.tree.leaves(grad_norm):
            checks.check_given_norm(f"{call}: grad_norm", number)
        for number in jax.tree.leaves(limit):
            # The value of an array is not checked: that would wait for the device.
            if not isinstance(number, jax.Array):
                checks.check_limit(f"{call}: limit", number)
        given = jax.tree.map(checks.number_for_jit, Given(grad_norm, limit))
        tree = trees.gradients_of(call, updates, params)
        if not settings.no_limit and not jax.tree.leaves(tree):
            trees.warn_of_integers(call, updates)
        # Weights that no rule looks at would only be another argument of the program.
        weights = None
        if settings.with_params:
            weights = trees.weights_of(call, tree, params)
        arguments = settings, numbers, eps, tree, state, weights, given
        if settings.has_schedule and isinstance(state.counts, Tracer):
            clipped, new_state = _update(*arguments)
        else:
            clipped, new_state = _update_jitted(*arguments)
        # Outside the jitted update: a compiled program cannot raise.
        if nonfinite == "raise":
            _raise_nonfinite(call, measure, new_state, tree)
        return trees.put_back(clipped, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    settings: Settings,
    numbers: list[Any],
    eps: Any,
    tree: PyTree,
    state: ClipState,
    params: PyTree,
    given: Given,
) -> tuple[PyTree, ClipState]:
    """One update. `numbers` are those of the rules."""
    # 1. Measure
    norms = measured(settings.measure, tree)
    if given.grad_norm is not None:
        values = _fitted("grad_norm", given.grad_norm, norms, settings)
        norms = norms._replace(values=values)
    # 2. Limit
    limited_blocks = _limited(settings, numbers, norms, state, params, given.limit)
    # 3. Shrink
    learns = bool(jax.tree.leaves(state.memory))
    # Clippers with other rules share these programs.
    decide = partial(_decide, settings._replace(rules=None), learns, eps)
    decisions = [decide(limited.norm, limited.limit) for limited in limited_blocks]
    # Multiplied by 1, updates would be other values to XLA, and read again by the next
    # clipper of a chain.
    if given.limit is not None or not settings.no_limit:
        roots: list[Any] = [None] * len(norms.values)
        for limited, decision in zip(limited_blocks, decisions):
            roots_of_block = _roots(limited, decision, decide)
            for index, root in zip(limited.block.indices, roots_of_block):
                roots[index] = root
        tree = multiply(tree, norms, roots, zero=settings.nonfinite == "zero")
    return tree, _next_state(state, norms, limited_blocks, decisions, decide)


# Jitted at module level, so that clippers with equal settings share one compilation,
# even when they are built again in every step.
_update_jitted = jax.jit(_update, static_argnums=0)


# ----------------------------------------------------------------------- 2. limits


class Limited(NamedTuple):
    """A block with its limits."""

    block: Block
    norm: Array
    limit: Array
    limits: list[Array]  # of each norm
    memory: PyTree  # what the rule remembers after this step


def _limited(
    settings: Settings,
    numbers: list[Any],
    norms: Norms,
    state: ClipState,
    params: PyTree,
    given_limit: PyTree,
) -> list[Limited]:
    """The blocks of a step with their limits."""
    rules = settings.rules.unflatten(numbers)
    rules_by_norm = blocks.rules_of_norms(
        rules, norms, settings.argument, state.names.layers
    )
    weights = None
    if settings.with_params:
        weights = measured(settings.measure, params).values
    total = norm_of_norms(norms) if settings.with_total else None
    if given_limit is not None:
        given_limits = _fitted("limit", given_limit, norms, settings)
        # Below 0 a limit counts as 0, as one of the clipper's own.
        given_limit = [jnp.maximum(limit, 0) for limit in given_limits]
    ask_rule = limit_of if settings.has_schedule else limit_of_jitted

    def ask(rule: Rule, norm: Array, weight: Any, memory: PyTree) -> tuple[Array, Any]:
        step = mesh.narrowed_as(state.step, norm)
        further = further_norms(rule, weight, total)
        return ask_rule(rule, norm, memory, step, *further, argument=settings.argument)

    def ask_each(block: Block) -> list[Array]:
        limits = []
        for index in block.indices:
            weight = None if weights is None else weights[index]
            limit, _ = ask(rules_by_norm[index], norms.values[index], weight, ())
            limits.append(limit)
        return limits

    memory_of_state = dict(zip((None, *state.names.units), state.memory))
    limited_blocks = []
    for block in blocks.blocks_of(norms, state, settings.call):
        norm = block.joined(norms.values)
        memory = memory_of_state[block.units_of]
        learns = bool(jax.tree.leaves(memory))
        if isinstance(rules, Rule):
            if learns and block.is_vector:
                memory = _of_entries(memory, block)
            memory = mesh.narrowed_as(memory, norm)
            rule = blocks.rule_of_block(rules, block)
            weight = None if weights is None else block.joined(weights)
            limit, memory = ask(rule, norm, weight, memory)
            if rule.needs_params and not learns and block.is_vector:
                # For a TPU each by itself, so that no leaf waits until all weights are
                # measured. XLA drops them elsewhere.
                limits = ask_each(block)
            else:
                limits = block.taken_apart(limit)
        else:
            # Limits for parts of the tree, which remember nothing.
            limits = ask_each(block)
            limit = blocks.concatenated(limits) if block.is_vector else limits[0]
        if given_limit is not None:
            limits = [given_limit[index] for index in block.indices]
            limit = block.joined(given_limit)
        limited_blocks.append(Limited(block, norm, limit, limits, memory))
    return limited_blocks


def _fitted(
    argument: str, tree: PyTree, norms: Norms, settings: Settings
) -> list[Array]:
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
    fitted = []
    for number, norm in zip(numbers, norms.values):
        # In the dtype and sharding of what was measured, so that the state keeps its
        # types.
        fitted.append(mesh.split_as(number.astype(norm.dtype), jax.typeof(norm)))
    return fitted


# ----------------------------------------------------------------------- 3. shrink


class Decision(NamedTuple):
    """What becomes of norms, elementwise."""

    root: Array  # what updates are multiplied by twice
    factor: Array
    clipped: Array  # bool
    known: Array  # bool: neither norm nor limit is broken


Decide = Callable[[Array, Array], Decision]  # of norms and limits


# Jitted, so that it is traced once for all norms of one shape. Inlined, since a call in
# its place is another program to XLA.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _decide(
    settings: Settings, learns: bool, eps: Any, norm: Array, limit: Array
) -> Decision:
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
        short = jnp.where(off, 1.0, short)
        long = jnp.where(off, 1.0, long)
    root, factor = factor_between(long, short)
    # Zeros stay zeros, whatever eps or the shrink make of their norm.
    zero = known & (norm == 0)
    clipped = known & (short != long) & ~zero
    return Decision(root, jnp.where(zero, 1.0, factor), clipped, known)


def _roots(limited: Limited, decision: Decision, decide: Decide) -> list[Array]:
    """The root of each norm of a block."""
    if not limited.block.is_vector:
        return [decision.root]
    return roots_of_numbers(decision.root, limited.block.norms, limited.limits, decide)


# ------------------------------------------------------------------------ the state


class Report(NamedTuple):
    """What a state keeps of the norms of a step. Each field has an entry for each norm
    of whole leaves, or for the units of each leaf.
    """

    norm: Array
    limit: Array
    factor: Array
    clipped: Array  # bool
    known: Array  # bool: neither norm nor limit is broken
    share: Array  # float: which share of its units was clipped, 0 or 1 of a whole leaf


def _next_state(
    state: ClipState,
    norms: Norms,
    limited_blocks: list[Limited],
    decisions: list[Decision],
    decide: Decide,
) -> ClipState:
    """The state after a step."""
    reports: list[Report] = []
    entries: list[np.ndarray] = []  # of the reports, in the state
    blocks_of_units: list[Limited] = []
    for limited, decision in zip(limited_blocks, decisions):
        if limited.block.units_of is not None:
            blocks_of_units.append(limited)
            continue
        report = Report(
            norm=limited.norm,
            limit=limited.limit,
            factor=decision.factor,
            clipped=decision.clipped,
            known=decision.known,
            share=decision.clipped.astype(limited.norm.dtype),
        )
        reports.append(report)
        entries.append(limited.block.entries)
    for alike in _of_equal_shapes(norms, blocks_of_units):
        reports.append(_summary(norms, alike, decide))
        entries += [limited.block.entries for limited in alike]
    steps = count_up(state.counts[0])
    if not reports:
        # A tree without leaves, or one in which all of them are missing.
        return state._replace(counts=jnp.asarray(state.counts).at[0].set(steps))
    report, is_present = _in_state(reports, np.concatenate(entries), state)
    # Units keep their memories as they are: none of them is a row of the state.
    memory = Packed(_memory_after(state, limited_blocks), counts=[], numbers=[])
    if not state.names.units:
        memory = packed(memory.windows, report.norm)
    counts = [
        steps,
        count_up(state.clipped, report.clipped),
        count_up(state.nonfinite, ~report.known),
    ]
    recently = moving_average(state.clipped_recently, report.share, steps)
    numbers = [report.norm, report.limit, report.factor, recently]
    if state.names.units:
        numbers.append(report.share)
    dtype = state.numbers.dtype
    new_counts = jnp.stack(counts + memory.counts)
    new_numbers = jnp.stack([row.astype(dtype) for row in numbers + memory.numbers])
    if not is_present.all():
        # Norms that are missing in this step keep what was known of them.
        kept_counts = jnp.where(is_present, new_counts, state.counts)
        new_counts = kept_counts.at[0].set(steps)
        new_numbers = jnp.where(is_present, new_numbers, state.numbers)
    return state._replace(
        counts=in_place(new_counts, state.counts),
        numbers=in_place(new_numbers, state.numbers),
        windows=jax.tree.map(in_place, memory.windows, state.windows),
    )


def _in_state(
    reports: list[Report], entries: np.ndarray, state: ClipState
) -> tuple[Report, np.ndarray]:
    """The reports as one of all entries of a state, and which entries they are."""
    shape = state.norm.shape
    is_present = np.zeros(shape, bool)
    is_present.reshape(-1)[entries] = True
    is_in_order = np.array_equal(entries, np.arange(is_present.size))
    rows = []
    for column in zip(*reports):
        row = blocks.concatenated(column)
        if is_in_order:
            row = row.reshape(shape)
        else:
            zeros = mesh.typed_as(jnp.zeros(shape, row.dtype), jax.typeof(row))
            row = zeros.at[entries].set(row)
        rows.append(row)
    return Report(*rows), is_present


def _memory_after(
    state: ClipState, limited_blocks: list[Limited]
) -> tuple[PyTree, ...]:
    """What the rule remembers after a step, in the form of `ClipState.memory`."""
    memory_of_leaves, *memories_of_units = state.memory
    memory_of_unit = dict(zip(state.names.units, memories_of_units))
    memories = []
    entries = []
    for limited in limited_blocks:
        if limited.block.units_of is None:
            memories.append(limited.memory)
            entries.append(limited.block.entries)
        else:
            memory_of_unit[limited.block.units_of] = limited.memory
    # Of a tree of limits, and of constant ones, nothing is remembered.
    if jax.tree.leaves(memory_of_leaves) and memories:
        places = np.concatenate(entries)

        def joined(old: Array, *parts: Array) -> Array:
            if state.names.is_one:
                return parts[0]
            if len(parts) == 1 and np.array_equal(places, np.arange(len(old))):
                return parts[0]
            together = jnp.concatenate(blocks.typed_alike(parts))
            return mesh.typed_as(old, jax.typeof(together)).at[places].set(together)

        memory_of_leaves = jax.tree.map(joined, memory_of_leaves, *memories)
    return memory_of_leaves, *memory_of_unit.values()


def _of_entries(memory: PyTree, block: Block) -> PyTree:
    """What a rule remembers of the norms of a block."""

    def taken(array: Array) -> Array:
        is_whole = np.array_equal(block.entries, np.arange(len(array)))
        return array if is_whole else array[block.entries]

    return jax.tree.map(taken, memory)


# ----------------------------------------------------------------- summaries of units


def _of_equal_shapes(
    norms: Norms, blocks_of_units: list[Limited]
) -> list[list[Limited]]:
    """Leaves of as many units, which are summed up together."""
    alike: dict[Any, list[Limited]] = {}
    for limited in blocks_of_units:
        key = jax.typeof(limited.norm), blocks.units_over(norms, limited.block)
        alike.setdefault(key, []).append(limited)
    return list(alike.values())


def _summary(norms: Norms, alike: list[Limited], decide: Decide) -> Report:
    """What a state keeps of the units of some leaves of equal shape: of each leaf norm
    and limit of the unit that is furthest above its limit, what becomes of it, and the
    share of units that were clipped.
    """
    stacks = [
        jnp.stack([limited.norm for limited in alike]),
        jnp.stack([limited.limit for limited in alike]),
    ]
    norm, limit = written_by_a_gpu(stacks)
    decision = decide(norm, limit)
    largest = jnp.finfo(norm.dtype).max
    # A limit of 0 would hide all differences, so it counts as tiny.
    ratio = jnp.minimum(norm / jnp.maximum(limit, 2.0**-60), largest)
    # Where nothing has a limit, the largest of these is that of the longest norm.
    ratio = jnp.where(limit == jnp.inf, jnp.maximum(-1 / norm, -largest), ratio)
    # A broken unit is the furthest.
    ratio = jnp.where(decision.known, ratio, jnp.inf)
    columns = Columns(
        ratio=ratio,
        norm=norm,
        limit=limit,
        factor=decision.factor,
        clipped=decision.clipped.astype(norm.dtype),
    )
    # JAX cannot differentiate a reduction of columns some of which are constant.
    furthest = _furthest(lax.stop_gradient(columns), range(1, norm.ndim))
    mesh_axes = blocks.units_over(norms, alike[0].block)
    if mesh_axes:
        # Each device knows its own units.
        split = mesh.Split(kept=((), (), mesh_axes))
        table = jnp.stack(furthest)[..., None]
        tables = lax.psum(mesh.at_own_place(table, split), mesh_axes)
        furthest = _furthest(Columns(*tables), (1,))
    units = norm.size // len(alike) * mesh.axes_size(mesh_axes)
    share = furthest.clipped / units
    known = furthest.ratio < jnp.inf
    return Report(
        norm=furthest.norm,
        limit=furthest.limit,
        factor=furthest.factor,
        clipped=known & (share > 0),
        known=known,
        share=share,
    )


class Columns(NamedTuple):
    """Numbers of units, [leaves, ...units], or of one unit of each leaf, [leaves]."""

    ratio: Array  # how far the norm is above its limit
    norm: Array
    limit: Array
    factor: Array
    clipped: Array  # 1 or 0, or how many were clipped


def _furthest(columns: Columns, axes: Sequence[int]) -> Columns:
    """The numbers of the unit with the largest ratio along some axes, and how many
    units were clipped.
    """
    # On a mesh one reduction of all columns would take a collective for each.
    if not mesh.is_on_one_device(columns.ratio):
        most = jnp.max(columns.ratio, axes, keepdims=True)
        is_furthest = columns.ratio == most
        rows = []
        for column in columns[:-1]:
            rows.append(jnp.max(jnp.where(is_furthest, column, -jnp.inf), axes))
        return Columns(*rows, clipped=jnp.sum(columns.clipped, axes))
    starts = [column.dtype.type(0) for column in columns]
    starts[0] = starts[0] - np.inf
    return Columns(*lax.reduce(tuple(columns), tuple(starts), _further, axes))


def _further(one: Any, other: Any) -> Any:
    """The row of the unit that is further above its limit, of two."""
    one, other = Columns(*one), Columns(*other)
    # Of rows that are level the one with the longer norm, as on a mesh.
    is_level = one.ratio == other.ratio
    is_first = (one.ratio > other.ratio) | is_level & (one.norm >= other.norm)
    row = [lax.select(is_first, x, y) for x, y in zip(one[:-1], other[:-1])]
    return *row, one.clipped + other.clipped


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
