"""AGC, Clippy and LARC beside their equations in float64 NumPy, and the figures of
TensorFlow Recommenders' tests.
"""

import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import adaptive_grad_clip, clippy, larc
from tests import oracles
from tests.helpers import apply

EPS = oracles.eps_of("float32")


def by_clippy(updates, params, *args, **options):
    return apply(clippy(*args, **options), updates, params)


# (update, weight, relative, absolute, result, scale)
PUBLIC = [
    (2.0, 4.0, 0.1, 0.02, 0.42, 0.21),
    (2.0, -4.0, 0.1, 0.02, 0.42, 0.21),
    (-2.0, 4.0, 0.1, 0.02, -0.42, 0.21),
    (-2.0, 4.0, 0.1, 0.0, -0.4, 0.2),
    (-2.0, 0.0, 0.1, 0.0, 0.0, 0.0),
    (2.0, 20.0, 0.1, 0.1, 2.0, 1.0),
    (-2.0, 20.0, 0.1, 0.1, -2.0, 1.0),
    (0.0, 1.0, 0.1, 0.1, 0.0, 1.0),
    (0.0, 1.0, 0.1, 0.0, 0.0, 1.0),
    (0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    (2.0, 0.0, 0.1, 0.02, 0.02, 0.01),
    ([1.0, 1.0], [1.0, 0.1], 0.1, 0.01, [0.02, 0.02], 0.02),
    (
        [1.0, 1.0, 0.0, 0.0],
        [1.0, 0.1, 1.0, 0.0],
        0.1,
        0.0,
        [0.01, 0.01, 0.0, 0.0],
        0.01,
    ),
    ([1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], 0.1, 0.0, [0.0, 0.0, 0.0, 0.0], 0.0),
    (
        [[1.0, 2.0], [1.0, 2.0]],
        [[1.0, 1.0], [1.0, 1.0]],
        0.1,
        0.1,
        [[0.1, 0.2], [0.1, 0.2]],
        0.1,
    ),
    ([10.0, 10.0], [1.0, 2.0], 0.4, 0.2, [0.6, 0.6], 0.06),
]


def test_clippy_gives_the_public_figures():
    for update, weight, relative, absolute, result, factor in PUBLIC:
        updates, state = by_clippy(
            jnp.float32(update), jnp.float32(weight), relative, absolute
        )
        np.testing.assert_allclose(updates, np.float64(result), rtol=1e-6)
        # A tensor of zeros is multiplied by nothing that matters.
        if np.any(update):
            np.testing.assert_allclose(state.factor, factor, rtol=1e-6)


def test_the_smallest_normal_update_within_its_bounds_does_not_change():
    updates, weights = jnp.array([2.0**-126]), jnp.ones(1)
    found, state = apply(optaxclip.clippy(), updates, weights)
    np.testing.assert_array_equal(found, updates)
    assert state.clipped == 0


def test_clippy_sees_one_wild_coordinate():
    params, updates = jnp.ones(10_000), jnp.full(10_000, 1e-3).at[17].set(10.0)
    clipped, state = by_clippy(updates, params)
    np.testing.assert_allclose(clipped[17], 0.1, rtol=1e-6)
    # 10 is 100 times its bound of 0.1.
    np.testing.assert_allclose((state.norm, state.limit), (100.0, 1.0), rtol=1e-5)


def test_a_tensor_stays_where_a_bound_is_0_or_far_below():
    for update, absolute in ((1e-30, 0.0), (1.0, 1e-39), (1e30, 1e-30)):
        updates = jnp.array([update, 0.1])
        clipped, state = by_clippy(updates, jnp.array([0.0, 1.0]), 0.1, absolute)
        np.testing.assert_array_equal(clipped, 0)
        assert (state.factor, state.limit, state.nonfinite) == (0, 0, 0)
        assert np.isfinite(state.norm)


def test_the_smallest_normal_bound_is_not_0():
    smallest = 2.0**-126
    _, state = by_clippy(jnp.ones(1), jnp.ones(1), smallest, 0.0)
    assert (state.norm, state.limit) == (1 / smallest, 1)


def test_bounds_of_64_bits_may_be_below_those_of_float32():
    with jax.enable_x64(True):
        updates, weights = np.array([4e-50, 1e-50]), np.array([2e-50, 2e-50])
        clipped, _ = by_clippy(jnp.asarray(updates), jnp.asarray(weights), 0.5, 0.0)
    np.testing.assert_allclose(clipped, updates / 4, rtol=1e-12)


def test_a_broken_update_is_seen_where_the_bound_is_0():
    for broken in (math.nan, math.inf):
        clipped, state = by_clippy(jnp.array([broken, 1.0]), jnp.zeros(2), 0.1, 0.0)
        assert np.isnan(clipped).all() and state.nonfinite == 1


def test_what_is_broken_becomes_nan_by_clippy_and_is_counted():
    for broken in (math.nan, math.inf):
        updates = {"a": jnp.array([1.0, broken]), "b": jnp.array([1.0, 2.0])}
        clipped, state = by_clippy(updates, {"a": jnp.ones(2), "b": jnp.ones(2)})
        assert np.isnan(clipped["a"]).all() and np.isfinite(clipped["b"]).all()
        np.testing.assert_array_equal(state.nonfinite, [1, 0])
    assert np.isnan(by_clippy(jnp.ones(2), jnp.array([1.0, math.nan]))[0]).all()
    assert np.isnan(by_clippy(jnp.zeros(2), jnp.array([1.0, math.nan]))[0]).all()


@pytest.mark.slow
def test_the_derivative_of_clippy_is_finite():
    def total(updates):
        return jnp.sum(by_clippy(updates, jnp.array([1.0, 0.0, 2.0]), 0.1, 0.0)[0])

    for updates in (
        jnp.zeros(3),
        jnp.array([1.0, 0.0, 3.0]),
        jnp.array([1.0, 1.0, 3.0]),
        jnp.array([1e-3, 0.0, 1e-3]),
    ):
        assert np.isfinite(jax.grad(total)(updates)).all()


def test_an_infinite_bound_of_either_kind_touches_nothing():
    updates = jnp.array([1e30, -2.0, 0.0])
    for bounds in ((np.inf, 0.0), (0.0, np.inf)):
        clipped, state = apply(clippy(*bounds), updates, jnp.array([1e-3, 0.0, 2.0]))
        assert oracles.same_bits(clipped, updates)
        assert state.limit == np.inf and state.nonfinite == 0


def test_the_smallest_weights_still_bound_their_updates():
    clipped, _ = apply(
        clippy(0.5, 0.0), jnp.array([4e-30, 1e-31]), jnp.array([2e-30, 2e-30])
    )
    np.testing.assert_allclose(clipped, [1e-30, 2.5e-32], rtol=1e-6)


def test_clippy_compares_complex_updates_by_modulus():
    clipped, _ = apply(
        clippy(0.5, 0.0), jnp.array([3 + 4j, 1j]), jnp.array([2 + 0j, 2j])
    )
    np.testing.assert_allclose(clipped, [0.6 + 0.8j, 0.2j], rtol=1e-6)


def test_clippy_compares_updates_of_16_bits_in_float32():
    random = np.random.default_rng(0)
    for dtype, relative, absolute in product(
        ("float16", "bfloat16"), (0.1, 1e-4), (1e-7, 1e-3)
    ):
        drawn = np.float32(random.standard_normal((2, 50)))
        drawn[1, 0] = 0.0  # a weight that moves by at most `absolute`
        updates, weights = (jnp.asarray(x, dtype) for x in drawn)
        clipped, state = by_clippy(updates, weights, relative, absolute)
        update, weight = oracles.wide(updates), oracles.wide(weights)
        norm = np.max(np.abs(update) / (relative * np.abs(weight) + absolute))
        np.testing.assert_allclose(state.norm, norm, rtol=4 * EPS)
        info = jnp.finfo(dtype)
        np.testing.assert_allclose(
            oracles.wide(clipped),
            update / norm,
            rtol=float(info.eps) / 2 + 8 * EPS,
            atol=float(info.smallest_subnormal) / 2,
        )


def test_agc_holds_each_unit_against_its_weights_or_eps():
    random = np.random.default_rng(0)
    # Units far below eps, about it, and far above.
    sizes = {"w": np.array([1e-3, 0.2, 0.3, 2.0, 50.0]), "b": 1e-2}
    shapes = {"w": (4, 5), "b": (3,)}
    params, grads = {}, {}
    for name, shape in shapes.items():
        params[name] = np.float32(sizes[name] * random.standard_normal(shape))
        grads[name] = np.float32(random.standard_normal(shape))
    for order, per_tensor in product((2, math.inf), (False, True)):
        options = {"ord": order, "per_tensor": per_tensor}
        clipped, _ = apply(adaptive_grad_clip(0.5, 0.25, **options), grads, params)
        for name, grad in grads.items():
            axes = tuple(range(grad.ndim)) if per_tensor else (0,)
            norm, length = (
                oracles.norm_over(x[name], axes, order) for x in (grads, params)
            )
            wanted = oracles.shrink(grad, norm, 0.5 * np.maximum(length, 0.25))
            np.testing.assert_allclose(clipped[name], wanted, rtol=10 * EPS)


def by_larc(grads, params, *args, **options):
    return apply(larc(*args, **options), grads, params)


def expected(grad, weight, rate, trust=0.02, decay=0.0, eps=1e-8):
    """(g + wd p) * min(1, trust |p| / (|g| + wd |p| + eps) / lr), or g where either is
    0.
    """
    grad, weight = oracles.wide(grad), oracles.wide(weight)
    length, size = np.linalg.norm(weight), np.linalg.norm(grad)
    if length == 0 or size == 0:
        return grad
    return (grad + decay * weight) * min(
        1.0, trust * length / (size + decay * length + eps) / rate
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_larc_follows_its_equation(dtype):
    random = np.random.default_rng(0)

    def tree(size):
        shapes = {"w": (5, 3), "b": (7,)}
        drawn = {name: random.standard_normal(shape) for name, shape in shapes.items()}
        return {name: jnp.asarray(size * x, dtype) for name, x in drawn.items()}

    params, grads = tree(1), tree(3)
    for rate, decay in product((0.001, 0.1, 10.0), (0.0, 0.5)):
        # An eps of half a norm is no floor.
        for eps in (1e-8, 5.0):
            options = {"weight_decay": decay, "eps": eps}
            clipped, state = by_larc(grads, params, rate, **options)
            for name in grads:
                exact = expected(grads[name], params[name], rate, 0.02, decay, eps)
                # The sum with weight decay is rounded once, the product once; the sum
                # may cancel, hence the absolute part.
                most = oracles.eps_of(dtype) + 16 * EPS
                np.testing.assert_allclose(
                    oracles.wide(clipped[name]),
                    exact,
                    rtol=most,
                    atol=most * np.abs(exact).max(),
                )
                assert clipped[name].dtype == jnp.dtype(dtype)
                # What is reported is without eps.
                sizes = [np.linalg.norm(oracles.wide(x[name])) for x in (grads, params)]
                norm, limit = sizes[0] + decay * sizes[1], 0.02 * sizes[1] / rate
                entry = state.by_name()[name]
                np.testing.assert_allclose(entry.norm, norm, rtol=1e-6)
                np.testing.assert_allclose(entry.limit, limit, rtol=1e-6)


def test_larc_takes_complex64_beside_float64():
    with jax.enable_x64(True):
        params = {"c": jnp.full(2, 3 + 4j, jnp.complex64), "d": jnp.ones(3)}
        updates, _ = by_larc(params, params, 0.5, trust=0.1)
        assert updates["c"].dtype == np.complex64
        # Each norm is clipped to trust / rate of the norm of its weights.
        for name, leaf in params.items():
            np.testing.assert_allclose(updates[name], 0.2 * leaf, rtol=1e-6)


def test_larc_touches_no_zero_weights_and_zero_gradients():
    grads = {"new": jnp.array([100.0, -0.0]), "still": jnp.array([0.0, -0.0])}
    params = {"new": jnp.array([0.0, 0.0]), "still": jnp.array([3.0, 4.0])}
    clipped, state = by_larc(grads, params, 0.1, weight_decay=0.1)
    for name, grad in grads.items():
        assert oracles.same_bits(clipped[name], grad)
    norms = {name: float(entry.norm) for name, entry in state.by_name().items()}
    assert norms == {"new": 100.0, "still": 0.0}
    assert state.by_name()["new"].limit == math.inf


def test_the_limit_of_larc_follows_the_schedule_of_the_rate():
    params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 100.0])
    clipper = larc(lambda step: 0.1 * step)
    state, limits = clipper.init(params), []
    for _ in range(3):
        _, state = clipper.update(grads, state, params)
        limits.append(float(state.limit))
    np.testing.assert_allclose(limits, [math.inf, 1.0, 0.5], rtol=4 * EPS)


def test_larc_adds_eps_to_the_norm_that_it_divides_by():
    grads, params = jnp.array([3.0, 4.0]), jnp.array([1.0, 0.0])
    updates, state = apply(optaxclip.larc(0.1, 0.1, eps=5.0), grads, params)
    assert state.limit == 1.0
    np.testing.assert_allclose(updates, [0.3, 0.4], rtol=1e-6)


def test_larc_keeps_the_sign_of_zero_where_nothing_decays():
    grads = jnp.array([-0.0, 1e-3])
    for weight, decay in ((0.0, 0.5), (1.0, 0.0)):
        params = jnp.array([0.0, weight])
        updates, _ = apply(optaxclip.larc(0.1, weight_decay=decay), grads, params)
        assert np.asarray(updates).tobytes() == np.asarray(grads).tobytes()


def test_larc_rounds_a_decayed_gradient_of_16_bits_once():
    random = np.random.default_rng(0)
    grads, params = (
        jnp.asarray(random.standard_normal(1000), jnp.bfloat16) for _ in range(2)
    )
    exact = np.asarray(grads).astype(np.float64) + float(np.float32(0.3)) * np.asarray(
        params
    ).astype(np.float64)
    updates, _ = apply(optaxclip.larc(1e-6, weight_decay=0.3), grads, params)
    assert (
        np.abs(np.asarray(updates).astype(np.float64) - exact)
        <= 2.0**-8 * np.abs(exact) * (1 + 1e-3) + 1e-6
    ).all()


def test_a_gradient_that_larc_decays_may_leave_the_range():
    for dtype in ("float16", "bfloat16", "float32"):
        # 6e4 + 0.5 * 6e4 is no float16, and what it is clipped to is one.
        grads = {"w": jnp.array([6e4, 1.0], dtype)}
        updates, _ = by_larc(grads, grads, 1.0, 0.02, weight_decay=0.5)
        wanted = expected(grads["w"], grads["w"], 1.0, 0.02, 0.5)
        assert updates["w"].dtype == dtype
        found, eps = updates["w"].astype("float32"), float(jnp.finfo(dtype).eps)
        # The factor ends a few eps of float32 below the quotient.
        np.testing.assert_allclose(found, wanted, rtol=eps / 2 + 8 * EPS)


@pytest.mark.parametrize("options", [{"trust": math.inf}, {"learning_rate": 0.0}])
def test_larc_without_a_limit_makes_no_finite_gradient_infinite(options):
    clipper = larc(**{"learning_rate": 0.1, "weight_decay": 1.0} | options)
    grads = jnp.array([6e4, -6e4, 1.0, math.inf], "float16")
    largest = float(jnp.finfo("float16").max)
    updates, _ = apply(clipper, {"w": grads[:3]}, {"w": grads[:3]})
    np.testing.assert_array_equal(updates["w"], [largest, -largest, 2.0])
    assert updates["w"].dtype == "float16"
    # A weight of inf makes no finite gradient.
    updates, _ = apply(clipper, jnp.ones(4, "float16"), grads)
    assert not np.isfinite(updates[3])


BROKEN = np.array([np.nan, 1.0], np.float32)


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
@pytest.mark.parametrize("rate", [0.0, lambda step: 0.0 * step, 0.1])
def test_larc_without_a_limit_lets_no_broken_tensor_through(rate, nonfinite):
    wanted = 0.0 if nonfinite == "zero" else np.nan
    for weights in ([1.0, 2.0], [0.0, 0.0]):
        clipper = larc(rate, nonfinite=nonfinite)
        updates, state = apply(clipper, jnp.asarray(BROKEN), jnp.array(weights))
        np.testing.assert_array_equal(updates, np.full(2, wanted))
        assert state.nonfinite == 1


def test_a_nan_in_the_first_step_of_a_rising_rate_does_not_stay():
    rate = optax.linear_schedule(0.0, 0.1, 10)
    optimizer = optax.chain(larc(rate, nonfinite="zero"), optax.sgd(rate, momentum=0.9))
    params = jnp.array([1.0, 2.0])
    state = optimizer.init(params)
    for grads in (BROKEN, np.ones(2, np.float32)):
        updates, state = optimizer.update(jnp.asarray(grads), state, params)
        params = optax.apply_updates(params, updates)
    assert np.isfinite(params).all()


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
@pytest.mark.parametrize("clipping", [0.01, 2.0])
def test_infinite_weights_let_no_broken_unit_through(clipping, nonfinite):
    clipper = adaptive_grad_clip(clipping, nonfinite=nonfinite)
    for weight in (np.inf, 3e38):
        params = jnp.full((3, 2), weight)
        grads = jnp.array([[np.nan, 3.0], [1.0, 0.1], [2.0, 0.0]])
        updates, _ = apply(clipper, grads, params)
        wanted = np.array(grads)
        wanted[:, 0] = 0.0 if nonfinite == "zero" else np.nan
        np.testing.assert_array_equal(updates, wanted)
    # Without a clipping it only measures.
    updates, _ = apply(adaptive_grad_clip(None, nonfinite=nonfinite), grads, params)
    np.testing.assert_array_equal(updates, grads)
