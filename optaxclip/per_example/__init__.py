"""Clipping each example's gradient before the examples are summed, so that no single
example can do more than the limit allows.

    g = (1 / B) sum_i f_i g_i
    f_i = shrink(|g_i|, C) / |g_i|        usually min(1, C / |g_i|)

Everything else in this library gets the gradient of a batch, where an outlier is
already mixed with the rest. Use this against outliers and wrong labels, against heavy
tails, and for DP-SGD, with noise of `add_noise` and the account of `epsilon`:
docs/private_training.md.

    from a loss        clipped_grad: like jax.grad of a mean loss.
                       explain_clipped_grad: how it does it.
                       noise_scale: how much the gradients of examples differ.
    from norms         noise_share: whether one part of a batch made its gradient.
    for privacy        draw: a batch by Poisson sampling.
                       add_noise: Gaussian noise for a sum of clipped gradients.
                       epsilon, noise_multiplier: the account, by dp-accounting.
                       sensitivity: an audit of how much one example changes a sum
    shrinks            of optaxclip.shrinks. auto_s and psac were made for this

An example whose gradient is NaN or inf contributes nothing, and the others are as if it
had been zero.

Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
1607.00133).
"""

# `as` tells type checkers that a name is public.
from .._arguments import helpful_errors as _helpful_errors
from ._account import epsilon as epsilon
from ._account import noise_multiplier as noise_multiplier
from ._audit import Sensitivity as Sensitivity
from ._audit import sensitivity as sensitivity
from ._clipped_grad import ClippedGrad as ClippedGrad
from ._clipped_grad import clipped_grad as clipped_grad
from ._draw import Drawn as Drawn
from ._draw import draw as draw
from ._explain import ExplainedLeaf as ExplainedLeaf
from ._explain import Explanation as Explanation
from ._explain import explain_clipped_grad as explain_clipped_grad
from ._noise import add_noise as add_noise
from ._noise_scale import NoiseScale as NoiseScale
from ._noise_scale import noise_scale as noise_scale
from ._noise_share import noise_share as noise_share

_helpful_errors.with_helpful_errors(__name__)
