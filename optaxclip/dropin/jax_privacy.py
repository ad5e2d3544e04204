"""The gradient of jax_privacy: a sum of gradients that were clipped one by one, with
the name and the arguments it has there.

    from jax_privacy import clipped_grad                     # before
    from optaxclip.dropin.jax_privacy import clipped_grad    # after

    grad = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=256)
    grads = grad(params, batch)
    sigma = noise_multiplier * grad.sensitivity()

The gradient comes from `optaxclip.per_example.clipped_grad`, which takes one backward
pass where that is fastest. Noise, sampling and accounting remain those of jax_privacy.
Its training loop and its Keras models run with this function. Its noise, in float32,
ends at 5.22 and -5.42 standard deviations. The noise of `add_noise(grads,
noise_multiplier, key, sensitivity=grad.sensitivity())` reaches 11. docs/per_example.md
says what that costs.

    case                          jax_privacy 2.0         here
    sums of 16-bit gradients      16 bits, unless         float32, unless `dtype` says
                                  `dtype` says otherwise  otherwise
    float16, squares below 6e-8   norm 0: not clipped     the true norm, clipped
    norm 1.8e19 or more           left out, as if broken  the true norm, clipped
    NaN or inf in a gradient      0 in their places, the  the example is left out (as
                                  rest is clipped         in jax_privacy 2.3)
    NaN or inf, nan_safe=False    NaN in their places     the whole sum is NaN
    outputs for padding           values, aux, norms      values, aux, and norms 0
    l2_clip_norm                  a number                a number, or a tree of numbers
                                                          (as in 2.3)
    microbatch_size               divides the batch size  any
    spmd_axis_name                where jit splits vmap   no effect: the batch stays
                                                          split as it came
    grid_scale (2.3)              rounds to a grid        absent
    sensitivity()                 the limit               the limit, with the rounding
                                                          of the sum

Reference: jax_privacy/clipping.py, jax_privacy 2.0.0 and main at 8967688.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import per_example
from .._arguments.checks import check_choice, check_number, check_whole_number
from .._arguments.helpful_errors import with_helpful_errors
from .._devices.mesh_types import varying_as_any_of
from .._norms.norms import global_norm
from ..per_example._limits import over_limit
from ..per_example._problem import Argnums, argnums_list

__all__ = ["AuxiliaryOutput", "BoundedSensitivityCallable", "clipped_grad"]

# By how many bounds the sum changes, by the names of dp_accounting's relations.
BOUND_COUNTS = {"ADD_OR_REMOVE_ONE": 1, "REPLACE_ONE": 2, "REPLACE_SPECIAL": 1}


class AuxiliaryOutput(NamedTuple):
    """Numbers of each example. None for those that were not asked for.

    Attributes:
      values: the loss of each example, with `return_values`.
      grad_norms: norms before clipping, a tree like `l2_clip_norm`, with
        `return_grad_norms`. 0 for padding.
      aux: what the loss returned beside its value, with `has_aux`.
    """

    values: Any  # float[batch]
    grad_norms: Any  # float32[batch]
    aux: Any  # [batch, ...]


# Compared by identity: JAX hashes functions, and a limit may be an array, which has no
# hash.
@dataclass(frozen=True, eq=False)
class BoundedSensitivityCallable:
    """A function, and how much one example can change its result.

    The bound includes the rounding of the sum. `explain_clipped_grad` proves it for one
    program and one size of the batch. So it is known once the function has run, or was
    traced: `jax.eval_shape(grad, params, batch)` is enough. The largest bound of all
    programs counts. Before the first one, and always for a limit that jit traces, it is
    the limit alone, with a warning.

    Attributes:
      fun: the function.
      limit: the limit of one example over `normalize_by`, without any rounding.
      has_aux: whether an `AuxiliaryOutput` is returned beside the sum.
      bounds: one number for each program that was run: by how much one example changes
        its sum at most.
    """

    fun: Callable[..., Any]
    limit: Any
    has_aux: bool
    bounds: set[float] = field(default_factory=set, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the sum, or (sum, `AuxiliaryOutput`).

        Args:
          *args: the arguments of the loss, with batches for examples.
          **kwargs: `is_padding_example=`, bool[batch], True for examples that
            contribute 0. All others are keywords of the loss. As in jax_privacy these
            are batches too, whose axis is never kept.
        """
        return self.fun(*args, **kwargs)

    @property
    def l2_norm_bound(self) -> Any:
        """By how much the sum can change with or without one example."""
        return self._largest_bound("l2_norm_bound")

    def sensitivity(self, neighboring_relation: Any = "REPLACE_SPECIAL") -> Any:
        """Returns by how much the sum can change between neighbouring batches.

        Both batches have the same size: `is_padding_example=` marks the place of an
        absent example. Nothing is proved for a batch that is one example shorter.
        Inside `jax.shard_map` the bound is for the sum over all devices, if `lax.psum`
        is in float32.

        Args:
          neighboring_relation: of `dp_accounting.NeighboringRelation`, or its name:
            ADD_OR_REMOVE_ONE and REPLACE_SPECIAL (by nothing) give the bound,
            REPLACE_ONE twice the bound. The bound is inf where none is proved: for a
            limit of inf or between 0 and 1e-5, with `rescale_to_unit_norm` also for
            0, with nan_safe=False, for random numbers from keys other than threefry's,
            for sums that `dtype` rounds to 16 bits, and for 2^24 parameters or more
            where JAX has a GPU or TPU.
        """
        # No import of dp_accounting, which takes seconds and is not always there.
        name = getattr(neighboring_relation, "name", neighboring_relation)
        check_choice("sensitivity: neighboring_relation", name, tuple(BOUND_COUNTS))
        return BOUND_COUNTS[name] * self._largest_bound("sensitivity")

    def _largest_bound(self, call: str) -> Any:
        """The largest bound of the programs so far. If there is none, the limit, with
        a warning in the name of `call`.
        """
        if not self.bounds:
            warnings.warn(
                f"{call}: the function has not run, or has a limit that jit traces, so "
                f"the rounding of its sum is not known, and the limit {self.limit} may "
                "be too little. Make it with a number, and call it first, or trace it: "
                "jax.eval_shape(grad, params, batch). If that is too late, account for "
                "noise / (1 + change), with change from "
                "optaxclip.per_example.explain_clipped_grad.",
                # This method, the one that was called, then the user.
                stacklevel=3,
            )
        return max(self.bounds, default=self.limit)


def clipped_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[Any], Any] = lambda grads: grads,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
) -> BoundedSensitivityCallable:
    """Makes a function that clips the gradient of each example and adds them up:
    (1 / normalize_by) sum_i g_i min(1, C / |g_i|).

    Args:
      fun: the loss, `fun(params, batch, ...) -> scalar`, or `(scalar, aux)` with
        `has_aux`. It gets one example at a time.
      argnums: which arguments to differentiate, as in `jax.grad`.
      has_aux: whether the loss returns something beside its value.
      l2_clip_norm: the limit C: a number at least 0, inf for none. Or a tree prefix of
        the gradients with a limit for each part, which is then clipped separately.
      rescale_to_unit_norm: whether to divide by C. With C = 0 each gradient is then
        made as long as 1.
      normalize_by: what the sum is divided by, above 0. A number that is not the size
        of the batch at hand, since that is private too.
      batch_argnums: which arguments are batches: trees of arrays whose first axis
        counts examples. All others are the same for all examples.
      keep_batch_dim: whether `fun` gets an example as a batch of size 1. Axes of size 1
        that it puts in front of its aux are then removed. False for a loss of one
        example, or of one user, with a further axis for what this user has.
      return_values: whether to return the loss of each example.
      return_grad_norms: whether to return the norms before clipping and before
        `pre_clipping_transform`.
      pre_clipping_transform: is applied to the gradient of each example before it is
        clipped. It may return another tree, which the sum then looks like. Unless it
        returns its argument, gradients of examples are made one by one.
      microbatch_size: how many examples are differentiated at once. None for the whole
        batch, or for what takes less memory and time.
      nan_safe: whether an example with NaN or inf in its gradient contributes 0. If
        not, the sum is NaN, and `sensitivity()` is inf.
      dtype: what the sum is returned in. None for that of the parameters, but for
        float32 in the place of 16 bits. In 16 bits one example could change the sum by
        more than the limit, and `sensitivity()` is inf.
      prng_argnum: which argument is a random key. Each example gets its own, of
        `jax.random.split(key, batch)`.
      spmd_axis_name: has no effect. The batch stays split over devices as it came.

    Returns:
      A `BoundedSensitivityCallable`: a function of the arguments of `fun`, and of
      `is_padding_example=`. It returns the sum, or (sum, `AuxiliaryOutput`) with
      `has_aux`, `return_values` or `return_grad_norms`. It should be jitted.

    Raises:
      ValueError: a limit that is negative or NaN, `normalize_by` that is not above 0,
        `microbatch_size` below 1, or arguments that are negative, in both roles, or no
        batch. From the function: batches of different sizes, or without examples,
        limits that do not fit, or a loss that `jax.vmap` shows the whole batch, as in
        `optaxclip.per_example.clipped_grad`.
      TypeError: a limit that is not a number. From the function: parameters that are no
        floats, or a loss that is not one real number.

    Example:
      >>> def loss(w, batch):
      ...     return 0.5 * jnp.mean((w - batch) ** 2)
      >>> clipped_grad = optaxclip.dropin.jax_privacy.clipped_grad
      >>> grad = clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True)
      >>> total, seen = grad(jnp.array(3.0), jnp.array([2.5, 1.0, 4.0]))
      >>> print(f"{total:.3f}", seen.grad_norms, f"{grad.sensitivity():.6f}")
      0.500 [0.5 2.  1. ] 1.000003

    Reference: De, Berrada, Hayes, Smith, Balle, Unlocking high-accuracy differentially
    private image classification through scale, 2022 (arXiv 2204.13650), for
    `rescale_to_unit_norm`.
    """
    roles = _checked_roles(argnums, batch_argnums, prng_argnum)
    limits = jax.tree.leaves(l2_clip_norm, is_leaf=lambda limit: limit is None)
    for limit in limits:
        check_number("clipped_grad: l2_clip_norm", limit, is_scalar=True)
    if microbatch_size is not None:
        check_whole_number("clipped_grad: microbatch_size", microbatch_size)
    if not normalize_by > 0:
        raise ValueError(f"clipped_grad: {normalize_by=} must be above 0.")
    # The gradient of an example has a part for each limit. A clipped part is at most as
    # long as its limit, or as 1 after rescaling. So the whole gradient is at most as
    # long as the root of the sum of their squares.
    if rescale_to_unit_norm:
        example_limit = len(limits) ** 0.5
        shrink = over_limit
        max_norm = jax.tree.map(_as_divisor, l2_clip_norm)
    else:
        example_limit = _root_of_squares(limits)
        shrink = None
        max_norm = l2_clip_norm
    has_auxiliary = has_aux or return_values or return_grad_norms
    bounds = set[float]()
    make_clipped_grad = partial(
        per_example.clipped_grad,
        max_norm=max_norm,
        has_aux=True,
        shrink=shrink,
        microbatch=microbatch_size,
        mean=False,
    )
    kept_batches = roles.batch if keep_batch_dim else []
    loss = partial(_loss_of_example, fun, has_aux, kept_batches)

    def clipped_result(inputs: list[Any], mask: jax.Array) -> per_example.ClippedGrad:
        """The sum of the clipped gradients, with the norms before the transform."""
        params = tuple(inputs[place] for place in roles.params)
        if not isinstance(argnums, Sequence):
            (params,) = params
        # Gradients have the shapes of params, so the transform is tried on params. If
        # it returns another tree, that tree has the shapes of the sum. The transform
        # may write to its argument, so it gets a copy.
        direction = pre_clipping_transform(jax.tree.map(lambda x: x, params))
        places = range(len(inputs) - 1)  # of all inputs but the keywords
        shared = [place for place in places if place not in roles.places]
        if _identity_of(direction) == _identity_of(params):
            grad = make_clipped_grad(loss, argnums=argnums, shared_argnums=shared)
            return grad(*inputs, mask=mask)
        grad = make_clipped_grad(
            partial(
                _product_with_gradient,
                loss,
                argnums,
                roles,
                pre_clipping_transform,
                l2_clip_norm,
            ),
            # The direction comes first, so all other arguments are one place further.
            shared_argnums=[place + 1 for place in (*roles.params, *shared)],
            method="one_pass",
        )
        # The gradient is the same for every direction.
        result = grad(direction, *inputs, mask=mask)
        norms, values, aux = result.aux
        norms = jax.tree.map(lambda norm: jnp.where(mask, norm, 0), norms)
        return result._replace(norms=norms, values=values, aux=aux)

    def clipped_sum(*args: Any, is_padding_example: Any = None, **keywords: Any) -> Any:
        """The sum, with an `AuxiliaryOutput` if there is one, and records its bound."""
        result = clipped_result(*roles.inputs(args, keywords, is_padding_example))

        def normalized(x: jax.Array) -> jax.Array:
            if not nan_safe:
                x = jnp.where(result.nonfinite > 0, jnp.nan, x)
            return (x / normalize_by).astype(x.dtype if dtype is None else dtype)

        sums = jax.tree.map(normalized, result.grads)
        # With nan_safe=False the sum shows the NaN of a single example.
        bound = _bound_of(result, sums, normalize_by) if nan_safe else math.inf
        # The bound of a limit that jit traces is not a number.
        if not isinstance(bound, Tracer):
            bounds.add(float(bound))
        if not has_auxiliary:
            return sums
        aux = result.aux
        if keep_batch_dim:
            aux = jax.tree.map(lambda x: x[:, 0] if x.shape[1:2] == (1,) else x, aux)
        auxiliary = AuxiliaryOutput(
            values=result.values if return_values else None,
            grad_norms=result.norms if return_grad_norms else None,
            aux=aux,
        )
        return sums, auxiliary

    return BoundedSensitivityCallable(
        clipped_sum, example_limit / normalize_by, has_auxiliary, bounds
    )


class Roles(NamedTuple):
    """Which positional arguments of the loss are params, batches and random keys."""

    params: list[int]
    batch: list[int]
    keys: list[int]
    options: str  # as errors show them

    @property
    def places(self) -> list[int]:
        """All arguments that have a role."""
        return [*self.params, *self.batch, *self.keys]

    def inputs(
        self, args: Sequence[Any], keywords: Any, is_padding_example: Any
    ) -> tuple[list[Any], jax.Array]:
        """(inputs, mask). The inputs are the positional arguments, with a random key
        for each example, and then the keywords as one dict. The mask is bool[batch],
        False for padding.
        """
        if max(self.places) >= len(args):
            raise TypeError(
                f"clipped_grad: {self.options}, but the function was called with "
                f"{len(args)} positional arguments. Give all of these by position."
            )
        batch = [args[place] for place in self.batch]
        size = _example_count([*batch, keywords, is_padding_example])
        inputs = [*args, keywords]
        for place in self.keys:
            inputs[place] = jax.tree.map(
                lambda key: jax.random.split(key, size), args[place]
            )
        # `per_example.clipped_grad` proves a bound only with a mask.
        mask = jnp.ones(size, bool)
        if is_padding_example is not None:
            mask = jnp.logical_not(is_padding_example)
            # `per_example.clipped_grad` would check it too, but call it mask.
            if mask.shape != (size,):
                raise ValueError(
                    "clipped_grad: is_padding_example must have one axis, of the "
                    f"{size} examples, got {mask.shape}."
                )
        return inputs, mask


def _checked_roles(
    argnums: Argnums, batch_argnums: Argnums, prng_argnum: int | None
) -> Roles:
    """The roles that these options give. Raises ValueError where they overlap."""
    keys = [] if prng_argnum is None else argnums_list(prng_argnum)
    options = f"{argnums=}, {batch_argnums=} and {prng_argnum=}"
    roles = Roles(argnums_list(argnums), argnums_list(batch_argnums), keys, options)
    is_repeated = len(set(roles.places)) < len(roles.places)
    # The tests of jax_privacy look for the last sentence of this error.
    if not roles.batch or min(roles.places) < 0 or is_repeated:
        raise ValueError(
            f"clipped_grad: {options} must be at least 0, and not overlap. Batch "
            "Argnums must not be empty."
        )
    return roles


def _loss_of_example(
    fun: Callable[..., Any], has_aux: bool, kept_batches: list[int], *inputs: Any
) -> tuple[Any, Any]:
    """The loss of one example, and its aux.

    Args:
      fun: the loss of the user, which returns an aux if `has_aux`.
      kept_batches: the places of the arguments that become batches of size 1.
      *inputs: those of `Roles.inputs`, for one example.
    """
    *args, keywords = inputs
    for place in kept_batches:
        args[place] = jax.tree.map(lambda x: x[None], args[place])
    returned = fun(*args, **keywords)
    return returned if has_aux else (returned, None)


def _product_with_gradient(
    loss: Callable[..., Any],
    argnums: Argnums,
    roles: Roles,
    transform: Callable[[Any], Any],
    l2_clip_norm: Any,
    direction: Any,
    *inputs: Any,
) -> tuple[Any, Any]:
    """The inner product of a direction and T(g), the transformed gradient of a loss.

    So the gradient by the direction is T(g), whatever the direction. The aux are the
    norms of g, and the value and aux of the loss.
    """
    args = list(inputs)
    example = [args[place] for place in roles.batch]
    for place in roles.params:
        args[place] = varying_as_any_of(args[place], example)
    (value, aux), grads = jax.value_and_grad(loss, argnums, has_aux=True)(*args)
    norms = jax.tree.map(
        lambda _, part: global_norm(part, mesh_axes=None), l2_clip_norm, grads
    )
    transformed = jax.lax.stop_gradient(transform(grads))
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), direction, transformed)
    return sum(jax.tree.leaves(products)), (norms, value, aux)


def _example_count(batch: Any) -> int:
    """The number of examples. Raises ValueError for arrays that disagree about it."""
    sizes: list[Any] = []  # each size once
    for array in jax.tree.leaves(batch):
        shape = jnp.shape(array)
        size = shape[0] if shape else "no axis"
        if size not in sizes:
            sizes.append(size)
    # `per_example.clipped_grad` would check it too, but name arguments of its own.
    if len(sizes) != 1 or 0 in sizes or "no axis" in sizes:
        raise ValueError(
            "clipped_grad: the arrays of batch_argnums, the keywords and "
            "is_padding_example must have the same size along axis 0, the number of "
            f"examples, at least 1, got {' and '.join(map(str, sizes)) or 'none'}. An "
            "argument that is the same for all examples is given by position, outside "
            "of batch_argnums."
        )
    (size,) = sizes
    return size


def _root_of_squares(limits: Sequence[Any]) -> Any:
    """The length of a vector of limits."""
    if any(isinstance(limit, Tracer) for limit in limits):
        return reduce(jnp.hypot, limits)
    # As Python floats: squares of float16 and int32 leave their ranges.
    return math.hypot(*map(float, limits))


def _bound_of(result: per_example.ClippedGrad, sums: Any, normalize_by: float) -> Any:
    """By how much one example changes `sums`, which are the sums of `result`, divided
    and cast. inf where nothing is proved.
    """
    is_narrow = any(jnp.finfo(x.dtype).bits < 32 for x in jax.tree.leaves(sums))
    if result.sensitivity is None or is_narrow:
        return math.inf
    # The sums with and without the example are each rounded by 2^-24 of their length.
    return (result.sensitivity + 2.0**-23 * result.longest) / normalize_by


def _identity_of(tree: Any) -> tuple[Any, list[int]]:
    """The structure of a tree, and the identity of each of its arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [id(leaf) for leaf in leaves]


def _as_divisor(limit: Any) -> Any:
    """The limit as a divisor in float32, neither 0 nor inf."""
    numpy = jnp if isinstance(limit, jax.Array) else np
    return numpy.clip(limit, 1.2e-38, 3.4e38)


with_helpful_errors(__name__)
