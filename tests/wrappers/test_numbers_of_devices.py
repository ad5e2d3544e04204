"""A loss or a norm that differs between devices: each would decide for itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optaxclip
from tests.sharded import on_four_devices, on_two_devices

WITH_LOSS = {
    "skip_step": lambda **options: optaxclip.skip_step(optax.sgd(0.1), **options),
    "skip_spikes": lambda **options: optaxclip.skip_spikes(
        optax.sgd(0.1), None, 9.0, **options
    ),
    "record_spikes": optaxclip.record_spikes,
}
LOSSES = np.float32([1.0, 2.0])


def stepped(optimizer, name="value", join=lambda x: x, **options):
    """One step, in which each of two devices has a number of its own."""
    grads = jnp.ones(3)

    def step(state, numbers):
        return optimizer.update(grads, state, **{name: join(numbers[0])})

    specs = (P(), P("x")), options.pop("out_specs", P())
    return on_two_devices(step, *specs, optimizer.init(grads), LOSSES, **options)


EACH = [(name, "value") for name in WITH_LOSS]
EACH += [(name, "grad_norm") for name in (*WITH_LOSS, "skip_nonfinite")]


@pytest.mark.parametrize(("name", "number"), EACH)
def test_a_number_of_each_device_is_named_where_types_show_it(name, number):
    skipping = {"skip_nonfinite": partial(optaxclip.skip_nonfinite, optax.sgd(0.1))}
    text = (
        rf"^{name}: {number} differs along the mesh axes \('x',\), so each device "
        "would decide for itself: hand over the norm of the whole gradient and the "
        r"mean of losses, lax.pmean\(value, \('x',\)\), or say"
    )
    with pytest.raises(ValueError, match=text):
        stepped((WITH_LOSS | skipping)[name](), number)


def test_all_axes_along_which_a_loss_differs_are_named():
    optimizer = WITH_LOSS["skip_step"]()
    state = optimizer.init(jnp.ones(3))

    def step(state, loss):
        return optimizer.update(jnp.ones(3), state, value=loss[0, 0])[1]

    program = on_four_devices(step, (P(), P("x", "y")), P())
    match = r"mesh axes \('x', 'y'\), so .* lax.pmean\(value, \('x', 'y'\)\)"
    with pytest.raises(ValueError, match=match):
        program(state, jnp.ones((2, 2)))


@pytest.mark.parametrize("name", WITH_LOSS)
def test_an_averaged_loss_is_taken(name):
    _, state = stepped(WITH_LOSS[name](), join=lambda x: lax.pmean(x, "x"))
    assert state.loss == 1.5


def test_runs_of_their_own_have_losses_of_their_own():
    """With mesh_axes=None each device is said to train alone."""
    optimizer = WITH_LOSS["skip_spikes"](mesh_axes=None)
    grads = jnp.ones(3)

    def step(numbers):
        state = optimizer.init(grads)
        return optimizer.update(grads, state, value=numbers[0])[1].loss[None]

    losses = on_two_devices(step, P("x"), P("x"), LOSSES)
    np.testing.assert_array_equal(losses, LOSSES)


@pytest.mark.parametrize("name", WITH_LOSS)
def test_devices_that_train_alone_have_states_of_their_own(name):
    optimizer = WITH_LOSS[name](mesh_axes=None)

    def run(params, grads):
        def turn(state, grads):
            return optimizer.update(grads, state, value=1.0)[1], None

        return lax.scan(turn, optimizer.init(params), grads)[0].step[None]

    arrays = jnp.ones((2, 3)), jnp.ones((4, 2, 3))
    steps = on_two_devices(run, (P("x"), P(None, "x")), P("x"), *arrays)
    np.testing.assert_array_equal(steps, [4, 4])


def test_a_loss_that_nobody_looks_at_may_differ():
    optimizer = optaxclip.skip_step(optax.sgd(0.1), on_loss=False)
    _, state = stepped(optimizer)
    assert state.step == 1


def parted(loss_of):
    """Whether two devices still have one state after a loss that only one has."""
    optimizer = optaxclip.skip_step(optax.sgd(0.1), window=4)
    grads, history = jnp.ones((5, 2)), jnp.ones((2, 5)).at[1, 4].set(100.0)

    def run(losses):
        state = optimizer.init(grads[0])
        for place in range(5):
            value = loss_of(losses[place])
            _, state = optimizer.update(grads[place], state, value=value)
        return optaxclip.check_replicated(state, "x"), state.skipped

    return jax.pmap(run, "x", devices=jax.devices()[:2])(history)


def test_check_replicated_finds_replicas_that_part_in_pmap():
    same, skipped = parted(lambda loss: loss)
    assert not same.any() and skipped.tolist() == [0, 1]
    same, skipped = parted(lambda loss: lax.pmean(loss, "x"))
    assert same.all() and skipped.tolist() == [1, 1]
