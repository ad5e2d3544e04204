"""A clipper applied once: tree in, tree and norms out, with no state to carry.

The functions of `dropin` and `clip_cotangent` are made of it.
"""

from typing import Any

from jax.typing import ArrayLike

from .._norms._measures import Measure
from ..rules._rule import is_rule
from ._kernel import make_clipper


def clip_once(
    tree: Any,
    limit: Any,
    measure: Measure,
    *,
    call: str,
    name: str,
    eps: ArrayLike = 0.0,
    nonfinite: str = "propagate",
    grad_norm: Any = None,
) -> tuple[Any, Any]:
    """Clips every norm of a tree to at most `limit`.

    Args:
      tree: a pytree of arrays.
      limit: a number or array at least 0, or None to only measure.
      measure: what is measured together. Equal calls share one compilation.
      call, name: what errors call the function and its limit.
      eps, nonfinite, grad_norm: as in `clip_by` and its update.

    Returns:
      The tree, and its norms before clipping, without eps, as `ClipState.norm` holds
      them: for one norm of everything a scalar.

    Raises:
      TypeError: a schedule or a rule, which without a state would stay at its first
        step.
    """
    if callable(limit) or is_rule(limit):
        raise TypeError(
            f"{call}: {name} must be a number, got {limit!r}. A schedule or a rule "
            "needs a state, which optaxclip.clip_by_global_norm(limit) has."
        )
    options = {"eps": eps, "nonfinite": nonfinite}
    # Built in each call. Settings are compared by value, so nothing compiles anew.
    clipper = make_clipper(measure, limit, call=call, name=name, **options)
    # A fixed limit remembers nothing, so each call begins with a new state.
    state: Any = clipper.init(tree)
    clipped, state = clipper.update(tree, state, grad_norm=grad_norm)
    return clipped, state.norm
