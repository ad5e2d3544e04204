"""The clipping functions of other frameworks, for code that is ported.

They have the names and arguments of the originals. They take a tree and return the
result, and are pure, so that they run under jit.

    torch_style        clip_grad_norm, clip_grad_value, get_total_norm,
                       clip_grads_with_norm
    tensorflow_style   clip_by_value, clip_by_norm, clip_by_average_norm,
                       clip_by_global_norm, global_norm, clip_gradients_by_norm
    keras              clip_gradients: clipnorm, clipvalue, global_clipnorm of the
                       optimizers, as an optax transformation
    jax_privacy        clipped_grad: the sum of gradients clipped one by one

    from optaxclip.dropin.torch_style import clip_grad_norm

What they compute is the library's: right in every precision, NaN for a broken step.
Each module says where that differs from its original. New code should use the optax
transformations, which need no second pass over the gradients and keep the norm for
`metrics`. `optaxclip.clip_grads` clips one tree of gradients once.
"""

from .._arguments.helpful_errors import with_helpful_errors
from . import jax_privacy, keras, tensorflow_style, torch_style

__all__ = ["jax_privacy", "keras", "tensorflow_style", "torch_style"]


with_helpful_errors(__name__)
