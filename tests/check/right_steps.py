"""Right steps: `python -m optaxclip.check tests.check.right_steps:NAME`.

Each function makes the step of one setting. The settings hand out float32, bfloat16 and
float16 gradients, replicated and split, so a step is written once for all of them.
"""

from operator import itemgetter

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import optaxclip


def ours_jit(setting):
    """Our clipper under jit. XLA adds the collectives."""
    clipper = optaxclip.clip_by_global_norm(setting.max_norm)
    optimizer = optax.chain(clipper, optax.sgd(1.0))

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        updates, state = optimizer.update(grads, optimizer.init(params))
        norm = optaxclip.metrics(state)["clip/norm_before"]
        return optax.apply_updates(params, updates), norm

    return step


def ours_shard_map(setting):
    """Our clipper in a typed shard_map. It reads from types what is split."""
    clipper = optaxclip.clip_by_global_norm(setting.max_norm)

    def step(params, batch):
        grads = averaged(setting, batch)
        updates, state = clipper.update(grads, clipper.init(params))
        return updates, state.norm

    return mapped(setting, step, check_vma=True)


def optax_jit(setting):
    """optax's clip of float32 gradients under jit."""
    optimizer = optax.chain(optax.clip_by_global_norm(setting.max_norm), optax.sgd(1.0))

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        # optax sums in the dtype of the gradients, which rounds in bfloat16.
        grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
        updates, _ = optimizer.update(grads, optimizer.init(grads))
        return optax.apply_updates(params, updates), optax.tree.norm(grads)

    return step


def by_hand(setting):
    """A shard_map without types, with squares summed over the axes of each leaf."""

    def step(params, batch):
        grads = averaged(setting, batch)
        norm = jnp.sqrt(sum(summed(grads, setting.specs).values()))
        return scaled(grads, factor(setting, norm)), norm

    return mapped(setting, step)


def multi_steps(setting):
    """Gradients are accumulated by optax, and their mean is clipped once."""
    clipper = optaxclip.clip_by_global_norm(setting.max_norm)
    inner = optax.chain(clipper, optax.sgd(1.0))
    optimizer = optax.MultiSteps(inner, setting.microbatches)

    @jax.jit
    def step(params, batch):
        state = optimizer.init(params)
        for part in microbatches(setting, batch):
            grads = jax.grad(setting.loss)(params, part)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, optaxclip.metrics(state)["clip/norm_before"]

    return step


def skips_nan(setting):
    """Leaves out a step whose norm is not finite, on all devices together."""

    def step(params, batch):
        grads = averaged(setting, batch)
        norm = jnp.sqrt(sum(summed(grads, setting.specs).values()))
        clipped = scaled(grads, factor(setting, norm))
        is_finite = jnp.isfinite(norm)
        return jax.tree.map(lambda x: jnp.where(is_finite, x, 0), clipped), norm

    return mapped(setting, step)


RIGHT = {
    function.__name__: function
    for function in (
        ours_jit,
        ours_shard_map,
        optax_jit,
        by_hand,
        multi_steps,
        skips_nan,
    )
}


def ours_pmap(setting):
    """Our clipper in pmap, for settings in which each device holds all weights."""
    clipper = optaxclip.clip_by_global_norm(setting.max_norm)
    devices = list(setting.mesh.devices[:, 0])

    def step(params, batch):
        grads = lax.pmean(jax.grad(setting.loss)(params, batch), "data")
        updates, state = clipper.update(grads, clipper.init(params))
        return updates, state.norm

    mapped = jax.pmap(step, "data", in_axes=(None, 0), out_axes=None, devices=devices)

    def split_step(params, batch):
        def split(leaf):
            return leaf.reshape(len(devices), -1, *leaf.shape[1:])

        return mapped(params, jax.tree.map(split, batch))

    return split_step


# ------------------------------------------------------- what trainers write by hand


def mapped(setting, step, check_vma=False):
    """The step of one device, on all devices of the setting."""
    mapping = jax.shard_map(
        step,
        mesh=setting.mesh,
        in_specs=(setting.specs, setting.batch_specs),
        out_specs=(setting.specs, P()),
        check_vma=check_vma,
    )
    return jax.jit(mapping)


def averaged(setting, batch):
    """The gradient of the whole batch. A leaf that data parallel devices have split
    (FSDP) is scattered, others are averaged.
    """
    devices = setting.mesh.shape["data"]

    def of_leaf(leaf, spec):
        own = leaf.mean(0)
        if "data" not in spec:
            return lax.pmean(own, "data")
        dim = spec.index("data")
        part = lax.psum_scatter(own, "data", scatter_dimension=dim, tiled=True)
        return part / devices

    return {name: of_leaf(leaf, setting.specs[name]) for name, leaf in batch.items()}


def squares(grads):
    """The sum of squares of each leaf's own part, in float32."""
    return {name: jnp.sum(x.astype(jnp.float32) ** 2) for name, x in grads.items()}


def summed(grads, specs):
    """The sum of squares of each leaf, over the mesh axes that it is split over."""
    own = squares(grads)
    axes = {name: tuple(axis for axis in spec if axis) for name, spec in specs.items()}
    return {
        name: lax.psum(own[name], axes[name]) if axes[name] else own[name]
        for name in own
    }


def factor(setting, norm):
    return jnp.where(norm > setting.max_norm, setting.max_norm / norm, 1.0)


def scaled(grads, number):
    return jax.tree.map(
        lambda x: (x.astype(jnp.float32) * number).astype(x.dtype), grads
    )


def microbatches(setting, batch):
    """The parts of a batch whose gradients are accumulated."""
    n = setting.microbatches
    return [jax.tree.map(itemgetter(slice(i, None, n)), batch) for i in range(n)]
