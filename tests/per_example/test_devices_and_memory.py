"""Batches that are split over devices, and memory beside the size of a batch."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import (
    EPS,
    METHODS,
    MLP,
    SIZE,
    close,
    examples,
    hard_factor,
    normal,
    norms_of,
    weighted,
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.slow
def test_in_shard_map_each_device_clips_its_own_examples(check_vma, method):
    loss, params, batch = MLP
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grad = clipped_grad(loss, 0.5, mean=False, method=method)

    def local(params, batch):
        result = grad(params, batch)
        return lax.psum(result.grads, "data"), result.norms

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P("data")),
            check_vma=check_vma,
        )
    )
    grads, norms = run(params, batch)
    leaves = examples()[1]
    np.testing.assert_allclose(norms, norms_of(leaves), rtol=64 * EPS)
    close(grads, weighted(leaves, hard_factor(norms_of(leaves), 0.5)), SIZE)


def convolved(image, kernel):
    form = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    form["feature_group_count"] = image.shape[3] // kernel.shape[2]
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", **form)


def one_kernel(kernel, image):
    return jnp.sum(jnp.tanh(convolved(image[None], kernel)))


def tied_kernels(kernel, image):
    hidden = jax.nn.relu(convolved(image[None], kernel))
    return jnp.sum(jnp.tanh(convolved(hidden, kernel.transpose(0, 1, 3, 2))))


@pytest.mark.parametrize("call", [jax.jit, lambda run: run], ids=["jit", "Python"])
def test_kernels_of_a_split_batch_are_right_or_refused(call):
    """XLA in JAX 0.10.2 and 0.12 gets gradients of examples by a kernel wrong there."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel, images = normal(0, 3, 3, 2, 2), normal(1, 16, 6, 6, 2)
    split = jax.device_put(images, NamedSharding(mesh, P("data")))
    leaves = jax.tree.leaves(jax.vmap(jax.grad(one_kernel), (None, 0))(kernel, images))
    for method in ("auto", "ghost"):
        run = clipped_grad(one_kernel, 0.5, method=method)
        result = call(run)(kernel, split)
        np.testing.assert_allclose(result.norms, norms_of(leaves), rtol=64 * EPS)
    wrong = {"one_pass": one_kernel, "auto": tied_kernels, "ghost": tied_kernels}
    for method, loss in wrong.items():
        run = clipped_grad(loss, 0.5, method=method)
        # With the line of the convolution.
        line = r"\(.*test_devices_and_memory\.py:\d+\)"
        text = f'each kernel used once.*{line}.*Got method="{method}"'
        with pytest.raises(ValueError, match=text):
            call(run)(kernel, split)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_patches_are_made_a_few_at_a_time_on_a_cpu_only(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    kernel, images = jnp.ones((3, 3, 4, 4)), jnp.ones((8, 64, 64, 4))
    run = clipped_grad(one_kernel, 0.5, method="ghost")
    program = str(jax.make_jaxpr(run)(kernel, images))
    assert ("scan" in program) == (backend == "cpu")


KERNELS_BY_EXAMPLE = {
    "rule": lambda kernel, image: optaxclip.clip_cotangent(kernel, max_norm=1.0),
    "data": lambda kernel, image: kernel * (1 + jnp.tanh(jnp.mean(image))),
}


@pytest.mark.parametrize("kind", KERNELS_BY_EXAMPLE)
def test_a_kernel_of_each_example_lets_no_nan_through(kind):
    """Of jax.vjp of jax.vmap the NaN of one example comes to all, on a CPU."""

    def loss(kernel, image):
        return one_kernel(KERNELS_BY_EXAMPLE[kind](kernel, image), image)

    kernel, images = normal(0, 3, 3, 2, 2), normal(1, 16, 6, 6, 2)
    run = jax.jit(clipped_grad(loss, 0.5, mean=False))
    leaves = [jax.vmap(jax.grad(loss), (None, 0))(kernel, images[:15])]
    wanted = weighted(leaves, hard_factor(norms_of(leaves), 0.5))
    images[15] = np.nan
    for mask, broken in ((None, 1), (np.arange(16) < 15, 0)):
        found = run(kernel, images, mask=mask)
        assert found.nonfinite == broken
        close([found.grads], wanted, 15)
    with pytest.raises(ValueError, match=r"kernel depends on the example .*, got"):
        clipped_grad(loss, 0.5, method="ghost")(kernel, images)
    # XLA makes them wrong on a batch that is split, in the forward pass already.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(images, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="each kernel used once"):
        run(kernel, split)


def standardized(kernel, image):
    return one_kernel(kernel / jnp.std(kernel), image)


@pytest.mark.parametrize("loss", [one_kernel, standardized])
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_a_kernel_of_groups_lets_no_nan_through(method, loss):
    """Of jax.vmap of jax.grad the NaN of one example comes to all, on a CPU."""
    # Depthwise, of several outputs a channel, and of several channels a group.
    for shape in ((1, 4), (1, 8), (2, 2), (2, 4)):
        kernel, images = normal(0, 3, 3, *shape), normal(1, 5, 6, 6, 4)
        each = jax.vmap(jax.grad(loss), (None, 0))(kernel, images)
        images[2] = np.nan
        norms = jax.jit(clipped_grad(loss, 0.5, method=method))(kernel, images).norms
        wanted = np.where(np.arange(5) == 2, np.nan, norms_of([each]))
        np.testing.assert_allclose(norms, wanted, rtol=64 * EPS, err_msg=str(shape))


def kernel_of_example(kernel, image):
    return one_kernel(KERNELS_BY_EXAMPLE["data"](kernel, image), image)


@pytest.mark.parametrize("loss", [one_kernel, tied_kernels, kernel_of_example])
@pytest.mark.parametrize("method", ["auto", "one_pass"])
def test_convolutions_of_float64_let_no_nan_through(method, loss):
    with jax.enable_x64(True):
        kernel = np.float64(normal(0, 3, 3, 2, 2))
        images = np.float64(normal(1, 5, 6, 6, 2))
        wanted = norms_of([jax.vmap(jax.grad(loss), (None, 0))(kernel, images)])
        images[2] = np.nan
        result = jax.jit(clipped_grad(loss, 0.5, method=method))(kernel, images)
    wanted[2] = np.nan
    np.testing.assert_allclose(result.norms, wanted, rtol=64 * EPS)


@jax.custom_vjp
def sum_of_both(kernel, image):
    """Its derivatives are those of `one_kernel`."""
    return jnp.sum(kernel) * jnp.sum(image)


sum_of_both.defvjp(
    lambda kernel, image: (sum_of_both(kernel, image), (kernel, image)),
    lambda both, cotangent: jax.vjp(one_kernel, *both)[1](cotangent),
)


def beside_another(kernel, image):
    return sum_of_both(kernel, image) + one_kernel(jnp.ones((3, 3, 4, 1)), image)


@pytest.mark.parametrize("loss", [sum_of_both, beside_another])
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_convolutions_of_a_rule_alone_let_no_nan_through(method, loss):
    kernel, images = normal(0, 3, 3, 2, 4), normal(1, 5, 6, 6, 4)
    wanted = norms_of([jax.vmap(jax.grad(loss), (None, 0))(kernel, images)])
    images[2] = wanted[2] = np.nan
    norms = jax.jit(clipped_grad(loss, 0.5, method=method))(kernel, images).norms
    np.testing.assert_allclose(norms, wanted, rtol=64 * EPS)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(np.ones((8, 6, 6, 4)), NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="splits over devices"):
        clipped_grad(loss, 0.5, method=method)(kernel, split)


@pytest.mark.parametrize("method", ["auto", "one_pass"])
def test_groups_of_images_let_no_nan_through(method):
    def loss(scale, images):
        kernel = scale * images[:2, :3, :3].transpose(1, 2, 3, 0)
        form = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "batch_group_count": 2}
        out = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", **form)
        return jnp.sum(jnp.tanh(out))

    scale, examples_of_4 = normal(0, 3, 3, 2, 2), normal(1, 5, 4, 6, 6, 2)
    wanted = norms_of([jax.vmap(jax.grad(loss), (None, 0))(scale, examples_of_4)])
    examples_of_4[2] = wanted[2] = np.nan
    grad = jax.jit(clipped_grad(loss, 0.5, method=method))
    np.testing.assert_allclose(grad(scale, examples_of_4).norms, wanted, rtol=64 * EPS)


@pytest.mark.parametrize("loss", [one_kernel, standardized])
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_a_kernel_of_groups_lets_no_nan_pass_a_limit_of_all_norms(method, loss):
    kernel, images = normal(0, 3, 3, 2, 4), normal(1, 5, 6, 6, 4)
    options = {"private": False, "method": method}
    grad = jax.jit(clipped_grad(loss, jnp.nanmedian, **options))
    leaves = [jax.vmap(jax.grad(loss), (None, 0))(kernel, images)]
    np.testing.assert_allclose(grad(kernel, images).norms, norms_of(leaves), 64 * EPS)
    images[2] = np.nan
    found = grad(kernel, images)
    assert found.nonfinite == 1
    assert np.isfinite(found.grads).all()


def test_products_with_what_adapters_make_are_for_a_few_examples():
    """Merged LoRA: the gradient by a @ b of an example is as large as the weights."""

    def loss(adapter, x):
        return jnp.sum(jnp.tanh(x @ (1 + adapter["a"] @ adapter["b"])))

    adapter = {"a": normal(0, 512, 4), "b": normal(1, 4, 512)}
    assert explain_clipped_grad(loss)(adapter, normal(2, 64, 512)).microbatch == 1


@pytest.mark.parametrize("loss", [one_kernel, tied_kernels])
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_kernels_of_a_batch_that_in_shardings_split(method, loss):
    """That only the compiler sees, so it raises."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel, images = normal(0, 3, 3, 2, 2), normal(1, 16, 6, 6, 2)
    specs = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    run = jax.jit(clipped_grad(loss, 0.5, method=method), in_shardings=specs)
    if loss is one_kernel and method in ("auto", "ghost"):
        each = jax.vmap(jax.grad(one_kernel), (None, 0))(kernel, images)
        norms = run(kernel, images).norms
        np.testing.assert_allclose(norms, norms_of([each]), rtol=64 * EPS)
        return
    with pytest.raises(RuntimeError, match=f'used once.*Got method="{method}"'):
        run(kernel, images)
    # Nothing is split here.
    jax.jit(clipped_grad(loss, 0.5, method=method))(kernel, images)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_kernels_of_a_batch_in_shard_map_are_right(method):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel, images = normal(0, 3, 3, 2, 2), normal(1, 16, 6, 6, 2)
    each = jax.vmap(jax.grad(tied_kernels), (None, 0))(kernel, images)

    def local(kernel, images):
        run = clipped_grad(tied_kernels, 0.5, mean=False, method=method)
        result = run(kernel, images)
        return lax.psum(result.grads, "data"), result.norms

    split = P(), P("data")
    run = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
    grads, norms = jax.jit(run)(kernel, images)
    np.testing.assert_allclose(norms, norms_of([each]), rtol=64 * EPS)
    close([grads], weighted([each], hard_factor(norms_of([each]), 0.5)), 16)


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_kernels_of_a_batch_on_an_explicit_mesh_are_right(method):
    split = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    kernel, images = normal(0, 3, 3, 2, 2), normal(1, 16, 6, 6, 2)
    each = jax.vmap(jax.grad(tied_kernels), (None, 0))(kernel, images)
    run = jax.jit(clipped_grad(tied_kernels, 0.5, mean=False, method=method))
    found = run(kernel, jax.device_put(images, split))
    np.testing.assert_allclose(found.norms, norms_of([each]), rtol=64 * EPS)
    close([found.grads], weighted([each], hard_factor(norms_of([each]), 0.5)), 16)


@cache
def temporary(method, batch, microbatch):
    shapes = {"in": (64, 256), "mid": (256, 256), "out": (256, 10)}

    def loss(p, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p["in"]) @ p["mid"]) @ p["out"])

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    run = jax.jit(
        lambda p, xs: (
            clipped_grad(loss, 1.0, microbatch=microbatch, method=method)(p, xs).grads
        )
    )
    return (
        run.lower(
            {name: shaped(*shape) for name, shape in shapes.items()}, shaped(batch, 64)
        )
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memory_does_not_grow_with_the_batch(method):
    """From 16 to 1024 examples it may grow by a few numbers for each example, never by
    a gradient, which is 338 kB.
    """
    assert abs(temporary(method, 1024, 8) - temporary(method, 16, 8)) < 1024 * 64


@pytest.mark.slow
def test_memory_grows_with_the_microbatch():
    gradient = 4 * (64 * 256 + 256 * 256 + 256 * 10)
    small, large = temporary("one_pass", 1024, 8), temporary("one_pass", 1024, 32)
    assert large - small > 0.9 * 24 * gradient


def test_a_perceptron_takes_the_memory_of_its_plain_gradient():
    """Only one layer at a time has its captured arrays copied, after the gradients by
    all biases are added up.
    """

    def loss(layers, x):
        *hidden_layers, (bias, w) = layers
        for hidden_bias, hidden_w in hidden_layers:
            x = jax.nn.relu(x @ hidden_w + hidden_bias)
        return jax.nn.logsumexp(x @ w + bias)

    widths = (256, 256, 10)
    layers = [(jnp.ones(width), jnp.ones((256, width))) for width in widths]
    xs = jnp.ones((256, 256))

    def plain(layers, xs):
        values = jax.vmap(loss, (None, 0))
        return jax.grad(lambda layers: jnp.mean(values(layers, xs)))(layers)

    def ghost(layers, xs):
        return clipped_grad(loss, 1.0, method="ghost")(layers, xs).grads

    sizes = []
    for run in (plain, ghost):
        compiled = jax.jit(run).lower(layers, xs).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] <= 1.1 * sizes[0]
