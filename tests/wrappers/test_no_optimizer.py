"""What is no optimizer is refused when the wrapper is built."""

import optax
import pytest

import optaxclip
from optaxclip import rules

WRAPPERS = {
    "carry_clipped: clipper": optaxclip.carry_clipped,
    "constrain: clipper": optaxclip.constrain,
    "skip_nonfinite: inner": optaxclip.skip_nonfinite,
    "skip_spikes: inner": lambda inner: optaxclip.skip_spikes(inner, 1.0),
    "skip_step: inner": optaxclip.skip_step,
    "reset_momentum: inner": optaxclip.reset_momentum,
}


@pytest.mark.parametrize("argument", WRAPPERS)
def test_a_rule_is_no_optimizer(argument):
    noun = "a clipper" if argument.endswith("clipper") else "an optimizer"
    for rule in (rules.growth(), rules.growth):
        match = f"^{argument} must be {noun} with init and update, got "
        with pytest.raises(TypeError, match=match):
            WRAPPERS[argument](rule)


@pytest.mark.parametrize("argument", WRAPPERS)
def test_a_factory_or_a_class_is_no_optimizer(argument):
    for wrong in (optax.sgd, optaxclip.zclip, optax.GradientTransformation):
        with pytest.raises(TypeError, match=f"^{argument} must be .*: call it"):
            WRAPPERS[argument](wrong)
