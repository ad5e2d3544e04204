"""In shard_map, with parameters split over mesh axes, the norm of an example is that of
its whole gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import METHODS, normal

AUTO = (jax.sharding.AxisType.Auto,)
# The first layer by columns, the second by rows. `own` is the same on all devices, but
# meets what differs between them.
SPECS = {
    "in": P(None, "model"),
    "bias": P("model"),
    "out": P("model"),
    "own": P(),
    "last": P(),
}


def parameters():
    return {
        "in": normal(0, 6, 8),
        "bias": normal(1, 8),
        "out": normal(2, 8, 3),
        "own": normal(3, 2, 3),
        "last": normal(4, 3),
    }


def loss_of(parts, total):
    """The loss of one device of a few, or of all parts of the hidden layer at once."""

    def loss(p, x):
        hidden = jnp.tanh(x @ p["in"] + p["bias"][None])
        each = [hidden[:, 2 * k : 2 * k + 2] @ p["own"] for k in range(parts)]
        seen = total(hidden @ p["out"] + sum(each))
        return jnp.sum((seen + p["last"][None]) ** 2)

    return loss


def exact(params, x):
    """Norms, and the sum of gradients clipped to 1."""
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (params, x))
        grads = jax.vmap(jax.grad(loss_of(4, lambda y: y)), (None, 0))(*wide)
        grads = jax.tree.map(np.asarray, grads)
    squares = sum((g.reshape(len(x), -1) ** 2).sum(1) for g in grads.values())
    norms = np.sqrt(squares)
    factors = np.minimum(1, 1 / norms)
    return norms, {name: np.einsum("b,b...", factors, g) for name, g in grads.items()}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_split_matrices_have_one_norm(method, times):
    for mesh_axes in ("auto", SPECS):
        check_split(method, times, mesh_axes)


def check_split(method, times, mesh_axes):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO * 2)
    loss = loss_of(1, lambda y: lax.psum(y, "model"))
    options = {"method": method, "mesh_axes": mesh_axes, "microbatch": 2}
    grad = clipped_grad(loss, 1.0, mean=False, **options)

    def local(params, x):
        result = grad(params, x)
        return lax.psum(result.grads, "data"), result.norms

    specs = {"in_specs": (SPECS, P("data")), "out_specs": (SPECS, P("data"))}
    run = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    params, x = parameters(), normal(5, 8, times, 6)
    sums, norms = run(params, x)
    wanted, expected = exact(params, x)
    np.testing.assert_allclose(norms, wanted, rtol=1e-5)
    for name, total in sums.items():
        np.testing.assert_allclose(total, expected[name], atol=1e-5, err_msg=name)


def without_types(grad, spec):
    mesh = jax.make_mesh((4,), ("model",), axis_types=AUTO)
    specs = {"in_specs": (spec, P()), "out_specs": (spec, P())}

    def local(w, x):
        result = grad(w, x)
        return result.grads, result.norms

    return jax.shard_map(local, mesh=mesh, check_vma=False, **specs)


def added(w, x):
    return lax.psum(jnp.sum(x @ w), "model")


@pytest.mark.parametrize("method", METHODS)
def test_without_types_names_of_mesh_axes_are_needed(method):
    grad = clipped_grad(added, 1.0, mean=False, method=method, mesh_axes="model")
    w, x = jnp.ones((6, 8)), normal(0, 1, 6)
    total, _ = jax.jit(without_types(grad, P(None, "model")))(w, x)
    np.testing.assert_allclose(jnp.linalg.norm(total), 1.0, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_in_pmap_names_of_mesh_axes_are_needed(method):
    grad = clipped_grad(added, 1.0, mean=False, method=method, mesh_axes="model")
    run = jax.pmap(lambda w, x: grad(w, x).grads, "model", in_axes=(0, None))
    total = run(jnp.ones((4, 6, 2)), normal(0, 1, 6))
    np.testing.assert_allclose(np.linalg.norm(total), 1.0, rtol=1e-5)


def test_in_pmap_an_explanation_takes_names_of_mesh_axes():
    explain = explain_clipped_grad(added, mesh_axes="model")
    found = []

    def on_device(w, x):
        found.append(explain(w, x))
        return w

    jax.pmap(on_device, "model", in_axes=(0, None))(
        jnp.ones((4, 6, 2)), normal(0, 1, 6)
    )
    assert found[0].leaves[0].shape == (6, 2)
    assert found[0].change < 1e-5


@pytest.mark.parametrize("mesh_axes", ["auto", None])
def test_without_types_a_loss_that_joins_devices_needs_names(mesh_axes):
    """Every other axis may split the batch, whose examples the loss would join."""
    grad = clipped_grad(added, 1.0, mean=False, mesh_axes=mesh_axes)
    run = without_types(grad, P(None, "model"))
    with pytest.raises(
        ValueError, match=r"clipped_grad: .* psum over 'model'.* mesh_axes does not"
    ):
        run(jnp.ones((6, 8)), normal(0, 1, 6))


def test_parameters_gathered_within_the_loss_are_refused():
    mesh = jax.make_mesh((4,), ("data",), axis_types=AUTO)

    def loss(w, x):
        return jnp.sum(x @ lax.all_gather(w, "data", tiled=True))

    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    grad = clipped_grad(loss, 1.0, mean=False)
    run = jax.shard_map(lambda w, x: grad(w, x).grads, mesh=mesh, **specs)
    with pytest.raises(
        ValueError, match=r"clipped_grad: .*all_gather.*'data'.* split the batch"
    ):
        run(jnp.ones((8, 2)), normal(0, 4, 8))


def test_a_sum_over_the_batch_in_a_backward_rule_is_refused():
    """A rule is a function, and no part of the program of a loss."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=AUTO)
    summed = jax.custom_vjp(lambda y: y)

    def backward(kept, cotangent):
        return (lax.pcast(lax.psum(cotangent, "data"), "data", to="varying"),)

    summed.defvjp(lambda y: (y, None), backward)

    def local(w, x):
        grad = clipped_grad(lambda w, x: jnp.sum(x @ summed(w)), 1.0, mean=False)
        return lax.psum(grad(w, x).grads, "data")

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"clipped_grad: .* psum.* over 'data'"):
        run(jnp.ones((8, 2)), normal(0, 4, 8))


@pytest.mark.parametrize("mesh_axes", ["auto", "data", P("data")])
def test_parameters_gathered_before_are_whole(mesh_axes):
    """By type they still differ along the axis, so that names must name it."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=AUTO)
    options = {"mean": False, "mesh_axes": mesh_axes}
    grad = clipped_grad(lambda w, x: jnp.sum(x @ w), 1.0, **options)

    def local(w, x):
        whole = lax.all_gather(w, "data", tiled=True)
        result = grad(whole, x)
        return lax.psum_scatter(result.grads, "data", tiled=True), result.norms

    specs = {"in_specs": (P("data"), P("data")), "out_specs": (P("data"), P("data"))}
    x = normal(0, 8, 8)
    sums, norms = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(jnp.ones((8, 2)), x)
    wanted = np.linalg.norm(np.float64(x), axis=1) * np.sqrt(2)
    np.testing.assert_allclose(norms, wanted, rtol=1e-5)
    clipped = (x * np.minimum(1, 1 / wanted)[:, None]).sum(0)
    np.testing.assert_allclose(sums, np.stack([clipped] * 2, 1), atol=1e-5)
