"""The logits of attention layers of flax are within the limit of qk_clip."""

import jax
import jax.numpy as jnp
import optax
import pytest

from optaxclip import qk_clip
from tests import attention

LIMIT = 10.0


@pytest.mark.parametrize("key_heads", (4, 2, 1))
@pytest.mark.slow
def test_logits_of_a_flax_model_are_within_the_limit(key_heads):
    model, variables, x = flax_model(key_heads)
    params = variables["params"]
    with jax.numpy_rank_promotion("allow"):
        _, sown = model.apply(variables, x, mutable=["intermediates"])
    most = jax.tree.leaves(sown)
    assert len(most) == 2 and all((each > LIMIT).any() for each in most)

    clipper = qk_clip(LIMIT, **attention.PATTERNS)
    zero = jax.tree.map(jnp.zeros_like, params)
    given = {"max_logits": sown["intermediates"]}
    updates, _ = clipper.update(zero, clipper.init(params), params, **given)
    # The second layer reads what the first one makes, and its logits are those of the
    # same inputs only if the first keeps its softmax. So layers are asked one by one.
    new = optax.apply_updates(params, updates)
    for name in ("first", "second"):
        both = {**params, name: new[name]}
        with jax.numpy_rank_promotion("allow"):
            _, after = model.apply({"params": both}, x, mutable=["intermediates"])
        found = after["intermediates"][name]["max_logits"][0]
        assert float(jnp.max(found)) <= LIMIT * (1 + 1e-5)


def flax_model(key_heads):
    nn = pytest.importorskip("flax.linen")

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            def dense(heads, name):
                return nn.DenseGeneral((heads, 8), name=name)(x)

            query = dense(4, "query") * 2.0
            key, value = dense(key_heads, "key"), dense(key_heads, "value")
            key, value = (jnp.repeat(y, 4 // key_heads, 2) for y in (key, value))
            logits = jnp.einsum("bthe,bshe->bhts", query, key) / 8**0.5
            self.sow("intermediates", "max_logits", logits.max((0, 2, 3)))
            seen = jnp.einsum("bhts,bshe->bthe", nn.softmax(logits), value)
            return x + nn.DenseGeneral(16, axis=(-2, -1), name="out")(seen)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Attention(name="second")(Attention(name="first")(x))

    x = 3 * jax.random.normal(jax.random.key(0), (2, 12, 16))
    with jax.numpy_rank_promotion("allow"):
        variables = Model().init(jax.random.key(1), x)
    return Model(), {"params": variables["params"]}, x
