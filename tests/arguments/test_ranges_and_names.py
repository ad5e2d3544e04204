"""Every number is checked under its own name, and names are what they say."""

import inspect

import numpy as np
import pytest

import optaxclip
from optaxclip.rules._rule import call_name
from tests.arguments.refusals import refused
from tests.methods import METHODS
from tests.parts import RULES, SHRINKS


def test_each_number_of_an_array_is_held_against_its_range():
    for wrong in ([0.5, 1.5], [-0.5, 0.5], [0.5, np.nan]):
        refused(
            ValueError,
            "windowed_quantile: quantile must",
            lambda wrong=wrong: optaxclip.rules.windowed_quantile(np.array(wrong)),
        )


# of each rule and clipper: its parameters, the least and the greatest number that each
# may be
NUMBERS = {m.function: m.numbers for m in METHODS.values() if m.numbers}
NUMBERS |= {rule: part.numbers for rule, part in RULES.items() if part.numbers}


@pytest.mark.filterwarnings("ignore:.*should be above 1:UserWarning")
@pytest.mark.parametrize(
    ("build", "name"),
    [(build, name) for build, names in NUMBERS.items() for name in names],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_every_number_is_checked_under_its_own_name(build, name):
    lowest, highest = NUMBERS[build][name]
    others = {"learning_rate": 0.1} if build is optaxclip.larc else {}
    call = call_name(build)
    with pytest.raises(
        ValueError,
        match=rf"^{call}: {name} must be at least {lowest}, got {lowest - 0.5}",
    ):
        build(**others | {name: lowest - 0.5})
    if highest is not None:
        with pytest.raises(
            ValueError,
            match=rf"^{call}: {name} must be at most {highest}, got {highest + 0.5}",
        ):
            build(**others | {name: highest + 0.5})
    for edge in (lowest, highest):
        if edge is not None and (build, name, edge) != (
            optaxclip.rules.ema_band,
            "up",
            None,
        ):
            build(**others | {name: edge})


@pytest.mark.parametrize(
    "build", [optaxclip.rules.windowed_quantile, optaxclip.rules.windowed_mean]
)
def test_a_window_is_one_whole_number(build):
    for wrong in (2.5, np.array([3, 4])):
        with pytest.raises(
            ValueError, match=rf"{call_name(build)}: window must be a whole number"
        ):
            build(window=wrong)


@pytest.mark.parametrize("function", RULES | SHRINKS, ids=lambda f: f.__name__)
def test_defaults_of_rules_and_shrinks_are_those_of_papers(function):
    parameters = inspect.signature(function).parameters
    wanted = (RULES | SHRINKS)[function].defaults
    assert {name: parameters[name].default for name in wanted} == wanted


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


def test_modules_of_the_dropins_are_those_of_their_names():
    modules = {
        name: value.__name__
        for name, value in vars(optaxclip.dropin).items()
        if inspect.ismodule(value) and not name.startswith("_")
    }
    assert modules == {
        name: f"optaxclip.dropin.{name}"
        for name in ("jax_privacy", "keras", "tensorflow_style", "torch_style")
    }
