"""The state of a skipped step, selected while the optimizer's update runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip
from tests.core.steps import same_bits

GRADS = jnp.array([3.0, 4.0])


def both(update, state, grads=GRADS):
    """(what a skipped step gives, what a good step gives)."""
    inner = optax.GradientTransformation(lambda _: state, update)
    optimizer = optaxclip.skip_spikes(inner, 1.0)
    found = []
    for norm in (2.0, 1.0):
        first = optimizer.init(grads)
        updates, after = optimizer.update(grads, first, grad_norm=norm)
        found.append((updates, after.inner_state))
    return found


def test_what_follows_a_new_state_reads_the_selected_one():
    seen = []

    def update(grads, state, params):
        state = state + 1
        jax.debug.callback(lambda count: seen.append(float(count)), state * 10)
        return grads, state

    both(update, jnp.float32(7))
    jax.effects_barrier()
    assert seen == [70.0, 80.0]


def test_a_new_state_that_no_equation_computes_alone_is_kept():
    old = [jnp.array([1.0, 2.0]), jnp.array([5.0, 6.0])]
    for new in (
        lambda grads, state: [state[0] + grads] * 2,
        lambda grads, state: [grads, grads],
        lambda grads, state: [np.float32([8, 9]), state[1]],
        lambda grads, state: state[::-1],
    ):
        update = partial(lambda new, grads, state, _: (grads, new(grads, state)), new)
        skipped, taken = both(update, old)
        same_bits(skipped, (jnp.zeros(2), old))
        same_bits(taken, (GRADS, [jnp.asarray(leaf) for leaf in new(GRADS, old)]))


def test_an_inner_jit_that_donates_leaves_the_old_state():
    donating = jax.jit(lambda grads, state: (grads, state + 1), donate_argnums=1)
    old = jnp.array([1.0, 2.0])
    skipped, taken = both(lambda grads, state, _: donating(grads, state), old)
    same_bits(skipped, (jnp.zeros(2), old))
    same_bits(taken, (GRADS, old + 1))
    assert not old.is_deleted()


def test_a_new_state_that_is_a_python_number_is_kept():
    old = {"first": jnp.bool_(True), "count": jnp.int32(3), "rate": jnp.float32(0.5)}
    new = {"first": False, "count": 0, "rate": 1.0}
    skipped, taken = both(lambda grads, state, _: (grads, new), old)
    same_bits(skipped, (jnp.zeros(2), old))
    wanted = {name: old[name].dtype.type(new[name]) for name in old}
    same_bits(taken, (GRADS, jax.tree.map(jnp.asarray, wanted)))
