"""On a mesh with Explicit axes a batch is clipped as on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import clipped_grad
from optaxclip.per_example import explain_clipped_grad
from tests.per_example.batches import METHODS, normal

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
# Specs of `in`, `out` and `bias`, and of the batch.
SPLITS = {
    "nothing": (P(), P(), P(), P()),
    "batch": (P(), P(), P(), P("x")),
    "as in FSDP": (P("y"), P(None, "y"), P("y"), P("y")),
    "over a part of the batch's axes": (P("x"), P("y"), P(), P(("x", "y"))),
    "over both axes": (P("y", "x"), P(("y", "x")), P("x"), P(("x", "y"))),
}
PARAMS = {"in": normal(0, 8, 8), "out": normal(1, 8, 4), "bias": normal(2, 4)}
BATCH = normal(3, 16, 8)
BATCH[6] = np.nan
IS_REAL = np.arange(16) % 5 > 0
LIMIT = 3.0


def loss(p, x):
    return jnp.sum(jnp.tanh(x @ p["in"]) @ p["out"] + p["bias"])


def exact():
    """Norms, and the mean of clipped gradients, in float64."""
    p, x = jax.tree.map(np.float64, (PARAMS, BATCH))
    hidden = np.tanh(x @ p["in"])
    inner = (1 - hidden**2) * p["out"].sum(1)
    each = {
        "in": x[:, :, None] * inner[:, None],
        "out": hidden[:, :, None] * np.ones(4),
        "bias": np.ones((16, 4)),
    }
    norms = np.sqrt(sum((g.reshape(16, -1) ** 2).sum(1) for g in each.values()))
    counts = np.isfinite(norms) & IS_REAL
    factors = np.where(counts, np.minimum(1, LIMIT / norms), 0)
    means = {}
    for name, grads in each.items():
        total = np.einsum("b,b...", factors[counts], grads[counts])
        means[name] = total / IS_REAL.sum()
    return np.where(IS_REAL, norms, 0), factors, means


def placed(tree, spec):
    return jax.device_put(tree, NamedSharding(MESH, spec))


def split(name):
    *specs, of_batch = SPLITS[name]
    params = dict(zip(PARAMS, map(placed, PARAMS.values(), specs)))
    return params, placed(BATCH, of_batch)


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_it_is_exact_however_arrays_are_split(method):
    norms, factors, means = exact()
    for name in SPLITS:
        params, batch = split(name)
        grad = jax.jit(clipped_grad(loss, LIMIT, method=method))
        with jax.set_mesh(MESH):
            found = grad(params, batch, mask=IS_REAL)
        np.testing.assert_allclose(found.norms, norms, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found.factors, factors, rtol=1e-5, err_msg=name)
        assert (found.nonfinite, found.divisor) == (1, IS_REAL.sum())
        for key, mean in means.items():
            np.testing.assert_allclose(found.grads[key], mean, atol=1e-6, err_msg=name)
            assert jax.typeof(found.grads[key]) == jax.typeof(params[key])
        assert found.values.sharding == found.norms.sharding
        of_batch = NamedSharding(MESH, SPLITS[name][3])
        assert found.norms.sharding.is_equivalent_to(of_batch, 1)


def test_the_mesh_need_not_be_set():
    grad = jax.jit(clipped_grad(loss, LIMIT, method="ghost"))
    found = grad(*split("as in FSDP"), mask=IS_REAL)
    np.testing.assert_allclose(found.grads["in"], exact()[2]["in"], atol=1e-6)


def compiled(method):
    """A gradient of three square matrices, split as in FSDP."""
    mesh = jax.make_mesh((8,), ("data",))
    sharding = NamedSharding(mesh, P("data"))

    def three(p, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2])

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    grad = clipped_grad(three, 1.0, method=method)
    run = jax.jit(lambda p, x: grad(p, x).grads)
    return run.lower([shaped(256, 256)] * 3, shaped(64, 256)).compile()


def test_each_matrix_is_gathered_once_and_scattered_once():
    text = compiled("auto").as_text()
    found = re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", text)
    assert sorted(found) == ["all-gather"] * 3 + ["reduce-scatter"] * 3


def test_auto_makes_no_gradients_of_examples():
    temporary = [
        compiled(method).memory_analysis().temp_size_in_bytes
        for method in ("auto", "ghost", "one_pass")
    ]
    assert temporary[0] == temporary[1]
    # Three gradients of whole matrices, and a little: a device has 8 examples.
    assert temporary[0] < 4 * 256**2 * 4 < temporary[2]


@pytest.mark.parametrize("method", METHODS)
def test_shared_arguments_keys_and_limits_may_be_split(method):
    def noisy(p, shared, function, key, x):
        x = x + 0.1 * jax.random.normal(key, x.shape)
        return function(loss({**p, **shared}, x))

    def run(params, keys, batch, limit):
        own, shared = {"in": params["in"]}, {k: params[k] for k in ("out", "bias")}
        options = {"shared_argnums": (1, 2), "method": method, "microbatch": 8}
        grad = clipped_grad(noisy, {"in": limit}, **options)
        return grad(own, shared, jnp.sin, keys, batch)

    params, batch = split("as in FSDP")
    keys = jax.random.split(jax.random.key(0), 16)
    wanted = jax.jit(run)(PARAMS, keys, BATCH, 1.0)
    with jax.set_mesh(MESH):
        limit = placed(np.float32(1), P())
        found = jax.jit(run)(params, placed(keys, P("y")), batch, limit)
    np.testing.assert_allclose(found.grads["in"], wanted.grads["in"], atol=1e-6)
    np.testing.assert_allclose(found.norms["in"], wanted.norms["in"], rtol=1e-5)


@pytest.mark.parametrize("microbatch", [1, 3, 5, 8])
@pytest.mark.parametrize("method", METHODS)
def test_devices_share_each_microbatch(method, microbatch):
    grad = clipped_grad(loss, LIMIT, method=method, microbatch=microbatch)
    with jax.set_mesh(MESH):
        found = jax.jit(grad)(*split("batch"), mask=IS_REAL)
    norms, _, means = exact()
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    np.testing.assert_allclose(found.grads["in"], means["in"], atol=1e-6)


def test_explain_tells_what_devices_do_together():
    explain = explain_clipped_grad(loss, method="ghost")
    whole, part = explain(PARAMS, BATCH), explain(*split("as in FSDP"))
    # The sum is still that of all examples.
    assert part.change == whole.change
    # Two devices have one example each, or as many as do not exceed the microbatch.
    for microbatch, width in ((1, 2), (3, 2), (5, 4), (8, 8)):
        explain = explain_clipped_grad(loss, microbatch=microbatch)
        assert explain(*split("batch")).microbatch == width


def test_costs_are_those_of_what_a_device_takes_at_once():
    """Four images on two devices, two at once, are one for each in a loop."""

    def loss(kernel, image):
        return jnp.sum(jax.lax.conv(image[None], kernel, (1, 1), "SAME"))

    kernel, images = normal(0, 4, 2, 3, 3), normal(1, 4, 2, 6, 6)
    half = explain_clipped_grad(loss, microbatch=1)(kernel, images[:2])
    explain = explain_clipped_grad(loss, microbatch=2)
    found = explain(placed(kernel, P()), placed(images, P("x")))
    assert found.costs == half.costs
    assert found.costs != explain_clipped_grad(loss)(kernel, images[:2]).costs


# What follows has layers that are split over an axis that does not split the batch.
GRADIENTS = normal(4, 6, 8)
TENSOR_PARALLEL = {
    "numbers": (P("y"), P(None, "y")),
    "both": (P("y"), P("x", "y")),
    "also as in FSDP": (P(("x", "y")), P("x", "y")),
}


def product(w, gradient):
    return jnp.sum(w * gradient)


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("method", ["one_pass", "auto"])
def test_other_axes_stay_explicit(method, microbatch):
    norms = np.linalg.norm(np.float64(GRADIENTS), axis=1)
    mean = (GRADIENTS * np.minimum(1, 2 / norms)[:, None]).mean(0)
    for of_weights, of_batch in TENSOR_PARALLEL.values():
        options = {"method": method, "microbatch": microbatch}
        grad = jax.jit(clipped_grad(product, 2.0, **options))
        with jax.set_mesh(MESH):
            weights = placed(np.zeros(8, np.float32), of_weights)
            found = grad(weights, placed(GRADIENTS, of_batch))
        np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
        np.testing.assert_allclose(found.grads, mean, atol=1e-6)
        assert jax.typeof(found.grads) == jax.typeof(weights)


@pytest.mark.parametrize("method", ["auto", "one_pass"])
def test_rows_of_a_table_may_be_split_over_another_axis(method):
    """Where the lookup says how it is split, which `jax.grad` asks for too."""
    table, words = normal(0, 16, 8), np.arange(24, dtype=np.int32).reshape(8, 3) % 16

    def loss(table, words):
        rows = table.at[words].get(out_sharding=P())
        return jnp.sum(jnp.tanh(rows) ** 2)

    def whole(table, words):
        return jnp.sum(jnp.tanh(table[words]) ** 2)

    grad = jax.jit(clipped_grad(loss, 0.5, method=method))
    wanted = jax.jit(clipped_grad(whole, 0.5))(table, words)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        parts = jax.reshard(table, P("model")), jax.reshard(words, P("data"))
        found = grad(*parts)
        assert jax.typeof(found.grads).sharding.spec == P("model", None)
        with pytest.raises(Exception, match="out_sharding=") as caught:
            jax.jit(clipped_grad(whole, 0.5, method=method))(*parts)
        cure = "table.at[rows].get(out_sharding=jax.sharding.PartitionSpec())"
        assert any(
            note.startswith("clipped_grad: ") and cure in note
            for note in caught.value.__notes__
        )
    assert np.any(wanted.factors < 1)
    np.testing.assert_allclose(found.grads, wanted.grads, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=1e-5)


def test_ghost_clipping_names_what_other_axes_split():
    weights, batch = placed(np.zeros(8), P("y")), placed(GRADIENTS, P("x"))
    grad = clipped_grad(product, 2.0, method="ghost")
    with (
        jax.set_mesh(MESH),
        pytest.raises(ValueError, match=r"method must be .* 'parameters'.*\[8@y\]"),
    ):
        grad(weights, batch)


def test_ghost_clipping_of_layers_that_auto_axes_split():
    specs = {"in": P("x", "y"), "out": P("y"), "bias": P()}
    params = {name: placed(PARAMS[name], spec) for name, spec in specs.items()}

    def run(params, batch):
        result = clipped_grad(loss, LIMIT, method="ghost")(params, batch, mask=IS_REAL)
        return result.grads, result.norms

    whole = jax.sharding.auto_axes(run, axes="y", out_sharding=(specs, P("x")))
    with jax.set_mesh(MESH):
        grads, found = jax.jit(whole)(params, placed(BATCH, P("x")))
    norms, _, means = exact()
    np.testing.assert_allclose(found, norms, rtol=1e-5)
    for name, mean in means.items():
        np.testing.assert_allclose(grads[name], mean, atol=1e-6)
