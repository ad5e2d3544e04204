"""One rule object at several places of a tree of limits."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([30.0, 40.0])}
MAKERS = {
    "ema_ratio": lambda: rules.ema_ratio(1.5),
    "schedule": lambda: rules.constant(optax.constant_schedule(10.0)),
    "joined": lambda: rules.minimum(rules.growth(1.1), 20.0),
    "window": lambda: rules.windowed_quantile(0.5, window=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_one_rule_twice_is_two_equal_rules(name):
    shared, make = MAKERS[name](), MAKERS[name]
    both = optaxclip.clip_by_tensor_norm({"a": shared, "b": shared})
    apart = optaxclip.clip_by_tensor_norm({"a": make(), "b": make()})
    states = [clipper.init(GRADS) for clipper in (both, apart)]
    for size in (1.0, 5.0, 2.0):
        grads = {name: size * leaf for name, leaf in GRADS.items()}
        first, states[0] = both.update(grads, states[0])
        second, states[1] = apart.update(grads, states[1])
        for name in grads:
            np.testing.assert_array_equal(first[name], second[name])
