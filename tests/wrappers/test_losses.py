"""What is not known of a loss is -inf, and a loss under another name is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import apply

GRADS = jnp.array([3.0, 4.0])
LOOK = {
    "skip_step": optaxclip.skip_step(optax.sgd(0.1)),
    "skip_spikes": optaxclip.skip_spikes(optax.sgd(0.1), None, 9.0),
    "record_spikes": optaxclip.record_spikes(),
}
EVERY = LOOK | {
    "skip_nonfinite": optaxclip.skip_nonfinite(optax.sgd(0.1)),
    "skip_step, on_loss=False": optaxclip.skip_step(optax.sgd(0.1), on_loss=False),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_loss_is_minus_inf_until_one_arrives(name):
    optimizer = EVERY[name]
    with jax.debug_nans(True):
        state = optimizer.init(GRADS)
    assert state.loss == -np.inf and state.loss_limit == np.inf
    if name == "skip_spikes":
        return
    _, state = optimizer.update(GRADS, state)
    assert state.loss == -np.inf
    (key,) = (key for key in optaxclip.metrics(state) if key.endswith("/loss"))
    assert optaxclip.metrics(state)[key] == -np.inf
    _, state = optimizer.update(GRADS, state, value=2.0)
    _, after = optimizer.update(GRADS, state)
    if name in LOOK:
        assert state.loss == after.loss == 2.0
        # A step without a loss is not broken by that of another.
        assert getattr(after, "skipped", 0) == getattr(after, "spikes", 0) == 0


@pytest.mark.parametrize("name", LOOK)
def test_another_loss_goes_on_beside_value(name):
    _, state = apply(LOOK[name], GRADS, value=1.0, loss=1e6)
    assert state.loss == 1.0


@pytest.mark.parametrize("name", [name for name in EVERY if name not in LOOK])
def test_what_looks_at_no_loss_hands_any_name_on(name):
    optimizer = EVERY[name]
    jax.eval_shape(
        lambda grads: optimizer.update(grads, optimizer.init(grads), loss=1e6), GRADS
    )
