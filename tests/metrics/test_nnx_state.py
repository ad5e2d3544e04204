"""`metrics` reads flax: an NNX optimizer, its state, a linen train state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import apply

nnx = pytest.importorskip("flax.nnx")
train_state = pytest.importorskip("flax.training.train_state")

CLIPPERS = {
    "global": lambda: optaxclip.clip_by_global_norm(0.5),
    "elements": lambda: optaxclip.clip_by_value(0.5, count=True),
    "spam": lambda: optaxclip.spam(2.0, warmup=0, count=True),
    "learning": lambda: optaxclip.zclip(),
    "skipping": lambda: optaxclip.skip_spikes(
        optax.chain(optaxclip.zclip(), optax.sgd(1.0)), 10.0
    ),
    "spikes": lambda: optaxclip.record_spikes(),
    "partition": lambda: optax.partition(
        {"a": optaxclip.clip_by_global_norm(0.5), "b": optax.sgd(1.0)},
        lambda params: jax.tree.map(lambda _: "a", params),
    ),
}
BY_TENSOR = {
    "tensors": lambda: optaxclip.clip_by_tensor_norm({"kernel": 1.0, "bias": 2.0}),
    "learning tensors": lambda: optaxclip.adagc(),
    "health": lambda: optaxclip.record_health(embeddings="kernel"),
    "health without weights": lambda: optaxclip.record_health(weights=False),
}
CLIPPERS |= BY_TENSOR


def optimizer_after_a_step(clipper):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    chain = optax.chain(clipper, optax.adam(0.1))
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)
    optimizer.update(model, grads)
    return optimizer


@pytest.mark.parametrize("name", CLIPPERS)
@pytest.mark.slow
def test_nnx_state_has_the_numbers_of_its_optimizer(name):
    optimizer = optimizer_after_a_step(CLIPPERS[name]())
    wanted = optaxclip.metrics(optimizer.opt_state)
    assert wanted
    state = nnx.state(optimizer)
    for found in map(optaxclip.metrics, (state, nnx.to_pure_dict(state))):
        # An NNX state has numbers for the names of tensors.
        assert name in BY_TENSOR or found.keys() == wanted.keys()
        np.testing.assert_equal(list(found.values()), list(wanted.values()))


def kernels(yes, no):
    return lambda params: jax.tree.map(lambda x: yes if x.ndim > 1 else no, params)


MASKING = {
    "masked": lambda inner: optax.masked(inner, kernels(True, False)),
    "partition": lambda inner: optax.partition(
        {"a": inner, "b": optax.sgd(1.0)}, kernels("a", "b")
    ),
}
# What looks at leaves: clippers, and optimizers that skip steps.
INSIDE = {
    "optax": lambda: optax.clip_by_global_norm(0.5),
    "global": lambda: optaxclip.clip_by_global_norm(0.5),
    "tensor": lambda: optaxclip.clip_by_tensor_norm(0.5),
    "agc": lambda: optaxclip.adaptive_grad_clip(0.5),
    "skipping": lambda: optaxclip.skip_nonfinite(optax.sgd(1.0)),
    "carry": lambda: optaxclip.carry_clipped(optaxclip.clip_by_global_norm(0.5)),
    "spam": lambda: optaxclip.spam(2.0, warmup=0),
}


@pytest.mark.parametrize("masking", MASKING)
@pytest.mark.parametrize("inside", INSIDE)
def test_parts_of_an_nnx_model_are_clipped(inside, masking):
    optimizer = optimizer_after_a_step(MASKING[masking](INSIDE[inside]()))
    if inside not in ("optax", "spam"):
        assert optaxclip.metrics(optimizer.opt_state)


def test_norms_of_nnx_variables_leave_masked_ones_out():
    tree = {"a": nnx.Param(jnp.ones(4)), "b": nnx.Param(optax.MaskedNode())}
    assert optaxclip.global_norm(tree) == 2
    clipped, norm = optaxclip.clip_grads(tree, 1.0)
    np.testing.assert_allclose(clipped["a"], 0.5, 1e-6)
    assert norm == 2
    limits = {"a": nnx.Param(1.0), "b": None}
    clipped, _ = apply(optaxclip.clip_by_tensor_norm(limits), tree)
    np.testing.assert_allclose(clipped["a"], 0.5, 1e-6)


def test_an_nnx_optimizer_is_read_as_it_is():
    optimizer = optimizer_after_a_step(optaxclip.clip_by_tensor_norm(0.5))
    found = optaxclip.metrics(optimizer)
    assert found == optaxclip.metrics(optimizer.opt_state)
    found = optaxclip.metrics(nnx.state(optimizer), only="norm_before")
    assert list(found) == ["clip/norm_before/0", "clip/norm_before/1"]


@pytest.mark.parametrize("fields", [("step",), ("norms",), ("counts", "numbers")])
def test_weights_of_nnx_with_names_of_fields_are_no_states(fields):
    class Model(nnx.Module):
        def __init__(self):
            for field in fields:
                setattr(self, field, nnx.Param(jnp.ones((4, 2))))

    def loss(model):
        return sum(jnp.sum(getattr(model, field)[...]) for field in fields)

    model = Model()
    clipper = optaxclip.clip_by_global_norm(0.5)
    optimizer = nnx.Optimizer(
        model, optax.chain(clipper, optax.adam(0.1)), wrt=nnx.Param
    )
    optimizer.update(model, nnx.grad(loss)(model))
    wanted = optaxclip.metrics(optimizer.opt_state)
    assert next(iter(wanted)) == "clip/norm_before"
    for state in (nnx.state(optimizer), nnx.to_pure_dict(nnx.state(optimizer))):
        assert optaxclip.metrics(state) == wanted


def test_a_linen_train_state_is_read_as_it_is():
    params = {"w": jnp.ones(2)}
    state = train_state.TrainState.create(
        apply_fn=None, params=params, tx=optaxclip.clip_by_global_norm(0.5)
    )
    state = state.apply_gradients(grads=params)
    assert optaxclip.metrics(state)["clip/clipped"] == 1
