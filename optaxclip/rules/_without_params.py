"""Rules of one norm alone: of a loss, of whole steps, of recorded norms."""

from typing import Any

from .._checks import shown
from ._constant import rule_of
from ._rule import Rule


def rule_without_params(limit: Any, argument: str) -> Rule:
    """The rule of a limit, asked without the norm of the weights or of all norms.

    Raises:
      ValueError: a rule that needs one of these.
    """
    rule = rule_of(limit, argument)
    # Refused when it is built. In the first step its fourth argument would be missing.
    if rule.needs_params:
        raise ValueError(
            f"{argument} must not compare norms with those of weights, since there "
            f"are no weights here, got {shown(rule)}."
        )
    if rule.needs_total:
        raise ValueError(
            f"{argument} must not compare norms with that of all norms, since each "
            f"norm is judged alone here, got {shown(rule)}."
        )
    return rule
