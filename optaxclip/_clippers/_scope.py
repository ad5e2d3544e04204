"""Where a rule is applied: to the norm of everything, of each tensor, or of each group.

A scope is "global", "tensor", or labels as `clip_by_group_norm` takes them: a tree
prefix of labels, or a function that makes one.
"""

from typing import Any

import optax

from .._core._kernel import make_clipper
from .._norms._measures import (
    GlobalNorm,
    GroupNorm,
    Measure,
    TensorNorm,
    check_measure,
)
from .._norms._mesh_axes import MeshAxes
from ..rules._rule import Rule
from ..shrinks import Shrink

Scope = Any


def clip_at(
    scope: Scope,
    rule: Rule,
    call: str,
    nonfinite: str,
    mesh_axes: MeshAxes,
    shrink: Shrink | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The clipper of a rule at a scope. `call` is the name that its errors quote.

    Raises:
      ValueError: a scope that is another string, or no labels at all.
    """
    measure = _measure(scope, call, mesh_axes)
    options = {"shrink": shrink, "nonfinite": nonfinite}
    return make_clipper(measure, rule, call=call, name="limit", **options)


def _measure(scope: Scope, call: str, mesh_axes: MeshAxes) -> Measure:
    if scope is None or (isinstance(scope, str) and scope not in ("global", "tensor")):
        raise ValueError(
            f"{call}: scope must be 'global', 'tensor', or labels as in "
            f"clip_by_group_norm, got {scope!r}."
        )
    if not isinstance(scope, str):
        options = check_measure(call, None, labels=scope, mesh_axes=mesh_axes)
        return GroupNorm(**options)
    kind = GlobalNorm if scope == "global" else TensorNorm
    return kind(**check_measure(call, None, mesh_axes=mesh_axes))
