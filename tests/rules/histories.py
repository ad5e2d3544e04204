"""Every rule with its numbers, histories of norms, and what a clipper makes of them."""

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip import rules
from tests import oracle_rules as oracle

STEPS = 400
HISTORIES = {name: norms[:STEPS] for name, norms in oracle.histories().items()}
EPS = float(np.finfo(np.float32).eps)


def f(number):
    """The number that a float32 program gets."""
    return float(np.float32(number))


# name: (rule, oracle, tolerance in float32 eps). A running average forgets rounding at
# its rate, so its error is about eps / (1 - decay); a logarithm of large norms
# multiplies it by log(norm); the tracker multiplies 400 factors.
RULES = {
    "quantile of the past": (
        rules.windowed_quantile(0.9, 100),
        oracle.windowed_quantile(f(0.9), 100),
        32,
    ),
    "percentile of all": (
        rules.windowed_quantile(0.1, 1000, current=True),
        oracle.windowed_quantile(f(0.1), 1000, current=True),
        32,
    ),
    "median, clipped": (
        rules.windowed_quantile(0.5, 64, factor=2.0, remember="clipped", warmup=10),
        oracle.windowed_quantile(0.5, 64, factor=2.0, remember="clipped", warmup=10),
        32,
    ),
    "Levanter": (
        rules.windowed_mean(3, 128, floor=1e-6, warmup=64),
        oracle.windowed_mean(3, 128, floor=f(1e-6), warmup=64),
        32,
    ),
    "OLMo-core": (
        rules.windowed_mean(6, 128, ddof=1, warmup=63),
        oracle.windowed_mean(6, 128, ddof=1, warmup=63),
        32,
    ),
    "mean of a large floor": (
        rules.windowed_mean(1.5, 10, ddof=1, floor=0.5, warmup=0),
        oracle.windowed_mean(1.5, 10, ddof=1, floor=0.5, warmup=0),
        32,
    ),
    "mean with the current": (
        rules.windowed_mean(1.5, 20, current=True, remember="clipped", warmup=5),
        oracle.windowed_mean(1.5, 20, current=True, remember="clipped", warmup=5),
        64,
    ),
    "z-score": (rules.z_score(), oracle.z_score(decay=f(0.97), eps=f(1e-6)), 128),
    "z-score to the mean": (
        rules.z_score(target="mean", eps=0.0),
        oracle.z_score(decay=f(0.97), target="mean", eps=0.0),
        128,
    ),
    "z-score to the edge": (
        rules.z_score(2.0, 0.9, target="max", warmup=1),
        oracle.z_score(2.0, f(0.9), 1, "max", f(1e-6)),
        128,
    ),
    "z-score of a large eps": (
        rules.z_score(0.5, 0.9, warmup=5, eps=0.25),
        oracle.z_score(0.5, f(0.9), 5, eps=0.25),
        128,
    ),
    "log-norm": (
        rules.log_z_score(warmup=50),
        oracle.log_z_score(decay=f(0.995), floor=f(0.01), spread=f(1e-3), warmup=50),
        512,
    ),
    "log-norm of a large floor and spread": (
        rules.log_z_score(1.0, 0.9, floor=0.75, spread=0.25, warmup=3),
        oracle.log_z_score(1.0, f(0.9), 0.75, 0.25, 3),
        512,
    ),
    "ratio": (rules.ema_ratio(1.5, 0.98), oracle.ema_ratio(1.5, f(0.98)), 64),
    "two rates": (
        rules.ema_ratio(2.0, 0.99, target=1.1, target_decay=0.9, corrected=True),
        oracle.ema_ratio(2.0, f(0.99), f(1.1), f(0.9), corrected=True),
        128,
    ),
    "two rates from the first norm": (
        rules.ema_ratio(1.5, 0.9, target=1.25, target_decay=0.5, warmup=4),
        oracle.ema_ratio(1.5, f(0.9), 1.25, 0.5, warmup=4),
        64,
    ),
    "raw ratio": (
        rules.ema_ratio(1.5, 0.9, remember="raw", warmup=20),
        oracle.ema_ratio(1.5, f(0.9), remember="raw", warmup=20),
        64,
    ),
    "growth": (rules.growth(1.01, floor=0.5), oracle.growth(f(1.01), 0.5), 64),
    "capped growth": (
        rules.growth(1.5, cap=0.5),
        oracle.least(oracle.growth(1.5), oracle.constant(0.5)),
        64,
    ),
    "tracker": (
        rules.quantile_tracker(0.9, 0.2),
        oracle.quantile_tracker(f(0.9), f(0.2), f(0.1)),
        128,
    ),
    "band": (
        rules.ema_band(),
        oracle.ema_band(f(0.95), f(0.6), f(0.95), f(0.01), f(1.1), f(0.9)),
        64,
    ),
    "lifting band": (
        rules.ema_band(0.5, 1.5, raise_small=True),
        oracle.ema_band(0.5, 1.5, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=True),
        64,
    ),
    "band above a floor": (
        rules.ema_band(0.5, 1.5, 0.5, floor=0.75, up=4, down=0.25, raise_small=True),
        oracle.ema_band(0.5, 1.5, 0.5, 0.75, 4, 0.25, raise_small=True),
        64,
    ),
    "average": (rules.ema(0.99), oracle.adaclip(f(0.99)), 64),
    "quotient of moments": (rules.moments_ratio(), oracle.adagn(f(0.7), f(0.9)), 64),
    "quotient of a large eps": (
        rules.moments_ratio(0.5, 0.75, eps=0.5),
        oracle.adagn(0.5, 0.75, 0.5),
        64,
    ),
    "capped": (
        rules.minimum(rules.z_score(), 1.0),
        oracle.least(oracle.z_score(decay=f(0.97), eps=f(1e-6)), oracle.constant(1.0)),
        128,
    ),
    "floored": (
        rules.maximum(rules.growth(), 0.7),
        oracle.at_least(oracle.growth(f(1.01)), f(0.7)),
        64,
    ),
    "warmed up": (
        rules.warm_up(20, 1.0, rules.ema_ratio(1.5, 0.98)),
        oracle.warm_up(20, oracle.constant(1.0), oracle.ema_ratio(1.5, f(0.98))),
        64,
    ),
}


def assert_limits(ours, theirs, norms, tolerance, name=""):
    """Equal wherever a norm is finite and not 0, and infinite in the same places."""
    norms, ours, theirs = (np.asarray(x, np.float64) for x in (norms, ours, theirs))
    counted = np.isfinite(norms) & (norms > 0)
    ours, theirs = ours[counted], theirs[counted]
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs), name)
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=name)


def gradients(names, shape=(3, 2), steps=120):
    """Random directions, as long as the histories say: {name: float32[steps,
    *shape]}.
    """
    random = np.random.default_rng(0)
    tree = {}
    for name in names:
        directions = random.standard_normal((steps, *shape))
        directions /= np.sqrt(np.sum(directions**2, axis=(1, 2), keepdims=True))
        with np.errstate(invalid="ignore"):
            tree[name] = np.asarray(
                directions * np.asarray(HISTORIES[name][:steps]).reshape(-1, 1, 1),
                np.float32,
            )
    return tree


def run(clipper, grads):
    """The clipped gradients of a whole run, and the states."""
    first = jax.tree.map(lambda x: x[0], grads)

    def step(state, grads):
        clipped, state = clipper.update(grads, state)
        return state, (clipped, state)

    return jax.jit(lambda grads: jax.lax.scan(step, clipper.init(first), grads)[1])(
        jax.tree.map(jnp.asarray, grads)
    )


def lengths(tree, *names):
    """The norm of these leaves together, at each step, in float64."""
    squares = [np.sum(np.float64(tree[name]) ** 2, axis=(1, 2)) for name in names]
    return np.sqrt(sum(squares))


def spiked(steps=120, shape=(4, 3)):
    random = np.random.default_rng(1)
    return np.asarray(
        random.standard_normal((steps, *shape))
        * np.where(random.random((steps, *shape)) < 0.03, 1e3, 1.0),
        np.float32,
    )
