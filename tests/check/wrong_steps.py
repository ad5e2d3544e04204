"""Steps with a known bug: `python -m optaxclip.check tests.check.wrong_steps:NAME`.

Each function makes the step of one setting, and has the bug that its docstring names.
docs/wrong_norms.md says where such a bug was public.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .right_steps import averaged, factor, mapped, microbatches, scaled, squares, summed


def with_norm(setting, norm_of):
    """A right step, except that `norm_of(grads)` is its norm."""

    def step(params, batch):
        grads = averaged(setting, batch)
        norm = norm_of(grads)
        return scaled(grads, factor(setting, norm)), norm

    return mapped(setting, step)


def local_norm(setting):
    """Gradients are not averaged over the data axis."""

    def step(params, batch):
        grads = jax.tree.map(lambda leaf: leaf.mean(0), batch)
        norm = jnp.sqrt(sum(squares(grads).values()))
        return scaled(grads, factor(setting, norm)), norm

    return mapped(setting, step)


def clip_before_average(setting):
    """Each device clips its own gradient, then they are averaged."""

    def step(params, batch):
        grads = jax.tree.map(lambda leaf: leaf.mean(0), batch)
        norm = jnp.sqrt(sum(squares(grads).values()))
        clipped = scaled(grads, factor(setting, norm))
        return lax.pmean((clipped, norm), "data")

    return mapped(setting, step)


def gradients_summed(setting):
    """psum where pmean belongs."""

    def step(params, batch):
        devices = setting.mesh.shape["data"]
        grads = scaled(averaged(setting, batch), devices)
        norm = jnp.sqrt(sum(summed(grads, setting.specs).values()))
        return scaled(grads, factor(setting, norm)), norm

    return mapped(setting, step)


def every_square_summed(setting):
    """One psum over all devices, also of what all devices hold."""

    def norm_of(grads):
        total = sum(squares(grads).values())
        return jnp.sqrt(lax.psum(total, setting.mesh.axis_names))

    return with_norm(setting, norm_of)


def experts_repeated(setting):
    """Squares of experts are also summed over devices that hold the same experts."""

    def norm_of(grads):
        own = squares(grads)
        experts = lax.psum(own.pop("experts"), setting.mesh.axis_names)
        return jnp.sqrt(sum(own.values()) + experts)

    return with_norm(setting, norm_of)


def own_shard(setting):
    """The norm of what one device holds: split leaves are not summed."""
    return with_norm(setting, lambda grads: jnp.sqrt(sum(squares(grads).values())))


def own_factor(setting):
    """The norm is right, but each device clips by the norm of its own shard."""

    def step(params, batch):
        grads = averaged(setting, batch)
        norm = jnp.sqrt(sum(summed(grads, setting.specs).values()))
        own = jnp.sqrt(sum(squares(grads).values()))
        return scaled(grads, factor(setting, own)), norm

    return mapped(setting, step)


def split_leaves_left_out(setting):
    """Squares of split leaves are left out."""

    def norm_of(grads):
        own = squares(grads)
        return jnp.sqrt(sum(own[name] for name in own if not any(setting.specs[name])))

    return with_norm(setting, norm_of)


def averaged_norms(setting):
    """Norms of shards are averaged over devices."""

    def norm_of(grads):
        own = jnp.sqrt(sum(squares(grads).values()))
        return lax.pmean(own, setting.mesh.axis_names)

    return with_norm(setting, norm_of)


def accumulation_summed(setting):
    """Gradients of micro-batches are added up, not averaged."""

    @jax.jit
    def step(params, batch):
        parts = microbatches(setting, batch)
        grads = [jax.grad(setting.loss)(params, part) for part in parts]
        grads = jax.tree.map(lambda *leaves: sum(leaves), *grads)
        norm = jnp.sqrt(sum(squares(grads).values()))
        return scaled(grads, factor(setting, norm)), norm

    return step


def after_clip(setting):
    """The norm that is logged is that of the clipped gradients."""

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        norm = jnp.sqrt(sum(squares(grads).values()))
        clipped = scaled(grads, factor(setting, norm))
        return clipped, jnp.sqrt(sum(squares(clipped).values()))

    return step


def scaled_loss(setting):
    """Norm and clip are of gradients that still carry the scale of the loss."""

    @jax.jit
    def step(params, batch):
        grads = scaled(jax.grad(setting.loss)(params, batch), 1024.0)
        norm = jnp.sqrt(sum(squares(grads).values()))
        return scaled(grads, factor(setting, norm) / 1024.0), norm

    return step


def own_dtype(setting):
    """optax's clip of gradients as they are: it squares and adds in their dtype."""
    clipper = optax.clip_by_global_norm(setting.max_norm)

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        updates, _ = clipper.update(grads, clipper.init(params))
        return updates, optax.tree.norm(grads)

    return step


def reported_in_float32(setting):
    """A float32 norm is logged, and another one in the gradients' dtype clips."""
    clipper = optax.clip_by_global_norm(setting.max_norm)

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        updates, _ = clipper.update(grads, clipper.init(params))
        return updates, jnp.sqrt(sum(squares(grads).values()))

    return step


def own_nan(setting):
    """Each device leaves out the step if its own part of the gradient is not finite."""

    def step(params, batch):
        grads = averaged(setting, batch)
        own = jnp.isfinite(sum(squares(grads).values()))
        grads = jax.tree.map(lambda x: jnp.where(own, x, 0), grads)
        norm = jnp.sqrt(sum(summed(grads, setting.specs).values()))
        return scaled(grads, factor(setting, norm)), norm

    return mapped(setting, step)


def eps_in_denominator(setting):
    """torch's factor, limit / (norm + 1e-6), is below the limit for small norms."""

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        norm = jnp.sqrt(sum(squares(grads).values()))
        number = jnp.minimum(1.0, setting.max_norm / (norm + 1e-6))
        return scaled(grads, number), norm

    return step


def always_scaled(setting):
    """Gradients below the limit are brought to it as well."""

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        norm = jnp.sqrt(sum(squares(grads).values()))
        return scaled(grads, setting.max_norm / norm), norm

    return step


def groups_apart(setting):
    """A clip inside `optax.multi_transform` clips each group by its own norm."""
    clip = optax.clip_by_global_norm(setting.max_norm)
    labels = {name: "bias" if name == "bias" else "rest" for name in setting.specs}
    clipper = optax.multi_transform({"bias": clip, "rest": clip}, labels)

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
        updates, _ = clipper.update(grads, clipper.init(params))
        return updates, optax.tree.norm(grads)

    return step


def not_clipped(setting):
    """The clipped gradients are thrown away, and the others applied."""

    @jax.jit
    def step(params, batch):
        grads = jax.grad(setting.loss)(params, batch)
        return grads, jnp.sqrt(sum(squares(grads).values()))

    return step
