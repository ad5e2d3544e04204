"""What big trainers decide on a history of norms and losses, in float64 NumPy.

Written from what their code computes, at these versions:

    MaxText    skip_step_on_spikes, e591f30 (2026-08-22)
    Levanter   SkipStepConfig, clip_update_by_historical_norm, 9263f81 (2025-09-26)
    axlearn    skip_and_clip_by_global_norm, 34aed43 (2026-07-08)
    AdaGC      megatron-gpt2.patch, 32c249f (the authors')

Each function was compared with the public one, run on the histories of
`test_trainers.py`: the same decisions, and norms to 1e-5.
"""

import numpy as np


def maxtext_skips(norms, losses, interval=128, factor=6.0):
    """Skips what is above mean + factor * deviation of the last `interval` steps."""
    half = max(2, interval // 2)
    skipped = []
    for step in range(len(norms)):
        over = False
        for values in (norms, losses):
            past = np.asarray(values[max(0, step - interval) : step], np.float64)
            mean = past.sum() / max(1, past.size)
            with np.errstate(invalid="ignore"):
                squares = ((past - mean) ** 2).sum() / max(1, past.size - 1)
            # Not "above": a NaN is out of order as well.
            over |= not (values[step] - mean <= factor * np.sqrt(squares))
        skipped.append(over and step + 1 >= half)
    return np.array(skipped)


def levanter_limit(past, sigmas):
    """mean + sigmas * max(deviation, 1e-6)."""
    past = np.asarray(past, np.float64)
    with np.errstate(invalid="ignore"):
        return past.mean() + sigmas * np.maximum(past.std(), 1e-6)


def levanter_skips(norms, losses, interval=128, sigmas=6.0):
    """Skips what is above mean + sigmas * deviation of the last `interval` steps."""
    skipped = []
    for step in range(len(norms)):
        over = False
        if step >= max(2, interval // 2):
            for values in (norms, losses):
                past = values[max(0, step - interval) : step]
                over |= not values[step] <= levanter_limit(past, sigmas)
        skipped.append(over)
    return np.array(skipped)


def levanter_clipped(norms, interval=128, sigmas=3.0):
    """The norms of updates after the clip."""
    clipped = []
    for step, norm in enumerate(norms):
        limit = np.inf
        if step >= max(2, interval // 2):
            limit = levanter_limit(norms[max(0, step - interval) : step], sigmas)
        clipped.append(limit if norm > limit else norm)
    return np.array(clipped)


def axlearn_drops_by_average(norms, multiple=20.0, decay=0.99):
    """Drops norms that are not below a multiple of the average of those that were."""
    average, count, dropped = 1.0, 0, []
    for norm in norms:
        valid = norm < multiple * average
        if valid:
            corrected = decay * (1 - decay**count) / (1 - decay ** (count + 1))
            average = corrected * average + (1 - corrected) * norm
            count += 1
        dropped.append(not valid)
    return np.array(dropped)


def adagc_clipped(norms, ratio=1.04, beta=0.99, max_norm=1.0, warmup=100, eps=1e-6):
    """The norms of tensors after the clip, from norms [steps, tensors]."""
    average, clipped = None, []
    for step, norm in enumerate(np.asarray(norms, np.float64)):
        if step < warmup:
            total = np.sqrt(np.sum(norm**2))
            norm = norm * min(1.0, max_norm / (total + eps))
            average = norm if average is None else np.minimum(average, norm)
        else:
            over = norm > ratio * average
            value = np.where(over, ratio * average, norm)
            norm = np.where(over, ratio * average / (norm + eps) * norm, norm)
            average = beta * average + (1 - beta) * value
        clipped.append(norm)
    return np.array(clipped)
