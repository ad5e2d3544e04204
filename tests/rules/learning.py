"""Clippers with limits that learn, and runs of them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from optaxclip.shrinks import drop, smooth
from tests.helpers import LABELS, random_tree

by_norm, by_tensor = optaxclip.clip_by_global_norm, optaxclip.clip_by_tensor_norm
by_unit = optaxclip.clip_by_unitwise_norm

# name: (build(**options), does it never lengthen?)
CLIPPERS = {
    "autoclip": (partial(optaxclip.autoclip, 50, 16), True),
    "zclip": (partial(optaxclip.zclip, 1.0, 0.9, warmup=3), True),
    "zclip of groups": (
        partial(optaxclip.zclip, 1.0, 0.9, warmup=3, scope=LABELS),
        True,
    ),
    "adagc": (partial(optaxclip.adagc, 1.05, max_norm=3.0, warmup=2), True),
    "aggc": (partial(optaxclip.aggc, 0.9, 1.1, scope=LABELS, raise_small=True), False),
    "adaclip": (partial(optaxclip.adaclip, 0.9), True),
    "adagn": (optaxclip.adagn, False),
    "log-norm": (partial(by_tensor, rules.log_z_score(0.5, 0.9, warmup=2)), True),
    "units that may grow": (partial(by_unit, rules.growth()), True),
    "ratio, drop": (partial(by_tensor, rules.ema_ratio(1.2), shrink=drop), True),
    "deviation, smooth": (
        partial(by_norm, rules.windowed_mean(1.0, 16), shrink=smooth()),
        True,
    ),
    "tracker under a cap": (
        partial(by_norm, rules.minimum(rules.quantile_tracker(), 1.0)),
        True,
    ),
}
# One of each kind: a window, running averages of groups, two measures in one, another
# multiplication, one that lengthens.
some_clippers = pytest.mark.parametrize(
    "name", ["autoclip", "zclip of groups", "adagc", "adaclip", "adagn"]
)


def history(dtype, steps=8, name=None):
    """Gradients whose norms jump up and down by factors up to 50: of a kernel and a
    bias; of the whole tree for groups, for no clipper by name, and in mixed dtypes.
    """
    trees = [
        random_tree(dtype, seed, scale)
        for seed, scale in zip(range(steps), [1.0, 0.7, 1.3, 0.9, 20.0, 1.1, 0.4, 2.0])
    ]
    if name in (None, "zclip of groups", "aggc") or dtype == "mixed":
        return trees
    return [{"kernel": tree["kernel"], "bias": tree["bias"]} for tree in trees]


@cache
def built(name, **options):
    """(the clipper, its jitted update): one of each kind, so that what one test has
    compiled serves the others.
    """
    clipper = CLIPPERS[name][0](**options)
    return clipper, jax.jit(clipper.update)


def run(name, grads, state=None, **options):
    """The updates and states of a run under jit."""
    clipper, update = built(name, **options)
    found = []
    state = clipper.init(grads[0]) if state is None else state
    for each in grads:
        updates, state = update(each, state)
        found.append((updates, state))
    return found


def times(factor, tree):
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) * factor, jnp.float32), tree
    )
