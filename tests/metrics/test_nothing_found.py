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
    with pytest.raises(TypeError, match=r"^metrics: .* hand over what init and update"):
        optaxclip.metrics(optimizer)


@pytest.mark.parametrize("empty", [None, (), {}])
def test_nothing_is_named_as_it_is(empty):
    with pytest.raises(ValueError, match=r"^metrics: opt_state .* got ") as error:
        optaxclip.metrics(empty)
    assert f"got {empty!r}: " in str(error.value)


@pytest.mark.parametrize(
    ("state", "begins"),
    [
        (GRADS, "{'w': Array("),
        (optax.sgd(0.1).init(GRADS), "(EmptyState(), EmptyState())"),
        (optax.adam(0.1).init(GRADS), "(ScaleByAdamState("),
    ],
    ids=["gradients", "stateless", "adam"],
)
def test_what_has_no_clipper_is_shown(state, begins):
    with pytest.raises(ValueError, match="clippers of optax keep no state") as error:
        optaxclip.metrics(state)
    assert f"got {begins}" in str(error.value)
