"""Clippers by norm: of everything, of each tensor, of each unit, of groups, and by
the mean of tensors.

limit 0          zeros, for zero updates as well
limit None, inf  bit for bit the input: the clipper only measures. NaN and inf pass,
                 but nonfinite="raise" raises
norm <= limit    bit for bit the input
norm NaN or inf  all that was measured together becomes NaN (nonfinite="propagate")
nothing to clip  the norm of an empty tree is 0. None, integer, bool and empty
                 leaves pass through

Each clipper here is a measure and a limit. `make_clipper` in _norm_clipper.py computes
g * min(1, limit / |g|) for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
from jax.typing import ArrayLike

from .._arguments.checks import Nonfinite, check_flag, shown
from .._devices.mesh import MeshAxes
from .._norm_clipper import make_clipper
from .._norms import norms
from .._norms.axes import Axis, Stacked
from .._norms.options import Ord, check_labels, checked_options
from ..rules._limits import Limit, LimitTree
from ..shrinks import Shrink


def clip_by_global_norm(
    max_norm: Limit,
    *,
    ord: Ord = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips the norm of all updates together: g * min(1, max_norm / |g|).

    Args:
      max_norm: a number at least 0, a schedule, None to only measure, or a rule of
        `optaxclip.rules`. 0 makes zeros.
      ord: the order of the norm: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`. None is
        `hard`.
      eps: added to the norm before it is compared and divided by. 1e-6 gives torch's
        numbers. At least 0.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`). With max_norm=None or inf, which only measure, only
        "raise" acts.
      mesh_axes: over which mesh axes leaves are split, inside shard_map and pmap:
        "auto" (right in shard_map with check_vma=True, and for gradients after
        `lax.pmean`), names that split every leaf, None (each device measures its own
        part), or a tree prefix of PartitionSpec.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. Its `update`
      also takes `grad_norm=`, the norm of these updates where it is known already, and
      `limit=` for this step. A chain hands both to all of its clippers. Behind the
      first one the updates are shorter, and `grad_norm` is wrong.
      Clipped updates are about 5e-7 shorter than by the equation (1e-15 in 64 bits),
      so that no rounding carries them over the limit.

    Raises:
      ValueError: a negative or NaN limit or eps, an order that is not above 0, an
        unknown `nonfinite`. From update: a mesh axis that is not bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = [jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0])]
      >>> clipper = optaxclip.clip_by_global_norm(5.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(f"{state.norm:.4f}", *(x for x in updates))
      5.4772 [2.7386 3.6515] [0.9129 1.8257]

    Reference: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural
    networks, 2013 (arXiv 1211.5063).
    """
    call = "clip_by_global_norm"
    options = checked_options(call, ord=ord, mesh_axes=mesh_axes)
    return make_clipper(
        norms.GlobalNorm(**options),
        max_norm,
        call=call,
        shrink=shrink,
        # torch divides by norm + 1e-6. With an eps of 0 updates whose norm is exactly
        # the limit keep their bits.
        eps=eps,
        nonfinite=nonfinite,
    )


def clip_by_tensor_norm(
    max_norm: LimitTree,
    *,
    ord: Ord = None,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips the norm of each leaf separately: g * min(1, max_norm / |g|).

    Args:
      max_norm: a number at least 0, an array, a schedule, None, a rule of
        `optaxclip.rules`, or a tree prefix of numbers and schedules.
      ord: the order of the norm: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      stacked: which axes of a leaf index its layers, each clipped separately. 1 is
        the leading axis, as `lax.scan` and `jax.vmap` stack layers, and 2 the two
        leading ones. A tuple names axes by position: (1,) is axis 1, as MaxText and T5X
        stack. Also a tree prefix of these, with None for leaves that are not stacked,
        or a function of the leaf's path ("blocks/w") and the leaf.
      shrink: what a norm over its limit becomes. None is `shrinks.hard`.
      eps: added to each norm, as in `clip_by_global_norm`. At least 0.
      nonfinite: what becomes of a tensor whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. Its `update`
      also takes `grad_norm=` and `limit=`, in the structure that `tensor_norm` returns.

    Raises:
      ValueError: a negative or NaN limit or eps, an order that is not above 0, an
        unknown `nonfinite`. From init or update: a leaf without a limit, an axis in
        `stacked` that a leaf does not have, leaves of one stack with different numbers
        of layers, or a mesh axis that is not bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> clipper = optaxclip.clip_by_tensor_norm(1.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(updates["w"], updates["b"])
      [0.6 0.8] [0.5]

    Reference: `tf.clip_by_norm`, and `clipnorm` of Keras optimizers.
    """
    call = "clip_by_tensor_norm"
    # The norms of N leaves are one float32[N], whose limits and counters are computed
    # together. A stacked leaf [layers, in, out] has norms [layers, 1, 1].
    options = checked_options(call, ord=ord, stacked=stacked, mesh_axes=mesh_axes)
    return make_clipper(
        norms.TensorNorm(**options),
        max_norm,
        call=call,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
    )


def clip_by_unitwise_norm(
    max_norm: LimitTree,
    *,
    axis: Axis = None,
    ord: Ord = None,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips the norm of each unit: of the weights that feed one output.

        g_u * min(1, c / |g_u|)        for each unit u

    Args:
      max_norm: a number at least 0, an array, a schedule, None, a rule of
        `optaxclip.rules`, or a tree prefix of numbers and schedules. An array may hold
        one limit for each unit, with the summed axes at size 1.
      axis: the axes that are summed over: an int, a tuple, a tree prefix of these, or a
        function of path and leaf. None chooses by shape: all axes where at most one is
        longer than 1, otherwise those before the last, the output of a JAX kernel (axis
        0 alone at rank 3). For weights of shape (out, in):
        `axis=lambda path, x: tuple(range(1, x.ndim)) or None`.
      ord: the order of the norm: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      stacked: which axes of a leaf index its layers, each clipped separately: 1 for the
        leading axis, or another form that `clip_by_tensor_norm` takes.
      shrink: what a norm over its limit becomes. None is `shrinks.hard`.
      eps: added to each norm, as in `clip_by_global_norm`. At least 0.
      nonfinite: what becomes of a unit whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. PartitionSpecs are
        required for every split leaf except vectors.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. Its `update`
      also takes `grad_norm=` and `limit=`, in the structure that `unitwise_norm`
      returns.

    Raises:
      ValueError: a negative or NaN limit or eps, an order that is not above 0, an
        unknown `nonfinite`. From init or update: a leaf without a limit, an axis that
        a leaf does not have, a rank above 5 without `axis`, or a mesh axis that is not
        bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = jnp.array([[3.0, 0.1], [4.0, 0.0]])
      >>> clipper = optaxclip.clip_by_unitwise_norm(1.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(updates)
      [[0.6 0.1]
       [0.8 0. ]]
    """
    call = "clip_by_unitwise_norm"
    # A kernel [in, out] has norms [1, out]: its last axis is the output in JAX.
    options = checked_options(
        call, ord=ord, axis=axis, stacked=stacked, mesh_axes=mesh_axes
    )
    return make_clipper(
        norms.UnitwiseNorm(**options),
        max_norm,
        call=call,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
    )


def clip_by_group_norm(
    max_norm: LimitTree,
    labels: Mapping[Any, Any] | Sequence[Any] | Callable[..., Any],
    *,
    ord: Ord = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
    allow_missing: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Clips the norm of each group of leaves: one norm and one limit for each label.

        g_k * min(1, c_k / |g_k|)        for the leaves of group k together

    Args:
      max_norm: one limit for every group, or a dict from label to limit. A limit is a
        number at least 0, an array, a schedule, None or a rule of `optaxclip.rules`.
      labels: a tree prefix of labels, a function that makes one from the tree, as in
        `optax.partition`, or a function of a leaf's path ("blocks/w") and the leaf.
      ord: the order of the norm: a number above 0, `math.inf`, "rms" or "average".
        None means 2.
      shrink: what a norm over its limit becomes. None is `shrinks.hard`.
      eps: added to each norm, as in `clip_by_global_norm`. At least 0.
      nonfinite: what becomes of a group whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`.
      allow_missing: whether labels may have no leaf in this model. Limits of such
        labels, and parts of `labels` that the tree does not have, are then left out, so
        that one configuration serves dense models and mixtures of experts. Otherwise
        they are errors, as a misspelt label is. True or False.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. Its `update`
      also takes `grad_norm=` and `limit=`, as dicts from label to number.

    Raises:
      ValueError: a negative or NaN limit or eps, an order that is not above 0, an
        unknown `nonfinite`. From init or update: a leaf without a label, a label
        without a limit, a limit or a part of `labels` without a leaf, or a mesh axis
        that is not bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> labels = {"w": "matrix", "b": "vector"}
      >>> clipper = optaxclip.clip_by_group_norm({"matrix": 1.0, "vector": 0.1}, labels)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(updates["w"], updates["b"])
      [0.6 0.8] [0.1]
    """
    call = "clip_by_group_norm"
    # JAX sorts the keys of a dict, and 1 and "a" do not sort.
    if isinstance(max_norm, dict):
        check_labels(f"{call}: max_norm must have labels", max_norm)
    # The limits of a list would have the keys 0, 1, ... in the place of labels.
    if isinstance(max_norm, (list, tuple)):
        raise TypeError(
            f"{call}: max_norm must be one limit, or a dict from label to limit, got "
            f"{shown(max_norm)}."
        )
    # The norms are float32[labels], in the order of the sorted labels.
    options = checked_options(call, ord=ord, labels=labels, mesh_axes=mesh_axes)
    check_flag(f"{call}: allow_missing", allow_missing)
    return make_clipper(
        norms.GroupNorm(**options, allow_missing=bool(allow_missing)),
        max_norm,
        call=call,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
    )


def clip_by_tensor_rms(
    max_rms: LimitTree,
    *,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips the root mean square of each leaf: g * min(1, max_rms / rms(g)).

    Adafactor's clip is `clip_by_tensor_rms(1.0)` after the preconditioner.

    Args:
      max_rms: a number at least 0, an array, a schedule, None, a rule of
        `optaxclip.rules`, or a tree prefix of numbers and schedules.
      stacked: which axes of a leaf index its layers, each clipped separately: 1 for the
        leading axis, or another form that `clip_by_tensor_norm` takes.
      shrink: what a norm over its limit becomes. None is `shrinks.hard`.
      eps: added to each norm, as in `clip_by_global_norm`. At least 0.
      nonfinite: what becomes of a tensor whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. Its `update`
      also takes `grad_norm=` and `limit=`, in the structure that `tensor_norm` returns.

    Raises:
      ValueError: a negative or NaN limit or eps, an unknown `nonfinite`. From init or
        update: a leaf without a limit, an axis in `stacked` that a leaf does not have,
        leaves of one stack with different numbers of layers, or a mesh axis that is not
        bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = jnp.array([3.0, 4.0, 0.0, 0.0])
      >>> clipper = optaxclip.clip_by_tensor_rms(1.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(state.norm, updates)
      2.5 [1.2 1.6 0.  0. ]

    Reference: Shazeer, Stern, Adafactor: adaptive learning rates with sublinear memory
    cost, 2018 (arXiv 1804.04235).
    """
    call = "clip_by_tensor_rms"
    # [3, 4, 0, 0] has the norm 5, the RMS 5 / sqrt(4) and the average norm 5 / 4. The
    # RMS does not grow with the size of a leaf, so one limit suits all leaves.
    options = checked_options(call, ord="rms", stacked=stacked, mesh_axes=mesh_axes)
    return make_clipper(
        norms.TensorNorm(**options),
        max_rms,
        call=call,
        limit_argument="max_rms",
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
    )


def clip_by_average_norm(
    max_norm: LimitTree,
    *,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: ArrayLike = 0.0,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips the average norm of each leaf, |g| / N for N elements, as TensorFlow does.

    Args:
      max_norm: a number at least 0, an array, a schedule, None, a rule of
        `optaxclip.rules`, or a tree prefix of numbers and schedules.
      stacked: which axes of a leaf index its layers, each clipped separately: 1 for the
        leading axis, or another form that `clip_by_tensor_norm` takes.
      shrink: what a norm over its limit becomes. None is `shrinks.hard`.
      eps: added to each norm, as in `clip_by_global_norm`. At least 0.
      nonfinite: what becomes of a tensor whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. Its `update`
      also takes `grad_norm=` and `limit=`, in the structure that `tensor_norm` returns.

    Raises:
      ValueError: a negative or NaN limit or eps, an unknown `nonfinite`. From init or
        update: a leaf without a limit, an axis in `stacked` that a leaf does not have,
        leaves of one stack with different numbers of layers, or a mesh axis that is not
        bound.
      TypeError: a limit that is not a number, or a shrink that is not a function.

    Example:
      >>> grads = jnp.array([3.0, 4.0, 0.0, 0.0])
      >>> clipper = optaxclip.clip_by_average_norm(1.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(state.norm, updates)
      1.25 [2.4 3.2 0.  0. ]

    Reference: `tf.compat.v1.clip_by_average_norm`.
    """
    call = "clip_by_average_norm"
    # The average norm of N elements is sqrt(N) times smaller than their RMS, so limits
    # of one do not suit the other.
    options = checked_options(call, ord="average", stacked=stacked, mesh_axes=mesh_axes)
    return make_clipper(
        norms.TensorNorm(**options),
        max_norm,
        call=call,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
    )


def clip_by_block_rms(threshold: LimitTree) -> optax.GradientTransformationExtraArgs:
    """Clips the root mean square of each leaf, as `optax.clip_by_block_rms`.

    Args:
      threshold: the limit of the root mean square: a number at least 0, an array, a
        schedule, None, a rule of `optaxclip.rules`, or a tree prefix of numbers and
        schedules.

    Returns:
      A transformation whose state is a `ClipState`.

    Raises:
      ValueError: a negative or NaN threshold. TypeError: one that is not a number.

    Example:
      >>> grads = jnp.array([3.0, 4.0, 0.0, 0.0])
      >>> clipper = optaxclip.clip_by_block_rms(1.0)
      >>> print(clipper.update(grads, clipper.init(grads))[0])
      [1.2 1.6 0.  0. ]
    """
    # optax's function has this one argument. `clip_by_tensor_rms` has the options.
    call = "clip_by_block_rms"
    measure = norms.TensorNorm(**checked_options(call, ord="rms"))
    return make_clipper(measure, threshold, call=call, limit_argument="threshold")
