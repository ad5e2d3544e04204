"""Gradient clipping for JAX, as optax transformations.

A clipper answers three questions: how long is it (norms), how long may it be
(thresholds), and what if it is longer (shrink).

    norms       global_norm, tensor_norm, unit_norm, group_norm, spectral_norm
    clippers    clip_by_global_norm, clip_by_tensor_norm, clip_by_tensor_rms,
                clip_by_average_norm, clip_by_unit_norm, clip_by_group_norm,
                adaptive_grad_clip, clip_by_value, clip_by_spectral_norm, clippy, larc
    that learn  autoclip, zclip, adagc, aggc, spam, adaclip, adagn, reset_momentum
    rules       constant, share_of_params, least, at_least, warm_up; windowed_quantile,
                windowed_mean, z_score, log_z_score, ema_ratio, ema_band, ema,
                moments_ratio, growth, quantile_tracker
    shrinks     hard, smooth, drop, normalize
    wrappers    skip_nonfinite, skip_spikes, skip_step (with SkipState), carry_clipped
    per example clipped_grad (which returns ClippedGrad), per_example_global_norm_clip,
    per_example_layer_norm_clip; the shrinks auto_s, psac
    backward    clip_cotangent, scale_cotangent
    drop-ins    optaxclip.dropin: functions named as in torch, TensorFlow and Keras
    reading     metrics, measure; replay, suggest, read_history
    kernel      clip_by, rescale, Threshold, ClipState
    debugging   check_replicated
    optax names clip, clip_by_block_rms, and clip_by_global_norm and adaptive_grad_clip
    above

    optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
"""

from . import dropin as dropin
from .adaptive import adaclip as adaclip
from .adaptive import adagc as adagc
from .adaptive import adagn as adagn
from .adaptive import aggc as aggc
from .adaptive import autoclip as autoclip
from .adaptive import ema as ema
from .adaptive import ema_band as ema_band
from .adaptive import ema_ratio as ema_ratio
from .adaptive import growth as growth
from .adaptive import log_z_score as log_z_score
from .adaptive import moments_ratio as moments_ratio
from .adaptive import quantile_tracker as quantile_tracker
from .adaptive import reset_momentum as reset_momentum
from .adaptive import spam as spam
from .adaptive import windowed_mean as windowed_mean
from .adaptive import windowed_quantile as windowed_quantile
from .adaptive import z_score as z_score
from .adaptive import zclip as zclip
from .backward import clip_cotangent as clip_cotangent
from .backward import scale_cotangent as scale_cotangent
from .by_value import clip as clip
from .by_value import clip_by_value as clip_by_value
from .carry import carry_clipped as carry_clipped
from .clippy import clippy as clippy
from .core import ClipState as ClipState
from .core import clip_by as clip_by
from .factors import rescale as rescale
from .fixed import adaptive_grad_clip as adaptive_grad_clip
from .fixed import clip_by_average_norm as clip_by_average_norm
from .fixed import clip_by_block_rms as clip_by_block_rms
from .fixed import clip_by_global_norm as clip_by_global_norm
from .fixed import clip_by_group_norm as clip_by_group_norm
from .fixed import clip_by_tensor_norm as clip_by_tensor_norm
from .fixed import clip_by_tensor_rms as clip_by_tensor_rms
from .fixed import clip_by_unit_norm as clip_by_unit_norm
from .fixed import measure as measure
from .larc import larc as larc
from .metrics import metrics as metrics
from .norms import global_norm as global_norm
from .norms import group_norm as group_norm
from .norms import tensor_norm as tensor_norm
from .norms import unit_norm as unit_norm
from .per_example import ClippedGrad as ClippedGrad
from .per_example import auto_s as auto_s
from .per_example import clipped_grad as clipped_grad
from .per_example import per_example_global_norm_clip as per_example_global_norm_clip
from .per_example import per_example_layer_norm_clip as per_example_layer_norm_clip
from .per_example import psac as psac
from .replay import read_history as read_history
from .replay import replay as replay
from .replay import suggest as suggest
from .sharding import check_replicated as check_replicated
from .shrinks import drop as drop
from .shrinks import hard as hard
from .shrinks import normalize as normalize
from .shrinks import smooth as smooth
from .skip import SkipState as SkipState
from .skip import skip_nonfinite as skip_nonfinite
from .skip import skip_spikes as skip_spikes
from .skip import skip_step as skip_step
from .spectral import clip_by_spectral_norm as clip_by_spectral_norm
from .spectral import spectral_norm as spectral_norm
from .thresholds import Threshold as Threshold
from .thresholds import at_least as at_least
from .thresholds import constant as constant
from .thresholds import least as least
from .thresholds import share_of_params as share_of_params
from .thresholds import warm_up as warm_up

__version__ = "0.1.0"
