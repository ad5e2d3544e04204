"""torch's gradient clipping for trees: `torch.nn.utils.clip_grad_norm_` and its
relatives, without the underscore, since nothing is changed in place.

    total_norm = |grads|    of order norm_type, over all leaves
    result     = grads * min(1, max_norm / (total_norm + 1e-6))

The arguments are gradients, not parameters. None leaves are ignored and kept. A single
array is a tree.

    case                          torch 2.13             here
    norm + 1e-6 above the limit   max_norm / (norm +     the same, to 8 eps of float32
                                  1e-6)
    norm + 1e-6 within the limit  times 1                the same bits
    no leaves, only None          norm 0                 the same
    empty leaf, norm_type inf     an error               ignored
    max_norm 0                    zeros                  the same
    norm_type a text              read as a number       the same
    norm_type <= 0                a count, or at most    ValueError: no norm
                                  the smallest |x|
    norm_type NaN                 NaN                    ValueError
    norm                          in the dtype of the    float32, or float64 if a leaf
                                  gradients              has 64 bits
    powers overflow, such as the  norm inf, zeros        the true norm, clipped
    square of 1e20 in float32,
    2e200 in float64
    powers underflow              norm 0                 the true norm, clipped
    a gradient is NaN             all NaN                the same
    a gradient is inf             NaN there, zeros       all NaN: a broken step is
                                  elsewhere              seen, never half applied
    max_norm inf, norm not        NaN                    untouched, since there is no
    finite                                               limit
    max_norm < 0                  the sign flips         ValueError
    max_norm, clip_value NaN      all NaN                ValueError
    clip_value < 0                all become clip_value  ValueError
    max_norm, clip_value a text   read as a number       TypeError
    error_if_nonfinite            RuntimeError           the same without jit, a
                                                         `checkify.check` under it.
                                                         No error where the true norm
                                                         is finite
    get_total_norm of None        an error               ignored, as in clip_grad_norm
    complex, clip_grad_value      an error               by modulus
    foreach=                      chooses the kernels    TypeError
    integer leaves                refused                neither measured nor clipped
                                                         by norm
    derivatives                   none: under no_grad    those of the formula

Reference: torch.nn.utils.clip_grad, PyTorch 2.13. Pascanu, Mikolov, Bengio, On the
difficulty of training recurrent neural networks, 2013 (arXiv 1211.5063).
"""

from __future__ import annotations

import math
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from .._arguments.checks import check_given_norm, check_number, check_scalar, shown
from .._arguments.helpful_errors import with_helpful_errors
from .._clippers.by_value import value_clipper
from .._norm_clipper import clip_once
from .._norms import norms
from .._trees import PyTree, Tree

__all__ = [
    "clip_grad_norm",
    "clip_grad_value",
    "clip_grads_with_norm",
    "get_total_norm",
]


EPS = 1e-6  # torch adds it to the norm that it divides by


def clip_grad_norm(
    grads: Tree,
    max_norm: ArrayLike,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
) -> tuple[Tree, Array]:
    """Clips the norm of all gradients together, and returns it.

        grads * min(1, max_norm / (total_norm + 1e-6))

    Args:
      grads: a pytree of arrays.
      max_norm: the limit, a scalar at least 0. inf only measures. It may be traced.
      norm_type: the order of the norm: a number above 0, `math.inf`, or a string such
        as "inf".
      error_if_nonfinite: raise where the norm is NaN or inf.

    Returns:
      (grads, total_norm): the gradients in their dtypes, and their norm before
      clipping, a scalar, float32 (float64 if a leaf has 64 bits).

    Raises:
      ValueError: a limit that is negative or NaN, or an order that is not above 0.
      TypeError: a limit that is not a real number.
      RuntimeError: a norm that is not finite, if `error_if_nonfinite`. Under jit a
        `checkify.check` that fails.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": None}
      >>> grads, norm = optaxclip.dropin.torch_style.clip_grad_norm(grads, 1.0)
      >>> print(norm, *(f"{x:.4f}" for x in grads["w"]), grads["b"])
      5.0 0.6000 0.8000 None

    Reference: torch.nn.utils.clip_grad_norm_.
    """
    call = "clip_grad_norm"
    # `_clipped_by_norm` takes None for no limit. torch does not.
    check_number(f"{call}: max_norm", max_norm)
    return _clipped_by_norm(call, grads, max_norm, norm_type, error_if_nonfinite)


def clip_grad_value(grads: Tree, clip_value: ArrayLike) -> Tree:
    """Clips every element to [-clip_value, clip_value].

    NaN stays NaN, and inf becomes the bound, or NaN if it is complex.

    Args:
      grads: a pytree of arrays.
      clip_value: the bound, a scalar at least 0. It may be traced.

    Returns:
      The gradients in their dtypes.

    Raises:
      ValueError: a bound that is negative, NaN, or not a scalar.
      TypeError: a bound that is not a real number.

    Example:
      >>> grads = jnp.array([-3.0, 0.25, 2.0])
      >>> print(optaxclip.dropin.torch_style.clip_grad_value(grads, 0.5))
      [-0.5   0.25  0.5 ]

    Reference: torch.nn.utils.clip_grad_value_.
    """
    call = "clip_grad_value"
    # torch takes one number. clip_by_value would broadcast an array.
    check_scalar(f"{call}: clip_value", clip_value)
    clipper: Any = value_clipper(call, clip_value, upper_argument="clip_value")
    return clipper.update(grads, clipper.init(grads))[0]


def get_total_norm(
    grads: PyTree, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
) -> Array:
    """Returns the norm of all gradients together, as if they were one vector.

    Args:
      grads: a pytree of arrays.
      norm_type: the order of the norm: a number above 0, `math.inf`, or a string such
        as "inf".
      error_if_nonfinite: raise where the norm is NaN or inf.

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits). 0 for an empty tree.

    Raises:
      ValueError: an order that is not above 0.
      RuntimeError: a norm that is not finite, if `error_if_nonfinite`. Under jit a
        `checkify.check` that fails.

    Example:
      >>> grads = [jnp.array([3.0, -4.0]), jnp.array([2.0])]
      >>> print(optaxclip.dropin.torch_style.get_total_norm(grads, "inf"))
      4.0

    Reference: torch.nn.utils.get_total_norm.
    """
    # Without a limit nothing is multiplied: only the norm is wanted.
    _, norm = _clipped_by_norm(
        "get_total_norm", grads, None, norm_type, error_if_nonfinite
    )
    return norm


def clip_grads_with_norm(
    grads: Tree, max_norm: ArrayLike, total_norm: ArrayLike
) -> Tree:
    """Clips gradients whose norm is known.

        grads * min(1, max_norm / (total_norm + 1e-6))

    Args:
      grads: a pytree of arrays.
      max_norm: the limit, a scalar at least 0. inf changes nothing. It may be traced.
      total_norm: the norm of the gradients, a scalar, as `get_total_norm` returns it.

    Returns:
      The gradients in their dtypes. All NaN where `total_norm` is NaN or inf, unless
      `max_norm` is inf.

    Raises:
      ValueError: a limit that is negative or NaN, or a norm that is negative or not a
        scalar. The sign of a `jax.Array` is not checked: that would wait for the
        device.
      TypeError: a limit or norm that is not a real number.

    Example:
      >>> grads = jnp.array([3.0, 4.0])
      >>> from optaxclip.dropin.torch_style import clip_grads_with_norm
      >>> clipped = clip_grads_with_norm(grads, 1.0, total_norm=10.0)
      >>> print(*(f"{x:.4f}" for x in clipped))
      0.3000 0.4000

    Reference: torch.nn.utils.clip_grads_with_norm_.
    """
    call = "clip_grads_with_norm"
    check_number(f"{call}: max_norm", max_norm)
    check_given_norm(f"{call}: total_norm", total_norm, is_scalar=True)
    clipped, _ = clip_once(
        grads,
        max_norm,
        # One norm for all leaves. Its order does not matter, since `total_norm`
        # replaces the measured norm.
        norms.GlobalNorm(call),
        call=call,
        limit_argument="max_norm",
        eps=EPS,
        grad_norm=total_norm,
    )
    return clipped


def _clipped_by_norm(
    call: str,
    grads: Tree,
    max_norm: ArrayLike | None,
    norm_type: float | str,
    error_if_nonfinite: bool,
) -> tuple[Tree, Array]:
    """The clipped gradients and their norm. `call` is the name that errors quote."""
    # torch reads texts too: "inf" becomes inf.
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise ValueError(
            f"{call}: norm_type must be a number above 0, or a text of one such as "
            f'"inf", got {shown(norm_type)}.'
        )
    measure = norms.GlobalNorm(call, order)
    nonfinite = "raise" if error_if_nonfinite else "propagate"
    try:
        return clip_once(
            grads,
            max_norm,
            measure,
            call=call,
            limit_argument="max_norm",
            # The norm comes back without eps, as from torch.
            eps=EPS,
            nonfinite=nonfinite,
        )
    except FloatingPointError as error:
        # Code that is ported catches a RuntimeError, as torch raises it.
        text = str(error).rstrip(".")
        raise RuntimeError(
            f"{text}. With error_if_nonfinite=False the norm is returned as it is."
        ) from error


with_helpful_errors(__name__)
