"""The defaults that docs/each_method.md names are those of the code.

Each section names them between `**Defaults:**` and `**When:**`, and some equations do.
"""

import inspect
import re
from pathlib import Path

import optaxclip

PAGE = (Path(__file__).parents[2] / "docs" / "each_method.md").read_text()
SECTION = re.compile(
    r"^### (\w+)\n.*?\*\*Defaults:\*\*(.*?)\*\*When:\*\*", re.MULTILINE | re.DOTALL
)
# 10,000 and 10^{-7} are numbers too.
NUMBER = re.compile(r"10\^\{-\d+\}|\d[\d,]*(?:\.\d+)?")

# method: the arguments whose defaults are the numbers of its section, in their order.
NUMBERS = {
    "adaptive_grad_clip": ("clipping", "eps"),
    "larc": ("trust",),
    "clippy": ("relative", "absolute"),
    "qk_clip": ("max_logit",),
    "autoclip": ("percentile", "window"),
    "zclip": ("z", "decay", "warmup"),
    "adagc": ("ratio", "decay", "max_norm", "warmup"),
    "aggc": ("high", "down", "10 % shorter", "10 % longer"),
    "adaclip": ("decay",),
    "adagn": ("decay1", "decay2"),
    "spam": ("threshold", "decay"),
    "skip_nonfinite": ("max_consecutive",),
    "skip_step": ("sigmas", "window", "not judged"),
    "reset_momentum": ("every", "warmup"),
    "record_spikes": ("sigmas", "window"),
}
# Numbers that are computed of a default.
COMPUTED = {
    "10 % shorter": lambda given: 100 * (1 - given["down"]),
    "10 % longer": lambda given: 100 * (given["up"] - 1),
    "not judged": lambda given: given["window"] // 2 - 1,
}
EQUATION = re.compile(r"^### (\w+)\n\n\$\$(.*?)\$\$$", re.MULTILINE | re.DOTALL)
# method: the arguments whose defaults are the numbers above 2 of its equation.
IN_EQUATIONS = {
    "skip_step": ("sigmas", "window"),
    "record_spikes": ("sigmas", "window"),
    "reset_momentum": ("every",),
}
# Sections without a number of the code: (argument, its default).
WORDS = {
    "clip_by_value": ("min_value", None),
    "clip_by_unitwise_norm": ("axis", None),
    "clip_by_spectral_norm": ("method", "svd"),
    "record_health": ("weights", True),
    "clipped_grad": ("mean", True),
}
# The limit, the rule or the clipper must be given.
GIVEN = {
    "clip_by_global_norm": "max_norm",
    "clip_grads": "max_norm",
    "clip_by_tensor_norm": "max_norm",
    "clip_by_group_norm": "max_norm",
    "clip_by_tensor_rms": "max_rms",
    "clip_by_average_norm": "max_norm",
    "larc": "learning_rate",
    "skip_spikes": "rule",
    "carry_clipped": "clipper",
    "constrain": "clipper",
}


def sections():
    """{method: what its section says of defaults}."""
    return dict(SECTION.findall(PAGE))


def defaults_of(method):
    parameters = inspect.signature(getattr(optaxclip, method)).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def numbers_in(text):
    texts = [x.replace(",", "") for x in NUMBER.findall(text)]
    return [float(re.sub(r"10\^\{(-\d+)\}", r"1e\1", x)) for x in texts]


def test_every_number_of_a_section_is_a_default_of_the_code():
    found = sections()
    for method, names in NUMBERS.items():
        given = defaults_of(method)
        wanted = []
        for name in names:
            wanted.append(COMPUTED[name](given) if name in COMPUTED else given[name])
        numbers = [round(float(number), 12) for number in wanted]
        assert numbers_in(found[method]) == numbers, method


def test_every_number_of_an_equation_is_a_default_of_the_code():
    equations = dict(EQUATION.findall(PAGE))
    assert equations.keys() == sections().keys()
    for method, equation in equations.items():
        given = defaults_of(method)
        wanted = [given[name] for name in IN_EQUATIONS.get(method, ())]
        assert [x for x in numbers_in(equation) if x > 2] == wanted, method


def test_what_a_section_says_in_words_is_so_in_the_code():
    for method, (name, default) in WORDS.items():
        assert defaults_of(method)[name] == default, method
    assert '`method="svd"`' in sections()["clip_by_spectral_norm"]
    assert defaults_of("record_norm")["norm"].__name__ == "global_norm"
    for method, name in GIVEN.items():
        assert defaults_of(method)[name] is inspect.Parameter.empty, method


def test_every_section_is_compared():
    titles = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    compared = {*NUMBERS, *WORDS, *GIVEN, "record_norm", "clip_cotangent"}
    assert set(sections()) == set(titles) == compared
