"""The docstrings of everything public, which is what `help()` shows."""

import inspect
import re
from collections import Counter
from types import ModuleType

import optaxclip
from optaxclip import dropin, per_example, replay, rules, shrinks
from optaxclip.dropin import jax_privacy, keras, tensorflow_style, torch_style

MODULES = (
    *(optaxclip, rules, shrinks, replay, per_example, dropin),
    *(torch_style, tensorflow_style, keras, jax_privacy),
)
EVERYTHING = {module.__name__: module for module in MODULES}
for module in MODULES:
    for name in module.__all__:
        found = getattr(module, name)
        if not isinstance(found, ModuleType):
            EVERYTHING[f"{module.__name__}.{name}"] = found


def prose(text):
    """The lines that are neither code nor what it prints."""
    lines, is_code = [], False
    for line in map(str.strip, text.splitlines()):
        is_code = bool(line) and (is_code or line.startswith(">>>"))
        if line and not is_code:
            lines.append(line)
    return lines


def repeated(text):
    """The lines that are in a text twice. Short ones may be, such as "|---|---|"."""
    counts = Counter(line for line in prose(text) if len(line) > 30)
    return [line for line, count in counts.items() if count > 1]


def test_no_docstring_says_a_line_twice():
    for path, thing in EVERYTHING.items():
        assert repeated(inspect.getdoc(thing) or "") == [], path


LINE = "Convolutions of a batch that jit splits over devices.\n"


def test_a_line_that_is_said_twice_is_found():
    assert repeated(f"{LINE}Nor others.\n  {LINE}") == [LINE.strip()]


def test_code_may_be_written_twice():
    assert not repeated(">>> run(a_long_name, and_another_one)\n" * 2)


NONFINITE = re.compile(
    "nonfinite: what becomes of (updates|gradients|a tensor|a unit|a group) whose norm "
    'is NaN or inf: "propagate" makes (them|it) NaN, "zero" makes (them|it) 0, "raise" '
    r"raises FloatingPointError \(under jit it is a `checkify.check`\)\."
)


def test_nonfinite_is_described_by_the_same_words_everywhere():
    for path, thing in EVERYTHING.items():
        text = " ".join((inspect.getdoc(thing) or "").split())
        # `release` has layers that are broken separately.
        if " nonfinite: what " in text and path != "optaxclip.release":
            assert NONFINITE.search(text), path
