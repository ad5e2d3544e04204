"""`metrics` reads flax: an NNX optimizer, its state, a linen train state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip

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
    for found in (
        optaxclip.metrics(nnx.state(optimizer)),
        optaxclip.metrics(nnx.to_pure_dict(nnx.state(optimizer))),
    ):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_nnx_state_has_tensors_with_and_without_memory():
    limits = {"kernel": 1.0, "bias": optaxclip.rules.z_score()}
    optimizer = optimizer_after_a_step(optaxclip.clip_by_tensor_norm(limits))
    wanted = optaxclip.metrics(optimizer.opt_state, only="norm_before")
    found = optaxclip.metrics(nnx.state(optimizer), only="norm_before")
    assert len(wanted) == 2
    assert list(found.values()) == list(wanted.values())


@pytest.mark.parametrize("options", [{"embeddings": "kernel"}, {"weights": False}])
def test_nnx_state_has_signs_of_health(options):
    optimizer = optimizer_after_a_step(optaxclip.record_health(**options))
    wanted = optaxclip.metrics(optimizer.opt_state)
    found = optaxclip.metrics(nnx.state(optimizer))
    assert any("zeros" in name for name in wanted)
    assert list(found.values()) == list(wanted.values())


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


def test_nnx_state_numbers_the_tensors():
    optimizer = optimizer_after_a_step(optaxclip.clip_by_tensor_norm(0.5))
    wanted = optaxclip.metrics(optimizer.opt_state, only="norm_before")
    found = optaxclip.metrics(nnx.state(optimizer), only="norm_before")
    assert list(found) == ["clip/norm_before/0", "clip/norm_before/1"]
    assert list(found.values()) == list(wanted.values())


def test_an_nnx_optimizer_is_read_as_it_is():
    optimizer = optimizer_after_a_step(optaxclip.clip_by_tensor_norm(0.5))
    found = optaxclip.metrics(optimizer)
    assert found == optaxclip.metrics(optimizer.opt_state)


def test_a_linen_train_state_is_read_as_it_is():
    params = {"w": jnp.ones(2)}
    state = train_state.TrainState.create(
        apply_fn=None, params=params, tx=optaxclip.clip_by_global_norm(0.5)
    )
    state = state.apply_gradients(grads=params)
    assert optaxclip.metrics(state)["clip/clipped"] == 1
