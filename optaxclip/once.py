"""A clipper applied once: tree in, tree and norms out, with no state to carry. The
functions of `dropin` and `backward` are made of it.
"""

from collections.abc import Callable
from typing import Any

from .core import clip_by
from .norms import Measure


def clip_once(
    tree: Any,
    limit: Any,
    norm: Callable[..., Any],
    *,
    argument: str,
    eps: float = 0.0,
    nonfinite: str = "propagate",
    grad_norm: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Shortens the tree to at most `limit`, in each norm by itself.

    Args:
      tree: a pytree of arrays.
      limit: a number or array at least 0, or None to only measure.
      norm: `global_norm`, `tensor_norm` or `unit_norm`; `options` are its keywords, and
        must be hashable, so that an equal call is not compiled anew.
      argument: "call: name of the limit", as errors quote it.
      eps, nonfinite, grad_norm: as in `clip_by` and its update.

    Returns:
      The tree, and its norms from before, without eps.
    """
    measure = Measure(norm, tuple(options.items()))
    clipper = clip_by(measure, limit, eps=eps, nonfinite=nonfinite, argument=argument)
    state: Any = clipper.init(tree)
    clipped, state = clipper.update(tree, state, grad_norm=grad_norm)
    return clipped, state.norm
