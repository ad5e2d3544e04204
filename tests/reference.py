"""Clippers by norm in plain `jnp`, without any care for range, precision, NaN or
sharding. docs/one_update.md shows this file.
"""

import jax
import jax.numpy as jnp


def norm_of(arrays, axis=None, mean=0.0):
    squares = [jnp.sum(x * x, axis, keepdims=axis is not None) for x in arrays]
    count = sum(x.size for x in arrays)
    return jnp.sqrt(sum(squares)) / count**mean


def global_norm(tree):
    return norm_of(jax.tree.leaves(tree))


def tensor_norm(tree, mean=0.0):
    return jax.tree.map(lambda x: norm_of([x], mean=mean), tree)


def unitwise_norm(tree):
    def norms(x):
        inputs = (0,) if x.ndim == 3 else tuple(range(x.ndim - 1))
        return norm_of([x], inputs if x.ndim > 1 else None)

    return jax.tree.map(norms, tree)


def group_norm(tree, labels):
    leaves, structure = jax.tree.flatten(tree)
    label_of, norms = jax.tree.leaves(labels), []
    for label in label_of:
        group = [x for x, own in zip(leaves, label_of) if own == label]
        norms.append(norm_of(group))
    return structure.unflatten(norms)


def clip(tree, norms, limits):
    def clip_part(norm, limit, part):
        factor = jnp.where(norm > limit, limit / norm, 1.0)
        return jax.tree.map(lambda x: x * factor, part)

    return jax.tree.map(clip_part, norms, limits, tree)
