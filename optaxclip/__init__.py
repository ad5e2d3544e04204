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
    trainers     check_step, also as `python -m optaxclip.check`. In tests
                 check.assert_right
    weights      qk_clip, Heads
    backward     clip_cotangent, scale_cotangent, release
    your own     clip_by, rescale
    of optax     clip, clip_by_block_rms
    states       ClipState, SkipState

    rules        limits that follow the run: rules.growth(), rules.z_score() ...
    shrinks      shrinks.hard, shrinks.smooth ...
    per_example  clipped_grad, add_noise, sensitivity, draw, noise_scale
    doctor       `python -m optaxclip.doctor log.jsonl` says why a run breaks
    replay       rules over recorded norms, also as `python -m optaxclip.replay`
    autopsy      a skipped step in a file, and what broke it
    dropin       functions named as in torch, TensorFlow, Keras and jax_privacy

Example:
  >>> optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
"""

import typing as _typing

from . import rules as rules
from . import shrinks as shrinks

# `as` tells type checkers that a name is public.
from ._arguments import helpful_errors as _helpful_errors
from ._backward import clip_cotangent as clip_cotangent
from ._backward import scale_cotangent as scale_cotangent
from ._clippers.by_norm import clip_by_average_norm as clip_by_average_norm
from ._clippers.by_norm import clip_by_block_rms as clip_by_block_rms
from ._clippers.by_norm import clip_by_global_norm as clip_by_global_norm
from ._clippers.by_norm import clip_by_group_norm as clip_by_group_norm
from ._clippers.by_norm import clip_by_tensor_norm as clip_by_tensor_norm
from ._clippers.by_norm import clip_by_tensor_rms as clip_by_tensor_rms
from ._clippers.by_norm import clip_by_unitwise_norm as clip_by_unitwise_norm
from ._clippers.by_value import clip as clip
from ._clippers.by_value import clip_by_value as clip_by_value
from ._clippers.by_weights import adaptive_grad_clip as adaptive_grad_clip
from ._clippers.by_weights import clippy as clippy
from ._clippers.by_weights import larc as larc
from ._clippers.clip_by import clip_by as clip_by
from ._clippers.clip_by import clip_grads as clip_grads
from ._clippers.health import record_health as record_health
from ._clippers.learned import adagc as adagc
from ._clippers.learned import adagn as adagn
from ._clippers.learned import aggc as aggc
from ._clippers.learned import autoclip as autoclip
from ._clippers.learned import zclip as zclip
from ._clippers.qk_clip import Heads as Heads
from ._clippers.qk_clip import qk_clip as qk_clip
from ._clippers.recorders import record_norm as record_norm
from ._clippers.recorders import record_spikes as record_spikes
from ._clippers.spam import adaclip as adaclip
from ._clippers.spam import reset_momentum as reset_momentum
from ._clippers.spam import spam as spam
from ._clippers.spectral import clip_by_spectral_norm as clip_by_spectral_norm
from ._clippers.spectral import spectral_norm as spectral_norm
from ._devices.mesh import check_replicated as check_replicated
from ._factors import rescale as rescale
from ._metrics.metrics import metrics as metrics
from ._norms.norms import global_norm as global_norm
from ._norms.norms import group_norm as group_norm
from ._norms.norms import tensor_norm as tensor_norm
from ._norms.norms import unitwise_norm as unitwise_norm
from ._state.state import ClipState as ClipState
from ._wrappers.carry import carry_clipped as carry_clipped
from ._wrappers.constrain import constrain as constrain
from ._wrappers.skipping import SkipState as SkipState
from ._wrappers.skipping import skip_nonfinite as skip_nonfinite
from ._wrappers.skipping import skip_spikes as skip_spikes
from ._wrappers.skipping import skip_step as skip_step

# What clippers do not need is imported at its first use. It takes as long to import as
# all the rest.
if _typing.TYPE_CHECKING:
    from . import autopsy as autopsy
    from . import check as check
    from . import doctor as doctor
    from . import dropin as dropin
    from . import per_example as per_example
    from . import replay as replay
    from ._check_step import check_step as check_step
    from ._release import release as release
    from .per_example import add_noise as add_noise
    from .per_example import clipped_grad as clipped_grad
    from .per_example import sensitivity as sensitivity

__version__ = "0.2.0"

# optaxclip.clip_grad_norm_ -> an AttributeError that names clip_grads.
_helpful_errors.with_helpful_errors(
    __name__,
    later={
        "autopsy": "autopsy",
        "check": "check",
        "doctor": "doctor",
        "dropin": "dropin",
        "per_example": "per_example",
        "replay": "replay",
        "check_step": "_check_step",
        "release": "_release",
        "add_noise": "per_example",
        "clipped_grad": "per_example",
        "sensitivity": "per_example",
    },
)
