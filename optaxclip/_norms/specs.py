"""How each leaf contributes to a norm."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._devices import mesh
from .._devices.mesh import AxisNames
from .._numbers import element_count
from .options import Ord
from .sums import Axes


class LeafSpec(NamedTuple):
    """How one leaf enters its norm. Static.

    Some axes of a leaf are summed, and the others are kept. Kept axes are either units
    or layers. Inside shard_map and pmap mesh axes may split either kind:

        mesh_axes_of_summed    split summed axes. Sums are joined over them
        mesh_axes_of_units     split units. Each device has the norms of its units
        mesh_axes_of_layers    split layers. Each device has the norms of all layers, so
                               norms are joined over these too
        mesh_axes_of_kept      split units or layers, with an entry for each axis
    """

    norm_index: Any  # an int, the index of its norm. None: the leaf is left alone
    # The axes that are summed, and stay with size 1. None: all, to a scalar.
    summed_axes: Axes = None
    mesh_axes_of_summed: AxisNames = ()
    # For each axis of the leaf its mesh axes, () for a summed axis. () if no kept axis
    # is split.
    mesh_axes_of_kept: tuple[AxisNames, ...] = ()
    has_units: bool = False  # whether kept axes are units. Otherwise they are layers

    @property
    def mesh_axes_of_units(self) -> AxisNames:
        """The mesh axes that split its units."""
        if not self.has_units:
            return ()
        return tuple(chain.from_iterable(self.mesh_axes_of_kept))

    @property
    def mesh_axes_of_layers(self) -> AxisNames:
        """The mesh axes that split its layers."""
        if self.has_units:
            return ()
        return tuple(chain.from_iterable(self.mesh_axes_of_kept))

    @property
    def joined_along(self) -> AxisNames:
        """The mesh axes over which its norm is joined."""
        return self.mesh_axes_of_summed + self.mesh_axes_of_layers

    def local_value(self, values: Sequence[Any]) -> Any:
        """The entry of this leaf in `values`, which has one for each norm. Of a stacked
        leaf it has the layers that this device holds.
        """
        value = values[self.norm_index]
        if self.mesh_axes_of_layers:
            return mesh.local_layers(value, self.mesh_axes_of_kept)
        return value


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
        and at least 1. All 1 for an order that is not a mean.
        """
        if not is_mean(self.ord):
            return list(np.ones(self.norm_count, dtype))
        counts: list[Any] = [0.0] * self.norm_count
        for spec, array in zip(self.specs, arrays):
            summed_axes = spec.summed_axes
            if summed_axes is None:
                summed_axes = range(array.ndim)
            count = element_count([array.shape[axis] for axis in summed_axes], dtype)
            device_count = mesh.device_count(spec.mesh_axes_of_summed)
            counts[spec.norm_index] += count * device_count
        numbers = []
        for count in counts:
            # Only a count of symbols is an array already.
            number = np.asarray(count) if isinstance(count, float) else count
            numbers.append(number.astype(dtype).clip(1))
        return numbers
