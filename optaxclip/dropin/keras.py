"""The clipping arguments of Keras optimizers, as an optax transformation to be chained
before the optimizer.

    clipnorm          each gradient:   g * min(1, clipnorm / |g|)
    clipvalue         each element:    max(min(g, clipvalue), -clipvalue)
    global_clipnorm   all gradients:   g * min(1, global_clipnorm / |all gradients|)

    # keras.optimizers.Adam(1e-3, clipnorm=1.0)
    optimizer = optax.chain(clip_gradients(clipnorm=1.0), optax.adam(1e-3))

    case                          Keras 3.15              here
    none of the three             no clipping             the same
    two of them                   ValueError              the same
    0, negative, NaN              silently no clipping    ValueError
    inf                           NaN, but untouched      untouched, no limit
                                  with clipvalue
    norm within the limit         rounded by the          the same bits as the input
                                  multiplication
    clipnorm, gradient with inf   NaN there, zeros        all NaN in that gradient
                                  elsewhere in it
    global_clipnorm, norm not     all NaN                 the same
    finite
    float16, float32 near         norm inf: NaN or        the true norm, clipped
    overflow                      zeros
    complex gradients             wrong numbers or        by modulus
                                  refused
    integer gradients             become float32, or      keep their dtype, and only
                                  are refused             clipvalue changes them
    a limit that changes          not possible            a schedule
    loss_scale_factor             gradients are           unscale before the chain
                                  unscaled first
    gradient_accumulation_steps   the mean is clipped     the same inside
                                                          `optax.MultiSteps`
    weight decay (AdamW)          added after clipping    the same with `optax.adamw`
    overwrite_with_gradient       left out of norm and    wrap the clipper in
                                  clipping                `optax.masked`

Reference: keras/src/optimizers/base_optimizer.py, Keras 3.15.
"""

from __future__ import annotations

import math

import numpy as np
import optax
from jax.core import Tracer

from .._arguments.checks import check_number, shown
from .._arguments.helpful_errors import with_helpful_errors
from .._clippers.by_value import value_clipper
from .._norm_clipper import make_clipper
from .._norms.norms import GlobalNorm, TensorNorm
from ..rules._rule import Number

__all__ = ["clip_gradients"]


def clip_gradients(
    clipnorm: Number | None = None,
    clipvalue: Number | None = None,
    global_clipnorm: Number | None = None,
) -> optax.GradientTransformation:
    """Returns the clipper that a Keras optimizer with this argument would use.

    At most one of the three may be given.

    Args:
      clipnorm: the limit of the norm of each gradient: a number above 0, or a schedule.
      clipvalue: the limit of the modulus of each element: a number above 0, or a
        schedule.
      global_clipnorm: the limit of the norm of all gradients together: a number above
        0, or a schedule.

    Returns:
      A transformation. It is `optax.identity()` where none is given.

    Raises:
      ValueError: more than one of the three, an array, or a number that is not above 0,
        with which Keras does not clip.
      TypeError: a bool, a string, or something else that is not a real number.

    Example:
      >>> clipper = optaxclip.dropin.keras.clip_gradients(clipnorm=1.0)
      >>> grads = [jnp.array([3.0, 4.0]), jnp.array([0.5])]
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(*(f"{x:.4f}" for x in updates[0]), updates[1])
      0.6000 0.8000 [0.5]
    """
    arguments = {
        "clipnorm": clipnorm,
        "clipvalue": clipvalue,
        "global_clipnorm": global_clipnorm,
    }
    # A limit of 0 is kept here, and refused below.
    limits = {name: limit for name, limit in arguments.items() if limit is not None}
    if not limits:
        return optax.identity()
    # As in Keras, whose optimizers apply at most one of them.
    if len(limits) > 1:
        texts = [f"{name}={shown(limit)}" for name, limit in limits.items()]
        raise ValueError(
            "clip_gradients: only one of clipnorm, clipvalue and global_clipnorm can "
            f"be set, got {', '.join(texts)}."
        )
    ((name, value),) = limits.items()
    call = "clip_gradients"
    argument = f"{call}: {name}"
    # The numbers of a schedule are not known before its steps.
    if not callable(value):
        # Negative numbers pass here. The text below says what Keras does with them.
        check_number(argument, value, lowest=-math.inf, is_scalar=True)
        # A limit of 0 makes zeros elsewhere in the library, and clips nothing in Keras.
        # Code that is ported should not meet that difference by accident.
        if not isinstance(value, Tracer) and np.less_equal(value, 0):
            raise ValueError(
                f"{argument} must be above 0, got {shown(value)}: Keras does not clip "
                "then; leave it out for that."
            )
    if name == "clipvalue":
        return value_clipper(call, value, upper_argument=name)
    # Keras applies clipnorm to each gradient, not to all of them together.
    measure = TensorNorm(call) if name == "clipnorm" else GlobalNorm(call)
    return make_clipper(measure, value, call=call, limit_argument=name)


with_helpful_errors(__name__)
