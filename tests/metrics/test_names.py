"""The keys of a clipper do not change when another one is added."""

import jax.numpy as jnp
import optax

import optaxclip

GRADS = {"w": jnp.ones(2)}
CLIPPER = optaxclip.clip_by_global_norm(1.0)


def keys(optimizer, name="limit"):
    found = optaxclip.metrics(optimizer.init(GRADS), only=name)
    return list(found)


def test_the_first_keeps_its_keys_when_a_second_is_added():
    assert keys(optax.chain(CLIPPER)) == ["clip/limit"]
    assert keys(optax.chain(CLIPPER, optax.sgd(0.1), CLIPPER)) == [
        "clip/limit",
        "clip_2/limit",
    ]


def test_a_clipper_of_elements_counts_as_one_more():
    chain = optax.chain(optaxclip.clip_by_value(1.0, count=True), CLIPPER)
    assert keys(chain) == ["clip_2/limit"]
    assert keys(chain, "elements_clipped") == ["clip/elements_clipped"]


def test_a_named_clipper_keeps_its_keys_wherever_another_is_added():
    named = ("inner", CLIPPER)
    for others in ([named], [("first", CLIPPER), named], [named, ("last", CLIPPER)]):
        assert "clip/inner/limit" in keys(optax.named_chain(*others))


def test_a_clipper_named_clip_has_that_name_once():
    named = optax.named_chain(("clip", CLIPPER), ("adam", optax.adam(0.1)))
    assert keys(named) == ["clip/limit"]


def test_a_skipping_optimizer_has_a_name_of_its_own():
    inner = optax.chain(CLIPPER, optax.sgd(0.1))
    chain = optax.chain(CLIPPER, optaxclip.skip_nonfinite(inner))
    assert keys(chain) == ["clip/limit", "skip/limit", "clip_2/limit"]
