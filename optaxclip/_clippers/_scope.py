"""Where a rule is applied: to the norm of everything, of each tensor, or of each group.

A scope is "global", "tensor", or labels as `clip_by_group_norm` takes them: a tree
prefix of labels, or a function that makes one. With "tensor", each layer of a stacked
leaf is a tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from .._checks import shown
from .._kernel import make_clipper
from .._mesh import MeshAxes
from .._norms import GlobalNorm, GroupNorm, Measure, TensorNorm, check_measure
from .._trees import Stacked
from ..rules._rule import Rule
from ..shrinks import Shrink

# "global", "tensor", a tree prefix of labels, or a function that makes one.
Scope = str | Mapping[Any, Any] | Sequence[Any] | Callable[..., Any]


def clip_at(
    scope: Scope,
    rule: Rule,
    call: str,
    nonfinite: str,
    mesh_axes: MeshAxes,
    *,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The clipper of a rule at a scope. `call` is the name that its errors quote.

    Raises:
      ValueError: a scope that is another string, or no labels at all, or `stacked` at
        another scope than "tensor".
    """
    measure = _measure(scope, call, stacked, mesh_axes)
    # These clippers have no argument for a limit, so errors name it plainly `limit`.
    options = {"shrink": shrink, "nonfinite": nonfinite}
    return make_clipper(measure, rule, call=call, name="limit", **options)


def _measure(
    scope: Scope, call: str, stacked: Stacked, mesh_axes: MeshAxes
) -> Measure:
    # As labels, None or another string would make one group of all leaves.
    if scope is None or (
        isinstance(scope, str) and scope not in ("global", "tensor")
    ):
        raise ValueError(
            f"{call}: scope must be 'global', 'tensor', or labels as in "
            f"clip_by_group_norm, got {shown(scope)}."
        )
    # The norm is of order 2, as in the papers of all these rules.
    if isinstance(scope, str) and scope == "tensor":
        numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
        return TensorNorm(**check_measure(call, None, **numbers))
    # Layers have norms of their own only where tensors have.
    if stacked is not None:
        raise ValueError(
            f"{call}: stacked={shown(stacked)} makes each layer a tensor of its own, "
            f"but scope={shown(scope)} measures tensors together: take scope='tensor'."
        )
    if isinstance(scope, str):
        return GlobalNorm(**check_measure(call, None, mesh_axes=mesh_axes))
    return GroupNorm(
        **check_measure(call, None, labels=scope, mesh_axes=mesh_axes)
    )
