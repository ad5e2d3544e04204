"""`max_norm`: the limits of norms. Parameters that share a limit are a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from .. import _trees as trees
from .._arguments.checks import check_limit, check_scalar, shown
from .._arguments.functions import is_function
from .._arguments.prefixes import for_each_leaf
from .._devices.mesh_types import varying
from .._numbers import in_norm_dtype
from .._trees import PyTree
from ..rules._rule import is_rule
from ..shrinks import Shrink, factor_per_limit_of, hard, is_ours

# Numbers below 1.2e-38 may be flushed to 0, and the bounds do not count them. They are
# too small to matter if limits are at least 1e-5, and factors at most 1e5 times the
# limit.
LEAST_LIMIT = 1e-5
MOST_FACTOR_PER_LIMIT = 1e5
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def limits_of(max_norm: PyTree, call: str, shrink: Shrink) -> Limits:
    """The limits of a number, a function, or of a tree of them.

    Raises:
      TypeError, ValueError: something that is not a limit, an array of several, or no
        limit at all.
    """
    argument = f"{call}: max_norm"

    def is_limit(node: object) -> bool:
        # JAX takes a rule for a tree, and a function of jax.tree_util.Partial too. A
        # rule is refused later: examples have no steps that it could learn from.
        return node is None or is_rule(node) or is_function(node)

    limits, treedef = jax.tree.flatten_with_path(max_norm, is_leaf=is_limit)
    if not limits:
        raise ValueError(f"{argument} has no limit in it, got {shown(max_norm)}.")
    for path, limit in limits:
        if limit is not None and not is_function(limit):
            argument_of_path = f"{argument} for {trees.path_name(path)!r}"
            check_limit(argument_of_path if path else argument, limit, is_scalar=True)
    return Limits(call, [limit for _, limit in limits], shrink, treedef)


class Limits(NamedTuple):
    """`max_norm`: a tree prefix of the parameters, with a limit for each group."""

    call: str  # the function that the user called, for errors
    # For each group a number, a function of its norms, or None for no limit
    values: list[Any]
    shrink: Shrink
    treedef: Any  # of `max_norm`

    @property
    def needs_all_norms(self) -> bool:
        """Whether a limit is a function of all norms of the batch."""
        return any(map(is_function, self.values))

    def groups_of(self, params: PyTree) -> list[int]:
        """The index of the group of each parameter. Raises ValueError for limits that
        do not fit.
        """
        group_indices = self.treedef.unflatten(range(len(self.values)))
        return for_each_leaf(group_indices, params, f"{self.call}: max_norm")

    def numbers_for(self, norms: Array, is_counted: Array) -> Array:
        """The limits as numbers [groups], for norms [batch, groups]."""
        limits = []
        for group_index, value in enumerate(self.values):
            limit = value
            if value is None:
                limit = jnp.inf
            elif is_function(value):
                limit = self._limit_from(value, norms[:, group_index], is_counted)
            limits.append(in_norm_dtype(norms.dtype, limit))
        # A traced limit, or one from a function, may be negative, and then counts as 0.
        return jnp.maximum(jnp.stack(limits), 0)

    def _limit_from(
        self, function: Callable[[Array], Any], norms: Array, is_counted: Array
    ) -> Array:
        """The limit that a function computes from the norms of a group. In shard_map it
        gets the norms of all devices. In pmap, and with check_vma=False, it gets only
        those of this device.
        """
        all_norms = lax.stop_gradient(jnp.where(is_counted, norms, jnp.nan))
        for name in sorted(varying(all_norms)):
            all_norms = lax.all_gather(all_norms, name, tiled=True)
        limit = function(all_norms)
        check_scalar(f"{self.call}: what max_norm returns", limit)
        # Without an example there is no median.
        return jnp.where(jnp.any(is_counted), limit, 0)

    def example_limit(self, norm_of_sum: float) -> tuple[Any, str | None]:
        """The limit of the norm of one example over all groups.

        Args:
          norm_of_sum: the most that the norm of the sum over examples may be, as a
            multiple of the limit (`Bounds.norm_of_sum`).

        Returns:
          (limit, None), or (None, reason) if no limit can be proved. A traced limit has
          its value only when the program runs, and is inf if it cannot be proved.
        """
        # `over_limit` returns at most 1, and multiplies by at most 1 over the limit.
        factor_per_limit = factor_per_limit_of(self.shrink)
        if self.shrink is not over_limit and factor_per_limit > MOST_FACTOR_PER_LIMIT:
            obstacle = "may return more than the limit"
            if is_ours(self.shrink):
                obstacle = (
                    "may multiply a small gradient by more than 1e5 times the limit"
                )
            return None, (
                f"the shrink {shown(self.shrink)} {obstacle}. Take another one of "
                "optaxclip.shrinks, such as hard."
            )
        if not any(limit is None for limit in self.values):
            example_limit = self._root_of_squares(norm_of_sum)
            if isinstance(example_limit, Tracer) or example_limit < np.inf:
                return example_limit, None
        max_norm = self.treedef.unflatten(self.values)
        return None, (
            f"max_norm must be 0 or at least {LEAST_LIMIT:g} for each parameter, and "
            f"below {LARGEST_FLOAT32 / norm_of_sum:.2g}, got {shown(max_norm)}."
        )

    def _root_of_squares(self, norm_of_sum: float) -> Any:
        """The root of the sum of squares of all limits. inf where no bound follows."""
        is_traced = any(isinstance(limit, Tracer) for limit in self.values)
        # By NumPy: under jit `sensitivity` of dropin.jax_privacy must not be a tracer.
        xp = jnp if is_traced else np
        # A traced limit may be negative, and then counts as 0.
        limits = xp.maximum(xp.array(self.values, float), 0)
        is_proved = xp.all((limits == 0) | (limits >= LEAST_LIMIT))
        if self.shrink is over_limit:
            # What `over_limit` returns is at most 1.
            limits = xp.ones_like(limits)
        example_limit = xp.linalg.norm(limits)
        # A difference of sums that are inf has no bound.
        is_proved &= example_limit < LARGEST_FLOAT32 / norm_of_sum
        if is_traced:
            # Squares, their sum and this product are wrong by less than 2^-23 for each
            # limit, and the root of a GPU or TPU by 2^-22.
            rounded_up = example_limit * (1 + (len(self.values) + 2) * 2.0**-23)
            return jnp.where(is_proved, rounded_up, jnp.inf)
        return example_limit if is_proved else np.inf


def over_limit(norm: Array, limit: Array) -> Array:
    """The shrink of `rescale_to_unit_norm` in dropin.jax_privacy: the clipped norm over
    the limit.
    """
    return hard(norm, limit) / limit
