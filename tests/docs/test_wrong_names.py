"""Every public function answers for itself: wrong names of arguments and of modules'
attributes are answered in the words of the function or module that the user called.
"""

import inspect
from types import ModuleType

import pytest

import optaxclip
from optaxclip import dropin, per_example, replay, rules, shrinks
from optaxclip.dropin import jax_privacy, keras, tensorflow_style, torch_style

MODULES = (
    optaxclip,
    rules,
    shrinks,
    replay,
    per_example,
    torch_style,
    tensorflow_style,
    keras,
    jax_privacy,
)
UNKNOWN = "nothing_like_it"


def is_called(thing):
    """Whether people call it: functions and rules, and not what holds results."""
    if inspect.isclass(thing):
        return issubclass(thing, rules.Rule) and thing is not rules.Rule
    return callable(thing) and not isinstance(thing, ModuleType)


CALLED = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if is_called(getattr(module, name))
}
NEEDS_ONE = [
    path
    for path, function in CALLED.items()
    for first in list(inspect.signature(function).parameters.values())[:1]
    if first.default is first.empty and first.kind is first.POSITIONAL_OR_KEYWORD
]


@pytest.mark.parametrize("path", CALLED)
def test_an_unknown_argument_is_named_by_the_function(path):
    name = path.rpartition(".")[2]
    with pytest.raises(TypeError) as caught:
        CALLED[path](**{UNKNOWN: 1})
    wanted = f"{name}: there is no argument {UNKNOWN!r}. It takes "
    assert str(caught.value).startswith(wanted)
    for parameter in inspect.signature(CALLED[path]).parameters:
        assert parameter in str(caught.value)


@pytest.mark.parametrize("path", NEEDS_ONE)
def test_a_missing_argument_is_named_by_the_function(path):
    name = path.rpartition(".")[2]
    first = next(iter(inspect.signature(CALLED[path]).parameters))
    with pytest.raises(TypeError) as caught:
        CALLED[path]()
    wanted = f"{name}: missing a required argument: {first!r}. It takes {first}"
    assert str(caught.value).startswith(wanted)
    assert "self" not in str(caught.value)


def test_a_rule_of_your_own_answers_by_its_name():
    class HalfTheLast(rules.Rule):
        """Takes no number."""

    with pytest.raises(TypeError, match=r"^HalfTheLast: there is no .* It takes none"):
        HalfTheLast(rate=1.0)
    with pytest.raises(TypeError, match=r"^HalfTheLast: too many .* It takes none"):
        HalfTheLast(1.0)


@pytest.mark.parametrize("module", MODULES[1:], ids=lambda module: module.__name__)
def test_an_unknown_attribute_lists_what_there_is(module):
    with pytest.raises(AttributeError) as caught:
        getattr(module, UNKNOWN)
    assert str(caught.value) == (
        f"module {module.__name__!r} has no attribute {UNKNOWN!r}. It has "
        f"{', '.join(module.__all__)}."
    )


ELSEWHERE = {
    (rules, "ZScore"): "optaxclip.rules.z_score",
    (rules, "EMA"): "optaxclip.rules.ema",
    (rules, "WindowedMean"): "optaxclip.rules.windowed_mean",
    (rules, "zclip"): "optaxclip.zclip",
    (rules, "smooth"): "optaxclip.shrinks.smooth",
    (shrinks, "Smooth"): "optaxclip.shrinks.smooth",
    (replay, "sugest"): "optaxclip.replay.suggest",
    (per_example, "metrics"): "optaxclip.metrics",
    (torch_style, "clip_grad_norm_"): "optaxclip.dropin.torch_style.clip_grad_norm",
    (keras, "clip_gradient"): "optaxclip.dropin.keras.clip_gradients",
    (optaxclip, "globalNorm"): "optaxclip.global_norm",
}


@pytest.mark.parametrize(
    ("module", "name"), ELSEWHERE, ids=lambda x: getattr(x, "__name__", x)
)
def test_an_attribute_of_another_place_or_spelling_names_it(module, name):
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert f"Use {ELSEWHERE[module, name]}." in str(caught.value)


def test_the_modules_of_dropin_are_found_without_an_import():
    own = {dropin.jax_privacy, dropin.keras}
    own |= {dropin.tensorflow_style, dropin.torch_style}
    assert own < {*MODULES}
