"""Parameters that were only rearranged: the gradient by the rearranged one has the same
numbers, and so the same norm.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp


class View(NamedTuple):
    """A parameter, or what a scan takes of it in a turn, with its axes rearranged."""

    shape: tuple[int, ...]  # of the parameter, maybe after a reshape
    # The axis of the parameter that each axis is, or None for a new one of size 1. None
    # altogether where axes were merged or split later than that.
    axes: tuple[int | None, ...] | None
    # (axis, depth of the scan over it). Axis -1 where it is not known.
    scanned: tuple[tuple[int, int], ...] = ()

    def sliced(self, depth: int) -> "View":
        """One turn of a scan over the first axis."""
        if self.axes is None:
            return self._replace(scanned=(*self.scanned, (-1, depth)))
        axis = -1 if self.axes[0] is None else self.axes[0]
        return self._replace(
            axes=self.axes[1:], scanned=(*self.scanned, (axis, depth))
        )


def view_after(eqn: Any, views: list[View | None]) -> View | None:
    """The view that the output of an equation is, or None if it is not one."""
    # What is made of two values, such as a sum of weights, is not one rearranged.
    if len(views) != 1 or views[0] is None:
        return None
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, views[0]) if rule else None


def _same(eqn: Any, view: View) -> View:
    return view


def _moved(eqn: Any, view: View) -> View:
    """The norm is the same. Sums with other uses of the parameter would not be."""
    return view._replace(axes=None)


def _cast(eqn: Any, view: View) -> View | None:
    (before,), (after,) = eqn.invars, eqn.outvars
    # A cast from or to complex numbers drops or adds their imaginary parts.
    dtypes = before.aval.dtype, after.aval.dtype
    if all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return view
    return None


def _transposed(eqn: Any, view: View) -> View:
    if view.axes is None:
        return view
    return view._replace(
        axes=tuple(view.axes[k] for k in eqn.params["permutation"])
    )


def _squeezed(eqn: Any, view: View) -> View:
    if view.axes is None:
        return view
    gone = eqn.params["dimensions"]
    return view._replace(
        axes=tuple(a for k, a in enumerate(view.axes) if k not in gone)
    )


def _broadcast(eqn: Any, view: View) -> View | None:
    """Only new axes of size 1. A copy would be counted more than once."""
    (before,), (after,) = eqn.invars, eqn.outvars
    if before.aval.size != after.aval.size:
        return None
    if view.axes is None:
        return view
    # [8] as [1, 8]: axes (0,) become (None, 0).
    axes: list[int | None] = [None] * after.aval.ndim
    for axis, place in zip(view.axes, eqn.params["broadcast_dimensions"]):
        axes[place] = axis
    return view._replace(axes=tuple(axes))


def _reshaped(eqn: Any, view: View) -> View:
    """Axes have a name again where nothing was rearranged before."""
    shape = tuple(eqn.outvars[0].aval.shape)
    # [8, 8] as [8, 2, 4]: as if the parameter had been [8, 2, 4] from the start.
    is_transposed = eqn.params["dimensions"] is not None
    if view.axes == tuple(range(len(view.shape))) and not is_transposed:
        return View(shape, tuple(range(len(shape))))
    return view._replace(axes=None)


_RULES = {
    "convert_element_type": _cast,
    "transpose": _transposed,
    "squeeze": _squeezed,
    "expand_dims": _broadcast,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "copy": _same,
    "pvary": _same,
    "sharding_constraint": _same,
    # Numbers that change place or sign have the same norm.
    "rev": _moved,
    "neg": _moved,
}
