"""Where a rule is applied: to the norm of everything, of each tensor, or of each
group.
"""

from typing import Any

import optax

from ..fixed import clip_groups, clip_tensors, clip_together
from ..sharding import Axes
from ..shrinks import Shrink
from ..thresholds import Threshold

Scope = Any
"""'global', 'tensor', or labels as `clip_by_group_norm` takes them: a tree prefix of
labels, or a function that makes one.
"""


def clip_at(
    scope: Scope,
    rule: Threshold | None,
    call: str,
    nonfinite: str,
    axes: Axes,
    shrink: Shrink | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The clipper of a rule at a scope; `call` is the name that its errors quote.

    Raises:
      ValueError: a scope that is another string, or no labels at all.
    """
    argument, options = (
        f"{call}: limit",
        {"shrink": shrink, "nonfinite": nonfinite, "axes": axes},
    )
    if scope is None or (isinstance(scope, str) and scope not in ("global", "tensor")):
        raise ValueError(
            f"{call}: scope must be 'global', 'tensor', or labels as in "
            f"clip_by_group_norm, got {scope!r}."
        )
    if not isinstance(scope, str):
        return clip_groups(argument, rule, scope, **options)
    return (clip_together if scope == "global" else clip_tensors)(
        argument, rule, **options
    )
