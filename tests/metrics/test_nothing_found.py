"""`metrics` raises where there is no clipper, and names what it got."""

import jax.numpy as jnp
import optax
import pytest

import optaxclip

GRADS = {"w": jnp.ones(2), "b": jnp.ones(3)}


@pytest.mark.parametrize(
    "optimizer",
    [
        optaxclip.clip_by_global_norm(1.0),
        optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1)),
        optax.MultiSteps(optaxclip.clip_by_global_norm(1.0), 2),
    ],
    ids=["clipper", "chain", "MultiSteps"],
)
def test_an_optimizer_is_not_its_state(optimizer):
    with pytest.raises(TypeError, match=r"^metrics: opt_state .* got the optimizer: "):
        optaxclip.metrics(optimizer)


def test_gradients_hold_no_state():
    with pytest.raises(ValueError, match="got a tree of 2 leaves that holds no state"):
        optaxclip.metrics(GRADS)


@pytest.mark.parametrize("empty", [None, (), {}])
def test_nothing_is_named_as_it_is(empty):
    with pytest.raises(ValueError, match=r"^metrics: opt_state .* got ") as error:
        optaxclip.metrics(empty)
    assert f"got {empty!r}." in str(error.value)


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "EmptyState"),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
            "EmptyState, ScaleByAdamState",
        ),
        (optax.masked(optax.adam(0.1), {"w": True, "b": False}), "MaskedState"),
    ],
    ids=["stateless", "adam", "masked"],
)
def test_states_without_a_clipper_are_named(optimizer, names):
    with pytest.raises(ValueError, match="clippers of optax keep no state") as error:
        optaxclip.metrics(optimizer.init(GRADS))
    assert f"got {names}" in str(error.value)
