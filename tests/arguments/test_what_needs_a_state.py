"""What would be wrong without a word: limits that need a state, arrays for one number,
and states of other rules.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import optaxclip
from optaxclip import rules, shrinks
from optaxclip.dropin import torch_style
from tests.arguments.refusals import TREE, refused

SGD = optax.sgd(1.0)


@pytest.mark.parametrize(
    "limit", [rules.z_score(), rules.z_score, optax.linear_schedule(0.0, 1.0, 10)]
)
def test_a_clip_without_a_state_takes_only_numbers(limit):
    text = "max_norm must be a number, got "
    refused(TypeError, f"clip_grads: {text}", lambda: optaxclip.clip_grads(TREE, limit))
    with pytest.raises(TypeError):
        torch_style.clip_grad_norm(TREE, limit)


def test_a_shrink_is_no_limit():
    text = "clip_by_global_norm: max_norm must be a limit, got a shrink"
    for shrink in (shrinks.hard, shrinks.smooth(), shrinks.auto_s()):
        refused(TypeError, text, lambda x=shrink: optaxclip.clip_by_global_norm(x))


@pytest.mark.parametrize("function", [optax.linear_schedule, lambda: 1.0])
def test_a_schedule_takes_the_step_alone(function):
    text = ": a schedule must take the step alone, got "
    refused(
        TypeError,
        f"clip_by_global_norm: max_norm{text}",
        lambda: optaxclip.clip_by_global_norm(function),
    )
    refused(TypeError, f"growth: rate{text}", lambda: rules.growth(function))


def test_schedules_of_every_kind_are_taken():
    for schedule in (jax.jit(lambda step: 1.0), optax.constant_schedule(1.0), abs):
        clipper = optaxclip.clip_by_global_norm(schedule)
        clipper.update(TREE, clipper.init(TREE))


@pytest.mark.parametrize("name", ["skip_step", "record_spikes"])
def test_a_loss_for_each_example_is_refused(name):
    optimizer = {
        "skip_step": lambda: optaxclip.skip_step(SGD),
        "record_spikes": optaxclip.record_spikes,
    }[name]()
    state = optimizer.init(TREE)
    for value in (jnp.ones(1), jnp.ones((2, 3))):
        refused(
            ValueError,
            f"{name}: value must be a scalar, got an array of shape {value.shape}.",
            lambda value=value: optimizer.update(TREE, state, TREE, value=value),
        )


def test_a_norm_that_is_no_number_is_refused():
    optimizer = optaxclip.skip_step(SGD)
    refused(
        TypeError,
        "skip_step: grad_norm must be a real number, got 'a'.",
        lambda: optimizer.update(TREE, optimizer.init(TREE), TREE, grad_norm="a"),
    )


OPTIMIZERS = {
    "skip_step": optaxclip.skip_step(SGD),
    "skip_nonfinite": optaxclip.skip_nonfinite(SGD),
    "skip_spikes": optaxclip.skip_spikes(SGD, rules.z_score()),
}


PAIRS = list(itertools.permutations(OPTIMIZERS, 2))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("name", "before"), PAIRS)
def test_the_state_of_another_skipper_is_refused(name, before, jit):
    state, update = OPTIMIZERS[before].init(TREE), OPTIMIZERS[name].update
    refused(
        ValueError,
        f"{name}: state was made with another rule. ",
        lambda: (jax.jit(update) if jit else update)(TREE, state, TREE),
    )


def test_flags_are_true_or_false():
    refused(
        TypeError,
        "skip_step: on_loss must be None, True or False, got 'no'.",
        lambda: optaxclip.skip_step(SGD, on_loss="no"),
    )
    refused(
        TypeError,
        "clipped_grad: mean must be True or False, got 'no'.",
        lambda: optaxclip.clipped_grad(jnp.sum, 1.0, mean="no"),
    )


def test_a_clip_of_values_names_the_one_of_values():
    refused(
        TypeError,
        "or optaxclip.dropin.torch_style.clip_grad_value(grads, max_value).",
        lambda: optaxclip.clip_by_value(TREE, -1.0, 1.0),
    )


def test_capitals_do_not_hide_a_name():
    with pytest.raises(AttributeError, match=r"Use optaxclip\.adaptive_grad_clip\."):
        _ = optaxclip.AGC
