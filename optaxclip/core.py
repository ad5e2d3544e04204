"""The kernel: measure, threshold, shrink.

    measure    how long is it?        updates -> norms         a tree prefix of the
                                      updates: one scalar, one per leaf, one per unit
    threshold  how long may it be?    norm, memory -> limit    a number, a schedule, a
                                      share of the weights, or a rule that learns
    shrink     what if it is longer?  norm, limit -> norm      how long it is made

`clip_by` joins the three into an optax transformation and does the rest once for all of
them: zero, NaN, counters, state. Updates are multiplied in `optaxclip.factors`.

Under jit the updates are read once for the norm and multiplied where the optimizer
reads them: no copy of them exists. Without jit the whole update is one compiled call,
which is found again even when `optax.inject_hyperparams` builds the clipper anew in
every step.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from . import prefix, sharding
from .arguments import (
    broadcasts_to,
    call_of,
    check_nonfinite,
    check_number,
    check_params,
    check_state,
    held_in,
)
from .factors import factor_of, multiply, scale_of, zero_where_zero
from .leaves import measured, measured_as, with_unmeasured
from .norms import Measure
from .prefix import is_none
from .shrinks import Shrink, hard
from .thresholds import Threshold, is_rule, rules_of


class ClipState(NamedTuple):
    """What a clipper knows after a step. `norm` and the fields below it are trees with
    one entry for each norm; a norm has shape [] unless units or stacked layers are
    measured.
    """

    step: jax.Array  # int32[]: updates seen
    norm: Any  # float32[norm]: the norm before clipping, at the last step
    limit: Any  # float32[norm]: what it was held against
    # float32[norm]: what the updates were multiplied by: 1 where nothing was done, 0
    # only where they were made 0. Held within the normal numbers of its dtype.
    scale: Any
    clipped: (
        Any  # int32[norm]: steps that changed the updates, non-finite ones left out
    )
    nonfinite: Any  # int32[norm]: steps whose norm was NaN or inf
    memory: Any  # the threshold's, for each norm


def clip_by(
    measure: Callable[[Any], Any],
    threshold: Any,
    shrink: Shrink | None = None,
    *,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    argument: str = "clip_by: threshold",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper of a measure, a threshold and a shrink.

    Args:
      measure: from a tree to its norms, such as `global_norm`, `tensor_norm`,
        `unit_norm`, or any function whose result is a tree prefix of its argument.
      threshold: a `Threshold`, a number, an array, a schedule, None for no limit, or a
        tree prefix of these.
      shrink: from norm and limit to the norm that the updates get: `hard` (None too),
        `smooth()`, `drop`, `normalize`, or your own. What returns the norm itself
        leaves the updates bit for bit.
      eps: added to the norm before it is compared and divided by; 1e-6 gives torch's
        numbers. At least 0.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes all
        that was measured together NaN, so that a broken step is seen and never half
        applied; "zero" makes it zero; "raise" raises FloatingPointError outside jit and
        is a `checkify.check` inside. Where the limit was set to inf or None nothing is
        touched.
      argument: how error messages name the call and its limit.

    Returns:
      A transformation with a `ClipState`. Its `update` also takes `grad_norm=`: norms
      measured elsewhere, in the structure that `measure` returns.

    Example:
      >>> import optaxclip
      >>> clipper = optaxclip.clip_by(optaxclip.global_norm, 1.0, optaxclip.smooth())
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(optaxclip.global_norm(updates).round(4))
      0.8333
    """
    call = call_of(argument)
    check_nonfinite(call, nonfinite)
    check_number(f"{call}: eps", eps)
    threshold = rules_of(threshold, argument)

    def init(params: Any) -> ClipState:
        here = (
            measure
            if sharding.inside() or not isinstance(measure, Measure)
            else measure.without_devices()
        )
        norms = sharding.types_of(lambda tree: _norms_of(here, measured(tree)), params)

        def filled(value, dtype=None):
            return jax.tree.map(
                lambda norm: sharding.typed_as(
                    jnp.full(norm.shape, value, dtype or norm.dtype), norm
                ),
                norms,
            )

        treedef = jax.tree.structure(norms)
        rules = _rules(threshold, norms, argument)
        memory = [
            jax.tree.map(partial(_beside, norm), rule.init(norm))
            for rule, norm in zip(rules, jax.tree.leaves(filled(0)))
        ]
        return ClipState(
            step=jnp.zeros((), jnp.int32),
            norm=filled(0),
            limit=filled(jnp.inf),
            scale=filled(1),
            clipped=filled(0, jnp.int32),
            nonfinite=filled(0, jnp.int32),
            memory=jax.tree.unflatten(treedef, memory),
        )

    def update(
        updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        check_state(call, state, ClipState)
        tree = measured(updates)
        weights = None if params is None else measured_as(tree, params)
        clipped, new_state = _clip(
            measure,
            shrink or hard,
            nonfinite,
            argument,
            threshold,
            eps,
            tree,
            state,
            weights,
            grad_norm,
        )
        if nonfinite == "raise":
            _raise_nonfinite(call, measure, new_state.norm, tree)
        return with_unmeasured(clipped, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def ask(
    rule: Threshold,
    norm: jax.Array,
    memory: Any,
    step: jax.Array,
    params_norm: Callable[[], jax.Array] | None = None,
    *,
    argument: str,
    signed: bool = False,
) -> tuple[jax.Array, Any]:
    """What a rule says of one norm: (limit, memory). The limit has the norm's dtype and
    shape and is at least 0; the memory has not learned from a norm that is NaN, inf or
    0.

    `signed`: it is no norm but a loss, which may well be 0 or negative, and so may its
    limit.
    """
    limit, new = rule.update(
        lax.stop_gradient(norm), memory, step, params_norm or _no_params
    )
    limit = _as_limit(limit, norm, argument, signed)
    if not jax.tree.leaves(memory):
        return limit, memory
    told = jnp.isfinite(norm) if signed else jnp.isfinite(norm) & (norm > 0)
    return limit, keep_where(told & ~jnp.isnan(limit), new, memory)


@partial(jax.jit, static_argnums=0)
def _norms_of(measure: Callable[[Any], Any], tree: Any) -> Any:
    """The norms of a tree. Jitted, since it is traced once then for the state, the
    updates and the weights, which have the same shapes.
    """
    return measure(tree)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _clip(
    measure,
    shrink,
    nonfinite,
    argument,
    threshold,
    eps,
    updates,
    state,
    params,
    grad_norm,
):
    """One step. It hangs on the module, not on the clipper, so that all clippers of
    equal make share its compilations.
    """
    call = call_of(argument)
    norms = (
        _norms_of(measure, updates)
        if grad_norm is None
        else _given(grad_norm, measure, updates, call)
    )
    slots, treedef = jax.tree.flatten(norms, is_leaf=is_none)
    rules = _rules(threshold, norms, argument)
    memories = _memories(rules, jax.tree.leaves(norms))
    try:
        columns = [treedef.flatten_up_to(field) for field in state[1:]]
    except ValueError as error:
        raise ValueError(
            f"{call}: state was made for norms of the structure "
            f"{jax.tree.structure(state.norm)}, but those of the updates have "
            f"{treedef}."
        ) from error
    rules = iter(zip(rules, memories, _params_norms(measure, params, norms, call)))
    factors, fields = [], []
    for norm, *old in zip(slots, *columns):
        if norm is None:  # nothing to measure here in this step: what is known stays
            factors.append(None)
            fields.append(old)
        else:
            rule, memory, params_norm = next(rules)
            _check_old(norm, memory, old[0], old[-1], call)
            limit, memory = ask(
                rule, norm, old[-1], state.step, params_norm, argument=argument
            )
            factor, new = _decide(
                shrink, nonfinite, bool(jax.tree.leaves(memory)), eps, norm, limit, old
            )
            factors.append(factor)
            fields.append([*new, memory])

    factors = treedef.unflatten(factors)
    updates = multiply(updates, factors)
    if nonfinite == "zero":
        updates = zero_where_zero(updates, factors)
    trees = (
        [treedef.unflatten(field) for field in zip(*fields)] if fields else state[1:]
    )
    return updates, ClipState(jnp.asarray(optax.safe_increment(state.step)), *trees)


def _memories(rules: list[Threshold], norms: list[jax.Array]) -> list[Any]:
    """The form of what each rule remembers. The length of a window is not compared: in
    a compiled step it is a number of the program.
    """
    begins = jax.tree.map(
        lambda leaf: np.ones(jnp.shape(leaf), jnp.result_type(leaf)),
        [rule.init for rule in rules],
    )
    return jax.eval_shape(
        lambda norms: [begin(norm) for begin, norm in zip(begins, norms)], norms
    )


def _check_old(
    norm: jax.Array, wanted: Any, old_norm: Any, memory: Any, call: str
) -> None:
    """Raises ValueError for a state of other updates or of another rule."""
    if old_norm is None or jnp.shape(old_norm) != norm.shape:
        made_for = (
            "no norm" if old_norm is None else f"norms of shape {jnp.shape(old_norm)}"
        )
        raise ValueError(
            f"{call}: state was made for {made_for} where the updates have norms of "
            f"shape {norm.shape}."
        )
    if jax.tree.structure(wanted) != jax.tree.structure(memory):
        wanted, found = (
            jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
            for tree in (wanted, memory)
        )
        raise ValueError(
            f"{call}: state must hold what its rule remembers, of the form {wanted}, "
            f"got {found}."
        )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _decide(shrink, nonfinite, learns, eps, norm, limit, old):
    """What happens to one norm: (its factor, its fields of the state). Only the
    quotient of before and after counts; where nothing is done both are equal. Jitted,
    since it is traced once then for all norms of one shape.
    """
    _, old_limit, old_scale, clipped, nonfinite_count, _ = old
    finite = jnp.isfinite(norm)
    # An infinite limit that was set only measures; a rule that has none yet still lets
    # no broken step through.
    off = (limit == jnp.inf) & finite if learns else limit == jnp.inf
    long = norm + jnp.asarray(eps).astype(norm.dtype)
    short = jnp.where(
        finite, shrink(long, limit), 0.0 if nonfinite == "zero" else jnp.nan
    )
    before, after = jnp.where(off, 1.0, long), jnp.where(off, 1.0, short)
    changed = finite & (after != before)
    new = [
        norm,
        limit.astype(old_limit.dtype),
        scale_of(before, after).astype(old_scale.dtype),
        clipped + changed.astype(jnp.int32),
        nonfinite_count + (~finite).astype(jnp.int32),
    ]
    return factor_of(before, after), new


def _as_limit(limit: Any, norm: jax.Array, argument: str, signed: bool) -> jax.Array:
    """The limit in the norm's dtype and shape. A negative one of a norm, which only a
    traced program can bring here, counts as 0.
    """
    if not broadcasts_to(jnp.shape(limit), norm.shape):
        raise ValueError(
            f"{argument} must be a number for each norm: its shape {jnp.shape(limit)} "
            f"does not fit norms of shape {norm.shape}."
        )
    return _made_like(norm, held_in(norm.dtype, limit), None if signed else 0)


@partial(jax.jit, static_argnums=2)
def _made_like(norm: jax.Array, number: Any, least: float | None) -> jax.Array:
    number = number if least is None else jnp.maximum(number, least)
    return sharding.typed_as(jnp.broadcast_to(number, norm.shape), jax.typeof(norm))


@jax.jit
def keep_where(wanted: jax.Array, new: Any, old: Any) -> Any:
    """The new state where it is wanted, element by element of a norm, and the old one
    elsewhere, in the old dtypes.
    """

    def kept(new: Any, old: jax.Array) -> jax.Array:
        new = sharding.split_as(jnp.asarray(new).astype(old.dtype), jax.typeof(old))
        return jnp.where(
            wanted.reshape(wanted.shape + (1,) * (new.ndim - wanted.ndim)), new, old
        )

    return jax.tree.map(kept, new, old)


def _rules(threshold: Any, norms: Any, argument: str) -> list[Threshold]:
    """The rule for each norm."""
    return prefix.lookup(prefix.freeze(threshold, is_rule), norms, argument)


def _params_norms(
    measure: Any, params: Any, norms: Any, call: str
) -> list[Callable[[], jax.Array]]:
    """For each norm, a function that gives the weights' norm at the same place. They
    are measured only if some rule asks.
    """

    @cache
    def measure_params() -> list[jax.Array]:
        check_params(call, params)
        return jax.tree.leaves(_norms_of(measure, params))

    return [
        partial(lambda place: measure_params()[place], place)
        for place in range(len(jax.tree.leaves(norms)))
    ]


def _given(grad_norm: Any, measure: Any, updates: Any, call: str) -> Any:
    """Norms measured elsewhere, once they are seen to fit."""
    wanted = sharding.types_of(partial(_norms_of, measure), updates)
    fits = jax.tree.structure(grad_norm) == jax.tree.structure(wanted)
    if not fits or not all(
        jnp.shape(given) == norm.shape
        for given, norm in zip(jax.tree.leaves(grad_norm), jax.tree.leaves(wanted))
    ):
        raise ValueError(
            f"{call}: grad_norm must have the structure and shapes of the norms that "
            f"it measures, {wanted}, got {grad_norm}."
        )
    return jax.tree.map(
        lambda given, norm: sharding.split_as(
            jnp.asarray(given).astype(norm.dtype), norm
        ),
        grad_norm,
        wanted,
    )


def _raise_nonfinite(call: str, measure: Any, norms: Any, updates: Any) -> None:
    finite = [jnp.all(jnp.isfinite(norm)) for norm in jax.tree.leaves(norms)]
    order = dict(getattr(measure, "options", ())).get("ord") or 2
    text = f"{call}: the norm of order {order} of the updates is not finite"
    if any(isinstance(x, Tracer) for x in finite):
        from jax.experimental import checkify

        checkify.check(jnp.all(jnp.stack(finite)), text)
    elif not all(finite):
        counts = [
            (prefix.name(path), int(jnp.sum(~jnp.isfinite(x))), x.size)
            for path, x in jax.tree_util.tree_flatten_with_path(updates)[0]
        ]
        guilty = "; ".join(
            f"{name!r}: {count} of {size} values are NaN or inf"
            for name, count, size in counts
            if count
        )
        raise FloatingPointError(
            f"{text}. "
            f"{guilty or 'All values are finite: the norm is too large for its dtype.'}"
        )


def _beside(norm: jax.Array, memory: Any) -> jax.Array:
    return sharding.typed_as(jnp.asarray(memory), jax.typeof(norm))


def _no_params() -> jax.Array:
    raise ValueError("There are no weights here to compare with.")
