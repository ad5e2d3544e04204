"""Every public function answers for itself: wrong names of arguments and of modules'
attributes are answered in the words of the function or module that the user called.
"""

import inspect
import re
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


# What people try for an argument, and ours.
OF_OTHERS = {
    optaxclip.clip_by_global_norm: {
        "max_norm": """max_rms max_value max_delta max_logit clipping limit threshold
            cap rule clip clip_norm clip_value clipnorm clipvalue delta global_clipnorm
            grad_clip gradient_clip_val l2_clip_norm l2_norm_clip max_grad_norm
            max_l2_norm norm value lambda_abs""",
        "mesh_axes": "axes axis_name axis_names mesh_axis",
        "ord": "norm_type order p",
        "eps": "epsilon stability_eps",
        "nonfinite": "error_if_nonfinite",
        "shrink": "rescale_to_unit_norm",
    },
    optaxclip.clip_by_value: {
        "max_value": "max_norm max_delta a_max clip_value_max max upper",
        "min_value": "a_min clip_value_min min lower",
    },
    optaxclip.clip: {"max_delta": "max_value max_norm"},
    optaxclip.clip_by_tensor_rms: {"max_rms": "max_norm threshold"},
    optaxclip.adaptive_grad_clip: {"clipping": "clip_factor max_norm"},
    optaxclip.clip_by_group_norm: {"labels": "groups param_labels"},
    optaxclip.autoclip: {"percentile": "q", "scope": "per groups"},
    optaxclip.zclip: {"z": "z_score z_thresh threshold", "warmup": "warmup_steps"},
    optaxclip.adagc: {"ratio": "lambda_rel", "max_norm": "lambda_abs"},
    optaxclip.adaclip: {"decay": "alpha beta momentum smoothing"},
    optaxclip.spam: {"threshold": "theta max_norm"},
    optaxclip.skip_step: {"sigmas": "threshold"},
    optaxclip.skip_nonfinite: {"max_consecutive": "max_consecutive_errors"},
    optaxclip.clipped_grad: {
        "shared_argnums": "batch_argnums",
        "microbatch": "microbatch_size",
        "mean": "normalize_by",
    },
    optaxclip.add_noise: {"noise_multiplier": "sigma stddev"},
    rules.windowed_quantile: {"quantile": "q percentile"},
}


def test_an_argument_of_others_is_answered_by_ours():
    for function, names in OF_OTHERS.items():
        for ours, others in names.items():
            for other in others.split():
                with pytest.raises(TypeError) as caught:
                    function(**{other: 1.0})
                text = rf".*: there is no argument '{other}'\. Here it is {ours}\b"
                assert re.match(text, str(caught.value)), caught.value


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


def test_a_private_name_is_answered_without_a_search():
    """IPython asks each object for names such as _repr_html_."""
    with pytest.raises(AttributeError, match=r"no attribute '_clip_grads'\.$"):
        _ = optaxclip._clip_grads


@pytest.mark.parametrize("module", MODULES[1:], ids=lambda module: module.__name__)
def test_an_unknown_attribute_lists_what_there_is(module):
    with pytest.raises(AttributeError) as caught:
        getattr(module, UNKNOWN)
    assert str(caught.value) == (
        f"module {module.__name__!r} has no attribute {UNKNOWN!r}. It has "
        f"{', '.join(module.__all__)}."
    )


def test_the_modules_of_dropin_are_found_without_an_import():
    own = {dropin.jax_privacy, dropin.keras}
    own |= {dropin.tensorflow_style, dropin.torch_style}
    assert own < {*MODULES}
