"""How a batch is cut into microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._jaxpr import every_equation
from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import normal


def widths(size, microbatch):
    """The sizes of the microbatches that a batch is cut into."""

    def loss(w, x):
        return w * jnp.floor(x)

    batch = np.arange(size, dtype=np.float32)
    grad = clipped_grad(
        loss, None, mean=False, method="one_pass", microbatch=microbatch
    )
    found = jax.jit(grad)(jnp.float32(1.0), batch)
    np.testing.assert_array_equal(found.values, batch)
    assert found.grads == size * (size - 1) / 2
    program = jax.make_jaxpr(grad)(jnp.float32(1.0), batch)
    seen = set()
    for outer in program.jaxpr.eqns:
        for eqn in every_equation(outer):
            if eqn.primitive.name == "floor":
                # Computed for all examples that are processed at once.
                seen.add(eqn.outvars[0].aval.size)
    return seen


@pytest.mark.parametrize(
    "size, microbatch, width",
    [(32, 9, 8), (10, 6, 5), (10, 4, 4), (7, 7, 7), (7, 8, 7), (5, 1, 1), (9, None, 9)],
)
def test_microbatches_are_filled_up_as_little_as_can_be(size, microbatch, width):
    assert widths(size, microbatch) == {width}


@pytest.mark.parametrize("number", [float, np.int64, jnp.int32])
def test_a_microbatch_may_be_a_number_of_every_type(number):
    explanation = explain_clipped_grad(long_sequence, microbatch=number(9))
    args = jnp.ones((4, 4)), jnp.ones((32, 2, 4))
    assert explanation(*args) == explain_clipped_grad(long_sequence, microbatch=9)(
        *args
    )
    assert "microbatch: 8\n" in str(explanation(*args))


def test_a_loss_without_parameters_has_no_gradient():
    result = clipped_grad(lambda params, x: x, 1.0)({}, jnp.arange(3.0))
    assert result.grads == {}
    np.testing.assert_array_equal(result.norms, np.zeros(3))
    np.testing.assert_array_equal(result.values, np.arange(3))


def long_sequence(w, x):
    """Which has more positions than one pass takes time for."""
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize(("backend", "batch"), [("cpu", 64), ("gpu", 32)])
def test_auto_chooses_microbatches_that_fill_the_batch(monkeypatch, backend, batch):
    # A cache of a CPU has room for the gradients of 16 examples of 128 x 128, but not
    # of 256 x 256. A GPU has room for 32.
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for size, on_cpu in ((128, 16), (256, 8)):
        args = jnp.ones((size, size)), jnp.ones((batch, 144, size))
        choice = explain_clipped_grad(long_sequence)(*args)
        width = {"cpu": on_cpu}.get(backend)
        assert (choice.method, choice.microbatch) == ("one_pass", width)


@pytest.mark.parametrize(("size", "microbatch"), [(25, None), (26, 13)])
def test_a_batch_of_eight_megabytes_is_taken_at_once(size, microbatch):
    """Of each example 256 inputs and cotangents of 128 numbers, and a gradient."""
    found = explain_clipped_grad(long_sequence)(
        jnp.ones((128, 128)), jnp.ones((size, 256, 128))
    )
    # 2^21 numbers
    assert 25 < 2**21 / (256 * 2 * 128 + 128**2) < 26
    assert (found.method, found.microbatch) == ("one_pass", microbatch)


@pytest.mark.parametrize(("images", "microbatch"), [(1, 8), (16, None)])
def test_convolutions_keep_a_batch_together_by_their_share(images, microbatch):
    """If they would take longer in a loop than all else."""

    def loss(p, image):
        out = jax.lax.conv(image, p["kernel"], (4, 4), "VALID")
        x = out[0].reshape(8, 144).T @ p["in"]
        return jnp.sum(jnp.tanh(x @ p["w"]) ** 2)

    p = {
        "kernel": jnp.ones((8, 3, 4, 4)),
        "in": jnp.ones((8, 256)),
        "w": jnp.ones((256, 256)),
    }
    found = explain_clipped_grad(loss)(p, jnp.ones((64, images, 3, 48, 48)))
    assert (found.method, found.microbatch) == ("one_pass", microbatch)


@pytest.mark.parametrize(("backend", "width"), [("cpu", 8), ("gpu", None)])
def test_without_ghost_clipping_auto_keeps_to_a_memory(monkeypatch, backend, width):
    """Eight megabytes of gradients on a CPU, 256 elsewhere."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    def with_ref(w, x):
        total = jax.new_ref(jnp.zeros(()))
        total[...] += jnp.sum(jnp.tanh(x @ w))
        return total[...]

    batch = jnp.ones((64, 512))
    found = explain_clipped_grad(with_ref)(jnp.ones((512, 512)), batch)
    assert (found.method, found.microbatch) == ("one_pass", width)
    # All of a small one, and one of a large one.
    found = explain_clipped_grad(with_ref)(jnp.ones((512, 64)), batch)
    assert found.microbatch is None
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    large = jax.ShapeDtypeStruct((512, 8192), jnp.float32)
    explain = explain_clipped_grad(with_ref)
    found = []
    jax.eval_shape(lambda w: found.append(explain(w, batch)), large)
    assert found[0].microbatch == 1


@pytest.mark.parametrize("method", ["auto", "one_pass"])
def test_costs_of_all_methods_are_shown(method):
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    # Forward: a product, and 21 other numbers for 8 each. A plain gradient: three times
    # that, and a quarter of writing 600 numbers, for 48 each. Ghost clipping keeps and
    # multiplies |x| |c|, of 30 and 20 numbers.
    found = explain_clipped_grad(loss, method=method)(
        jnp.ones((30, 20)), jnp.ones((4, 30))
    )
    plain = 3 * (600 + 21 * 8) + 48 * 600 / 4
    one, ghost = 1 + 48 * 600 / plain, 1 + (48 * 50 + 50) / plain
    expected = {"ghost": ghost, "one_pass": one}
    assert found.costs == pytest.approx(expected)
    assert "ghost 1.3" in str(found)


def test_a_loop_over_convolutions_costs_more_than_one_for_all():
    def loss(kernel, image):
        return jnp.sum(jax.lax.conv(image, kernel, (1, 1), "SAME"))

    # Forward: 144 sums of 18 products, each of which counts twice in a convolution, and
    # a number for 8. A plain gradient: as above.
    products = 144 * 18 * 2
    plain = 3 * (products + 8) + 48 * 72 / 4
    for microbatch, times in ((None, 2), (4, 2), (1, 16)):
        explain = explain_clipped_grad(loss, microbatch=microbatch)
        found = explain(jnp.ones((4, 2, 3, 3)), jnp.ones((4, 1, 2, 6, 6)))
        slower = (times - 1) * 3 * products
        expected = 1 + (48 * 72 + slower) / plain
        assert found.costs["one_pass"] == pytest.approx(expected)


@pytest.mark.parametrize(("stride", "times"), [(1, 2), (2, 2), (3, 1), (4, 1)])
def test_products_of_windows_that_overlap_count_twice(stride, times):
    """Ghost clipping keeps a gradient. The plain gradient writes the image and the
    cotangents of the outputs too.
    """

    def loss(kernel, image):
        return jnp.sum(jax.lax.conv(image, kernel, (stride, stride), "VALID"))

    outputs = ((24 - 3) // stride + 1) ** 2 * 2
    plain = 3 * (times * 9 * outputs + 8) + 48 * 18 / 4
    explain = explain_clipped_grad(loss, method="ghost")
    found = explain(jnp.ones((2, 1, 3, 3)), jnp.ones((4, 1, 1, 24, 24)))
    assert found.costs["ghost"] == pytest.approx(1 + 48 * 18 / plain)


@pytest.mark.parametrize(("groups", "outputs"), [(1, 6), (3, 6), (6, 6), (6, 12)])
def test_a_kernel_of_groups_costs_as_much_as_of_one(groups, outputs):
    def loss(kernel, image):
        return jnp.sum(convolved(image, kernel, groups))

    explain = explain_clipped_grad(loss, method="ghost")
    found = explain(jnp.ones((3, 3, 6 // groups, outputs)), jnp.ones((4, 1, 8, 8, 6)))
    gradient = 48 * 9 * 6 // groups * outputs
    plain = 3 * (8 * 8 * outputs * 2 * 9 * 6 + 8) + gradient / 4
    assert found.costs["ghost"] == pytest.approx(1 + gradient / plain)


def convolved(image, kernel, groups=1):
    return jax.lax.conv_general_dilated(
        image,
        kernel,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


KERNELS = {
    "depthwise": [(3, 3, 1, 48)],
    "separable": [(3, 3, 1, 48), (1, 1, 48, 48)],
    "single pixels": [(1, 1, 48, 48)],
    "single pixels, few channels": [(1, 1, 48, 8), (1, 1, 8, 8), (1, 1, 8, 8)],
}


def network(kernels, image):
    for kernel in kernels:
        groups = image.shape[-1] // kernel.shape[2]
        image = jnp.tanh(convolved(image, kernel, groups))
    return jnp.mean(image**2)


@pytest.mark.parametrize("batch", [8, 256])
@pytest.mark.parametrize("kind", KERNELS)
def test_auto_takes_ghosts_for_small_kernels(kind, batch):
    """One pass took up to 144 times the memory of the plain gradient."""
    kernels = [jnp.ones(shape) for shape in KERNELS[kind]]
    found = explain_clipped_grad(network)(kernels, jnp.ones((batch, 1, 24, 24, 48)))
    assert (found.method, found.microbatch) == ("ghost", None)
    assert found.costs["ghost"] < 1.1 < 1.2 < found.costs["one_pass"]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("method", ["auto", "one_pass"])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_depthwise_gradients_are_made_one_by_one(
    monkeypatch, backend, method, microbatch
):
    """If ghost clipping would make them too."""

    def loss(kernels, image):
        standardized = [kernel / jnp.std(kernel) for kernel in kernels]
        return network(standardized, image)

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    explain = explain_clipped_grad(loss, method=method, microbatch=microbatch)
    found = explain([normal(0, 3, 3, 1, 48)], jnp.ones((8, 1, 24, 24, 48)))
    assert found.microbatch == 1


@pytest.mark.parametrize(("window", "most"), [(4, 0.1), (1, 0.01)])
def test_a_convolution_counts_by_its_share(window, most):
    """The patches of an image before large matrices, or single pixels."""

    def loss(p, image):
        strides = (window, window)
        h = jax.lax.conv(image[None], p["kernel"], strides, "VALID")
        return jnp.sum(jnp.tanh(h.reshape(8, 16).T @ p["w"]) ** 2)

    p = {"kernel": jnp.ones((8, 3, window, window)), "w": jnp.ones((8, 4000))}
    batch = jnp.ones((4, 3, 4 * window, 4 * window))
    costs = []
    for microbatch in (1, 4):
        found = explain_clipped_grad(loss, microbatch=microbatch)(p, batch)
        costs.append(found.costs["one_pass"])
    # In a loop the share counts 16 times, at once twice.
    plain = 3 * 16 * 4000 * 8
    slower = (16 - 2) * 3 * 16 * 8 * 3 * window**2
    assert 0 < costs[0] - costs[1] <= most
    assert costs[0] - costs[1] <= slower / plain


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
@pytest.mark.parametrize(
    ("microbatch", "width"), [(9, 8), (32, None), (100, None), (31, 16), (8, 8)]
)
def test_the_microbatch_that_runs_is_explained(method, microbatch, width):
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    options = {"method": method, "microbatch": microbatch}
    args = jnp.ones((4, 3)), jnp.ones((32, 4))
    found = explain_clipped_grad(loss, **options)(*args)
    assert found.microbatch == width
    program = str(jax.make_jaxpr(clipped_grad(loss, 1.0, **options))(*args))
    turns = 32 // width if width else 1
    assert (f"length={turns}" in program) == (turns > 1)
