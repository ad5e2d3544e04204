"""Which norms some leaves have: how each leaf enters its norm, and of which order."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from . import _mesh as mesh
from ._mesh import AxisNames
from ._options import Ord
from ._sums import Axes, element_count


class LeafSpec(NamedTuple):
    """How one leaf enters its norm. Static.

    Some axes of a leaf are summed, and the others are kept. Inside shard_map and pmap
    mesh axes may split both:

        summed_over    the mesh axes that split summed axes. Sums are joined over them
        kept_over      the mesh axes that split kept axes

    Kept axes are either units or layers:

        units_over     `kept_over` of units. Each device has the norms of its units
        layers_over    `kept_over` of layers. Each device has the norms of all layers,
                       so norms are joined over these mesh axes too
    """

    norm_index: Any  # an int, the index of its norm. None: the leaf is left alone
    # The axes that are summed, and stay with size 1. None: all, to a scalar.
    axes: Axes = None
    summed_over: AxisNames = ()
    # For each axis of the leaf its mesh axes, () for a summed axis. () if no kept axis
    # is split.
    kept_over: tuple[AxisNames, ...] = ()
    has_units: bool = False  # whether kept axes are units. Otherwise they are layers

    @property
    def units_over(self) -> AxisNames:
        """The mesh axes that split its units."""
        return tuple(chain.from_iterable(self.kept_over)) if self.has_units else ()

    @property
    def layers_over(self) -> AxisNames:
        """The mesh axes that split its layers."""
        return () if self.has_units else tuple(chain.from_iterable(self.kept_over))

    @property
    def joined_over(self) -> AxisNames:
        """The mesh axes over which its norm is joined."""
        return self.summed_over + self.layers_over

    def local_value(self, values: Sequence[Any]) -> Any:
        """The entry of this leaf in `values`, which has one for each norm. Of a stacked
        leaf it has the layers that this device holds.
        """
        value = values[self.norm_index]
        return mesh.local_layers(value, self.kept_over) if self.layers_over else value


def is_mean(ord: Ord) -> bool:
    """Whether norms of an order are divided by a number of elements."""
    return isinstance(ord, str)


class NormPlan(NamedTuple):
    """The norms of some leaves. Static."""

    specs: tuple[LeafSpec, ...]  # of each leaf
    norm_count: int  # how many norms there are. A norm without leaves is 0
    ord: Ord  # the order of all of them

    def element_counts(self, arrays: list[Array], dtype: DTypeLike) -> list[Any]:
        """For each norm the number of elements that its mean is over, on all devices,
        and at least 1. All 1 for an order that is no mean.
        """
        if not is_mean(self.ord):
            return list(np.ones(self.norm_count, dtype))
        counts: list[Any] = [0.0] * self.norm_count
        for spec, array in zip(self.specs, arrays):
            axes = range(array.ndim) if spec.axes is None else spec.axes
            count = element_count([array.shape[axis] for axis in axes], dtype)
            counts[spec.norm_index] += count * mesh.device_count(spec.summed_over)
        numbers = []
        for count in counts:
            # Only a count of symbols is an array already.
            number = np.asarray(count) if isinstance(count, float) else count
            numbers.append(number.astype(dtype).clip(1))
        return numbers
