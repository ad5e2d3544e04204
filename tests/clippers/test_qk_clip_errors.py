"""What `qk_clip` refuses, and in which words."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import Heads, qk_clip, rules
from tests import attention

ONES = jnp.ones((4, 2, 3))
PARAMS = {"q": ONES, "k": ONES}
PLAIN = {"queries": {"q": 1}, "keys": {"k": 1}}


def refused(match, params=PARAMS, kind=ValueError, **options):
    with pytest.raises(kind, match=match):
        qk_clip(20.0, **{**PLAIN, **options}).init(params)


def test_patterns_find_leaves():
    refused("qk_clip: queries=.* finds no leaf: the updates have", queries={"x": 1})
    refused("qk_clip: rotary=.* finds no leaf", rotary={"rope": 1})


def test_patterns_are_a_dict():
    text = r"^qk_clip: queries must be a dict from patterns .* got 'q'\.$"
    refused(text, kind=TypeError, queries="q")


def test_axes_are_those_of_the_leaf():
    for axis in (3, 1.5, "1", [0, 1]):
        refused("qk_clip: queries=.* does not fit the leaf 'q'", queries={"q": axis})
    refused("keys=.* does not fit the leaf 'k', .* twice", keys={"k": (1, 1)})


def test_heads_and_entries_are_those_of_the_leaf():
    wrong = [Heads(2, width=2), Heads(2, entries=(0, 1)), Heads(1, width=0)]
    for heads in ((0, 9), (-3, None), (1, 1), (1, 0)):
        wrong.append(Heads(1, heads=heads))
    for entries in ((3, None), (2, 1), (0, 9)):
        wrong.append(Heads(1, entries=entries))
        wrong.append(Heads(2, width=3, entries=entries))
    text = "qk_clip: keys: Heads.* does not fit the leaf 'k' of shape .4, 2, 3.: width"
    for heads in wrong:
        refused(text, keys={"k": heads})


def test_every_query_has_a_key_beside_it():
    params = {"a": {"q": ONES, "k": ONES}, "b": {"q": ONES}}
    where = {"queries": {"*/q": 1}, "keys": {"*/k": 1}}
    refused("keys finds no leaf beside the queries 'b/q'", params, **where)


def test_a_query_and_a_key_of_different_blocks_are_no_attention():
    params = {"a": {"q": ONES, "k": ONES}, "b": {"q": ONES}, "c": {"k": ONES}}
    where = {"queries": {"*/q": 1}, "keys": {"*/k": 1}}
    refused("keys finds no leaf beside the queries 'b/q'", params, **where)


def test_every_key_has_a_query_beside_it():
    params = {"a": {"q": ONES, "k": ONES}, "b": {"k": ONES}}
    where = {"queries": {"*/q": 1}, "keys": {"*/k": 1}}
    refused("queries finds no leaf beside the keys 'b/k'", params, **where)


def test_heads_of_queries_are_a_multiple_of_those_of_keys():
    refused("'q' have the shape \\(2,\\)", {"q": ONES, "k": jnp.ones((4, 3, 3))})


def test_numbers_are_in_their_ranges():
    wrong = -0.1, np.nan, 1.5, np.float32(1.5), np.array(1.5), jnp.float32(1.5)
    for alpha in wrong:
        with pytest.raises(ValueError, match="qk_clip: alpha"):
            qk_clip(20.0, alpha=alpha, **PLAIN)
    with pytest.raises(ValueError, match="qk_clip: max_logit"):
        qk_clip(-1.0, **PLAIN)
    with pytest.raises(TypeError, match="qk_clip: max_logit"):
        qk_clip("100", **PLAIN)
    with pytest.raises(ValueError, match=r"qk_clip: max_logit must not compare"):
        qk_clip(rules.share_of_params(0.1), **PLAIN)


def test_names_of_elsewhere_lead_here():
    with pytest.raises(
        TypeError, match=r"there is no argument 'tau'. Here it is max_lo"
    ):
        qk_clip(tau=100.0, **PLAIN)


def update(params, **given):
    clipper = qk_clip(20.0, **attention.PATTERNS)
    state = clipper.init(params)
    return clipper.update(params, state, params, **given)


def test_update_needs_weights_and_logits():
    params = attention.weights(4, 4)
    clipper = qk_clip(20.0, **attention.PATTERNS)
    state = clipper.init(params)
    with pytest.raises(ValueError, match="qk_clip compares updates with weights"):
        clipper.update(params, state, max_logits=jnp.ones(4))
    with pytest.raises(ValueError, match=r"one array for each of .*, got none\."):
        clipper.update(params, state, params)
    with pytest.raises(TypeError, match="qk_clip: state must be the ClipState"):
        clipper.update(params, (), params, max_logits=jnp.ones(4))


def test_logits_have_a_number_for_each_head():
    params = attention.weights(4, 4)
    for wrong in (jnp.ones(3), jnp.ones((2, 4)), jnp.ones(())):
        with pytest.raises(ValueError, match=r"must have the shape \(4,\)"):
            update(params, max_logits=wrong)


def test_logits_belong_to_one_attention_each():
    params = {name: attention.weights(4, 4) for name in ("one", "two")}
    four = jnp.ones(4)
    for wrong in (four, {"one": four}, {"one": four, "two": four, "three": four}):
        with pytest.raises(ValueError, match=r"one array for each of .*'one', 'two'"):
            update(params, max_logits=wrong)
    two_for_one = {"one": {"a": four, "b": four}}
    with pytest.raises(ValueError, match="one array for each"):
        update(params, max_logits=two_for_one)
    with pytest.raises(ValueError, match="one array for each"):
        update({"layer": params}, max_logits={"layer": four})


def test_a_leaf_that_is_no_array_is_named():
    params = attention.weights(4, 4)
    clipper = qk_clip(20.0, **attention.PATTERNS)
    state, updates = clipper.init(params), {**params, "value": print}
    with pytest.raises(TypeError, match="qk_clip: the leaf 'value' must be an array"):
        clipper.update(updates, state, params, max_logits=jnp.ones(4))
