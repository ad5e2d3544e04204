"""Shows our docstrings as they are meant, and finds public names without one.

Example:    is code, for which griffe's name is `Examples:`
Returns:    is prose, where griffe takes what is before a colon for a type
"""

import logging
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

RETURNS = re.compile(r"\n(Returns|Yields):\n((?:  .*(?:\n|$)|\n)+)")
# mkdocs counts what is logged below its own name.
LOG = logging.getLogger("mkdocs.docstrings")


class OurDocstrings(griffe.Extension):
    """Rewrites the sections of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = RETURNS.sub(_as_prose, text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in _public_modules(pkg):
            for name in module.exports or ():
                if not module[str(name)].has_docstring:
                    LOG.warning("%s.%s has no docstring", module.path, name)


def _public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for name, child in module.modules.items():
        if not name.startswith("_"):
            yield from _public_modules(child)


def _as_prose(section: re.Match[str]) -> str:
    return f"\n**{section[1]}:**\n\n{textwrap.dedent(section[2])}\n"
