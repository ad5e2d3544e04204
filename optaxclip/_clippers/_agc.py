"""Adaptive gradient clipping: a gradient is held against the weights it changes."""

from __future__ import annotations

import math

import optax
from jax.typing import ArrayLike

from .._checks import check_limit, shown
from .._kernel import make_clipper
from .._mesh import MeshAxes
from .._norms import Ord, TensorNorm, UnitwiseNorm, check_measure
from .._trees import Axis, Stacked
from ..rules._rule import Number
from ..rules._share_of_params import ShareOfParams
from ..shrinks import Shrink


def adaptive_grad_clip(
    clipping: Number | None = 0.01,
    eps: ArrayLike = 1e-3,
    axis: Axis = None,
    *,
    per_tensor: bool = False,
    ord: Ord = None,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    nonfinite: str = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips each unit's gradient against its weights: |G_i| <= clipping * max(|W_i|,
    eps).

    Its `update` needs params. The paper leaves out the final linear layer: wrap the
    clipper in `optax.masked`.

    Args:
      clipping: a number at least 0, an array or a schedule. None and inf are no limit.
        0.01 is the paper's for batches of 1024 to 4096. Smaller batches take larger
        ones.
      eps: weights shorter than this count as this long. At least 0.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a
        function of path and leaf. None chooses by shape,
        as the paper's code and optax do: all axes where at most one is longer than 1,
        so that a bias or a kernel of shape (n, 1) or (1, n) is one unit. Otherwise
        those before the last, the output of a JAX kernel (axis 0 alone at rank 3).
        Weights of shape (out, in), as equinox and torch have them, need to be told, or
        a unit is what one input feeds:
        `axis=lambda path, x: tuple(range(1, x.ndim)) or None`.
      per_tensor: whether whole leaves are compared instead of units, as DreamerV3 does
        with clipping=0.3.
      ord: the order of the norms: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      stacked: which axes of a leaf count layers: 1 for the leading axis, 2 for the two
        leading ones, (1,) for axis 1, a tree prefix of these, or a function of path and
        leaf.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`. None is
        `hard`.
      nonfinite: what a norm that is NaN or inf makes of its unit: "propagate" NaN,
        "zero" zeros. "raise" raises FloatingPointError (in jit a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None for the own part of each device,
        or a tree prefix of PartitionSpec, which all leaves that are split need but
        vectors.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`.

    Raises:
      ValueError: a negative or NaN number, an order that is not above 0, an unknown
        `nonfinite`, or `axis` beside `per_tensor`. From init or update: an axis that a
        leaf does not have, a rank above 5 without `axis`, or no params.
      TypeError: something that is not a number, or a shrink that is not a function.

    Example:
      >>> params, grads = jnp.array([[3.0], [4.0]]), jnp.array([[0.6], [0.8]])
      >>> clipper = optaxclip.adaptive_grad_clip(0.1)
      >>> updates, state = clipper.update(grads, clipper.init(params), params)
      >>> print(updates.ravel())
      [0.3 0.4]

    Reference: Brock et al., High-performance large-scale image recognition without
    normalization, 2021 (arXiv 2102.06171). Hafner et al., Mastering diverse domains
    through world models, 2023 (arXiv 2301.04104).
    """
    call = "adaptive_grad_clip"
    # A leaf as a whole has no axes to choose, so one of the two is a mistake.
    if per_tensor and axis is not None:
        raise ValueError(
            f"{call}: axis={shown(axis)} says how units are summed; with "
            "per_tensor=True there are none."
        )
    clipping = math.inf if clipping is None else clipping
    # Checked here as well, since errors of the rule name share_of_params: share.
    for name, value in (("clipping", clipping), ("eps", eps)):
        if not callable(value):
            check_limit(f"{call}: {name}", value)
    numbers = {"stacked": stacked, "mesh_axes": mesh_axes}
    # |G| and |W| of whole leaves as in DreamerV3, or of units as in NFNets.
    if per_tensor:
        measure = TensorNorm(**check_measure(call, ord, **numbers))
    else:
        measure = UnitwiseNorm(
            **check_measure(call, ord, axis=axis, **numbers)
        )
    options = {"shrink": shrink, "nonfinite": nonfinite}
    # limit = clipping * max(|W|, eps), with |W| measured as |G| is.
    rule = ShareOfParams(clipping, eps)
    return make_clipper(measure, rule, call=call, name="clipping", **options)
