"""The clipper of norms, of which almost all clippers are made.

A clipper answers three questions:

    measure    how long is it?        updates -> norms
    limit      how long may it be?    norms, memory -> limits
    shrink     what if it is longer?  norms, limits -> new norms

`make_clipper` joins the three answers into an optax transformation. What is the same
for all clippers is here: zero, NaN, counters, state. `_update` is one step. The common
case, a global norm under a number:

    norm     = sqrt(sum(x^2 for all leaves))    _norms/norms.py: measured
    new_norm = min(norm, limit)                 _factors.py: shrunk_by
    root     = sqrt(new_norm / norm)            _factors.py: factor_between
    updates  = x * root * root, for each leaf   _factors.py: times_squares

`_decide` computes new_norm and root.

Words of this and the modules around it:

    name       of a norm: the path of its leaf ("blocks/w"), the label of its group, or
               "" for the norm of everything
    unit       the weights that feed one output, with a norm of its own
    whole leaf a leaf that is one tensor or a stack of layers, and not units
    block      norms that are decided as one array: the norm of everything, the vector
               of all whole leaves, or the units of one leaf (`_state/blocks.py`)
    row        an array of the state with an entry for each norm (`_state/packed.py`)
    memory     what a rule remembers. Arrays in it with one number for each norm are
               rows, too
    window     an array of a memory that is not a row, such as the last 100 norms
    sound      norm finite, limit not NaN, and the shrink returns a finite number of at
               least 0. Otherwise the norm is broken
    clipped    sound, and changed by the shrink. A leaf with units is clipped if one of
               them is
    furthest   of several norms the one with the largest norm / limit (`severity` in
               `_state/outcome.py`). A broken one comes first

Under jit the updates are read once for the norms, and the multiplication is fused into
the optimizer's own loop. Without jit the whole update is one compiled call.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from . import _trees as trees
from ._arguments import checks
from ._arguments.checks import Nonfinite, shown
from ._arguments.functions import is_function
from ._arguments.other_names import OTHER_NAMES_IN_UPDATE
from ._arguments.prefixes import Prefix
from ._arguments.updates import (
    gradients_of,
    warn_of_integers,
    warn_of_stacks,
    weights_of,
)
from ._devices import mesh_types
from ._devices.platforms import traced_once
from ._factors import factor_between, roots_of_norms, shrunk_by, times_squares
from ._norms.norms import GlobalNorm, Measure, Norms, UnitwiseNorm, measured, total_norm
from ._numbers import number_for_jit
from ._state import blocks
from ._state.blocks import Block, blocks_of
from ._state.first_state import first_state
from ._state.interop import is_placeholder
from ._state.nonfinite import raise_nonfinite
from ._state.outcome import Decide, Decision, Memories, Outcome, are_sound, next_state
from ._state.state import ClipState, state_of_placeholder
from ._trees import PyTree
from .rules._limits import LimitTree, rule_of, tree_of_rules
from .rules._rule import (
    Rule,
    extra_norms_of,
    is_rule,
    limit_and_memory_of,
    limit_and_memory_of_jitted,
)
from .shrinks import Shrink, is_ours, shrink_of


class Settings(NamedTuple):
    """What is static in a clipper. Clippers with equal settings share a program."""

    call: str  # the function that the user called
    limit_in_errors: str  # "clip_by_global_norm: max_norm"
    measure: Measure
    shrink: Shrink
    nonfinite: Nonfinite
    only_measures: bool  # the limit is None. `update` may still be given one
    rules_treedef: Any  # of the rules. Their numbers are arguments of `_update`
    needs_params: bool  # whether a rule needs the norms of the weights
    # Whether all rules have `inf_is_off`: then a limit of inf lets broken norms pass.
    inf_is_off: bool
    # Whether a rule has a schedule. A function that we jit keeps a schedule alive in
    # its cache, and all that the schedule closes over. So inside the user's jit we call
    # `_update` itself. Without the user's jit we call `_update_jitted`, since a step
    # would be too slow otherwise.
    has_schedule: bool


class Overrides(NamedTuple):
    """Norms and limits that `update` was given, which replace the clipper's own."""

    grad_norm: PyTree = None
    limit: PyTree = None


def make_clipper(
    measure: Measure,
    limit: LimitTree,
    *,
    call: str,
    limit_argument: str = "max_norm",
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper. Errors name the function `call` and its argument
    `limit_argument`.
    """
    checks.check_choice(f"{call}: nonfinite", nonfinite, checks.NONFINITE)
    # The norm with an infinite eps would be inf, and all updates 0.
    largest = float(jnp.finfo(jnp.float32).max)
    checks.check_number(f"{call}: eps", eps, highest=largest, is_scalar=True)
    eps = number_for_jit(eps)
    limit_in_errors = f"{call}: {limit_argument}"
    checks.check_is_no_optimizer(limit_in_errors, limit)
    # One norm takes one limit. Others take a tree prefix of limits.
    if isinstance(measure, GlobalNorm):
        rules: PyTree = rule_of(limit, limit_in_errors)
    else:
        rules = tree_of_rules(limit, limit_in_errors)
    rule_list = jax.tree.leaves(rules, is_leaf=is_rule)
    rule_numbers, treedef = jax.tree.flatten(rules)
    # `is_function`, not `callable`: an equinox module that holds limits is callable,
    # but is a tree of limits and no schedule.
    numbers_and_schedules = jax.tree.leaves(rules, is_leaf=is_function)
    settings = Settings(
        call=call,
        limit_in_errors=limit_in_errors,
        measure=measure,
        # None is `hard`.
        shrink=shrink_of(shrink, call),
        nonfinite=nonfinite,
        only_measures=limit is None,
        rules_treedef=treedef,
        needs_params=any(rule.needs_params for rule in rule_list),
        inf_is_off=all(rule.inf_is_off for rule in rule_list),
        has_schedule=any(is_function(number) for number in numbers_and_schedules),
    )

    def init(params: PyTree) -> ClipState:
        # optax.tree_map_params calls init without parameters.
        if is_placeholder(params):
            return state_of_placeholder()
        tree = trees.leaves_to_clip(params, call)
        if (
            isinstance(measure, UnitwiseNorm)
            and measure.axis is None
            and measure.stacked is None
        ):
            warn_of_stacks(call, tree)
        norms = mesh_types.types_of(partial(measured, _measure_for_init(measure)), tree)
        rules_in_order = blocks.rules_of_norms(rules, norms, limit_in_errors)
        return first_state(norms, rules_in_order, limit_in_errors)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        grad_norm: PyTree = None,
        limit: PyTree = None,
        **extra_args: object,
    ) -> tuple[PyTree, ClipState]:
        wrong_names = sorted(OTHER_NAMES_IN_UPDATE["limit"] & extra_args.keys())
        if wrong_names:
            raise TypeError(
                f"{call}: update has no argument {wrong_names[0]!r}: the limit of one "
                "step is limit. Call update(grads, state, params, limit=...)."
            )
        # None, as for a clipper of optax, begins anew.
        if checks.can_begin_anew(call, state, rules):
            empty_state = state
            state = init(updates)
            # The memory of a rule that learns must not begin anew in every step.
            if jax.tree.leaves(state.memory):
                why = "learns from earlier norms"
                raise TypeError(checks.missing_state_error(call, empty_state, why))
        else:
            checks.check_state(call, state, ClipState)
        overrides = _checked_overrides(call, grad_norm, limit)
        tree = gradients_of(call, updates, params)
        if not jax.tree.leaves(tree):
            warn_of_integers(call, updates)
        # The weights are an argument of the program only if a rule reads them.
        weights = None
        if settings.needs_params:
            weights = weights_of(call, tree, params)
        arguments = settings, rule_numbers, eps, tree, state, weights, overrides
        if settings.has_schedule and isinstance(state.counts, Tracer):
            clipped, new_state = _update(*arguments)
        else:
            clipped, new_state = _update_jitted(*arguments)
        # Outside the jitted update: a compiled program cannot raise.
        if nonfinite == "raise":
            raise_nonfinite(call, measure, state, new_state, tree)
        return trees.put_back(clipped, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_overrides(call: str, grad_norm: PyTree, limit: PyTree) -> Overrides:
    """The norms and limits that `update` was given, in the form that jit takes."""
    for number in jax.tree.leaves(grad_norm):
        checks.check_given_norm(f"{call}: grad_norm", number)
    for number in jax.tree.leaves(limit):
        # The value of an array is not checked: that would wait for the device.
        if isinstance(number, Array):
            checks.check_real(f"{call}: limit", number)
        else:
            checks.check_limit(f"{call}: limit", number)
    return jax.tree.map(number_for_jit, Overrides(grad_norm, limit))


def _measure_for_init(measure: Any) -> Measure:
    """The measure without mesh axes, where none is bound.

    A state is often made outside the shard_map that it goes into.
    """
    # Norms of the user's and the spectral norm have no mesh_axes.
    mesh_axes = getattr(measure, "mesh_axes", None)
    # None and "auto" name no mesh axis, so the measure stays as it is. The first update
    # then finds the trace of `measured` that `init` made.
    if mesh_axes in (None, "auto") or mesh_types.manual_axes():
        return measure
    if not isinstance(mesh_axes, Prefix):
        return measure._replace(mesh_axes=None)
    # None for each part of the tree. Its structure must still fit the parameters.
    entries = tuple((path, None) for path, _ in mesh_axes.entries)
    return measure._replace(mesh_axes=Prefix(entries))


def _update(
    settings: Settings,
    rule_numbers: list[Any],
    eps: ArrayLike,
    tree: PyTree,
    state: ClipState,
    weights: PyTree,
    overrides: Overrides,
) -> tuple[PyTree, ClipState]:
    """One update: the clipped tree and the new state."""
    # 1. Measure
    norms = measured(settings.measure, tree)
    if overrides.grad_norm is not None:
        # XLA drops the norms that are not used then.
        values = _numbers_for_norms("grad_norm", overrides.grad_norm, norms, settings)
        norms = norms._replace(values=values)
    names = trees.unique_names(norms.paths)
    inputs = _rule_inputs(
        settings, rule_numbers, norms, names, state, weights, overrides
    )
    # With update(limit=inf) the user switches clipping off, so broken norms pass too.
    # They still count as broken, and nonfinite="raise" raises.
    inf_is_off = settings.inf_is_off or overrides.limit is not None
    # `_decide` is jitted. It needs no rules, and must not keep their schedules alive.
    settings_of_decide = settings._replace(inf_is_off=inf_is_off, rules_treedef=None)
    decide = partial(_decide, settings_of_decide, eps)
    # By leaf with units. All other leaves share a memory, with None for a name.
    memories: Memories = dict(zip((None, *state.names.unit_leaves), state.memory))
    outcomes: list[tuple[Block, Outcome]] = []
    roots: dict[str, Array] = {}
    # A clipper that only measures returns its input: even a product with 1 would be
    # written to a new array.
    changes_updates = overrides.limit is not None or not settings.only_measures
    for block in blocks_of(norms, names, state, settings.call):
        # 2. Limit
        memory = memories[block.leaf_of_units]
        limits = _limits_of_block(inputs, block, block.memory_of_block(memory))
        memories[block.leaf_of_units] = block.memory_with_block(memory, limits.memory)
        # 3. Shrink
        decision = decide(block.norm, limits.limit)
        outcomes.append((block, decision.outcome))
        if changes_updates:
            roots |= _roots_by_name(block, decision, limits.limit_of_name, decide)
    if changes_updates:
        roots_in_order = [roots[name] for name in names]
        zero_at_zero = settings.nonfinite == "zero"
        tree = times_squares(tree, norms, roots_in_order, zero_at_zero=zero_at_zero)
    return tree, next_state(state, outcomes, memories, decide)


# Jitted at module level, so that clippers with equal settings share one compilation,
# even when they are built again in every step.
_update_jitted = jax.jit(_update, static_argnums=0)


# ----------------------------------------------------------------------- 2. limits


class RuleInputs(NamedTuple):
    """The inputs that the rules of all blocks share."""

    # `limit_and_memory_of` of rules/_rule.py, jitted or not
    compute_limit: Callable[..., tuple[Array, PyTree]]
    step: Array
    rules: PyTree  # one rule, or a tree prefix of rules: fixed limits of parts
    rule_of_name: dict[str, Rule]  # of each norm
    weight_norm_of_name: dict[str, Array]  # empty where no rule needs them
    total: Array | None  # the norm of all norms
    given_limit_of_name: dict[str, Array] | None  # what `update` was given instead

    def limit_and_memory(
        self, rule: Rule, norm: Array, *, weight_norm: Array | None, memory: PyTree
    ) -> tuple[Array, PyTree]:
        """The limit of a norm, or of each norm of a vector, and the new memory."""
        step = mesh_types.narrowed_as(self.step, norm)
        extra_norms = extra_norms_of(rule, weight_norm, self.total)
        return self.compute_limit(rule, norm, memory, step, *extra_norms)


class Limits(NamedTuple):
    """The limits of a block, and what its rule remembers after this step."""

    limit: Array  # shaped like the norm of the block
    limit_of_name: dict[str, Array]  # the same limits, by the name of the norm
    memory: PyTree


def _rule_inputs(
    settings: Settings,
    rule_numbers: list[Any],
    norms: Norms,
    names: list[str],
    state: ClipState,
    weights: PyTree,
    overrides: Overrides,
) -> RuleInputs:
    """The inputs that the rules of all blocks share."""
    rules = settings.rules_treedef.unflatten(rule_numbers)
    rules_in_order = blocks.rules_of_norms(rules, norms, settings.limit_in_errors)
    weight_norm_of_name = {}
    if settings.needs_params:
        weight_norms = measured(settings.measure, weights).values
        weight_norm_of_name = dict(zip(names, weight_norms))
    given_limit_of_name = None
    if overrides.limit is not None:
        # Below 0 a limit counts as 0, as it does in a schedule.
        limits = _numbers_for_norms("limit", overrides.limit, norms, settings)
        limits = [jnp.maximum(limit, 0) for limit in limits]
        given_limit_of_name = dict(zip(names, limits))
    total = None
    if any(rule.needs_total for rule in rules_in_order):
        total = total_norm(norms)
    if settings.has_schedule:
        compute_limit = limit_and_memory_of
    else:
        compute_limit = limit_and_memory_of_jitted
    return RuleInputs(
        compute_limit=partial(compute_limit, argument=settings.limit_in_errors),
        step=state.step,
        rules=rules,
        rule_of_name=dict(zip(names, rules_in_order)),
        weight_norm_of_name=weight_norm_of_name,
        total=total,
        given_limit_of_name=given_limit_of_name,
    )


def _limits_of_block(inputs: RuleInputs, block: Block, memory: PyTree) -> Limits:
    """The limits of a block: those that `update` was given, or those of the rules.
    `memory` is what the rule of the block remembers.
    """
    if isinstance(inputs.rules, Rule):
        limits = _limits_by_one_rule(inputs, block, memory)
    else:
        # The rules of parts remember nothing.
        limit_of_name = _limits_norm_by_norm(inputs, block)
        limits = Limits(block.as_array(limit_of_name), limit_of_name, memory)
    if inputs.given_limit_of_name is None:
        return limits
    # A rule learns also in a step whose limit was given.
    limit = block.as_array(inputs.given_limit_of_name)
    return Limits(limit, inputs.given_limit_of_name, limits.memory)


def _limits_by_one_rule(inputs: RuleInputs, block: Block, memory: PyTree) -> Limits:
    """The limits of a block, by the rule of all norms."""
    rule = inputs.rules
    if block.is_vector:
        rule = blocks.rule_of_vector(rule, [*block.norm_of_name.values()])
    weight_norm = None
    if rule.needs_params:
        weight_norm = block.as_array(inputs.weight_norm_of_name)
    memory = _memory_typed_as(block.norm, memory)
    limit, memory = inputs.limit_and_memory(
        rule, block.norm, weight_norm=weight_norm, memory=memory
    )
    remembers = len(jax.tree.leaves(memory)) > 0
    if rule.needs_params and block.is_vector and not remembers:
        # On a TPU `roots_of_norms` computes the root of each leaf again, from its own
        # norm and limit, so that no leaf waits for all others. It says what that gains.
        # A limit taken from the vector would wait for the weight norms of all leaves,
        # so each limit is computed a second time. On other platforms nothing uses these
        # second limits, and XLA removes them.
        limit_of_name = _limits_norm_by_norm(inputs, block)
    else:
        limit_of_name = block.by_name(limit)
    return Limits(limit, limit_of_name, memory)


def _limits_norm_by_norm(inputs: RuleInputs, block: Block) -> dict[str, Array]:
    """The limit of each norm of a block, by rules that remember nothing."""
    limit_of_name = {}
    for name, norm in block.norm_of_name.items():
        rule = inputs.rule_of_name[name]
        weight_norm = inputs.weight_norm_of_name.get(name)
        limit, _ = inputs.limit_and_memory(
            rule, norm, weight_norm=weight_norm, memory=()
        )
        limit_of_name[name] = limit
    return limit_of_name


def _memory_typed_as(norm: Array, memory: PyTree) -> PyTree:
    """The memory of a rule, typed as the norm: along which mesh axes its arrays vary,
    and how a mesh splits them.
    """
    # A state that was made outside jax.set_mesh has no mesh in its type.
    norm_type = jax.typeof(norm)
    memory = jax.tree.map(
        lambda array: mesh_types.resharded_as(array, norm_type), memory
    )
    # In shard_map a memory taken out of a vector has the type of the vector's most
    # varying norm.
    return mesh_types.narrowed_as(memory, norm)


def _numbers_for_norms(
    argument: str, tree: PyTree, norms: Norms, settings: Settings
) -> list[Array]:
    """Norms or limits of the user's, checked, in the order, dtype and sharding of the
    norms of the step.
    """
    if isinstance(tree, Norms):
        # `adaclip` gives them as they are. A pytree class of the user's may check the
        # shapes of its arrays, and refuse to hold norms.
        numbers = tree.values
    else:
        # The user gives them in the structure that the norm functions return. Shapes
        # are compared as lists: a pytree class of the user's may have no `==`.
        norm_types = jax.eval_shape(norms.local_values)
        wanted_shapes = [norm_type.shape for norm_type in norm_types]
        shapes = [jnp.shape(number) for number in jax.tree.leaves(tree)]
        if jax.tree.structure(tree) != norms.treedef or shapes != wanted_shapes:
            raise ValueError(
                f"{settings.call}: {argument} must have the structure and shapes of "
                "the norms that it measures, "
                f"{norms.treedef.unflatten(wanted_shapes)}, got "
                f"{jax.tree.map(jnp.shape, tree)}."
            )
        numbers = norms.gathered(jax.tree.leaves(tree))
    typed_numbers = []
    for number, norm in zip(numbers, norms.values, strict=True):
        # In the dtype and sharding of the measured norm, so that the state keeps its
        # types.
        number = jnp.asarray(number).astype(norm.dtype)
        typed_numbers.append(mesh_types.resharded_as(number, jax.typeof(norm)))
    return typed_numbers


# ----------------------------------------------------------------------- 3. shrink


# Traced once for all norms of one shape.
@partial(traced_once, static_argnums=0)
def _decide(settings: Settings, eps: ArrayLike, norm: Array, limit: Array) -> Decision:
    """What becomes of norms under their limits: the root of each factor, and what the
    state keeps.
    """
    is_sound = are_sound(norm, limit)
    norm_with_eps = norm + jnp.asarray(eps).astype(norm.dtype)
    # With the shrink `hard`: min(norm_with_eps, limit).
    new_norm = shrunk_by(settings.shrink, norm_with_eps, limit, settings.call)
    if not is_ours(settings.shrink):
        # A function of the user's may return NaN, such as sqrt(limit - norm).
        is_sound = is_sound & (new_norm >= 0) & (new_norm < jnp.inf)
    # The new norm of a broken norm is NaN, or 0 under "zero". The updates follow.
    new_norm_if_broken = 0.0 if settings.nonfinite == "zero" else jnp.nan
    new_norm = jnp.where(is_sound, new_norm, new_norm_if_broken)
    # Under a limit of inf that the user set, updates pass untouched, NaN included: both
    # norms become 1, so the factor is 1. Only nonfinite="raise" still raises. Under a
    # rule that returns inf because it has no limit yet, a broken step does not pass.
    if settings.inf_is_off:
        is_off = limit == jnp.inf
        new_norm = jnp.where(is_off, 1.0, new_norm)
        norm_with_eps = jnp.where(is_off, 1.0, norm_with_eps)
    root, factor = factor_between(norm_with_eps, new_norm)
    # A norm of 0 counts as not clipped, even where eps or the shrink changes it: the
    # updates stay zeros.
    was_zero = is_sound & (norm == 0)
    clipped = is_sound & (new_norm != norm_with_eps) & ~was_zero
    outcome = Outcome(
        norm=norm,
        limit=limit,
        factor=jnp.where(was_zero, 1.0, factor),
        clipped=clipped,
        is_sound=is_sound,
        units_clipped=clipped.astype(norm.dtype),
    )
    return Decision(root, outcome)


def _roots_by_name(
    block: Block, decision: Decision, limit_of_name: dict[str, Array], decide: Decide
) -> dict[str, Array]:
    """The root of the factor of each norm of a block."""
    if not block.is_vector:
        return block.by_name(decision.root_of_factor)
    norms = list(block.norm_of_name.values())
    limits = [limit_of_name[name] for name in block.norm_of_name]

    def root_of(norm: Array, limit: Array) -> Array:
        return decide(norm, limit).root_of_factor

    roots = roots_of_norms(decision.root_of_factor, norms, limits, root_of)
    return dict(zip(block.norm_of_name, roots))


# --------------------------------------------------------------- for other modules


def clip_once(
    tree: PyTree,
    limit: ArrayLike | None,
    measure: Measure,
    *,
    call: str,
    limit_argument: str,
    grad_norm: PyTree = None,
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
    if is_function(limit) or is_rule(limit):
        raise TypeError(
            f"{call}: {limit_argument} must be a number, got {shown(limit)}. A "
            "schedule or a rule needs the state of a transformation, such as "
            "optaxclip.clip_by_global_norm(limit)."
        )
    # Built in each call. Settings are compared by value, so nothing compiles anew.
    clipper = make_clipper(
        measure, limit, call=call, limit_argument=limit_argument, **options
    )
    # A state may hold a limit of inf, at which jax_debug_infs would raise.
    with jax.debug_infs(False):
        # A fixed limit remembers nothing, so each call begins with a new state.
        state: Any = clipper.init(tree)
        clipped, state = clipper.update(tree, state, grad_norm=grad_norm)
    return clipped, state.norm


def without_overrides(extra_args: Mapping[str, object]) -> dict[str, Any]:
    """The extra arguments of an `update`, without the norms and limits that a chain
    hands to all of its links.
    """
    return {
        name: value
        for name, value in extra_args.items()
        if name not in Overrides._fields
    }
