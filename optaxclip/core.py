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
from jax import lax
from jax.core import Tracer

from . import prefix, sharding
from .arguments import broadcasts_to, carried, check_nonfinite, check_number, check_state
from .norms import measured, measured_as, with_unmeasured
from .shrinks import Shrink, hard


class Measure(NamedTuple):
    """A norm function with its options, called on a tree. Two with the same content are equal, which is how a compiled update is found again."""

    norm: Callable[..., Any]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, tree: Any) -> Any:
        return self.norm(tree, **dict(self.options))

    def without_devices(self) -> "Measure":
        """The same measure where there are no mesh axes to speak of, as in an `init` outside shard_map: the norms have the same shapes."""
        return self._replace(options=tuple((name, None if name == "axes" else value) for name, value in self.options))


class Threshold(NamedTuple):
    """A rule for how long ONE norm may be. The kernel uses it for every norm that was measured.

    init(norm) -> memory: what the rule remembers before the first step; its arrays have the norm's shape, followed by axes of their own.
    update(norm, memory, step, params_norm) -> (limit, memory): `step` is an int32 scalar that counts from 0, `params_norm()` gives the norm of the
      weights at the same place.

    A norm that is NaN, inf or 0 is never remembered: `ask`, through which everyone consults a rule, keeps the old memory then. A 0 says nothing about the usual length (the
    part took no part in the step), and would hold any rule that multiplies at 0 for ever. To the rule the norm is a number: limits have no derivative by the updates.

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


def clip_by(
    measure: Callable[[Any], Any],
    threshold: Any,
    shrink: Shrink | None = None,
    *,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    call: str = "clip_by",
) -> optax.GradientTransformationExtraArgs:
    """Makes a clipper of a measure, a threshold and a shrink.

    Args:
      measure: from a tree to its norms, such as `global_norm`, `tensor_norm`, `unit_norm`, or any function whose result is a tree prefix of its argument.
      threshold: a `Threshold`, or a tree prefix of them.
      shrink: from norm and limit to the norm that the updates get: `hard` (None too), `smooth()`, `drop`, `normalize`, or your own. What returns the norm itself leaves the updates bit for bit.
      eps: added to the norm before it is compared and divided by; 1e-6 gives torch's numbers. At least 0.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes all that was measured together NaN, so that a broken step is seen and never half applied;
        "zero" makes it zero; "raise" raises FloatingPointError outside jit and is a `checkify.check` inside. Where the limit was set to inf or None nothing is touched.
      call: the name that error messages quote.

    Returns:
      A transformation with a `ClipState`. Its `update` also takes `grad_norm=`: norms measured elsewhere, in the structure that `measure` returns.

    Example:
      >>> import optaxclip
      >>> clipper = optaxclip.clip_by(optaxclip.global_norm, optaxclip.constant(1.0), optaxclip.smooth())
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(optaxclip.global_norm(updates).round(4))
      0.8333
    """
    check_nonfinite(call, nonfinite)
    check_number(f"{call}: eps", eps)
    threshold = jax.tree.map(as_pytree, threshold, is_leaf=_is_threshold)

    def init(params: Any) -> ClipState:
        here = measure if sharding.inside() or not isinstance(measure, Measure) else measure.without_devices()
        norms = jax.eval_shape(lambda tree: here(measured(tree)), params)

        def filled(value, dtype=None):
            return jax.tree.map(lambda norm: sharding.typed_as(jnp.full(norm.shape, value, dtype or norm.dtype), norm), norms)

        treedef = jax.tree.structure(norms)
        rules = _rules(threshold, norms, call)
        memory = [jax.tree.map(partial(_beside, norm), rule.init(norm)) for rule, norm in zip(rules, jax.tree.leaves(filled(0)))]
        return ClipState(
            step=jnp.zeros((), jnp.int32),
            norm=filled(0),
            limit=filled(jnp.inf),
            scale=filled(1),
            clipped=filled(0, jnp.int32),
            nonfinite=filled(0, jnp.int32),
            memory=jax.tree.unflatten(treedef, memory),
        )

    def update(updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any) -> tuple[Any, Any]:
        check_state(call, state, ClipState)
        tree = measured(updates)
        weights = None if params is None else measured_as(tree, params)
        clipped, new_state = _clip(measure, shrink or hard, nonfinite, call, threshold, eps, tree, state, weights, grad_norm)
        if nonfinite == "raise":
            _raise_nonfinite(call, measure, new_state.norm, tree)
        return with_unmeasured(clipped, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def as_pytree(threshold: Threshold) -> Threshold:
    """The rule with functions that JAX can carry into a compiled call."""
    return Threshold(*map(carried, threshold))


def ask(
    rule: Threshold, norm: jax.Array, memory: Any, step: jax.Array, params_norm: Callable[[], jax.Array] | None = None, *, argument: str
) -> tuple[jax.Array, Any]:
    """What a rule says of one norm: (limit, memory). The limit has the norm's dtype and shape and is at least 0; the memory has not learned from a norm that is NaN, inf or 0."""
    limit, new = rule.update(lax.stop_gradient(norm), memory, step, params_norm or _no_params)
    limit = _as_limit(limit, norm, argument)
    if not jax.tree.leaves(memory):
        return limit, memory
    return limit, keep_where(jnp.isfinite(norm) & (norm > 0) & ~jnp.isnan(limit), new, memory)


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

    return _multiply(updates, jax.tree.map(lambda norm, new: None if norm is None else _factors(norm, new), norms, new_norms, is_leaf=_is_none))


def _multiply(updates: Any, factors: Any) -> Any:
    """Every part of the updates times its factors."""

    def part(factors: Factors | None, subtree: Any) -> Any:
        if factors is None:
            return subtree
        return with_unmeasured(jax.tree.map(lambda x: _stretch(x, factors), measured(subtree)), subtree)

    return jax.tree.map(part, factors, updates, is_leaf=lambda x: x is None or isinstance(x, Factors))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _clip(measure, shrink, nonfinite, call, threshold, eps, updates, state, params, grad_norm):
    """One step. It hangs on the module, not on the clipper, so that all clippers of equal make share its compilations."""
    norms = measure(updates) if grad_norm is None else _given(grad_norm, measure, updates, call)
    slots, treedef = jax.tree.flatten(norms, is_leaf=_is_none)
    rules = _rules(threshold, norms, call)
    try:
        columns = [treedef.flatten_up_to(field) for field in state[1:]]
    except ValueError as error:
        raise ValueError(
            f"{call}: state was made for norms of the structure {jax.tree.structure(state.norm)}, but those of the updates have {treedef}."
        ) from error
    rules = iter(zip(rules, _params_norms(measure, params, norms, call)))
    factors, fields = [], []
    for norm, *old in zip(slots, *columns):
        if norm is None:  # nothing to measure here in this step: what is known stays
            factors.append(None)
            fields.append(old)
        else:
            rule, params_norm = next(rules)
            _check_old(rule, norm, old[0], old[-1], call)
            limit, memory = ask(rule, norm, old[-1], state.step, params_norm, argument=f"{call}: max_norm")
            factor, new = _decide(shrink, nonfinite, bool(jax.tree.leaves(memory)), eps, norm, limit, old)
            factors.append(factor)
            fields.append([*new, memory])

    factors = treedef.unflatten(factors)
    updates = _multiply(updates, factors)
    if nonfinite == "zero":
        updates = _zero_where_zero(updates, factors)
    trees = [treedef.unflatten(field) for field in zip(*fields)] if fields else state[1:]
    return updates, ClipState(jnp.asarray(optax.safe_increment(state.step)), *trees)


def _check_old(rule: Threshold, norm: jax.Array, old_norm: Any, memory: Any, call: str) -> None:
    """Raises ValueError for a state of other updates or of another rule. The length of a window is not compared: here it is a number of the program."""
    if old_norm is None or jnp.shape(old_norm) != norm.shape:
        made_for = "no norm" if old_norm is None else f"norms of shape {jnp.shape(old_norm)}"
        raise ValueError(f"{call}: state was made for {made_for} where the updates have norms of shape {norm.shape}.")
    begin = jax.tree.map(lambda leaf: np.ones(jnp.shape(leaf), jnp.result_type(leaf)), rule.init)
    wanted = jax.eval_shape(begin, norm)
    if jax.tree.structure(wanted) != jax.tree.structure(memory):
        wanted, found = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (wanted, memory))
        raise ValueError(f"{call}: state must hold what the rule in max_norm remembers, of the form {wanted}, got {found}.")


@partial(jax.jit, static_argnums=(0, 1, 2))
def _decide(shrink, nonfinite, learns, eps, norm, limit, old):
    """What happens to one norm: (factors, its fields of the state). Only the quotient of before and after counts; where nothing is done both are equal. Jitted, since it is
    traced once then for all norms of one shape."""
    _, old_limit, old_scale, clipped, nonfinite_count, _ = old
    finite = jnp.isfinite(norm)
    # An infinite limit that was set only measures; a rule that has none yet still lets no broken step through.
    off = (limit == jnp.inf) & finite if learns else limit == jnp.inf
    long = norm + jnp.asarray(eps).astype(norm.dtype)
    short = jnp.where(finite, shrink(long, limit), 0.0 if nonfinite == "zero" else jnp.nan)
    before, after = jnp.where(off, 1.0, long), jnp.where(off, 1.0, short)
    changed = finite & (after != before)
    scale = jnp.where(after == before, 1.0, jnp.where(after == 0, 0.0, _ratio(after, before)))
    new = [
        norm,
        limit.astype(old_limit.dtype),
        scale.astype(old_scale.dtype),
        clipped + changed.astype(jnp.int32),
        nonfinite_count + (~finite).astype(jnp.int32),
    ]
    return _factors(before, after), new


def _as_limit(limit: Any, norm: jax.Array, argument: str) -> jax.Array:
    """The limit in the norm's dtype and shape. A negative one, which only a traced program can bring here, counts as 0."""
    limit = jnp.asarray(limit)
    if not broadcasts_to(limit.shape, norm.shape):
        raise ValueError(f"{argument} must be a number for each norm: its shape {limit.shape} does not fit norms of shape {norm.shape}.")
    return sharding.typed_as(jnp.broadcast_to(jnp.maximum(limit.astype(norm.dtype), 0), norm.shape), norm)


@jax.jit
def keep_where(wanted: jax.Array, new: Any, old: Any) -> Any:
    """The new state where it is wanted, element by element of a norm, and the old one elsewhere, in the old dtypes."""

    def kept(new: Any, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new).astype(old.dtype)
        return jnp.where(wanted.reshape(wanted.shape + (1,) * (new.ndim - wanted.ndim)), new, old)

    return jax.tree.map(kept, new, old)


class Factors(NamedTuple):
    """What updates are multiplied by, in two steps: the quotient of 1 and 1e38 is subnormal, which hardware flushes to 0."""

    first: jax.Array  # float32[norm]: 1, or a power of 2 where the way is far
    then: jax.Array  # float32[norm]: 1 exactly where nothing is to be done, NaN for a broken step


def _factors(norm: jax.Array, new_norm: jax.Array) -> Factors:
    info = jnp.finfo(norm.dtype)
    first = jnp.where(new_norm < norm * 2.0 ** (info.minexp + 26), 2.0 ** (info.minexp // 2 - 1), 1.0).astype(norm.dtype)
    # A hair less than the quotient, so that the roundings of limit, norm, quotient and products never add up to more than the limit.
    then = _ratio(new_norm, norm * first) * (1 - 3 * info.eps)
    return Factors(first, jnp.where(new_norm == norm, 1.0, jnp.where(new_norm == 0, 0.0, then)))


@jax.jit
def _stretch(x: jax.Array, factors: Factors) -> jax.Array:
    x = jnp.asarray(x)
    first, then = factors
    if x.weak_type:  # what is made of weakly typed arrays alone stays weakly typed
        first, then = (_as_weak_as(x, factor) for factor in factors)
        stretched = x * first * then
    else:
        wide = np.promote_types(x.dtype, then.dtype)
        stretched = (x.astype(wide) * first.astype(wide) * then.astype(wide)).astype(x.dtype)
    # Selected where nothing is to be done: a product would flush subnormal numbers.
    return jnp.where(then == 1, x, stretched)


def _as_weak_as(x: jax.Array, factor: jax.Array) -> jax.Array:
    """The factor in the dtype of a weakly typed array, weakly typed: only filling with a scalar makes that."""

    def fill(number: jax.Array) -> jax.Array:
        return lax.full_like(x, number, shape=())

    for _ in range(factor.ndim):
        fill = jax.vmap(fill)
    return fill(factor)


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


def _zero_where_zero(updates: Any, factors: Any) -> Any:
    """Zeros in the place of a part whose factor is 0, since 0 times inf is NaN."""

    def part(factors: Factors | None, subtree: Any) -> Any:
        return subtree if factors is None else jax.tree.map(lambda x: jnp.where(factors.then == 0, jnp.zeros_like(x), x), subtree)

    return jax.tree.map(part, factors, updates, is_leaf=lambda x: x is None or isinstance(x, Factors))


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
        from jax.experimental import checkify

        checkify.check(jnp.all(jnp.stack(finite)), text)
    elif not all(finite):
        counts = [(prefix.name(path), int(jnp.sum(~jnp.isfinite(x))), x.size) for path, x in jax.tree_util.tree_flatten_with_path(updates)[0]]
        guilty = "; ".join(f"{name!r}: {count} of {size} values are NaN or inf" for name, count, size in counts if count)
        raise FloatingPointError(f"{text}. {guilty or 'All values are finite: the norm is too large for its dtype.'}")


def _beside(norm: jax.Array, memory: Any) -> jax.Array:
    return sharding.typed_as(jnp.asarray(memory), norm)


def _no_params() -> jax.Array:
    raise ValueError("There are no weights here to compare with.")


def _is_threshold(x: Any) -> bool:
    return isinstance(x, Threshold)


def _is_none(x: Any) -> bool:
    return x is None
