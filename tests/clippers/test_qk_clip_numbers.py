"""Numbers and rules of `qk_clip` that cannot be."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import qk_clip, rules

PLACES = {"queries": {"q": 1}, "keys": {"k": 1}}


@pytest.mark.parametrize("kind", [np.float32, jnp.float32, np.array, np.float64])
def test_an_alpha_above_one_raises_in_every_type(kind):
    with pytest.raises(ValueError, match=r"qk_clip: alpha must be at most 1"):
        qk_clip(1.0, **PLACES, alpha=kind(1.5))


def test_a_rule_of_weights_is_refused_when_it_is_built():
    with pytest.raises(ValueError, match=r"qk_clip: max_logit must not compare"):
        qk_clip(rules.share_of_params(0.1), **PLACES)


def test_with_alpha_one_keys_stay_at_a_limit_of_zero():
    # factor^(1 - alpha) = 0^0 = 1
    weights = {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}
    clipper = qk_clip(0.0, **PLACES, alpha=1.0)
    given = weights, clipper.init(weights), weights
    updates, _ = clipper.update(*given, max_logits=jnp.ones(2))
    assert updates["q"].tolist() == [[-1.0, -1.0]]
    assert updates["k"].tolist() == [[1.0, 1.0]]


def test_logits_of_one_attention_do_not_serve_two():
    params = {
        "layer": {name: {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))} for name in "ab"}
    }
    clipper = qk_clip(1.0, queries={"*/q": 1}, keys={"*/k": 1})
    given = params, clipper.init(params), params
    with pytest.raises(ValueError, match=r"max_logits must have one array for each"):
        clipper.update(*given, max_logits={"layer": jnp.ones(2)})
