"""Rules that compare a norm with that of all norms together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0, 12.0])}  # together 13
PARAMS = jax.tree.map(lambda leaf: 10 * leaf, GRADS)


class ShareOfTotal(rules.Rule):
    share: float

    @property
    def needs_total(self):
        return True

    def update(self, norm, memory, step, total):
        return self.share * total, memory


class Both(rules.Rule):
    @property
    def needs_params(self):
        return True

    @property
    def needs_total(self):
        return True

    def update(self, norm, memory, step, params_norm, total):
        return params_norm + 1000 * total, memory


def limits(rule, params=None):
    clipper = optaxclip.clip_by_tensor_norm(rule)
    _, state = clipper.update(GRADS, clipper.init(GRADS), params)
    return {name: float(entry.limit) for name, entry in state.by_name().items()}


@pytest.mark.parametrize(
    "rule",
    [
        rules.minimum(ShareOfTotal(0.5), 100.0),
        rules.maximum(1.0, ShareOfTotal(0.5)),
        rules.warm_up(1, ShareOfTotal(0.5), 1.0),
        rules.minimum(rules.maximum(ShareOfTotal(0.5), 1.0), 100.0),
    ],
)
def test_a_joined_rule_hands_on_the_norm_of_all(rule):
    assert limits(rule) == {"a": 6.5, "b": 6.5}


def test_a_joined_rule_hands_on_what_each_rule_needs():
    weights = rules.share_of_params(0.1)
    rule = rules.minimum(weights, rules.maximum(ShareOfTotal(0.5), 1.0))
    assert limits(rule, PARAMS) == {"a": 5.0, "b": 6.5}


def test_rules_beside_each_other_get_what_each_needs():
    tree = {"a": ShareOfTotal(0.5), "b": rules.share_of_params(0.5)}
    assert limits(tree, PARAMS) == {"a": 6.5, "b": 60.0}


def test_a_rule_may_need_weights_and_the_norm_of_all():
    assert limits(Both(), PARAMS) == {"a": 13050.0, "b": 13120.0}
    assert limits(rules.minimum(Both(), 13100.0), PARAMS) == {
        "a": 13050.0,
        "b": 13100.0,
    }


@pytest.mark.parametrize(
    "build",
    [
        lambda rule: optaxclip.replay.run(rule, [1.0, 2.0]),
        lambda rule: optaxclip.skip_spikes(optax.sgd(1.0), rule),
        lambda rule: optaxclip.skip_spikes(optax.sgd(1.0), 1.0, rule),
    ],
)
def test_where_there_is_one_norm_the_rule_is_refused(build):
    for rule in (ShareOfTotal(0.5), rules.minimum(ShareOfTotal(0.5), 1.0)):
        with pytest.raises(
            ValueError, match="rule must not compare norms with that of"
        ):
            build(rule)


def test_the_norm_of_all_follows_a_norm_that_is_given():
    clipper = optaxclip.clip_by_tensor_norm(rules.minimum(ShareOfTotal(0.5), 100.0))
    norms = {"a": jnp.float32(6.0), "b": jnp.float32(8.0)}
    _, state = clipper.update(GRADS, clipper.init(GRADS), grad_norm=norms)
    np.testing.assert_allclose(state.limit, 5.0, rtol=1e-6)
