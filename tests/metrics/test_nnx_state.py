"""`metrics` reads flax: an NNX optimizer, not its state, and a linen train state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import apply

nnx = pytest.importorskip("flax.nnx")
train_state = pytest.importorskip("flax.training.train_state")


def optimizer_after_a_step(clipper):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    chain = optax.chain(clipper, optax.adam(0.1))
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)
    optimizer.update(model, grads)
    return optimizer


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
    assert "clip/norm_before/kernel" in found


def test_an_nnx_state_is_refused_with_the_way_out():
    optimizer = optimizer_after_a_step(optaxclip.clip_by_global_norm(0.5))
    wanted = optaxclip.metrics(optimizer)
    state = nnx.state(optimizer)
    with pytest.raises(ValueError, match=r"(?s)metrics: .* or the nnx\.Optimizer"):
        optaxclip.metrics(state)
    with pytest.raises(ValueError, match="must be the state of an optimizer"):
        optaxclip.metrics(nnx.to_pure_dict(state))
    # A stored state goes into an optimizer of the same kind.
    restored = optimizer_after_a_step(optaxclip.clip_by_global_norm(9.0))
    nnx.update(restored, state)
    assert optaxclip.metrics(restored) == wanted


def test_a_mapping_of_integers_is_no_state():
    for tree in ({"step": jnp.array(0)}, {"step": 1}):
        with pytest.raises(ValueError, match="with a clipper of optaxclip in it"):
            optaxclip.metrics(tree)


def test_a_linen_train_state_is_read_as_it_is():
    params = {"w": jnp.ones(2)}
    state = train_state.TrainState.create(
        apply_fn=None, params=params, tx=optaxclip.clip_by_global_norm(0.5)
    )
    state = state.apply_gradients(grads=params)
    assert optaxclip.metrics(state)["clip/clipped"] == 1
