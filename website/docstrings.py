"""Lets the reference show two sections of our docstrings as they are meant.

Example:    is code, for which griffe's name is `Examples:`
Returns:    is prose, where griffe takes what is before a colon for a type
"""

import re
import textwrap
from typing import Any

import griffe

RETURNS = re.compile(r"\n(Returns|Yields):\n((?:  .*(?:\n|$)|\n)+)")


class OurDocstrings(griffe.Extension):
    """Rewrites the sections of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = RETURNS.sub(_as_prose, text)


def _as_prose(section: re.Match[str]) -> str:
    return f"\n**{section[1]}:**\n\n{textwrap.dedent(section[2])}\n"
