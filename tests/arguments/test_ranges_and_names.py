"""Every number is checked under its own name, and names are what they say."""

import inspect
import math

import pytest

import optaxclip
from optaxclip.rules._rule import call_name
from tests.methods import METHODS
from tests.parts import RULES, SHRINKS

# of each rule and clipper: its parameters, the least and the greatest number that each
# may be
NUMBERS = {m.function: m.numbers for m in METHODS.values() if m.numbers}
NUMBERS |= {rule: part.numbers for rule, part in RULES.items() if part.numbers}
# What each number is tried beside.
OTHER_ARGUMENTS = {
    optaxclip.larc: {"learning_rate": 0.1},
    # With resets before each update nothing but a warm-up of 0 is allowed.
    optaxclip.spam: {"warmup": 0},
}


@pytest.mark.filterwarnings("ignore:.*should be above 1:UserWarning")
def test_every_number_is_checked_under_its_own_name():
    for build, numbers in NUMBERS.items():
        for name, (lowest, highest) in numbers.items():
            check_range(build, name, lowest, highest)


def check_range(build, name, lowest, highest):
    others = OTHER_ARGUMENTS.get(build, {})
    argument = f"{call_name(build)}: {name}"
    text = rf"^{argument} must be at least {lowest}, got {lowest - 0.5}"
    with pytest.raises(ValueError, match=text):
        build(**others | {name: lowest - 0.5})
    build(**others | {name: lowest})
    if highest == math.inf:
        text = rf"^{argument} must be at most .*, got inf"
        with pytest.raises(ValueError, match=text):
            build(**others | {name: math.inf})
    elif highest is not None:
        text = rf"^{argument} must be at most {highest}, got {highest + 0.5}"
        with pytest.raises(ValueError, match=text):
            build(**others | {name: highest + 0.5})
        build(**others | {name: highest})


def test_defaults_of_rules_and_shrinks_are_those_of_papers():
    for function, part in (RULES | SHRINKS).items():
        parameters = inspect.signature(function).parameters
        found = {name: parameters[name].default for name in part.defaults}
        assert found == part.defaults, function


@pytest.mark.parametrize(
    "module",
    [optaxclip, optaxclip.rules, optaxclip.shrinks, optaxclip.per_example],
    ids=lambda module: module.__name__,
)
def test_public_names_are_those_of_what_they_name(module):
    public = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "").startswith("optaxclip")
    }
    assert len(public) > 3
    for name, value in public.items():
        is_a_rule = isinstance(value, type) and name[0].islower()
        assert (call_name(value) if is_a_rule else value.__name__) == name
