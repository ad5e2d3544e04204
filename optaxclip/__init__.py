"""Gradient clipping for JAX, as optax transformations.

A clipper answers three questions: how long is it (norms), how long may it be (thresholds), and what if it is longer (shrink).

    norms       global_norm, tensor_norm, unit_norm, group_norm
    clippers    clip_by_global_norm, clip_by_tensor_norm, clip_by_tensor_rms, clip_by_average_norm, clip_by_unit_norm, clip_by_group_norm, adaptive_grad_clip, clip_by_value
    reading     metrics, measure
    kernel      clip_by, rescale, hard, Threshold, ClipState, constant, share_of_params
    debugging   check_replicated
    optax names clip, clip_by_block_rms, and clip_by_global_norm and adaptive_grad_clip above

    optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
"""

from .core import ClipState as ClipState
from .core import Threshold as Threshold
from .core import clip_by as clip_by
from .core import hard as hard
from .core import rescale as rescale
from .fixed import adaptive_grad_clip as adaptive_grad_clip
from .fixed import clip as clip
from .fixed import clip_by_average_norm as clip_by_average_norm
from .fixed import clip_by_block_rms as clip_by_block_rms
from .fixed import clip_by_global_norm as clip_by_global_norm
from .fixed import clip_by_group_norm as clip_by_group_norm
from .fixed import clip_by_tensor_norm as clip_by_tensor_norm
from .fixed import clip_by_tensor_rms as clip_by_tensor_rms
from .fixed import clip_by_unit_norm as clip_by_unit_norm
from .fixed import clip_by_value as clip_by_value
from .fixed import measure as measure
from .metrics import metrics as metrics
from .norms import global_norm as global_norm
from .norms import group_norm as group_norm
from .norms import tensor_norm as tensor_norm
from .norms import unit_norm as unit_norm
from .sharding import check_replicated as check_replicated
from .thresholds import constant as constant
from .thresholds import share_of_params as share_of_params

__version__ = "0.1.0"
