"""The clipping arguments of Keras optimizers, as an optax transformation to be chained
before the optimizer.

    clipnorm          each gradient by itself:  g * min(1, clipnorm / |g|)
    clipvalue         each element:             max(min(g, clipvalue), -clipvalue)
    global_clipnorm   all gradients together:   g * min(1, global_clipnorm / |all
                                                gradients|)

    optimizer = optax.chain(clip_gradients(clipnorm=1.0), optax.adam(1e-3))     #
        keras.optimizers.Adam(1e-3, clipnorm=1.0)

    case                               Keras 3.15                              here
    none of the three                  no clipping                             the same
    two of them                        ValueError                              the same
    0, negative, NaN                   silently no clipping
                                       ValueError
    inf                                NaN
                                       untouched, since there is no limit
    norm within the limit              rounded by the multiplication           the same
                                       bits as the input
    clipnorm, gradient with inf        NaN there, zeros elsewhere in it        all NaN
                                       in that gradient
    global_clipnorm, norm not finite   all NaN                                 the same
    float16, float32 near overflow     norm inf: NaN or zeros                  the true
                                       norm, clipped
    complex gradients                  wrong numbers or refused                by
                                       modulus
    integer gradients                  become float32, or are refused          keep
                                       their dtype; only clipvalue changes them
    a limit that changes               not possible                            a
                                       schedule
    loss_scale_factor                  gradients are unscaled first            unscale
                                       before the chain
    gradient_accumulation_steps        the mean is clipped                     the same
                                       inside `optax.MultiSteps`
    weight decay (AdamW)               added after clipping                    the same
                                       with `optax.adamw`
    overwrite_with_gradient            left out of norm and clipping           wrap the
                                       clipper in `optax.masked`

Reference: keras/src/optimizers/base_optimizer.py, Keras 3.15.
"""

import math
from typing import Any

import numpy as np
import optax
from jax.core import Tracer

from .._arguments import check_number
from .._clippers._by_value import clip_by_value
from ..fixed import clip_by_global_norm, clip_by_tensor_norm


def clip_gradients(
    clipnorm: Any = None, clipvalue: Any = None, global_clipnorm: Any = None
) -> optax.GradientTransformation:
    """The clipper that a Keras optimizer with this argument would use. One of the three
    may be given.

    Args:
      clipnorm: the greatest norm of each gradient: a number above 0, or a schedule.
      clipvalue: the greatest modulus of each element, likewise.
      global_clipnorm: the greatest norm of all gradients together, likewise.

    Returns:
      A transformation; `optax.identity()` where none is given.

    Raises:
      ValueError: more than one of the three, or a number that is not above 0, which
        Keras takes for no clipping.
      TypeError: a bool, a text, or another thing that is no real number.

    Example:
      >>> import jax.numpy as jnp
      >>> clipper = clip_gradients(clipnorm=1.0)
      >>> grads = [jnp.array([3.0, 4.0]), jnp.array([0.5])]
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(*(f"{x:.4f}" for x in updates[0]), updates[1])
      0.6000 0.8000 [0.5]
    """
    given = {
        name: value
        for name, value in zip(_CLIPPERS, (clipnorm, clipvalue, global_clipnorm))
        if value is not None
    }
    if not given:
        return optax.identity()
    if len(given) > 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            "clip_gradients: only one of clipnorm, clipvalue and global_clipnorm can "
            f"be set, got {shown}."
        )
    ((name, value),) = given.items()
    if not callable(value):
        _check_above_zero(f"clip_gradients: {name}", value)
    return _CLIPPERS[name](value)


_CLIPPERS = {
    "clipnorm": clip_by_tensor_norm,
    "clipvalue": clip_by_value,
    "global_clipnorm": clip_by_global_norm,
}


def _check_above_zero(argument: str, value: Any) -> None:
    """Refuses 0 too: Keras would not clip at all, the library would make zeros of
    everything, and whoever moves from one to the other should learn of neither by
    accident.
    """
    check_number(argument, value, lowest=-math.inf)
    if not isinstance(value, Tracer) and np.any(np.asarray(value) <= 0):
        raise ValueError(
            f"{argument} must be above 0, got {value!r}: Keras does not clip then; "
            "leave it out for that."
        )
