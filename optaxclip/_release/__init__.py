"""Clips and optimizes inside the backward pass, one layer at a time (gradient release).
In the order in which to read:

    trainer             one step
    budget              the limit of all gradients, in one backward pass
    step_clip           the clip of one layer, and the norm of everything
    model               loss and params together, and one backward pass
    program             the loss is traced: which of its scans go through layers
    stacks              such a scan, in whose backward pass layers are updated
    optimizers          one layer in the optimizer's state
    optimizer_checks    whether the optimizer can see one layer at a time

Gradients are as large as the weights, and the usual step holds all of them until the
optimizer has seen them. Here the gradient of a layer is gone before the layer below has
one. Only the input of every layer stays. The layer runs again from it, as under
`jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from .._arguments.checks import Nonfinite, shown, with_extra_args
from .._norm_clipper import make_clipper
from .._norms.norms import GlobalNorm
from .._trees import PyTree
from ..rules._limits import Limit, rule_of_norm_alone
from .trainer import ReleaseState, Trainer

__all__ = ["ReleaseState", "Trainer", "release"]


def release(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    max_norm: Limit = None,
    passes: int = 1,
    trainable: PyTree = True,
    nonfinite: Nonfinite = "propagate",
) -> Trainer:
    """Trains a model that scans its layers without ever holding the gradient of more
    than one of them.

        value = loss(params, *batch)       a scalar, or (scalar, any other outputs)

    The loss is traced, and its program is cut at each `lax.scan` (also in nn.scan and
    nnx.scan) whose xs are leaves of params. A loop over these layers, the last one
    first, takes the gradient of each layer, clips it, and applies the optimizer to the
    slices of weights and state. All other weights are updated at the end. If one scan
    of layers is in a `jax.checkpoint` around it and another is not, the layers in the
    checkpoint count as other weights.

    Group 1 is the last layer, and the last group is all weights outside of the layers.
    One pass clips by the usual share s_j of group j in the square of the norm. s_j is
    the average of about the last 10 steps. Before the first, all are equal.

        a_j = sqrt(left * s_j / (s_j + s_(j+1) + ...)),  left = max_norm^2 at first
        g_j = g_j * min(1, a_j / |g_j|),                 left -= min(|g_j|, a_j)^2

    | limit                | passes | all gradients together                          |
    |----------------------|--------|-------------------------------------------------|
    | max_norm             | 1      | at most max_norm. Where shares are as usual, it |
    |                      |        | is the clip of the global norm                  |
    | max_norm, passes=2   | 2      | the clip of the global norm. The first pass     |
    |                      |        | only measures the norm                          |

    Args:
      loss: returns the loss, a real scalar, or a pair of that and any pytree.
      optimizer: any optimizer of optax whose state follows its weights (SGD, Adam,
        AdamW, Lion ...), without a clip of the global norm. It sees one layer at a
        time, with the shapes and paths that the leaves have in params, but one layer
        long.
      max_norm: the limit of the norm of all gradients: a number at least 0, a schedule,
        or a rule of `optaxclip.rules`. With one pass a rule is asked before the norm of
        the step is known. It gets the norm of the step before, or the limit of that
        step if the norm is NaN or inf. None: no limit.
      passes: how many backward passes a step takes, 1 or 2.
      trainable: which leaves are trained, as optax masks: True, a tree prefix of params
        with True and False, or a function from params to one. Leaves without elements,
        and leaves that are neither float nor complex, never are. The optimizer sees
        None in place of leaves that are not trained.
      nonfinite: what `max_norm` makes of a norm that is NaN or inf: "propagate" makes
        the gradients NaN, "zero" zero, "raise" is a `checkify.check`. With one pass
        only the layer whose norm is broken is replaced. The layers above it have been
        clipped as usual, and those below are clipped by their own norms. With "zero"
        `metrics(state)` shows the factor 0, although these layers moved.

    Returns:
      `init(params, *batch)` makes the state. `step(params, state, *batch)` returns new
      params, the new state, and what the loss returned. Jit the step and donate params
      and state: `jax.jit(step, donate_argnums=(0, 1))`. `released(params, *batch)`
      names the leaves whose gradients are never whole. `metrics(state)` reads norms,
      limits and factors, and `state.optimizer` is the optimizer's own state.

    Raises:
      TypeError: a loss that is not a function, an optimizer without init and update, a
        limit that is not a number. From init and step: a loss that is not a
        real scalar, a leaf of params that is not an array. From init: an optimizer that
        wants more than gradients, state and params, or every leaf. From step: a state
        that neither init nor step returned.
      ValueError: a negative or NaN limit, a rule that needs weights, passes other than
        1 and 2, an unknown `nonfinite`. From init and step: a loss that scans no leaf
        of params, or only leaves that something else reads as well, and a float leaf
        that the loss does not depend on, such as statistics of BatchNorm. From init: an
        optimizer that mixes leaves, or whose state does not follow the weights or
        changes its dtype or its entries in an update. From step: a state of another
        optimizer or of params of other shapes or dtypes, pmap, or shard_map with
        check_vma=False.

    Example:
      >>> def loss(params, target):
      ...     def layer(x, weights):
      ...         return x + jnp.tanh(x @ weights), None
      ...     x, _ = jax.lax.scan(layer, jnp.ones(2), params["layers"])
      ...     return jnp.sum((x * params["out"] - target) ** 2)
      >>> trainer = optaxclip.release(loss, optax.sgd(0.1), max_norm=1.0)
      >>> params = {"layers": jnp.ones((3, 2, 2)), "out": jnp.ones(2)}
      >>> state = trainer.init(params, jnp.zeros(2))
      >>> step = jax.jit(trainer.step, donate_argnums=(0, 1))
      >>> for _ in range(3):
      ...     params, state, value = step(params, state, jnp.zeros(2))
      ...     print(f"{value:.2f}")
      31.41
      28.28
      24.22

    Reference: Lv et al., Full parameter fine-tuning for large language models with
    limited resources, 2023 (arXiv 2306.09782), which takes two passes.
    """
    if not callable(loss):
        raise TypeError(f"release: loss must be a function, got {shown(loss)}.")
    if passes not in (1, 2):
        raise ValueError(f"release: passes must be 1 or 2, got {shown(passes)}.")
    rule = rule_of_norm_alone(max_norm, "release: max_norm")
    measure = GlobalNorm("release")
    return Trainer(
        loss,
        optimizer=with_extra_args("release: optimizer", optimizer),
        clipper=make_clipper(measure, max_norm, call="release", nonfinite=nonfinite),
        inf_is_off=rule.inf_is_off,
        passes=passes,
        trainable=trainable,
    )
