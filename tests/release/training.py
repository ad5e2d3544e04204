"""Released runs beside usual ones: `value_and_grad`, a clip by NumPy, the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optaxclip import release


def norm(tree):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return np.sqrt(
        sum(
            np.sum(np.abs(x.astype(np.result_type(x, np.float64))) ** 2) for x in leaves
        )
    )


def shortened(tree, limit):
    factor = min(1, limit / norm(tree))
    return jax.tree.map(lambda x: (np.asarray(x) * factor).astype(x.dtype), tree)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def parted(params):
    """The leaves that are trained, and all others, with None in their places."""
    floats = jax.tree.map(lambda x: x if is_float(x) else None, params)
    others = jax.tree.map(lambda x: None if is_float(x) else x, params)
    return floats, others


def joined(floats, others):
    return jax.tree.map(
        lambda x, y: y if x is None else x, floats, others, is_leaf=lambda x: x is None
    )


def usual_run(model, optimizer, clip, steps, has_aux=True):
    """Returns params, the optimizer's state, values of the loss, and gradients."""
    loss, params, batch_of = model
    trained, others = parted(params)
    state, values, gradients = optimizer.init(trained), [], []
    update = jax.jit(optimizer.update)
    apply_updates = jax.jit(optax.apply_updates)

    @jax.jit
    def value_and_grad(trained, *batch):
        def loss_of(trained):
            outputs = loss(joined(trained, others), *batch)
            return outputs if type(outputs) is tuple else (outputs, None)

        (value, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        return (value if aux is None else (value, aux)), grads

    for seed in range(steps):
        value, grads = value_and_grad(trained, *batch_of(seed))
        values.append(value)
        gradients.append(grads)
        updates, state = update(jax.tree.map(jnp.asarray, clip(grads)), state, trained)
        trained = apply_updates(trained, updates)
    return joined(trained, others), state, values, gradients


def released_run(model, optimizer, steps, **options):
    """Returns params, the states after each step, and values of the loss."""
    loss, params, batch_of = model
    trainer = release(loss, optimizer, **options)
    state, states, values = trainer.init(params, *batch_of(0)), [], []
    step = jax.jit(trainer.step)
    for seed in range(steps):
        params, state, value = step(params, state, *batch_of(seed))
        states.append(state)
        values.append(value)
    return params, states, values


def assert_close(found, wanted, rtol):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol, rtol)
