"""What is built otherwise, or is no transformation, as a clipper of the registry."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optaxclip
from optaxclip import clip_by_global_norm


def labels_by_rank(tree: Any) -> Any:
    """Two groups: matrices, and all else."""
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) > 1 else "vector", tree)


def by_group(
    limit: Any,
    ord: Any = None,
    shrink: Any = None,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    mesh_axes: Any = "auto",
) -> Any:
    """`clip_by_group_norm` of two groups.

    Not a partial with `labels`: optax.inject_hyperparams calls functions of steps.
    """
    options = {"ord": ord, "shrink": shrink, "eps": eps, "mesh_axes": mesh_axes}
    options["nonfinite"] = nonfinite
    return optaxclip.clip_by_group_norm(limit, labels_by_rank, **options)


def bounds(limit: Any, lower: Any = None) -> Any:
    """`clip_by_value`, in one clipper with a stateless rest of the signature."""
    return optax.with_extra_args_support(optaxclip.clip_by_value(limit, lower))


def carried(limit: Any, **options: Any) -> Any:
    """`carry_clipped` of a clipper of the global norm."""
    return optaxclip.carry_clipped(clip_by_global_norm(limit, **options))


def constrained(limit: Any, **options: Any) -> Any:
    """`constrain` of a clipper of the global norm."""
    return optaxclip.constrain(clip_by_global_norm(limit, **options))


def around(wrapper: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A wrapper of optimizers around one that hands on what it gets."""
    return lambda **options: wrapper(optax.identity(), **{**settings, **options})


def once(limit: Any, **options: Any) -> Any:
    """`clip_grads` as a clipper."""

    def update(grads: Any, params: Any) -> Any:
        return optaxclip.clip_grads(grads, limit, **options)[0]

    return optax.with_extra_args_support(optax.stateless(update))


def cotangent(limit: Any, **options: Any) -> Any:
    """`clip_cotangent` as a clipper: each leaf is the cotangent of an identity."""

    def update(grads: Any, params: Any) -> Any:
        clip = partial(optaxclip.clip_cotangent, max_norm=limit, **options)
        return jax.vjp(clip, jax.tree.map(jnp.asarray, grads))[1](grads)[0]

    return optax.with_extra_args_support(optax.stateless(update))


def example(limit: Any, **options: Any) -> Any:
    """`clipped_grad` as a clipper: the batch is one example with this gradient."""

    def update(grads: Any, params: Any) -> Any:
        def loss(weights, gradient):
            products = jax.tree.map(lambda w, g: jnp.sum(w * g), weights, gradient)
            return sum(map(jnp.real, jax.tree.leaves(products)))

        weights = jax.tree.map(jnp.zeros_like, grads)
        batch = jax.tree.map(lambda g: g[None], grads)
        return optaxclip.clipped_grad(loss, limit, **options)(weights, batch).grads

    return optax.with_extra_args_support(optax.stateless(update))
