"""What would be wrong without a word: limits that need a state, and states of others.

The errors are in tests/docs/mistakes.txt, and here they are those of compiled updates.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.arguments.refusals import TREE, refused

SGD = optax.sgd(1.0)


@pytest.mark.parametrize("limit", [rules.z_score, optax.linear_schedule(0.0, 1.0, 10)])
def test_a_clip_without_a_state_takes_only_numbers(limit):
    text = "clip_grads: max_norm must be a number, got "
    refused(TypeError, text, lambda: optaxclip.clip_grads(TREE, limit))


def test_a_schedule_takes_the_step_alone():
    text = "clip_by_global_norm: max_norm: a schedule must take the step alone, got "
    refused(
        TypeError, text, lambda: optaxclip.clip_by_global_norm(optax.linear_schedule)
    )


def test_schedules_of_every_kind_are_taken():
    for schedule in (jax.jit(lambda step: 1.0), optax.constant_schedule(1.0), abs):
        clipper = optaxclip.clip_by_global_norm(schedule)
        clipper.update(TREE, clipper.init(TREE))


OPTIMIZERS = {
    "skip_step": optaxclip.skip_step(SGD),
    "skip_nonfinite": optaxclip.skip_nonfinite(SGD),
    "skip_spikes": optaxclip.skip_spikes(SGD, rules.z_score()),
}


@pytest.mark.parametrize(
    ("name", "before"), list(itertools.permutations(OPTIMIZERS, 2))
)
def test_the_state_of_another_skipper_is_refused(name, before):
    state, update = OPTIMIZERS[before].init(TREE), OPTIMIZERS[name].update
    text = f"{name}: state was made with another rule. "
    refused(ValueError, text, lambda: jax.jit(update)(TREE, state, TREE))


by_tensor, carry = optaxclip.clip_by_tensor_norm(1.0), optaxclip.carry_clipped
# A transformation, another one, and what is said of a state of that.
OTHERS_STATES = {
    "type": (by_tensor, SGD, "state must be the ClipState that its init returned, got"),
    "norms": (
        by_tensor,
        optaxclip.clip_by_global_norm(1.0),
        "state was made for norms of everything, but the updates have norms of 'b', 'w",
    ),
    "memory": (
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.clip_by_global_norm(rules.growth()),
        "state was made with another rule. constant remembers nothing, and the state",
    ),
}


@pytest.mark.parametrize("name", OTHERS_STATES)
def test_a_state_of_something_else_is_refused_under_jit(name):
    clipper, other, text = OTHERS_STATES[name]
    update, state = jax.jit(clipper.update), other.init(TREE)
    refused((TypeError, ValueError), text, lambda: update(TREE, state, TREE))


@pytest.mark.parametrize(
    "clipper",
    [optaxclip.spam(), carry(optaxclip.clip_by_global_norm(1.0))],
    ids=["spam", "carry_clipped"],
)
def test_a_state_of_other_leaves_is_refused_under_jit(clipper):
    for other, text in (
        ({"w": jnp.ones((2, 3))}, "state was made for the leaves 'w', but the updates"),
        ({**TREE, "w": jnp.ones((2, 4))}, "state was made for the leaf 'w' of shape"),
    ):
        state = clipper.init(other)
        refused(
            ValueError, text, lambda s=state: jax.jit(clipper.update)(TREE, s, TREE)
        )
