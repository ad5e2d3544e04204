"""The trainings that are broken on purpose. One of their causes must come first."""

import optax

import optaxclip

from .faults import (
    bad_targets,
    block_without_gradient,
    dead_units,
    decay_of_wrong_sign,
    factor_from_a_step,
    inputs_not_scaled,
    labels_shuffled,
    logged_after_the_clip,
    logits_explode,
    masked_mean,
    moments_lost,
    nan_in_an_input,
    nan_in_the_backward,
    one_token,
    q_learning,
    rate_grows,
    rate_leaps,
    static_scale,
    tokens_shuffled,
    tokens_vanish,
    underflows,
)
from .loops import BREAK_STEP, clipped, in_bfloat16, train
from .models import language, regression
from .table import Training, numbered, on_both


def broken(offset: int) -> list[Training]:
    """40 trainings, with an offset of all seeds."""
    return [
        *on_both(
            "Adam's rate x 100",
            rate_leaps,
            seed=offset,
            causes=("learning rate", "divergence"),
        ),
        *numbered(
            "SGD's rate too high from the start",
            lambda: train(regression(offset), optax.sgd(2.0)),
            lambda: train(regression(offset + 1), optax.sgd(8.0)),
            causes=("learning rate",),
        ),
        *on_both(
            "a rate that never stops growing",
            rate_grows,
            seed=offset,
            causes=("learning rate", "divergence"),
        ),
        *numbered(
            "targets of -500 in two batches",
            lambda: bad_targets(offset, -500.0),
            lambda: bad_targets(offset + 1, 100.0),
            causes=("bad batch",),
        ),
        *numbered(
            "one batch of one token", lambda: one_token(offset), causes=("bad batch",)
        ),
        *numbered(
            "NaN in an input",
            lambda: nan_in_an_input(offset, optax.adam(3e-3)),
            # Skipped, so that the run goes on.
            lambda: nan_in_an_input(
                offset + 1, optaxclip.skip_nonfinite(optax.adam(3e-3))
            ),
            causes=("not finite",),
        ),
        *numbered(
            "0/0 in a masked mean", lambda: masked_mean(offset), causes=("not finite",)
        ),
        *numbered(
            "NaN in the backward pass alone",
            lambda: nan_in_the_backward(offset),
            causes=("not finite",),
        ),
        *numbered(
            "loss scale x 1024 not undone",
            lambda: factor_from_a_step(regression(offset), 1024.0),
            lambda: factor_from_a_step(language(offset + 1), 1024.0, at=90),
            causes=("change of scale",),
        ),
        *numbered(
            "sum of 8 devices in place of the mean",
            lambda: factor_from_a_step(language(offset + 2), 8.0),
            lambda: factor_from_a_step(regression(offset + 3), 8.0, at=120),
            causes=("change of scale",),
        ),
        *numbered(
            "half of the replicas missing",
            lambda: factor_from_a_step(language(offset + 4), 0.5),
            causes=("change of scale",),
        ),
        *numbered(
            "labels shuffled from a step on",
            lambda: labels_shuffled(offset),
            lambda: tokens_shuffled(offset + 1),
            causes=("divergence",),
        ),
        *numbered(
            "inputs not scaled from a step on",
            lambda: inputs_not_scaled(offset, 20.0),
            causes=("divergence",),
        ),
        *on_both(
            "weight decay with the wrong sign",
            decay_of_wrong_sign,
            seed=offset,
            causes=("growing weights",),
        ),
        *numbered(
            "a block without a gradient",
            lambda: block_without_gradient(offset, block=0),
            lambda: block_without_gradient(offset + 1, block=1),
            causes=("no gradient",),
        ),
        *numbered(
            "units that die in a bad batch",
            lambda: dead_units(offset + 1),
            causes=("bad batch", "no gradient", "vanishing"),
        ),
        *on_both(
            "updates below the rounding of bfloat16",
            lambda problem: in_bfloat16(problem, 1e-4),
            seed=offset,
            causes=("lost updates",),
        ),
        *numbered(
            "a loss that underflows in float16",
            lambda: underflows(offset, 1e-5),
            causes=("underflow",),
        ),
        *numbered(
            "a static loss scale too large",
            lambda: static_scale(offset),
            causes=("not finite",),
        ),
        *numbered(
            "half of the tokens vanish",
            lambda: tokens_vanish(offset, BREAK_STEP),
            lambda: tokens_vanish(offset + 1, 100),
            causes=("dead embedding",),
        ),
        *numbered(
            "attention logits explode",
            lambda: logits_explode(offset, 2e-2),
            lambda: logits_explode(offset + 1, 2e-2),
            causes=("attention logits",),
        ),
        *numbered(
            "skip_step behind a clip",
            lambda: clipped(
                regression(offset), 0.5, optaxclip.skip_step(optax.sgd(0.05))
            ),
            causes=("skip behind clip",),
        ),
        *numbered(
            "a limit 1,000 times too small",
            lambda: clipped(regression(offset), 1e-3, optax.sgd(0.1)),
            causes=("clipped always",),
        ),
        *numbered(
            "norms after the clip",
            lambda: logged_after_the_clip(offset),
            causes=("norm after clip",),
        ),
        *numbered(
            "Adam's moments lost at a resume",
            lambda: moments_lost(offset),
            causes=("learning rate", "divergence"),
        ),
        *numbered(
            "Q-learning without a target network",
            lambda: q_learning(offset, 0.99),
            lambda: q_learning(offset + 1, 1.2),
            causes=("divergence", "steady growth", "learning rate", "growing weights"),
        ),
    ]
