"""Clipping each example's gradient before the examples are summed, so that no single
example can do more than the limit allows.

    g = (1 / B) sum_i f_i g_i
    f_i = shrink(|g_i|, C) / |g_i|        usually min(1, C / |g_i|)

Everything else in this library gets the gradient of a batch, where an outlier is
already mixed with the rest. Use this against outliers and wrong labels, against heavy
tails, and for DP-SGD, with noise of `add_noise` and an account of dp-accounting:
docs/private_training.md.

    from a loss        clipped_grad: like jax.grad of a mean loss.
                       explain_clipped_grad: how it does it.
                       noise_scale: how much the gradients of examples differ.
    for privacy        add_noise: Gaussian noise for a sum of clipped gradients.
                       sensitivity: an audit of how much one example changes a sum
    from gradients     per_example_global_norm_clip, per_example_layer_norm_clip: the
                       functions of optax
    shrinks            of optaxclip.shrinks. auto_s and psac were made for this

An example whose gradient is NaN or inf contributes nothing, and the others are as if it
had been zero.

Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
1607.00133).
"""

from .._names import with_our_names
from ._clipped_grad import (
    ClippedGrad,
    ExplainedLeaf,
    Explanation,
    clipped_grad,
    explain_clipped_grad,
)
from ._noise import NoiseScale, Sensitivity, add_noise, noise_scale, sensitivity
from ._optax_names import per_example_global_norm_clip, per_example_layer_norm_clip

__all__ = [
    "ClippedGrad",
    "ExplainedLeaf",
    "Explanation",
    "NoiseScale",
    "Sensitivity",
    "add_noise",
    "clipped_grad",
    "explain_clipped_grad",
    "noise_scale",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
    "sensitivity",
]

with_our_names(__name__)
