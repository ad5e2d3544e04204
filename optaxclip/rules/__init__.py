"""Limits that follow the run: how long may a norm be?

A rule goes wherever a limit goes, so each exists for every norm:
`clip_by_global_norm(rules.windowed_mean(3.0))`,
`clip_by_tensor_norm(rules.growth())`. It decides about whole steps in `skip_spikes`,
and `replay.run` applies it to recorded norms.

    windows       windowed_quantile, windowed_mean
    averages      z_score, log_z_score, ema_ratio, ema, ema_band, moments_ratio
    one number    growth, quantile_tracker
    no memory     constant, share_of_params
    joined        minimum, maximum, warm_up
    your own      Rule

Public code disagrees on what a rule remembers. All rules here that have these
parameters mean the same by them:

    current    whether the norm of this step is in the statistic it is held against
    remember   "raw" for the norm as it came, "clipped" for what was let through
    warmup     how many norms are seen before there is a limit
    ddof       what is taken off the count in a variance

No rule remembers a norm that is NaN, inf or 0. What a schedule returns beyond the range
of its parameter counts as the nearest number in it.
"""

from .._arguments.helpful_errors import with_helpful_errors
from ._averages import Ema as ema
from ._averages import EmaBand as ema_band
from ._averages import EmaRatio as ema_ratio
from ._averages import LogZScore as log_z_score
from ._averages import MomentsRatio as moments_ratio
from ._averages import ZScore as z_score
from ._limits import Constant as constant
from ._limits import ShareOfParams as share_of_params
from ._limits import maximum, minimum, warm_up
from ._rule import Rule
from ._windows import Growth as growth
from ._windows import QuantileTracker as quantile_tracker
from ._windows import WindowedMean as windowed_mean
from ._windows import WindowedQuantile as windowed_quantile

# Rules are classes that are called like functions, so they are named like functions.
__all__ = ["Rule", "constant", "maximum", "minimum", "share_of_params", "warm_up"]
__all__ += ["ema", "ema_band", "ema_ratio", "log_z_score", "moments_ratio", "z_score"]
__all__ += ["growth", "quantile_tracker", "windowed_mean", "windowed_quantile"]

# `rules.ZScore` raises an error that names `rules.z_score`.
with_helpful_errors(__name__)
