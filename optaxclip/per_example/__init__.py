"""Clipping each example's gradient before the examples are summed, so that no single
example can say more than the limit allows.

    g = (1 / B) sum_i f_i g_i        f_i = shrink(|g_i|, C) / |g_i|, usually min(1, C /
                                     |g_i|)

Everything else in this library sees the gradient of a batch, where an outlier is
already mixed with the rest. Use this against outliers and wrong labels, against heavy
tails, and for DP-SGD. It adds no noise and keeps no account: privacy needs both, and
jax_privacy (https://github.com/google-deepmind/jax_privacy) has them.

    from a loss        clipped_grad: like jax.grad, in bounded memory
    from gradients     per_example_global_norm_clip, per_example_layer_norm_clip: the
                       functions of optax
    shrinks            auto_s, psac, beside hard, smooth, drop and normalize

An example whose gradient is NaN or inf contributes nothing, and the others are as if it
had been zero.

Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
1607.00133).
"""

from .automatic import auto_s as auto_s
from .automatic import psac as psac
from .clipped_grad import ClippedGrad as ClippedGrad
from .clipped_grad import clipped_grad as clipped_grad
from .optax_names import per_example_global_norm_clip as per_example_global_norm_clip
from .optax_names import per_example_layer_norm_clip as per_example_layer_norm_clip
