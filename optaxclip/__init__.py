"""Gradient clipping for JAX, as optax transformations.

A clipper answers three questions. How long is the gradient? (norm) How long may it be?
(limit) What becomes of a longer one? (shrink)

    norms        global_norm, tensor_norm, unitwise_norm, group_norm, spectral_norm,
                 check_replicated
    clippers     clip_by_global_norm, clip_by_tensor_norm, clip_by_tensor_rms,
                 clip_by_average_norm, clip_by_unitwise_norm, clip_by_group_norm,
                 clip_by_value, clip_by_spectral_norm, adaptive_grad_clip, clippy, larc
    that learn   autoclip, zclip, adagc, aggc, spam, adaclip, adagn
    wrappers     skip_nonfinite, skip_spikes, skip_step, carry_clipped, constrain,
                 reset_momentum
    once         clip_grads(grads, max_norm) -> (grads, norm)
    reading      metrics, record_norm, record_spikes, record_health
    weights      qk_clip, Heads
    backward     clip_cotangent, scale_cotangent
    your own     clip_by, rescale
    of optax     clip, clip_by_block_rms
    states       ClipState, SkipState

    rules        limits that follow the run: rules.growth(), rules.z_score() ...
    shrinks      shrinks.hard, shrinks.smooth ...
    per_example  clipped_grad and functions named as in optax
    doctor       `python -m optaxclip.doctor log.jsonl` says why a run breaks
    replay       rules over recorded norms, also as `python -m optaxclip.replay`
    dropin       functions named as in torch, TensorFlow and Keras

Example:
  >>> optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
"""

# Imported, so that `optaxclip.rules` works without an import of its own.
from . import dropin, per_example, replay, rules, shrinks
from ._backward import clip_cotangent, scale_cotangent
from ._clippers._adaclip import adaclip
from ._clippers._adagc import adagc
from ._clippers._adagn import adagn
from ._clippers._agc import adaptive_grad_clip
from ._clippers._aggc import aggc
from ._clippers._autoclip import autoclip
from ._clippers._by_mean import (
    clip_by_average_norm,
    clip_by_block_rms,
    clip_by_tensor_rms,
)
from ._clippers._by_norm import (
    clip_by_global_norm,
    clip_by_group_norm,
    clip_by_tensor_norm,
    clip_by_unitwise_norm,
)
from ._clippers._by_value import clip, clip_by_value
from ._clippers._clip_by import clip_by
from ._clippers._clip_grads import clip_grads
from ._clippers._clippy import clippy
from ._clippers._heads import Heads
from ._clippers._larc import larc
from ._clippers._qk_clip import qk_clip
from ._clippers._record_norm import record_norm
from ._clippers._record_spikes import record_spikes
from ._clippers._spam import spam
from ._clippers._spectral import clip_by_spectral_norm, spectral_norm
from ._clippers._zclip import zclip
from ._factors import rescale
from ._health import record_health
from ._mesh import check_replicated
from ._metrics import metrics
from ._names import with_our_names
from ._norms import global_norm, group_norm, tensor_norm, unitwise_norm
from ._state import ClipState
from ._wrappers._carry import carry_clipped
from ._wrappers._constrain import constrain
from ._wrappers._reset_momentum import reset_momentum
from ._wrappers._skipping import (
    SkipState,
    skip_nonfinite,
    skip_spikes,
    skip_step,
)
from .per_example import clipped_grad

__version__ = "0.2.0"

__all__ = [
    "ClipState",
    "Heads",
    "SkipState",
    "adaclip",
    "adagc",
    "adagn",
    "adaptive_grad_clip",
    "aggc",
    "autoclip",
    "carry_clipped",
    "check_replicated",
    "clip",
    "clip_by",
    "clip_by_average_norm",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_spectral_norm",
    "clip_by_tensor_norm",
    "clip_by_tensor_rms",
    "clip_by_unitwise_norm",
    "clip_by_value",
    "clip_cotangent",
    "clip_grads",
    "clipped_grad",
    "clippy",
    "constrain",
    "dropin",
    "global_norm",
    "group_norm",
    "larc",
    "metrics",
    "per_example",
    "qk_clip",
    "record_health",
    "record_norm",
    "record_spikes",
    "replay",
    "rescale",
    "reset_momentum",
    "rules",
    "scale_cotangent",
    "shrinks",
    "skip_nonfinite",
    "skip_spikes",
    "skip_step",
    "spam",
    "spectral_norm",
    "tensor_norm",
    "unitwise_norm",
    "zclip",
]


# optaxclip.clip_grad_norm_ -> an AttributeError that names clip_grads.
with_our_names(__name__)
