"""Clips and optimizes inside the backward pass, one layer at a time (gradient release).

    forward     keep the input of every layer
    norms       for a global norm: a backward pass whose gradients are only measured
    backward    last layer first: gradient, clip, optimizer, new weights

A gradient is as large as the weights, and the usual step holds that of all layers until
the optimizer has seen them. Here the gradient of a layer is gone before that of the
layer below is computed. What stays is the input of every layer, from which the layer
runs again, as under `jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.interpreters.partial_eval import dce_jaxpr

from ._checks import check_flag, shown, with_extra_args
from ._exported import exported
from ._kernel import make_clipper
from ._mesh import has_types, manual_axes
from ._norms import GlobalNorm, check_measure, global_norm
from ._state import ClipState
from ._trees import clipped_leaves, name, put_back
from .rules._constant import Limit
from .rules._rule import is_rule

# What to do about an optimizer that is refused.
HINT = "Clippers are given as max_norm, or as layer_clip, and not within the optimizer."


@exported
class ReleaseState(NamedTuple):
    """The state of `release`.

    Attributes:
      layers: the optimizer's state of the stack, as `optimizer.init(layers)` makes it.
      rest: the optimizer's state of the other weights.
      clip: the `ClipState` of the norm of everything. () without `max_norm`.
      layer_clip: the arrays of the state of `layer_clip`, [layers, ...].
      clips: what `metrics` shows of `layer_clip`: a `ClipState` of all layers for each
        clipper in it, and the state of the rest.
    """

    layers: Any
    rest: Any
    clip: Any
    layer_clip: Any
    clips: Any


class Released(NamedTuple):
    """What `release` returns: `init(params)` and `step(params, state, *batch)`."""

    init: Callable[[Any], ReleaseState]
    step: Callable[..., tuple[Any, ReleaseState, jax.Array]]


class Parts(NamedTuple):
    """What a model and its training are made of."""

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]
    optimizer: optax.GradientTransformationExtraArgs
    layer_clip: optax.GradientTransformationExtraArgs
    clip: optax.GradientTransformationExtraArgs | None
    delayed: bool


def release(
    embed: Callable[..., Any],
    layer: Callable[..., Any],
    head: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    max_norm: Limit = None,
    layer_clip: optax.GradientTransformation | None = None,
    delayed: bool = False,
    nonfinite: str = "propagate",
) -> Released:
    """Trains a stack of equal layers without ever holding the gradient of more than
    one.

        x = embed(rest, *batch)
        x = layer(layers[i], x, *batch)        for each layer i
        loss = head(rest, x, *batch)

    A loop over the layers, the last one first, takes each layer's gradient, clips it,
    and applies the optimizer to the slices of weights and state.

    | limit                | backward passes |                                        |
    |----------------------|-----------------|----------------------------------------|
    | layer_clip           | 1               | exact                                  |
    | max_norm             | 2               | exact: the first only measures         |
    | both                 | 2               | exact: layers first, then everything   |
    | both, delayed        | 1               | the factor is that of the step before  |

    Args:
      embed: makes the input of the first layer: `embed(rest, *batch)`, an array or a
        pytree of arrays.
      layer: one layer: `layer(weights, x, *batch)` returns the next `x`, of the same
        structure, shapes and dtypes. `weights` is a slice of the stack.
      head: the loss, a real scalar: `head(rest, x, *batch)`.
      optimizer: any optimizer of optax whose state follows its weights (SGD, Adam,
        AdamW, Lion, Muon ...), without a clipper. It sees one layer at a time, and the
        rest of the weights as one tree. Counters are shared by all layers.
      max_norm: the limit of the norm of all gradients: a number at least 0, a schedule,
        or a rule of `optaxclip.rules`. None: no limit.
      layer_clip: a clipper of optaxclip or optax. It sees the gradient of one layer at
        a time, and those of the rest as one more: `clip_by_global_norm(0.1)` limits
        each layer as a whole, `clip_by_tensor_norm(0.1)` each tensor of each layer.
      delayed: whether gradients are multiplied by the factor that `max_norm` gave in
        the step before, which saves the second backward pass. The first large gradient
        of a spike then passes, but for `layer_clip`, which it therefore needs.
      nonfinite: what `max_norm` makes of a norm that is NaN or inf: "propagate" makes
        all gradients NaN, "zero" all zero.

    Returns:
      A pair of functions. `init(params)` makes the state. `step(params, state, *batch)`
      returns new params, the new state, and the loss before the step. `params` is a
      pair: the stack, a tree whose arrays have the layers as their first axis, and a
      tree of all other weights, whose gradients are clipped and updated as usual.
      Leaves that are neither float nor complex are not trained. Jit the step and donate
      params and state: `jax.jit(step, donate_argnums=(0, 1))`. `metrics(state)` reads
      norms, limits and factors.

    Raises:
      TypeError: an optimizer or a clipper without init and update, a function that does
        not take these arguments, a limit that is not a number, or `params` that are no
        pair. From step: a layer that changes the type of `x`, or a loss that is not a
        real scalar.
      ValueError: a negative or NaN limit, `delayed` without both limits, a rule that
        needs weights, an unknown `nonfinite`. From init: leaves of the stack with
        different numbers of layers, an optimizer that mixes leaves, or whose state does
        not follow the weights. From step: pmap, or shard_map with check_vma=False.

    Example:
      >>> def layer(weights, x, target):
      ...     return x + jnp.tanh(x @ weights)
      >>> def embed(rest, target):
      ...     return jnp.ones(2)
      >>> def loss(rest, x, target):
      ...     return jnp.sum((x * rest - target) ** 2)
      >>> trainer = optaxclip.release(embed, layer, loss, optax.sgd(0.1), max_norm=1.0)
      >>> params = jnp.ones((3, 2, 2)), jnp.ones(2)  # three layers, and the rest
      >>> state = trainer.init(params)
      >>> step = jax.jit(trainer.step, donate_argnums=(0, 1))
      >>> for _ in range(3):
      ...     params, state, value = step(params, state, jnp.zeros(2))
      ...     print(value)

    Reference: Lv et al., Full parameter fine-tuning for large language models with
    limited resources, 2023 (arXiv 2306.09782).
    """
    for argument, function in (
        ("embed", embed),
        ("layer", layer),
        ("head", head),
    ):
        if not callable(function):
            raise TypeError(
                f"release: {argument} must be a function, got {function!r}."
            )
    check_flag("release: delayed", delayed)
    if delayed and (max_norm is None or layer_clip is None):
        raise ValueError(
            f"release: delayed={delayed!r} needs max_norm and layer_clip, got "
            f"max_norm={max_norm!r} and layer_clip={layer_clip!r}: the factor of the "
            "step before lets a spike through, which layer_clip has to hold."
        )
    if is_rule(max_norm) and max_norm.needs_params:
        raise ValueError(
            f"release: max_norm={max_norm!r} follows the norm of all weights, which "
            "is not at hand where one layer is clipped."
        )
    clip = None
    if max_norm is not None:
        measure = GlobalNorm(**check_measure("release", None))
        clip = make_clipper(
            measure,
            max_norm,
            call="release",
            name="max_norm",
            nonfinite=nonfinite,
        )
    if layer_clip is None:
        layer_clip = optax.identity()
    parts = Parts(
        embed,
        layer,
        head,
        with_extra_args("release: optimizer", optimizer),
        with_extra_args("release: layer_clip", layer_clip, "a clipper"),
        clip,
        bool(delayed),
    )
    return Released(partial(_first_state, parts), partial(_step, parts))


def _first_state(parts: Parts, params: Any) -> ReleaseState:
    layers, rest = _pair(params)
    count = _count(layers)
    weights, others = clipped_leaves((layers, rest))
    _check_optimizer(parts.optimizer, weights)
    clip = () if parts.clip is None else parts.clip.init((weights, others))
    own = parts.layer_clip.init(_take(weights, 0))
    own = jax.tree.map(lambda x: jnp.stack([x] * count), own)
    return ReleaseState(
        parts.optimizer.init(weights),
        parts.optimizer.init(others),
        clip,
        tuple(jax.tree.leaves(own)),
        _clips(own, parts.layer_clip.init(others)),
    )


def _step(
    parts: Parts, params: Any, state: ReleaseState, *batch: Any
) -> tuple[Any, ReleaseState, jax.Array]:
    manual = manual_axes()
    if manual and not has_types(manual):
        raise ValueError(
            f"release: along the mesh axes {manual} JAX does not know which values "
            "differ between devices, so gradients would not be added up: use jit, or "
            "shard_map with check_vma=True."
        )
    layers, rest = _pair(params)
    weights, others = clipped_leaves((layers, rest))
    count = _count(layers)
    forward = _forward(parts, layers, rest, batch)
    backward = partial(_backward, parts, layers, forward, batch, count)
    update = partial(_update, parts, state.clip)
    one = _one(weights)
    clips = jax.tree.structure(jax.eval_shape(parts.layer_clip.init, one))
    clips = clips.unflatten(state.layer_clip)

    def measure(
        number: jax.Array, grads: Any, own: Any, norms: jax.Array
    ) -> tuple[None, jax.Array]:
        """The norm of a layer within layer_clip."""
        clip = _take(clips, number)
        grads, _ = parts.layer_clip.update(grads, clip, own)
        return None, norms.at[number].set(global_norm(grads))

    def train(
        number: jax.Array, grads: Any, own: Any, kept: Any
    ) -> tuple[Any, Any]:
        """The new weights of a layer, and its states."""
        norms, states = kept
        clip, moments = _take(states, number)
        grads, clip = parts.layer_clip.update(grads, clip, own)
        if parts.delayed:
            norms = norms.at[number].set(global_norm(grads))
        own, moments = update(norm, grads, moments, own)
        return own, (norms, _put(states, number, (clip, moments)))

    def rest_of(cotangent: Any) -> tuple[Any, Any]:
        """The gradient of the rest within layer_clip, and the state of that."""
        grads = forward.rest_grads(cotangent)
        clip = state.clips["rest"]
        return parts.layer_clip.update(grads, clip, others)

    norms = jnp.zeros(count, jax.eval_shape(global_norm, one).dtype)
    clip, norm = state.clip, None
    if parts.delayed:
        norm = clip.norm
    elif parts.clip is not None:
        cotangent, _, norms = backward(measure, weights, norms)
        norm = _norm_of_all(norms, rest_of(cotangent)[0])
    kept = norms, (clips, state.layers)
    cotangent, new, (norms, states) = backward(train, weights, kept)
    grads, rest_clip = rest_of(cotangent)
    new_rest, rest = update(norm, grads, state.rest, others)
    if parts.clip is not None:
        norm = _norm_of_all(norms, grads)
        _, clip = parts.clip.update(grads, clip, grad_norm=norm)
    clips, moments = states
    params = put_back(new, layers), put_back(new_rest, params[1])
    state = ReleaseState(
        _counted(parts.optimizer, moments, state.layers, weights),
        rest,
        clip,
        tuple(jax.tree.leaves(clips)),
        _clips(clips, rest_clip),
    )
    return params, state, forward.loss


class Forward(NamedTuple):
    """What the backward pass begins with."""

    loss: jax.Array
    inputs: Any  # of all layers: arrays [layers, ...]
    cotangent: Any  # of the output of the last layer
    rest_grads: Callable[[Any], Any]  # from the cotangent of the first input


def _forward(parts: Parts, layers: Any, rest: Any, batch: Any) -> Forward:
    def first(others: Any) -> tuple[Any, Any]:
        x = parts.embed(put_back(others, rest), *batch)
        x = jax.tree.map(jnp.asarray, x)
        return clipped_leaves(x), x

    def through(x: Any, own: Any) -> tuple[Any, Any]:
        new = parts.layer(own, x, *batch)
        wanted, found = _types(x), _types(new)
        if wanted != found:
            raise TypeError(
                f"release: layer must return what it gets as x, {wanted}, got {found}."
            )
        return new, x

    def last(others: Any, moved: Any) -> jax.Array:
        whole = put_back(others, rest), put_back(moved, x)
        loss = jnp.asarray(parts.head(*whole, *batch))
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(
                "release: head must return the loss, a real scalar, got "
                f"{loss.dtype}{list(loss.shape)}."
            )
        return loss

    others = clipped_leaves(rest)
    _, from_embed, x = jax.vjp(first, others, has_aux=True)
    x, inputs = lax.scan(through, x, layers)
    loss, from_head = jax.vjp(last, others, clipped_leaves(x))
    head_grads, cotangent = from_head(jnp.ones_like(loss))

    def rest_grads(cotangent: Any) -> Any:
        (embed_grads,) = from_embed(cotangent)
        return jax.tree.map(jnp.add, embed_grads, head_grads)

    return Forward(loss, inputs, cotangent, rest_grads)


def _backward(
    parts: Parts,
    layers: Any,
    forward: Forward,
    batch: Any,
    count: int,
    visit: Callable[..., tuple[Any, Any]],
    weights: Any,
    kept: Any,
) -> tuple[Any, Any, Any]:
    """Goes through the layers, the last one first.

    `visit(number, grads, weights, kept)` returns new weights of a layer, or None, and
    what is kept.

    Returns:
      The cotangent of the first layer's input, the weights, and what is kept.
    """

    def body(turn: jax.Array, loop: Any) -> Any:
        cotangent, weights, kept = loop
        number = count - 1 - turn
        own, x = _take((layers, forward.inputs), number)

        def run(slices: Any, moved: Any) -> Any:
            given = put_back(slices, own), put_back(moved, x)
            return clipped_leaves(parts.layer(*given, *batch))

        slices = _take(weights, number)
        _, pull = jax.vjp(run, slices, clipped_leaves(x))
        grads, cotangent = pull(cotangent)
        slices, kept = visit(number, grads, slices, kept)
        # Weights that were put back as they are would be copied.
        if slices is not None:
            weights = _put(weights, number, slices)
        return cotangent, weights, kept

    return lax.fori_loop(0, count, body, (forward.cotangent, weights, kept))


def _update(
    parts: Parts, clip: Any, norm: Any, grads: Any, moments: Any, own: Any
) -> tuple[Any, Any]:
    """The new weights of a layer or of the rest, and the optimizer's state."""
    if parts.clip is not None:
        # The norm of everything, in the place of that of these gradients.
        grads, _ = parts.clip.update(grads, clip, grad_norm=norm)
    updates, moments = parts.optimizer.update(grads, moments, own)
    return optax.apply_updates(own, updates), moments


def _counted(
    optimizer: optax.GradientTransformation, new: Any, old: Any, weights: Any
) -> Any:
    """The state of the stack with the numbers that all layers share, one step on."""
    # Of any layer and any gradients. Jitted, nothing but the numbers is computed.
    own = _take(weights, 0)
    _, once = optimizer.update(own, _take(old, 0), own)
    return jax.tree.map(lambda x, y: x if x.ndim else y, new, once)


def _norm_of_all(norms: jax.Array, rest: Any) -> jax.Array:
    return global_norm((norms, global_norm(rest)))


# -------------------------------------------------------------------- stacks of layers


def _take(tree: Any, number: Any) -> Any:
    """The slices of a layer. Numbers are shared by all layers."""

    def take(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        return lax.dynamic_index_in_dim(x, number, keepdims=False)

    return jax.tree.map(take, tree)


def _one(tree: Any) -> Any:
    """The types of the slices of a layer."""
    return jax.eval_shape(partial(_take, number=0), tree)


def _put(tree: Any, number: jax.Array, new: Any) -> Any:
    """The stack with new slices of a layer. Numbers stay as they were."""

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        return lax.dynamic_update_index_in_dim(x, y, number, 0)

    return jax.tree.map(put, tree, new)


def _clips(clips: Any, rest: Any) -> dict[str, Any]:
    """What `metrics` shows: the clippers of all layers, and of the rest."""
    found = []
    for state in jax.tree.leaves(clips, is_leaf=_is_clip_state):
        if _is_clip_state(state):
            found.append(_of_all_layers(state))
    return {"layers": found, "rest": rest}


def _is_clip_state(x: Any) -> bool:
    return isinstance(x, ClipState)


def _of_all_layers(state: ClipState) -> ClipState:
    """A state that has each layer's norms, as of a stacked leaf, from arrays [layers,
    norms].
    """
    count = state.step.size
    names = []
    for part in state.names:
        named: dict[str, Any] = {}
        for leaf, inside in part.items():
            ends = [""] if inside is None else [f"/{x}" for x in inside]
            keys = [f"{i}{end}" for end in ends for i in range(count)]
            # The norm of everything in a layer has no name of its own.
            named[leaf or "layer"] = dict.fromkeys(keys)
        names.append(named)
    fields = state._replace(step=(), memory=())
    fields = jax.tree.map(lambda x: x.T.reshape(-1), fields)
    return fields._replace(names=tuple(names), step=state.step[0])


# ----------------------------------------------------------------------------- checks


def _pair(params: Any) -> tuple[Any, Any]:
    if isinstance(params, tuple) and len(params) == 2:
        return params
    raise TypeError(
        "release: params must be a pair (layers, rest): the stacked weights, and a "
        f"tree of all others, got {shown(params)}."
    )


def _count(layers: Any) -> int:
    """How many layers a stack has."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(layers)[0]:
        shapes[name(path)] = jnp.shape(leaf)
    counts = {shape[:1] for shape in shapes.values()}
    if len(counts) == 1 and counts.isdisjoint({(), (0,)}):
        return counts.pop()[0]
    raise ValueError(
        "release: params[0] must be arrays whose first axis counts the layers, got "
        f"{shapes}."
    )


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


def _check_optimizer(
    optimizer: optax.GradientTransformation, weights: Any
) -> None:
    """Refuses an optimizer that does something else to a layer than to its stack."""
    count, one = _count(weights), _one(weights)
    stacked = jax.eval_shape(optimizer.init, weights)
    state = jax.eval_shape(optimizer.init, one)
    must = "release: the state of optimizer must follow the weights"
    if jax.tree.structure(stacked) != jax.tree.structure(state):
        raise ValueError(
            f"{must}, but it has another structure for the stack than for one layer, "
            "as where the number of axes decides what is done to an array."
        )
    entries = jax.tree_util.tree_flatten_with_path(state)[0]
    is_number = []
    for (path, own), whole in zip(entries, jax.tree.leaves(stacked)):
        # A random key is none: all layers would draw the same.
        known = jnp.issubdtype(whole.dtype, np.number) or whole.dtype == bool
        is_number.append(known and whole.shape == ())
        if not is_number[-1] and whole.shape != (count, *own.shape):
            raise ValueError(
                f"{must}, but {name(path)!r} is {_types(whole)} for the stack, and "
                f"{_types(own)} for one layer. {HINT}"
            )
    # A program of [gradients, state, weights] -> [updates, state].
    program = jax.make_jaxpr(optimizer.update)(one, state, one).jaxpr
    paths = jax.tree_util.tree_leaves_with_path(one)
    names = [name(path) for path, _ in paths]
    size, numbers = len(names), np.array(is_number, bool)

    def used_by(place: int) -> tuple[np.ndarray, np.ndarray]:
        """Which leaves and which part of the state an output depends on."""
        wanted = [x == place for x in range(len(program.outvars))]
        used = np.array(dce_jaxpr(program, wanted)[1], bool)
        grads, of_state, own = np.split(used, [size, used.size - size])
        return grads | own, of_state

    for place, (path, _) in enumerate(entries):
        of_leaves, of_state = used_by(size + place)
        changes = of_leaves.any() or of_state[~numbers].any()
        if numbers[place] and changes:
            raise ValueError(
                f"{must}, but {name(path)!r} is one number, which gradients or "
                f"weights change. {HINT}"
            )
    for place, leaf in enumerate(names):
        of_leaves, _ = used_by(place)
        if of_leaves.sum() > of_leaves[place]:
            both = [x for x, is_used in zip(names, of_leaves) if is_used]
            raise ValueError(
                "release: optimizer must treat each array by itself, but the update "
                f"of {leaf!r} depends on {both}. {HINT}"
            )
