"""What some rules need besides the norm that they limit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._rule import Rule


class Others(NamedTuple):
    """Norms that some rules need besides the one that they limit."""

    params: Any = None  # of the weights
    total: Any = None  # of all norms together

    def of(self, rule: Rule) -> list[Any]:
        """The further arguments of a rule's `update`."""
        needs = rule.needs_params, rule.needs_total
        return [norm for norm, needed in zip(self, needs) if needed]


NO_OTHERS = Others()


def others_from(rule: Rule, arguments: Sequence[Any]) -> Others:
    """The norms out of the further arguments of a rule's `update`."""
    given = iter(arguments)
    return Others(
        next(given) if rule.needs_params else None,
        next(given) if rule.needs_total else None,
    )
