"""Steps with a known bug: `python -m optaxclip.check tests.check.wrong_steps:NAME`.

Each function makes the step of one setting, and has the bug that its docstring names.
docs/wrong_norms.md says where such a bug was public.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optaxclip

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


# --------------------------------------------------- what else was planted in trainers


def under_jit(setting, outcome):
    """A step under jit. `outcome(grads, params)` is its update and its norm."""

    @jax.jit
    def step(params, batch):
        return outcome(jax.grad(setting.loss)(params, batch), params)

    return step


def global_norm(grads):
    return jnp.sqrt(sum(squares(grads).values()))


def clipped(setting, grads):
    return scaled(grads, factor(setting, global_norm(grads)))


def clipped_by(setting, norm_of):
    """A step that clips by `norm_of(grads)`, and returns it."""

    def outcome(grads, _):
        norm = norm_of(grads)
        return scaled(grads, factor(setting, norm)), norm

    return under_jit(setting, outcome)


def chained(setting, *transformations):
    """A step of transformations of optax. The norm is right."""
    optimizer = optax.chain(*transformations)

    def outcome(grads, params):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return updates, global_norm(grads)

    return under_jit(setting, outcome)


def rms(setting):
    """The mean of squares in place of their sum."""

    def norm_of(grads):
        count = sum(leaf.size for leaf in grads.values())
        return global_norm(grads) / count**0.5

    return clipped_by(setting, norm_of)


def largest_element(setting):
    """The norm of order inf."""

    def norm_of(grads):
        return jnp.stack([jnp.max(abs(leaf)) for leaf in grads.values()]).max()

    return clipped_by(setting, norm_of)


def sum_of_norms(setting):
    """The norms of leaves are added, and not their squares."""

    def norm_of(grads):
        return sum(jnp.sqrt(square) for square in squares(grads).values())

    return clipped_by(setting, norm_of)


def squared_in_log(setting):
    """The sum of squares is logged without a root."""
    return under_jit(
        setting, lambda grads, _: (clipped(setting, grads), global_norm(grads) ** 2)
    )


def squared_in_factor(setting):
    """The limit is divided by the sum of squares without a root."""

    def outcome(grads, _):
        norm = global_norm(grads)
        return scaled(grads, factor(setting, norm**2)), norm

    return under_jit(setting, outcome)


def clipped_twice(setting):
    """The factor of one norm multiplies twice."""

    def outcome(grads, _):
        norm = global_norm(grads)
        return scaled(grads, factor(setting, norm) ** 2), norm

    return under_jit(setting, outcome)


def clipped_by_value(setting):
    """`optax.clip` in place of `optax.clip_by_global_norm`."""
    return chained(setting, optax.clip(setting.max_norm))


def half_the_limit(setting):
    """Clips to half of the limit."""
    return chained(setting, optax.clip_by_global_norm(setting.max_norm / 2))


def root_of_factor(setting):
    """Multiplies by the root of the factor."""

    def clip(grads, params):
        factor = jnp.minimum(1, setting.max_norm / optax.tree.norm(grads))
        return scaled(grads, jnp.sqrt(factor))

    return chained(setting, optax.stateless(clip))


def eight_limits(setting):
    """Clips to eight times the limit, as many as there are devices."""
    return chained(setting, optax.clip_by_global_norm(setting.max_norm * 8))


def scaled_by(setting, scale):
    """A step whose norm and clip are of gradients of a scaled loss."""

    def outcome(grads, _):
        grads = scaled(grads, scale)
        return scaled(clipped(setting, grads), 1 / scale), global_norm(grads)

    return under_jit(setting, outcome)


def scale_of_8(setting):
    """The loss is multiplied by 8, as many as there are devices."""
    return scaled_by(setting, 8.0)


def scale_of_1000(setting):
    """The loss is multiplied by 1000, which is no power of two."""
    return scaled_by(setting, 1000.0)


def rate_before_clip(setting):
    """The learning rate multiplies before the clip."""
    clip = optax.clip_by_global_norm(setting.max_norm)
    return chained(setting, optax.sgd(0.1), clip)


def rate_of_a_tenth(setting):
    """The learning rate is 0.1 and not 1."""
    clip = optax.clip_by_global_norm(setting.max_norm)
    return chained(setting, clip, optax.sgd(0.1))


def updated_twice(setting):
    """The update is applied twice."""
    clip = optax.clip_by_global_norm(setting.max_norm)
    return chained(setting, clip, optax.scale(2.0))


def adam_before_clip(setting):
    """The updates of Adam are clipped."""
    clip = optax.clip_by_global_norm(setting.max_norm)
    return chained(setting, optax.adam(1.0), clip)


def frozen_leaf(setting):
    """One leaf is never updated, and counts in the norm."""

    def outcome(grads, _):
        name = min(grads)
        return clipped(setting, grads) | {name: 0 * grads[name]}, global_norm(grads)

    return under_jit(setting, outcome)


def leaf_not_clipped(setting):
    """One leaf is left out of the clip, and of its norm."""

    def outcome(grads, _):
        name = min(grads)
        others = {other: leaf for other, leaf in grads.items() if other != name}
        updates = clipped(setting, others) | {name: grads[name]}
        return updates, global_norm(others)

    return under_jit(setting, outcome)


def decay_before_clip(setting):
    """Weight decay is added before the clip, and counts in the norm."""

    def outcome(grads, params):
        grads = jax.tree.map(lambda leaf, w: leaf + 0.1 * w, grads, params)
        return clipped(setting, grads), global_norm(grads)

    return under_jit(setting, outcome)


def penalty_in_loss(setting):
    """A small penalty on weights is part of the loss."""

    def outcome(grads, params):
        penalty = jax.grad(
            lambda weights: 5e-5 * optax.tree.norm(weights, squared=True)
        )
        grads = jax.tree.map(jnp.add, grads, penalty(params))
        return clipped(setting, grads), global_norm(grads)

    return under_jit(setting, outcome)


def norm_of_weights(setting):
    """The norm of the weights is logged."""
    return under_jit(
        setting, lambda grads, params: (clipped(setting, grads), global_norm(params))
    )


def norm_of_last_step(setting):
    """The norm is read from the state before the update."""
    clipper = optaxclip.clip_by_global_norm(setting.max_norm)

    def outcome(grads, params):
        state = clipper.init(params)
        updates, _ = clipper.update(grads, state)
        return updates, state.norm

    return under_jit(setting, outcome)


def not_updated(setting):
    """The params of the last step are returned, and the new ones forgotten."""
    return under_jit(setting, lambda grads, params: (params, global_norm(grads)))


def clip_of_microbatches(setting):
    """Each micro-batch is clipped, then they are averaged. Norms are averaged too."""

    @jax.jit
    def step(params, batch):
        parts = microbatches(setting, batch)
        grads = [jax.grad(setting.loss)(params, part) for part in parts]
        trees = [clipped(setting, part) for part in grads]
        updates = jax.tree.map(lambda *leaves: sum(leaves) / len(parts), *trees)
        return updates, sum(map(global_norm, grads)) / len(parts)

    return step


def clip_outside_multi_steps(setting):
    """The clip stands before `optax.MultiSteps`, so it sees micro-batches."""
    clip = optaxclip.clip_by_global_norm(setting.max_norm)
    steps = optax.MultiSteps(optax.sgd(1.0), setting.microbatches)
    optimizer = optax.chain(clip, steps.gradient_transformation())

    @jax.jit
    def step(params, batch):
        state = optimizer.init(params)
        for part in contiguous(setting, batch):
            grads = jax.grad(setting.loss)(params, part)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, optaxclip.metrics(state)["clip/norm_before"]

    return step


def contiguous(setting, batch):
    """Micro-batches of examples that follow each other."""
    parts = jax.tree.map(lambda leaf: jnp.split(leaf, setting.microbatches), batch)
    return [
        {name: leaves[k] for name, leaves in parts.items()}
        for k in range(setting.microbatches)
    ]


def microbatch_dropped(setting):
    """The gradient of the last micro-batch is overwritten by that before it."""

    @jax.jit
    def step(params, batch):
        parts = microbatches(setting, batch)
        kept = parts[:-1] or parts
        grads = [jax.grad(setting.loss)(params, part) for part in kept]
        grads = jax.tree.map(lambda *leaves: sum(leaves) / len(kept), *grads)
        return clipped(setting, grads), global_norm(grads)

    return step


def averaged_twice(setting):
    """Averaged gradients are divided by the number of devices once more."""

    def step(params, batch):
        grads = scaled(averaged(setting, batch), 1 / setting.mesh.shape["data"])
        norm = jnp.sqrt(sum(summed(grads, setting.specs).values()))
        return scaled(grads, factor(setting, norm)), norm

    return mapped(setting, step)


def clip_before_division(setting):
    """Summed gradients are clipped, then divided by the number of devices."""

    def step(params, batch):
        devices = setting.mesh.shape["data"]
        grads = scaled(averaged(setting, batch), devices)
        norm = jnp.sqrt(sum(summed(grads, setting.specs).values()))
        return scaled(grads, factor(setting, norm) / devices), norm

    return mapped(setting, step)


def nan_to_0(setting):
    """NaN is made 0 before the norm, on purpose."""
    clip = optax.clip_by_global_norm(setting.max_norm)

    def outcome(grads, params):
        grads = jax.tree.map(jnp.nan_to_num, grads)
        return clip.update(grads, clip.init(params))[0], global_norm(grads)

    return under_jit(setting, outcome)


def norm_without_nan(setting):
    """NaN is 0 in the norm, and stays in the update."""

    def outcome(grads, params):
        norm = global_norm(jax.tree.map(jnp.nan_to_num, grads))
        return scaled(grads, factor(setting, norm)), norm

    return under_jit(setting, outcome)


# ---------------------------------------------------------- what was public in 2026


def scale_in_log(setting):
    """The norm in the log still carries the scale of the loss. The clip does not."""
    return under_jit(
        setting, lambda grads, _: (clipped(setting, grads), 128 * global_norm(grads))
    )


def norm_from_adam(setting):
    """Leaves are clipped, then the norm is rebuilt from the second moments of Adam."""
    clip = optaxclip.clip_by_tensor_norm(setting.max_norm)
    adam = optax.scale_by_adam(b2=0.999)

    def outcome(grads, params):
        updates, _ = clip.update(grads, clip.init(params))
        _, state = adam.update(updates, adam.init(params))
        moments = jax.tree.map(lambda leaf: leaf / (1 - 0.999), state.nu)
        return updates, jnp.sqrt(optax.tree.sum(moments))

    return under_jit(setting, outcome)


def skip_by_clipped_norm(setting):
    """Spikes are judged by the norm of clipped gradients, which has none."""
    clip = optax.clip_by_global_norm(setting.max_norm)
    optimizer = optaxclip.skip_step(optax.sgd(1.0))

    def outcome(grads, params):
        updates, _ = clip.update(grads, clip.init(params))
        norm = optax.tree.norm(updates)
        state = optimizer.init(params)
        updates, _ = optimizer.update(updates, state, params, value=0.0, grad_norm=norm)
        return optax.apply_updates(params, updates), norm

    return under_jit(setting, outcome)
