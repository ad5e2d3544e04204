"""What adaptive limits must be, written from the equations in float64 NumPy, with
nothing of the library in it.

A rule is a value: the memory it starts with, and `step(norm, memory, index) -> (limit,
memory)`, where `index` counts the updates from 0. A limit is known before the step's
norm is remembered. What all rules share is decided in one place, `limits`:

    a norm that is NaN or inf       limit NaN, the memory stays as it was
    a norm of 0                     the limit of the formula, the memory stays as it was
    any other norm n                the limit of the formula, the memory takes n, or
                                    min(n, limit)

    limits(least(z_score(), constant(1.0)), norms)

In a combination each rule remembers by its own limit, as if it were alone. inf means
that there is no limit. Results are Python floats; statistics are taken over lists in
two passes, or by the recursion of the paper where the paper has one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Rule(NamedTuple):
    start: Any
    step: Callable


def limits(rule, norms):
    """The limit that holds at each step of a history of norms."""
    memory, found = rule.start, []
    for index, norm in enumerate(map(float, norms)):
        if not math.isfinite(norm):
            found.append(math.nan)
            continue
        limit, after = rule.step(norm, memory, index)
        found.append(float(limit))
        memory = memory if norm == 0 else after
    return found


def clipped(rule, norms):
    """The norms that the limits let through; NaN where the norm is not finite."""
    return [
        min(norm, limit) if math.isfinite(norm) else math.nan
        for norm, limit in zip(map(float, norms), limits(rule, norms))
    ]


def kept(norm, limit, remember):
    return {"raw": norm, "clipped": min(norm, limit)}[remember]


def constant(limit):
    return Rule(None, lambda norm, memory, index: (limit, None))


def windowed(statistic, window, fewest, current, remember):
    """The statistic of the last `window` remembered norms; inf while fewer than
    `fewest` were seen.
    """

    def step(norm, memory, index):
        seen = [*memory, norm] if current else memory
        known = len(seen) >= max(fewest, 1)
        limit = float(statistic(seen[-window:])) if known else math.inf
        return limit, [*memory, kept(norm, limit, remember)]

    return Rule([], step)


def windowed_quantile(
    quantile, window, factor=1.0, current=False, remember="raw", warmup=1
):
    """AutoClip (arXiv 2007.14469) with current=True; PyPI autoclip's QuantileClip
    without; icefall's ScaledAdam at factor 2 and the median.
    """

    def statistic(sample):
        return factor * np.quantile(sample, quantile)

    return windowed(statistic, window, warmup, current, remember)


def windowed_mean(
    sigmas, window, ddof=0, floor=0.0, current=False, remember="raw", warmup=2
):
    """mean + sigmas * max(std, floor), as in Levanter (ddof 0) and OLMo-core (ddof
    1).
    """

    def statistic(sample):
        return np.mean(sample) + sigmas * max(np.std(sample, ddof=ddof), floor)

    return windowed(statistic, window, max(warmup, 1 + ddof), current, remember)


def z_score(z=2.5, decay=0.97, warmup=25, target="adaptive", eps=1e-6):
    """ZClip (arXiv 2504.02507): mean + z * (std + eps), and a norm above it goes to
    mean + xi * std.
    """

    def step(norm, memory, index):
        first, mean, var = memory
        if len(first) < warmup:
            first = [*first, norm]
            return math.inf, (first, np.mean(first), np.var(first))
        std = math.sqrt(var)
        limit = mean + z * (std + eps)
        if norm > limit:
            score = (norm - mean) / (std + eps)
            limit = (
                mean + {"adaptive": z * z / score, "mean": 0.0, "max": z}[target] * std
            )
        seen = min(norm, limit)
        mean = decay * mean + (1 - decay) * seen
        # The reference implementation measures the deviation from the mean it has just
        # moved.
        return limit, (first, mean, decay * var + (1 - decay) * (seen - mean) ** 2)

    return Rule(([], 0.0, 0.0), step)


def average(decay, corrected):
    """An exponential moving average as (start, add, read). It begins at the first norm,
    or at 0 with the bias correction of Adam.
    """

    def add(memory, x):
        total, count = memory
        later = decay * total + (1 - decay) * x
        return later if count or corrected else x, count + 1

    def read(memory):
        total, count = memory
        return total / (1 - decay**count) if corrected else total

    return (0.0, 0), add, read


def ema_ratio(
    ratio,
    decay,
    target=None,
    target_decay=None,
    corrected=False,
    remember="clipped",
    warmup=1,
):
    """ratio * EMA(norm), as in OLMo v1; with a target, a norm above that goes to target
    * another EMA, as in PDE-Transformer.
    """
    start, slow_add, slow_read = average(decay, corrected)
    _, fast_add, fast_read = average(
        decay if target_decay is None else target_decay, corrected
    )

    def step(norm, memory, index):
        slow, fast, count = memory
        limit = math.inf
        if count >= max(warmup, 1):
            limit = ratio * slow_read(slow)
            if target is not None and norm > limit:
                limit = target * fast_read(fast)
        seen = kept(norm, limit, remember)
        return limit, (slow_add(slow, seen), fast_add(fast, seen), count + 1)

    return Rule((start, start, 0), step)


def log_z_score(z=4.0, decay=0.995, floor=0.01, spread=1e-3, warmup=277):
    """RNMT+ (arXiv 1804.09849) as in Lingvo: exp(mean + z * max(std, spread)) - 1, with
    the mean and std of log(max(norm, floor) + 1).
    """

    def step(norm, memory, index):
        limit = math.inf
        if len(memory) >= max(warmup, 1):
            # E[x^2] - mean^2 loses every digit on a steady history, so the same weights
            # are used in two passes.
            weights = decay ** np.arange(len(memory) - 1, -1, -1.0)
            mean = np.average(memory, weights=weights)
            var = np.average((np.array(memory) - mean) ** 2, weights=weights)
            limit = math.expm1(mean + z * max(math.sqrt(var), spread))
        return limit, [*memory, math.log1p(max(min(norm, limit), floor))]

    return Rule([], step)


def growth(rate=1.01, floor=0.0):
    """The norm-growth limiter of Fira (arXiv 2410.01623): rate * max(last, floor)."""

    def step(norm, last, index):
        limit = math.inf if last is None else rate * max(last, floor)
        return limit, min(norm, limit)

    return Rule(None, step)


def quantile_tracker(quantile=0.5, rate=0.2, start=0.1):
    """The geometric update of Andrew et al. (arXiv 1905.03871) with one norm a step and
    no noise.
    """

    def step(norm, limit, index):
        below = 1.0 if norm <= limit else 0.0
        return limit, limit * math.exp(-rate * (below - quantile))

    return Rule(start, step)


def adagc_rule(ratio=1.05, decay=0.98, warmup=100, shares=None):
    """AdaGC (arXiv 2502.11034) for one tensor; `shares` holds min(1, max_norm / global
    norm) of each step, NaN where the global norm is not finite.
    """

    def step(norm, memory, index):
        gamma, count = memory
        if count >= warmup:
            limit = ratio * gamma
            return limit, (decay * gamma + (1 - decay) * min(norm, limit), count + 1)
        limit = norm * (1.0 if shares is None else shares[index])
        if not math.isfinite(limit):
            return math.nan, memory
        return limit, (min(gamma, limit), count + 1)

    return Rule((math.inf, 0), step)


def adagc(tensor_histories, max_norm=1.0, ratio=1.05, decay=0.98, warmup=100):
    """AdaGC for several tensors, by name: the limits of each, with the global norm of
    the warm-up taken from all of them.
    """
    shares = []
    for norms in zip(*tensor_histories.values(), strict=True):
        joint = math.hypot(*norms)
        share = min(1.0, max_norm / joint) if joint else 1.0
        shares.append(share if math.isfinite(joint) else math.nan)
    return {
        name: limits(adagc_rule(ratio, decay, warmup, shares), norms)
        for name, norms in tensor_histories.items()
    }


def ema_band(low, high, decay=0.95, floor=0.01, up=1.1, down=0.9, raise_small=False):
    """AGGC (arXiv 2601.11864): the norm that comes out, which may be larger than the
    norm that went in; `low` and `high` may be functions of the step.
    """

    def step(norm, center, index):
        if center is None:
            return norm, norm
        lower = max(floor, (low(index) if callable(low) else low) * center)
        upper = (high(index) if callable(high) else high) * center
        target = (
            upper if norm > upper else lower if raise_small and norm < lower else norm
        )
        target = min(max(target, down * norm), up * norm)
        return target, decay * center + (1 - decay) * target

    return Rule(None, step)


def adagn(decay1=0.7, decay2=0.9, eps=1e-8):
    """AdaGN of Stable-SPAM (arXiv 2502.17055): mean / (sqrt(mean square) + eps) of the
    norms, this one included.
    """
    start, first_add, first_read = average(decay1, corrected=True)
    _, second_add, second_read = average(decay2, corrected=True)

    def step(norm, memory, index):
        first, second = first_add(memory[0], norm), second_add(memory[1], norm**2)
        root = math.sqrt(second_read(second))
        return first_read(first) / (root + eps), (first, second)

    return Rule((start, start), step)


def adaclip(decay=0.999):
    """AdaClip of Stable-SPAM (arXiv 2502.17055): the EMA of the largest modulus, this
    one included.
    """
    start, add, read = average(decay, corrected=True)

    def step(norm, memory, index):
        memory = add(memory, norm)
        return read(memory), memory

    return Rule(start, step)


def least(*rules):
    """The smallest of the limits."""

    def step(norm, memory, index):
        found, after = zip(
            *(rule.step(norm, own, index) for rule, own in zip(rules, memory))
        )
        return min(found), after

    return Rule(tuple(rule.start for rule in rules), step)


def at_least(rule, floor):
    """The limit of the rule, but no less than the floor."""

    def step(norm, memory, index):
        limit, after = rule.step(norm, memory, index)
        return max(limit, floor), after

    return Rule(rule.start, step)


def warm_up(steps, before, after):
    """The limit of `before` until `steps` norms are remembered, then that of `after`;
    both remember from the start.
    """

    def step(norm, memory, index):
        count, early, late = memory
        early_limit, early = before.step(norm, early, index)
        late_limit, late = after.step(norm, late, index)
        return early_limit if count < steps else late_limit, (count + 1, early, late)

    return Rule((0, before.start, after.start), step)


def spam(grads, threshold=5000.0, decay=0.999, warmup=20, reset_every=500):
    """SPAM (arXiv 2501.06842): the gradients over time, each coordinate g with g^2 >
    threshold * v replaced by sign(g) * sqrt(threshold * v).
    """
    v, out = np.zeros(np.shape(grads[0])), []
    for t, g in enumerate((np.asarray(g, np.float64) for g in grads), 1):
        if t % reset_every == 0:
            v = np.zeros_like(v)
        # Where v is 0 nothing was seen since the reset, and every value would look like
        # a spike.
        spike = (t % reset_every >= warmup) & (v > 0) & (g**2 > threshold * v)
        through = np.where(spike, np.sign(g) * np.sqrt(threshold * v), g)
        v = np.where(np.isfinite(g), decay * v + (1 - decay) * through**2, v)
        out.append(through)
    return out


def adaclip_values(grads, decay=0.999):
    """AdaClip on the gradients over time: values beyond the limit become g / max|g| *
    limit; a gradient that is not finite is left alone.
    """
    grads = [np.asarray(g, np.float64) for g in grads]
    largest = [np.max(np.abs(g), initial=0.0) for g in grads]
    out = []
    for g, top, limit in zip(grads, largest, limits(adaclip(decay), largest)):
        unit = g / (top if top > 0 else 1.0)
        out.append(np.where(np.abs(g) > limit, unit * limit, g))
    return out


def histories(seed=0):
    """Histories of norms by name, 400 to 600 long, every value a float32."""
    rng = np.random.default_rng(seed)
    ramp = np.geomspace(1.0, 1e6, 500)

    def noise(length, spread=0.4):
        return np.exp(spread * rng.standard_normal(length))

    spikes = noise(600)
    spikes[np.sort(rng.choice(600, 24, replace=False))] *= np.geomspace(
        20.0, 1000.0, 24
    )[rng.permutation(24)]
    zeros = noise(500)
    zeros[[0, 1, 40, 41, 42, *rng.choice(500, 40, replace=False)]] = 0.0
    broken = noise(500)
    broken[rng.choice(500, 40, replace=False)] = rng.choice([math.nan, math.inf], 40)
    # Bad from the first step on, and several in a row: the cases a start value or a
    # counter gets wrong.
    broken[[0, 1, 2, 50, 51, 52]] = [
        math.nan,
        math.inf,
        0.0,
        math.inf,
        math.nan,
        math.inf,
    ]
    found = {
        "constant": np.full(400, 0.7),
        "lognormal": noise(500),
        "spikes": spikes,
        "zeros": zeros,
        "broken": broken,
        "growing": ramp * noise(500, 0.2),
        "falling": ramp[::-1] * noise(500, 0.2),
        "tiny": 1e-12 * noise(400),
        "huge": 1e12 * noise(400),
    }
    return {
        name: [float(norm) for norm in norms.astype(np.float32)]
        for name, norms in found.items()
    }
