"""The kernel: measure, limit, shrink.

    measure    how long is it?        updates -> norms
    limit      how long may it be?    norms, memory -> limits
    shrink     what if it is longer?  norms, limits -> new norms

`make_clipper` joins the three into an optax transformation and does the rest once for
all of them: zero, NaN, counters, state.

Under jit the updates are read once for the norms, and XLA multiplies them in the loop
in which the optimizer reads them. Without jit the whole update is one compiled call.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from . import _blocks as blocks
from . import _checks as checks
from . import _mesh as mesh
from . import _trees as trees
from ._blocks import Block, BlockLimits
from ._checks import Nonfinite, shown
from ._exported import PLACEHOLDER
from ._factors import factor_between, multiply, separate_roots, shrunk_by
from ._names import OF_UPDATE
from ._norms import GlobalNorm, Measure, Norms, measured, norm_of_norms
from ._packed import PyTree
from ._reports import Decide, Decision, next_state
from ._state import ClipState, state_of_placeholder
from .rules._limits import check_limits_of_parts, check_one_limit, rule_of, rules_of
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
    # Whether a rule has a schedule. The cache of a jit keeps it alive, with all that it
    # refers to, such as a model. So under a jit of the user's we use none of ours.
    has_schedule: bool


class Given(NamedTuple):
    """Norms and limits that `update` was given, in the place of its own."""

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
        # axis has a name. Norms of the user's and the spectral norm have no mesh_axes.
        mesh_axes = getattr(measure, "mesh_axes", None)
        is_table = isinstance(mesh_axes, trees.Prefix)
        has_names = not is_table and mesh_axes not in ("auto", None)
        if has_names and not mesh.manual_axes():
            first_measure = first_measure._replace(mesh_axes=None)
        tree = trees.clipped_leaves(params, call)
        norms = mesh.types_of(partial(measured, first_measure), tree)
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
            empty_state = state
            state = init(updates)
            # The memory of a rule that learns must not begin anew in every step.
            if jax.tree.leaves(state.memory):
                why = "learns from earlier norms"
                raise TypeError(checks.no_state(call, empty_state, why))
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
    limits = _limits_of_blocks(settings, numbers, norms, state, params, given.limit)
    # 3. Shrink
    learns = bool(jax.tree.leaves(state.memory))
    # Without the rules, so that all clippers share the programs of `_decide`.
    decide = partial(_decide, settings._replace(rules=None), learns, eps)
    decisions = [decide(x.norm, x.limit) for x in limits]
    # A product with 1 is a new array to XLA, which the next clipper of a chain would
    # read again.
    if given.limit is not None or not settings.no_limit:
        roots: list[Any] = [None] * len(norms.values)
        for of_block, decision in zip(limits, decisions):
            roots_of_block = _roots(of_block, decision, decide)
            for index, root in zip(of_block.block.indices, roots_of_block):
                roots[index] = root
        tree = multiply(tree, norms, roots, zero=settings.nonfinite == "zero")
    return tree, next_state(state, norms, limits, decisions, decide)


# Jitted at module level, so that clippers with equal settings share one compilation,
# even when they are built again in every step.
_update_jitted = jax.jit(_update, static_argnums=0)


# ----------------------------------------------------------------------- 2. limits


def _limits_of_blocks(
    settings: Settings,
    numbers: list[Any],
    norms: Norms,
    state: ClipState,
    params: PyTree,
    given_limit: PyTree,
) -> list[BlockLimits]:
    """The limits of each block, and what the rule remembers after this step."""
    rules = settings.rules.unflatten(numbers)
    names = state.names.layers
    rule_of_norm = blocks.rules_of_norms(rules, norms, settings.argument, names)
    weight_norms = None
    if settings.with_params:
        weight_norms = measured(settings.measure, params).values
    total = norm_of_norms(norms) if settings.with_total else None
    ask_rule = limit_of if settings.has_schedule else limit_of_jitted

    def ask(rule: Rule, norm: Array, weight: Any, memory: PyTree) -> tuple[Array, Any]:
        step = mesh.narrowed_as(state.step, norm)
        further = further_norms(rule, weight, total)
        return ask_rule(rule, norm, memory, step, *further, argument=settings.argument)

    def ask_separately(block: Block) -> list[Array]:
        """The limit of each norm of a block, by a rule that remembers nothing."""
        limits = []
        for index in block.indices:
            weight = None if weight_norms is None else weight_norms[index]
            limit, _ = ask(rule_of_norm[index], norms.values[index], weight, ())
            limits.append(limit)
        return limits

    given_limits = None
    if given_limit is not None:
        given_limits = _fitted("limit", given_limit, norms, settings)
    memory_of_unit_leaf = dict(zip((None, *state.names.units), state.memory))
    limits_of_blocks = []
    for block in blocks.blocks_of(norms, state, settings.call):
        norm = block.joined(norms.values)
        memory = memory_of_unit_leaf[block.unit_leaf]
        if isinstance(rules, Rule):
            memory = mesh.narrowed_as(blocks.memory_of_block(memory, block), norm)
            rule = blocks.rule_of_block(rules, block)
            weight = None if weight_norms is None else block.joined(weight_norms)
            limit, memory = ask(rule, norm, weight, memory)
            if rule.needs_params and block.is_vector and not jax.tree.leaves(memory):
                # `separate_roots` takes these on a TPU, where no leaf then waits
                # until all weights are measured. Elsewhere XLA drops them.
                limit_of_norms = ask_separately(block)
            else:
                limit_of_norms = block.taken_apart(limit)
        else:
            # Limits for parts of the tree, which remember nothing.
            limit_of_norms = ask_separately(block)
            limit = block.together(limit_of_norms)
        if given_limits is not None:
            # Below 0 a limit counts as 0, as it does in a schedule.
            limit_of_norms = []
            for index in block.indices:
                limit_of_norms.append(jnp.maximum(given_limits[index], 0))
            limit = block.together(limit_of_norms)
        limits_of_blocks.append(BlockLimits(block, norm, limit, limit_of_norms, memory))
    return limits_of_blocks


def _fitted(
    argument: str, tree: PyTree, norms: Norms, settings: Settings
) -> list[Array]:
    """Norms or limits of the user's, once they are seen to fit."""
    if isinstance(tree, Norms):
        # From within the library, such as `adaclip`. As a tree they would be in nodes
        # of the user's, and one that checks its arrays refuses norms.
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
        numbers = norms.gathered(jax.tree.leaves(tree))
    fitted = []
    for number, norm in zip(numbers, norms.values):
        # In the dtype and sharding of what was measured, so that the state keeps its
        # types.
        fitted.append(mesh.split_as(number.astype(norm.dtype), jax.typeof(norm)))
    return fitted


# ----------------------------------------------------------------------- 3. shrink


# Jitted, so that it is traced once for all norms of one shape. Inlined, since XLA fuses
# nothing across a call.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _decide(
    settings: Settings, learns: bool, eps: Any, norm: Array, limit: Array
) -> Decision:
    is_sound = jnp.isfinite(norm) & (limit == limit)
    old_norm = norm + jnp.asarray(eps).astype(norm.dtype)
    # With the shrink `hard`: min(old_norm, limit).
    new_norm = shrunk_by(settings.shrink, old_norm, limit, settings.call)
    # NaN makes the root NaN, and the updates with it.
    norm_of_broken = 0.0 if settings.nonfinite == "zero" else jnp.nan
    # A rule that has no limit yet, and gives inf, still lets no broken step through.
    new_norm = jnp.where(is_sound, new_norm, norm_of_broken)
    if not learns:
        # A limit of inf that the user set only measures: the factor of equal norms is
        # 1, also where the norm is NaN.
        is_off = limit == jnp.inf
        new_norm = jnp.where(is_off, 1.0, new_norm)
        old_norm = jnp.where(is_off, 1.0, old_norm)
    root, factor = factor_between(old_norm, new_norm)
    # Zeros stay zeros, whatever eps or the shrink make of their norm.
    is_zero = is_sound & (norm == 0)
    return Decision(
        root=root,
        factor=jnp.where(is_zero, 1.0, factor),
        clipped=is_sound & (new_norm != old_norm) & ~is_zero,
        is_sound=is_sound,
    )


def _roots(limits: BlockLimits, decision: Decision, decide: Decide) -> list[Array]:
    """The root of each norm of a block."""
    block = limits.block
    if not block.is_vector:
        return [decision.root]
    # A CPU and a GPU take them out of the vector, and a TPU decides each anew.
    return separate_roots(decision.root, block.norms, limits.limit_of_norms, decide)


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
