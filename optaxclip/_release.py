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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.interpreters.partial_eval import dce_jaxpr

from ._checks import Nonfinite, check_flag, shown, with_extra_args
from ._exported import exported
from ._kernel import make_clipper
from ._mesh_types import has_types, manual_axes, resharded_as
from ._norms import GlobalNorm, global_norm
from ._state import COUNT_NAMES, ClipState, Names, clip_states
from ._trees import clipped_leaves, listed_paths, name, put_back
from ._wrappers._skipping import SkipState
from .rules._limits import Limit, rule_without_params

# What to do about an optimizer that is refused.
HINT = "Clippers are given as max_norm, or as layer_clip, and not within the optimizer."
ACCUMULATION = "A gradient that is gone cannot be added to: give step the whole batch."
BROKEN_STEPS = "For NaN and inf set max_norm and nonfinite='zero'."
# Optimizers whose update is 0 in some steps, by their state.
PAUSES = {
    optax.MultiStepsState: ("optax.MultiSteps", ACCUMULATION),
    optax.ApplyEvery: ("optax.apply_every", ACCUMULATION),
    optax.ConditionallyMaskState: (
        "optax.conditionally_mask",
        "Call step in the other steps alone.",
    ),
    optax.ApplyIfFiniteState: ("optax.apply_if_finite", BROKEN_STEPS),
    SkipState: ("skip_nonfinite, skip_step or skip_spikes", BROKEN_STEPS),
}


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


@dataclass(frozen=True, eq=False)
class Released:
    """What `release` returns: `init(params)` and `step(params, state, *batch)`."""

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]
    optimizer: optax.GradientTransformationExtraArgs
    layer_clip: optax.GradientTransformationExtraArgs
    clip: optax.GradientTransformationExtraArgs | None  # of everything
    delayed: bool

    def init(self, params: Any) -> ReleaseState:
        """Returns the state before the first step."""
        weights, others = clipped_leaves(_pair(params), "release")
        # Raises for leaves with different numbers of layers.
        _count(params[0])
        _check_optimizer(self.optimizer, weights)
        # Zeros that vmap stacks have no type of a mesh.
        clips = jax.vmap(self.layer_clip.init)(weights)
        clips = jax.tree.map(lambda x: resharded_as(x, jax.typeof(x)), clips)
        moments, of_others = map(self.optimizer.init, (weights, others))
        clip = self.clip.init((weights, others)) if self.clip else ()
        views = _views(clips, self.layer_clip.init(others))
        return ReleaseState(moments, of_others, clip, *views)

    def step(self, params: Any, state: ReleaseState, *batch: Any) -> Any:
        """Returns new params, the new state, and the loss before the step."""
        manual = manual_axes()
        if manual and not has_types(manual):
            raise ValueError(
                f"release: along the mesh axes {manual} nothing would add up gradients "
                "of devices: use jit, or shard_map with check_vma=True."
            )
        layers, rest = _pair(params)
        weights, others = clipped_leaves((layers, rest), "release")
        clips = jax.eval_shape(jax.vmap(self.layer_clip.init), weights)
        clips = jax.tree.structure(clips).unflatten(state.layer_clip)
        loss, inputs, of_head, last, back = self._forward(layers, rest, batch)
        self._check_reads((layers, rest), batch)

        dtype = jax.eval_shape(global_norm, weights).dtype
        norms = jnp.zeros(_count(layers), dtype)

        def backward(norms: Any, stack: Any, by: Any = None) -> Any:
            loop = last, norms, stack
            first, *loop = self._backward(layers, inputs, batch, loop, by)
            (of_embed,) = back(first)
            grads = jax.tree.map(jnp.add, of_embed, of_head)
            return *loop, *self.layer_clip.update(grads, state.clips["rest"], others)

        stack = weights, clips, state.layers
        clip, numbers = state.clip, {}
        if self.delayed:
            # A rule has learnt from this norm already, and would give another limit.
            numbers = {"grad_norm": clip.norm, "limit": clip.limit}
        elif self.clip:
            norms, _, grads, _ = backward(norms, stack)
            numbers = {"grad_norm": global_norm((norms, grads))}
        by = clip, numbers
        norms, stack, grads, rest_clip = backward(norms, stack, by)
        if self.clip:
            norm = global_norm((norms, grads))
            _, clip = self.clip.update(grads, clip, grad_norm=norm)
        others, of_others = self._update(by, grads, state.rest, others)
        new, clips, moments = stack
        # The numbers that all layers share, one step on, from any layer.
        own, old = _take((weights, state.layers), 0)
        _, once = self.optimizer.update(own, old, own)
        moments = jax.tree.map(lambda x, y: x if x.ndim else y, moments, once)
        state = ReleaseState(moments, of_others, clip, *_views(clips, rest_clip))
        return (put_back(new, layers), put_back(others, rest)), state, loss

    def _check_reads(self, params: Any, batch: Any) -> None:
        """Refuses float leaves that the loss does not depend on.

        They would get moments and weight decay. `stop_gradient` makes no such leaf.
        """

        def loss(weights: Any, others: Any) -> Any:
            stack, rest = put_back(weights, params[0]), put_back(others, params[1])
            x = self.embed(rest, *batch)
            x, _ = lax.scan(lambda x, own: (self.layer(own, x, *batch), None), x, stack)
            return self.head(rest, x, *batch)

        trained = clipped_leaves(params)
        program = jax.make_jaxpr(loss)(*trained).jaxpr
        is_read = dce_jaxpr(program, [True])[1]
        paths = [path for path, _ in jax.tree.leaves_with_path(trained)]
        unread = [path for path, reads in zip(paths, is_read) if not reads]
        if unread:
            raise ValueError(
                "release: the loss must depend on every float leaf of params, but does "
                f"not on {listed_paths(unread)}. Leave out what is not trained, such "
                "as statistics of BatchNorm: close over it, or pass it in the batch. "
                "What a layer writes to it is lost."
            )

    def _forward(self, layers: Any, rest: Any, batch: Any) -> Any:
        """The loss, the input of every layer, the gradients of the rest in the head and
        of the last output, and how to go back from the first input to the rest.
        """

        def first(others: Any) -> Any:
            x = self.embed(put_back(others, rest), *batch)
            return clipped_leaves(x), x

        def through(x: Any, own: Any) -> Any:
            return self.layer(own, x, *batch), x

        def last(others: Any, moved: Any) -> Any:
            given = put_back(others, rest), put_back(moved, x)
            return self.head(*given, *batch)

        others = clipped_leaves(rest)
        _, back, x = jax.vjp(first, others, has_aux=True)
        x, inputs = lax.scan(through, x, layers)
        loss, grads = jax.value_and_grad(last, (0, 1))(others, clipped_leaves(x))
        return loss, inputs, *grads, back

    def _backward(
        self, layers: Any, inputs: Any, batch: Any, loop: Any, by: Any
    ) -> Any:
        """Goes through the layers, the last one first.

        `by` is the state of the clip of everything, and the numbers that it takes. None
        only measures.
        """
        count = _count(layers)

        def body(turn: jax.Array, loop: Any) -> Any:
            cotangent, norms, stack = loop
            number = count - 1 - turn
            own, own_clip, moments = _take(stack, number)
            whole, x = _take((layers, inputs), number)

            def run(own: Any, moved: Any) -> Any:
                given = put_back(own, whole), put_back(moved, x)
                return clipped_leaves(self.layer(*given, *batch))

            _, pull = jax.vjp(run, own, clipped_leaves(x))
            grads, cotangent = pull(cotangent)
            grads, own_clip = self.layer_clip.update(grads, own_clip, own)
            if self.delayed or by is None:
                norms = norms.at[number].set(global_norm(grads))
            # Put back as they are, weights would be copied.
            if by is not None:
                own, moments = self._update(by, grads, moments, own)
                stack = _put(stack, number, (own, own_clip, moments))
            return cotangent, norms, stack

        return lax.fori_loop(0, count, body, loop)

    def _update(self, by: Any, grads: Any, moments: Any, own: Any) -> Any:
        """New weights, of a layer or of the rest, and the optimizer's state."""
        if self.clip:
            clip, numbers = by
            # The norm of everything, in the place of that of these gradients.
            grads, _ = self.clip.update(grads, clip, **numbers)
        updates, moments = self.optimizer.update(grads, moments, own)
        return optax.apply_updates(own, updates), moments


def release(
    embed: Callable[..., Any],
    layer: Callable[..., Any],
    head: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    max_norm: Limit = None,
    layer_clip: optax.GradientTransformation | None = None,
    delayed: bool = False,
    nonfinite: Nonfinite = "propagate",
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
        AdamW, Lion ...), without a clipper. It sees one layer at a time, and the
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
      TypeError: a part of the model that is no function, an optimizer or a clipper
        without init and update, a limit that is not a number, or `params` that are no
        pair. From step: a layer that changes the type of `x`, or a loss that is not a
        real scalar.
      ValueError: a negative or NaN limit, `delayed` without both limits, a rule that
        needs weights, an unknown `nonfinite`. From init: leaves of the stack with
        different numbers of layers, an optimizer that mixes leaves, that leaves out
        steps (`optax.MultiSteps`, `skip_step`), or whose state does not follow the
        weights. From step: a float leaf that the loss does not depend on, such as
        statistics of BatchNorm, pmap, or shard_map with check_vma=False.

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
      ...     print(f"{value:.2f}")
      31.41
      27.13
      23.16

    Reference: Lv et al., Full parameter fine-tuning for large language models with
    limited resources, 2023 (arXiv 2306.09782).
    """
    check_flag("release: delayed", delayed)
    if delayed and (max_norm is None or layer_clip is None):
        raise ValueError(
            f"release: delayed={delayed!r} needs max_norm, got {max_norm!r}, and "
            f"layer_clip, got {layer_clip!r}, which holds the spike that it lets pass."
        )
    rule_without_params(max_norm, "release: max_norm")
    clip = None
    if max_norm is not None:
        measure = GlobalNorm("release")
        clip = make_clipper(measure, max_norm, call="release", nonfinite=nonfinite)
    for own, part in {"embed": embed, "layer": layer, "head": head}.items():
        if not callable(part):
            raise TypeError(f"release: {own} must be a function, got {shown(part)}.")
    optimizer = with_extra_args("release: optimizer", optimizer)
    layer_clip = optax.identity() if layer_clip is None else layer_clip
    layer_clip = with_extra_args("release: layer_clip", layer_clip, "a clipper")
    return Released(embed, layer, head, optimizer, layer_clip, clip, bool(delayed))


# -------------------------------------------------------------------- stacks of layers


def _take(tree: Any, number: Any) -> Any:
    """The slices of a layer. Numbers are shared by all layers."""
    index = partial(lax.dynamic_index_in_dim, index=number, keepdims=False)
    return jax.tree.map(lambda x: index(x) if x.ndim else x, tree)


def _put(tree: Any, number: Any, new: Any) -> Any:
    """The stack with the new slices of a layer. Numbers stay as they were."""
    put = partial(lax.dynamic_update_index_in_dim, index=number, axis=0)
    return jax.tree.map(lambda x, y: put(x, y) if x.ndim else x, tree, new)


def _views(clips: Any, rest: Any) -> tuple[Any, Any]:
    """The states of `layer_clip`, as a step takes and as `metrics` shows them."""
    found = list(map(_of_all_layers, clip_states(clips)))
    return tuple(jax.tree.leaves(clips)), {"layers": found, "rest": rest}


def _of_all_layers(state: ClipState) -> ClipState:
    """The states of all layers, arrays [layers, rows, norms], as that of a stacked
    leaf.
    """
    layers = range(state.step.size)
    names = {}
    for leaf, inside in state.names.layers_of_name.items():
        ends = [f"/{end}" for end in inside] if inside else [""]
        keys = [f"{layer}{end}" for end in ends for layer in layers]
        # The norm of everything in a layer has no name of its own.
        names[leaf or "layer"] = dict.fromkeys(keys)

    def rows_of_all(array: jax.Array) -> jax.Array:
        rows = array[..., None] if state.names.is_global else array
        # [rows, norms, layers], of which each norm has its layers side by side.
        return jnp.moveaxis(rows, 0, -1).reshape(rows.shape[1], -1)

    return ClipState(
        Names(names, state.names.unit_leaves),
        rows_of_all(state.counts)[: len(COUNT_NAMES)],
        rows_of_all(state.numbers)[: len(state.number_names)],
    )


# ----------------------------------------------------------------------------- checks


def _pair(params: Any) -> tuple[Any, Any]:
    if isinstance(params, tuple) and len(params) == 2:
        return params
    must = "a pair (layers, rest): the stacked weights, and a tree of all others"
    raise TypeError(f"release: params must be {must}, got {shown(params)}.")


def _count(layers: Any) -> int:
    """How many layers a stack has."""
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(layers)}
    if len(counts) == 1 and counts.isdisjoint({(), (0,)}):
        return counts.pop()[0]
    must = "params[0] must be arrays whose first axis counts the layers"
    raise ValueError(f"release: {must}, got {jax.tree.map(jnp.shape, layers)}.")


def _check_optimizer(optimizer: Any, weights: Any) -> None:
    """Refuses an optimizer that does something else to a layer than to its stack."""
    one = jax.eval_shape(partial(_take, number=0), weights)
    state, stacked = (jax.eval_shape(optimizer.init, x) for x in (one, weights))
    _check_every_step(state)
    names = [name(path) for path, _ in jax.tree.leaves_with_path(one)]
    # Of what update takes, gradients and state. What it returns has the same names.
    inputs, numbers = list(names), []
    entries = jax.tree.leaves_with_path(state)
    for (path, own), whole in zip(entries, jax.tree.leaves(stacked)):
        # A random key is no number: all layers would draw the same.
        if whole.shape == () and jnp.issubdtype(whole.dtype, np.number):
            numbers.append(len(inputs))
        elif whole.shape != (_count(weights), *own.shape):
            raise ValueError(
                "release: the state of optimizer must have an entry for each layer, "
                f"but {name(path)!r} is {whole.dtype}{list(whole.shape)} for the stack "
                f"and {own.dtype}{list(own.shape)} for one layer. {HINT}"
            )
        inputs.append(name(path))
    program = jax.make_jaxpr(optimizer.update)(one, state, one).jaxpr
    for place in (*numbers, *range(len(names))):
        wanted = [x == place for x in range(len(program.outvars))]
        used = np.flatnonzero(dce_jaxpr(program, wanted)[1])
        reads = {[*inputs, *names][x] for x in used if x not in numbers}
        kind = "number"
        if place not in numbers:
            kind, reads = "update of", reads.intersection(names) - {names[place]}
        if reads:
            raise ValueError(
                "release: optimizer must treat each array by itself, but its "
                f"{kind} {inputs[place]!r} depends on {sorted(reads)}. {HINT}"
            )


def _check_every_step(state: Any) -> None:
    """Refuses an optimizer whose update is 0 in some steps."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: type(x) in PAUSES)
    for node in nodes:
        if type(node) in PAUSES:
            optimizer, hint = PAUSES[type(node)]
            raise ValueError(
                "release: optimizer must change the weights in every step, and "
                f"{optimizer} does not. {hint}"
            )
