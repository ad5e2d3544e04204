"""Thresholds that learn from the run: rules, and the clippers that papers named.

A rule is a `Threshold` for one norm. It goes wherever a limit goes, so each exists for
every norm: `clip_by_global_norm(windowed_mean(3.0))`, `clip_by_tensor_norm(growth())`,
`clip_by_group_norm(z_score(), labels)`; it decides about whole steps in `skip_spikes`,
and `replay` runs it over recorded norms.

    windows   windowed_quantile, windowed_mean      a ring of past norms
    averages  z_score, log_z_score, ema_ratio, ema, ema_band, moments_ratio
    one       growth, quantile_tracker              one number
    clippers  autoclip, zclip, adagc, aggc, spam, adaclip, adagn
    beside    reset_momentum

Public code disagrees on these switches; all rules that have them mean the same by them:

    current   is the norm of this step in the statistic that it is held against? False:
              only those before it. With True a first spike raises its own limit.
    remember  "raw": the norm as it came, so that the limit follows a lasting change;
              "clipped": what was let through, so that one spike does not excuse the
              next.
    warmup    how many norms the statistic must hold before there is a limit, the
              current one counted if it is in it. Until then nothing is clipped.
    ddof      what is taken off the count in the variance: 0 the population's, 1 the
              sample's.

No rule learns from a norm that is NaN, inf or 0, and `warmup` does not count it: the
next step goes on as if that one had not happened. A statistic in which a 0 counted
could fall to 0, and no multiple of 0 leads out again.
"""

from .adagc import adagc as adagc
from .aggc import aggc as aggc
from .aggc import ema_band as ema_band
from .autoclip import autoclip as autoclip
from .autoclip import windowed_quantile as windowed_quantile
from .ema_ratio import ema_ratio as ema_ratio
from .growth import growth as growth
from .log_z_score import log_z_score as log_z_score
from .quantile_tracker import quantile_tracker as quantile_tracker
from .spam import reset_momentum as reset_momentum
from .spam import spam as spam
from .stable_spam import adaclip as adaclip
from .stable_spam import adagn as adagn
from .stable_spam import ema as ema
from .stable_spam import moments_ratio as moments_ratio
from .windowed_mean import windowed_mean as windowed_mean
from .zclip import z_score as z_score
from .zclip import zclip as zclip
