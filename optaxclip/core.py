"""The kernel: measure, threshold, shrink.

    measure    how long is it?        updates -> norms         a tree prefix of the updates: one scalar, one per leaf, one per unit
    threshold  how long may it be?    norm, memory -> limit    a number, a schedule, a share of the weights, or a rule that learns
    shrink     what if it is longer?  norm, limit -> norm      how long it is made

`clip_by` joins the three into an optax transformation and does the rest once for all of them: precision, zero, NaN, counters, state. `rescale` is the
one place where updates are multiplied.

Under jit the updates are read once for the norm and multiplied where the optimizer reads them: no copy of them exists. Without jit the whole update
is one compiled call, which is found again even when `optax.inject_hyperparams` builds the clipper anew in every step.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.experimental import checkify
from jax.tree_util import Partial

from . import prefix
from .arguments import broadcasts_to, check_nonfinite, check_number
from .norms import measured


class Measure(NamedTuple):
    """A norm function with its options, called on a tree. Two with the same content are equal, which is how a compiled update is found again."""

    norm: Callable[..., Any]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, tree: Any) -> Any:
        return self.norm(tree, **dict(self.options))


class Threshold(NamedTuple):
    """A rule for how long ONE norm may be. The kernel uses it for every norm that was measured.

    init(norm) -> memory: what the rule remembers before the first step; its arrays have the norm's shape, followed by axes of their own.
    update(norm, memory, step, params_norm) -> (limit, memory): `step` is an int32 scalar that counts from 0, `params_norm()` gives the norm of the
      weights at the same place. A norm that is not finite is never remembered: the kernel keeps the old memory then.

    Numbers that may change from build to build belong in a `jax.tree_util.Partial`, so that a changed number does not mean a new compilation.
    """

    init: Callable[[jax.Array], Any]
    update: Callable[[jax.Array, Any, jax.Array, Callable[[], jax.Array]], tuple[Any, Any]]


class ClipState(NamedTuple):
    """What a clipper knows after a step. `norm` and the fields below it are trees with one entry for each norm; a norm has shape [] unless units or stacked layers are measured."""

    step: jax.Array  # int32[]: updates seen
    norm: Any  # float32[norm]: the norm before clipping, at the last step
    limit: Any  # float32[norm]: what it was held against
    scale: Any  # float32[norm]: what the updates were multiplied by; 1 where nothing was done
    clipped: Any  # int32[norm]: steps that changed the updates, non-finite ones left out
    nonfinite: Any  # int32[norm]: steps whose norm was NaN or inf
    memory: Any  # the threshold's, for each norm


def hard(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """Clipping as everyone means it: min(norm, limit)."""
    return jnp.minimum(norm, limit)


def clip_by(
    measure: Callable[[Any], Any],
    threshold: Any,
    shrink: Callable[[jax.Array, jax.Array], jax.Array] = hard,
    *,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    call: str = "clip_by",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper of a measure, a threshold and a shrink.

    Args:
      measure: from a tree to its norms, such as `global_norm`, `tensor_norm`, `unit_norm`, or any function whose result is a tree prefix of its argument.
      threshold: a `Threshold`, or a tree prefix of them.
      shrink: from norm and limit to the norm that the updates get. Below or at the limit it must return the norm itself.
      eps: added to the norm before it is compared and divided by; 1e-6 gives torch's numbers. At least 0.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes all that was measured together NaN, so that a broken step is seen and never half applied;
        "zero" makes it zero; "raise" raises FloatingPointError outside jit and is a `checkify.check` inside. Where the limit is inf nothing is touched.
      call: the name that error messages quote.

    Returns:
      A transformation with a `ClipState`. Its `update` also takes `grad_norm=`: norms measured elsewhere, in the structure that `measure` returns.

    Example:
      >>> import optaxclip
      >>> clipper = optaxclip.clip_by(optaxclip.global_norm, optaxclip.constant(1.0), lambda norm, limit: norm / (1 + norm / limit))
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(optaxclip.global_norm(updates).round(4))
      0.8333
    """
    check_nonfinite(call, nonfinite)
    check_number(f"{call}: eps", eps)
    threshold = jax.tree.map(_as_pytree, threshold, is_leaf=_is_threshold)

    def init(params: Any) -> ClipState:
        norms = jax.eval_shape(lambda tree: measure(measured(tree)), params)

        def filled(value, dtype=None):
            return jax.tree.map(lambda norm: jnp.full(norm.shape, value, dtype or norm.dtype), norms)

        zeros, treedef = filled(0), jax.tree.structure(norms)
        rules = _rules(threshold, norms, call)
        memory = [rule.init(norm) for rule, norm in zip(rules, jax.tree.leaves(zeros))]
        return ClipState(
            step=jnp.zeros((), jnp.int32),
            norm=zeros,
            limit=filled(jnp.inf),
            scale=filled(1),
            clipped=filled(0, jnp.int32),
            nonfinite=filled(0, jnp.int32),
            memory=jax.tree.unflatten(treedef, memory),
        )

    def update(updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any) -> tuple[Any, Any]:
        tree = measured(updates)
        weights = None if params is None else jax.tree.map(lambda u, p: None if u is None else p, tree, params, is_leaf=_is_none)
        clipped, new_state = _clip(measure, shrink, nonfinite, call, threshold, eps, tree, state, weights, grad_norm)
        if nonfinite == "raise":
            _raise_nonfinite(call, measure, new_state.norm, tree)
        return jax.tree.map(lambda u, c: u if c is None else c, updates, clipped, is_leaf=_is_none), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def rescale(updates: Any, norms: Any, new_norms: Any) -> Any:
    """Stretches every part of `updates` from its norm to a new one.

    Args:
      updates: a pytree of arrays.
      norms: a tree prefix of `updates`: their norms. None in it leaves a part alone.
      new_norms: what the norms become, in the same structure.

    Returns:
      The updates in their own dtypes, multiplied in the norm's dtype. Where both norms are equal, bit for bit the input; where the new one is NaN, all NaN.
      The result is never longer than the new norm but for the rounding to the leaf's dtype.
    """

    def part(norm: Any, new_norm: Any, subtree: Any) -> Any:
        if norm is None:
            return subtree
        factors = _factors(norm, new_norm)
        return jax.tree.map(lambda x, seen: x if seen is None else _stretch(seen, *factors), subtree, measured(subtree), is_leaf=_is_none)

    return jax.tree.map(part, norms, new_norms, updates, is_leaf=_is_none)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _clip(measure, shrink, nonfinite, call, threshold, eps, updates, state, params, grad_norm):
    """One step. It hangs on the module, not on the clipper, so that all clippers of equal make share its compilations."""
    norms = measure(updates) if grad_norm is None else _given(grad_norm, measure, updates, call)
    slots, treedef = jax.tree.flatten(norms, is_leaf=_is_none)
    rules = iter(zip(_rules(threshold, norms, call), _params_norms(measure, params, norms, call)))
    seen = []
    for norm, *fields in zip(slots, *(treedef.flatten_up_to(field) for field in state[1:])):
        if norm is None:  # nothing to measure here in this step: what is known stays
            seen.append((None, None, ClipState(state.step, *fields)))
        else:
            rule, params_norm = next(rules)
            seen.append(_decide(rule, shrink, nonfinite, eps, norm, params_norm, ClipState(state.step, *fields)))

    before, after, fields = zip(*seen) if seen else ((), (), ())
    before, after = treedef.unflatten(before), treedef.unflatten(after)
    updates = rescale(updates, before, after)
    if nonfinite == "zero":
        updates = _zero_where_zero(updates, after)
    trees = [treedef.unflatten(field) for field in zip(*(field[1:] for field in fields))] if fields else state[1:]
    return updates, ClipState(jnp.asarray(optax.safe_increment(state.step)), *trees)


def _decide(rule, shrink, nonfinite, eps, norm, params_norm, old):
    """What happens to one norm: (before, after, its part of the state). Only the quotient of before and after counts; where nothing is done both are equal."""
    finite = jnp.isfinite(norm)
    limit, memory = rule.update(norm, old.memory, old.step, params_norm)
    limit = _as_limit(limit, norm)
    off = limit == jnp.inf
    long = norm + jnp.asarray(eps).astype(norm.dtype)
    short = jnp.where(finite, shrink(long, limit), 0.0 if nonfinite == "zero" else jnp.nan)
    before, after = jnp.where(off, 1.0, long), jnp.where(off, 1.0, short)
    changed = finite & (after != before)
    scale = jnp.where(after == before, 1.0, jnp.where(after == 0, 0.0, _ratio(after, before)))
    new = ClipState(
        step=old.step,
        norm=norm.astype(old.norm.dtype),
        limit=limit.astype(old.limit.dtype),
        scale=scale.astype(old.scale.dtype),
        clipped=old.clipped + changed.astype(jnp.int32),
        nonfinite=old.nonfinite + (~finite).astype(jnp.int32),
        memory=jax.tree.map(partial(_keep_unless, finite), memory, old.memory),
    )
    return before, after, new


def _as_limit(limit: Any, norm: jax.Array) -> jax.Array:
    """The limit in the norm's dtype and shape. A negative one, which only a traced program can bring here, counts as 0."""
    limit = jnp.asarray(limit)
    if not broadcasts_to(limit.shape, norm.shape):
        raise ValueError(f"max_norm must be a number for each norm: its shape {limit.shape} does not fit norms of shape {norm.shape}.")
    return jnp.broadcast_to(jnp.maximum(limit.astype(norm.dtype), 0), norm.shape)


def _keep_unless(finite: jax.Array, new: Any, old: jax.Array) -> jax.Array:
    """The new memory, but the old one for a norm that is not finite."""
    new = jnp.asarray(new).astype(old.dtype)
    return jnp.where(finite.reshape(finite.shape + (1,) * (new.ndim - finite.ndim)), new, old)


def _factors(norm: jax.Array, new_norm: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(nothing to do, first shrink by `_step_down`, factor) to get from one norm to the other. The quotient of 1 and 1e38 is subnormal, which hardware flushes to 0: so very
    far ways take two multiplications."""
    info = jnp.finfo(norm.dtype)
    far = new_norm < norm * 2.0 ** (info.minexp + 26)
    quotient = _ratio(new_norm, jnp.where(far, norm * _step_down(norm), norm))
    # A hair less than the quotient, so that the roundings of limit, norm, quotient and product never add up to more than the limit.
    return new_norm == norm, far, quotient * (1 - 3 * info.eps)


def _step_down(norm: jax.Array) -> float:
    return 2.0 ** (jnp.finfo(norm.dtype).minexp // 2 - 1)


def _stretch(x: jax.Array, same: jax.Array, far: jax.Array, factor: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    if x.weak_type:  # what is made of weakly typed arrays alone stays weakly typed
        wide, factor = x, jax.lax.full_like(x, factor, shape=factor.shape)
    else:
        wide = x.astype(np.promote_types(x.dtype, factor.dtype))
        factor = factor.astype(wide.dtype)
    # In two steps where the way is far: neither factor is subnormal, their product is.
    stretched = jnp.where(far, wide * _step_down(factor), wide) * factor
    return jnp.where(same, x, stretched if x.weak_type else stretched.astype(x.dtype))


@jax.custom_jvp
def _ratio(short: jax.Array, long: jax.Array) -> jax.Array:
    """short / long, and 0 / 0 = 0."""
    # Two wheres: the quotient of the unused branch must be finite for the derivative's sake.
    return short / jnp.where(long == 0, 1.0, long)


@_ratio.defjvp
def _ratio_jvp(primals, tangents):
    """d(s/l) = (ds - (s/l) dl) / l. The rule of division itself squares l, which overflows."""
    short, long = primals
    ratio = _ratio(short, long)
    return ratio, _ratio(tangents[0] - ratio * tangents[1], long)


def _zero_where_zero(updates: Any, after: Any) -> Any:
    """Zeros in the place of a part whose new norm is 0, since 0 times inf is NaN."""

    def part(new_norm: Any, subtree: Any) -> Any:
        return subtree if new_norm is None else jax.tree.map(lambda x: jnp.where(new_norm == 0, jnp.zeros_like(x), x), subtree)

    return jax.tree.map(part, after, updates, is_leaf=_is_none)


def _rules(threshold: Any, norms: Any, call: str) -> list[Threshold]:
    """The rule for each norm."""
    return prefix.lookup(prefix.freeze(threshold, _is_threshold), norms, f"{call}: max_norm")


def _params_norms(measure: Any, params: Any, norms: Any, call: str) -> list[Callable[[], jax.Array]]:
    """For each norm, a function that gives the weights' norm at the same place. They are measured only if some rule asks."""

    @cache
    def measure_params() -> list[jax.Array]:
        if params is None:
            raise ValueError(f"{call} compares gradients with weights: call update(grads, state, params).")
        return jax.tree.leaves(measure(params))

    return [partial(lambda place: measure_params()[place], place) for place in range(len(jax.tree.leaves(norms)))]


def _given(grad_norm: Any, measure: Any, updates: Any, call: str) -> Any:
    """Norms measured elsewhere, once they are seen to fit."""
    wanted = jax.eval_shape(lambda tree: measure(tree), updates)
    fits = jax.tree.structure(grad_norm) == jax.tree.structure(wanted)
    if not fits or not all(jnp.shape(given) == norm.shape for given, norm in zip(jax.tree.leaves(grad_norm), jax.tree.leaves(wanted))):
        raise ValueError(f"{call}: grad_norm must have the structure and shapes of the norms that it measures, {wanted}, got {grad_norm}.")
    return jax.tree.map(lambda given, norm: jnp.asarray(given).astype(norm.dtype), grad_norm, wanted)


def _raise_nonfinite(call: str, measure: Any, norms: Any, updates: Any) -> None:
    finite = [jnp.all(jnp.isfinite(norm)) for norm in jax.tree.leaves(norms)]
    order = dict(getattr(measure, "options", ())).get("ord") or 2
    text = f"{call}: the norm of order {order} of the updates is not finite"
    if any(isinstance(x, Tracer) for x in finite):
        checkify.check(jnp.all(jnp.stack(finite)), text)
    elif not all(finite):
        counts = [(prefix.name(path), int(jnp.sum(~jnp.isfinite(x))), x.size) for path, x in jax.tree_util.tree_flatten_with_path(updates)[0]]
        guilty = "; ".join(f"{name!r}: {count} of {size} values are NaN or inf" for name, count, size in counts if count)
        raise FloatingPointError(f"{text}. {guilty or 'All values are finite: the norm is too large for its dtype.'}")


def _as_pytree(threshold: Threshold) -> Threshold:
    return Threshold(*(f if isinstance(f, Partial) else Partial(f) for f in threshold))


def _is_threshold(x: Any) -> bool:
    return isinstance(x, Threshold)


def _is_none(x: Any) -> bool:
    return x is None
