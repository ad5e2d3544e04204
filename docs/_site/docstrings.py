"""Shows our docstrings as they are meant, and finds public names without one.

Example:    is code, for which griffe's name is `Examples:`
Returns:    is prose, where griffe takes what is before a colon for a type
rules       get the signature that their fields make
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
                thing = module[str(name)]
                thing = thing.final_target if thing.is_alias else thing
                if not thing.has_docstring:
                    LOG.warning("%s.%s has no docstring", module.path, name)
                if thing.is_class and "Rule" in map(str, thing.bases):
                    init = griffe.Function("__init__", parameters=_parameters(thing))
                    thing.set_member("__init__", init)


def _public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for name, child in module.modules.items():
        if not name.startswith("_"):
            yield from _public_modules(child)


def _parameters(rule: Any) -> griffe.Parameters:
    """The fields of a rule. Those after `_: KW_ONLY` are keywords."""
    kind = griffe.ParameterKind.positional_or_keyword
    parameters = [griffe.Parameter("self", kind=kind)]
    for name, field in rule.members.items():
        if name == "_":
            kind = griffe.ParameterKind.keyword_only
        elif field.is_attribute and "property" not in field.labels:
            default = _default(field.value)
            parameter = griffe.Parameter(name, default=default, kind=kind)
            parameters.append(parameter)
    return griffe.Parameters(*parameters)


def _default(value: Any) -> Any:
    """The 1.01 of `number_field(default=1.01)`, or a plain default."""
    if not isinstance(value, griffe.ExprCall):
        return value
    for argument in value.arguments:
        if isinstance(argument, griffe.ExprKeyword) and argument.name == "default":
            return argument.value
    return None


def _as_prose(section: re.Match[str]) -> str:
    return f"\n**{section[1]}:**\n\n{textwrap.dedent(section[2])}\n"
