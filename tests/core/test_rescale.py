"""Rescaling from any norm to any other, over the whole range, and shrinks: those of
users, whose zeros stay and whose derivatives are finite, psac at the ends of its range,
and updates without a limit, whose derivative is 1.
"""

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by_global_norm, rules, shrinks
from tests.helpers import apply


def test_rescale_keeps_zeros_zero_whatever_they_are_to_become():
    found = optaxclip.rescale(jnp.zeros(2), jnp.float32(0.0), jnp.float32(1.0))
    np.testing.assert_array_equal(found, jnp.zeros(2))


def norms_of_4(tree):
    return jax.tree.map(lambda _: jnp.ones(4), tree)


def test_norms_that_do_not_broadcast_to_their_leaf_are_named():
    grads = {"w": jnp.ones((2, 3)), "b": jnp.ones(4)}
    cause = r"must be one number .* shape \(4,\) for a leaf of shape \(2, 3\)"
    with pytest.raises(ValueError, match=f"^rescale: norms {cause}"):
        optaxclip.rescale(grads, norms_of_4(grads), norms_of_4(grads))
    with pytest.raises(ValueError, match=f"^clip_by: what norm returns {cause}"):
        optaxclip.clip_by(norms_of_4, 1.0).init(grads)
    # A norm for each row, and one for two leaves.
    rows = jnp.full((2, 1), 2.0)
    half = optaxclip.rescale(grads, {"w": rows, "b": 2.0}, {"w": rows / 2, "b": 1.0})
    np.testing.assert_allclose(half["w"], np.full((2, 3), 0.5), rtol=1e-6)
    optaxclip.rescale(grads, 2.0, 1.0)


def test_norms_of_rescale_that_are_no_numbers_are_named():
    with pytest.raises(TypeError, match=r"^rescale: norms must be a real number"):
        optaxclip.rescale(jnp.ones(2), optaxclip.global_norm, 1.0)
    with pytest.raises(TypeError, match=r"^rescale: new_norms must be a real number"):
        optaxclip.rescale(jnp.ones(2), 1.0, 1j)


def test_rescale_to_0_keeps_the_sign_of_what_becomes_0():
    norm, new_norm = jnp.float32(5.0), jnp.float32(0.0)
    zeros = optaxclip.rescale(jnp.array([3.0, -4.0]), norm, new_norm)
    assert not np.any(zeros) and np.signbit(zeros).tolist() == [False, True]


def test_equal_norms_keep_complex_numbers_with_a_broken_part():
    parts = np.float32(
        [math.inf, 0, 1, 2, -math.inf, 3, 0.5, math.nan, -0.0, -math.inf]
    )
    grads = parts.view(np.complex64)
    clip = clip_by_global_norm(math.inf)
    clipped, _ = clip.update(grads, clip.init(grads))
    for result in (optaxclip.rescale(grads, 2.0, 2.0), clipped):
        np.testing.assert_array_equal(np.asarray(result).view(np.float32), parts)


def test_an_infinite_norm_becomes_a_finite_one_by_zeros():
    grads = jnp.array([1.0, -2.0, math.inf])
    rescaled = optaxclip.rescale(grads, math.inf, 1.0)
    np.testing.assert_array_equal(rescaled, [0.0, -0.0, math.nan])


# (norm, limit): normal float32 numbers that are far apart.
FAR = [
    (1.2e-38, 10.0),
    (1e-30, 1e10),
    (1.2e-38, 3.3e38),
    (1e38, 1e-20),
    (1e30, 1e-28),
    (1e38, 1e-19),
    (3e38, 1.0),
    (3.3e38, 2.0**-124),  # the furthest: a quotient of 2^-252
    # quotients next to 2^-128, 2^128, 2^-126, 2^-100 and 2^100
    (2.0**100, 2.0**-28),
    (2.0**-28, 2.0**100),
    (2.0**100, 2.0**-26),
    (2.0**60, 2.0**-40 * 0.99),
    (2.0**60, 2.0**-40 * 1.01),
    (2.0**-40, 2.0**60 * 0.99),
    (2.0**-40, 2.0**60 * 1.01),
]


@pytest.mark.parametrize("units", [False, True], ids=["whole", "units"])
def test_a_norm_becomes_any_other_that_float32_holds(units):
    clip = optaxclip.clip_by_unitwise_norm if units else optaxclip.clip_by_global_norm
    for norm, limit in FAR:
        # Both entries have one size, so that the smallest norms have no subnormal
        # entries.
        grads = np.float32([[norm, 0.0], [-norm, 0.0]])
        clipper = clip(limit, ord=np.inf, shrink=optaxclip.shrinks.normalize)
        updates, state = apply(clipper, grads)
        # 6 eps are taken off on purpose, and 5 are roundings.
        bound = 11 * np.finfo(np.float32).eps
        wanted = np.float64(grads) / np.float64(np.float32(norm)) * np.float32(limit)
        np.testing.assert_allclose(np.float64(updates), wanted, rtol=bound)
        assert np.max(np.abs(updates)) <= np.float32(limit)
        assert np.all(np.asarray(state.factor) > 0)
        assert np.all(np.isfinite(state.factor))


def test_far_from_its_limit_no_normal_number_is_lost():
    for norm, limit in FAR:
        sizes = norm * 2.0 ** np.arange(0.0, -250.0, -5.0)
        # All of one shape, which is compiled once.
        grads = np.float32(np.where(sizes > 1.3e-38, sizes, 0))
        rescaled = optaxclip.rescale(grads, jnp.float32(norm), jnp.float32(limit))
        wanted = np.float64(grads) / np.float64(np.float32(norm)) * np.float32(limit)
        held = np.abs(wanted) > 1.2e-38 * (1 + 1e-5)
        bound = 11 * np.finfo(np.float32).eps
        np.testing.assert_allclose(np.float64(rescaled)[held], wanted[held], rtol=bound)


@pytest.mark.parametrize(("norm", "limit"), [(1e300, 1e-300), (3e-308, 1e308)])
def test_64_bit_norms_become_any_other_as_well(norm, limit):
    with jax.enable_x64(True):
        rescaled = optaxclip.rescale(
            np.array([norm, -norm]), jnp.float64(norm), jnp.float64(limit)
        )
    np.testing.assert_allclose(rescaled, [limit, -limit], rtol=1e-14)


# Next to both ends of the range at once a part of the derivative is flushed.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "limit"), [each for each in FAR if 1e-75 < each[1] / each[0] < 1e75]
)
def test_the_derivative_of_a_factor_is_that_of_the_quotient(norm, limit):
    x = jnp.float32(norm)

    def stretched(limit):
        return optaxclip.rescale(x, x, limit)

    at = jnp.float32(limit)
    for slope in (jax.jvp(stretched, (at,), (1.0,))[1], jax.grad(stretched)(at)):
        np.testing.assert_allclose(slope, 1.0, rtol=2e-6)


def test_rescale_takes_numpy_arrays_while_jit_is_off():
    """As in a debugger, where no tracer stands for the array."""
    updates = np.array([3.0, 4.0], np.float32)
    with jax.disable_jit():
        shorter = optaxclip.rescale(updates, jnp.float32(5.0), jnp.float32(1.0))
    np.testing.assert_allclose(shorter, [0.6, 0.8], rtol=1e-6)


def test_rescale_computes_with_norms_of_any_kind_in_float32():
    for kind in (int, jnp.int32, jnp.float16, jnp.bfloat16):
        found = optaxclip.rescale(jnp.array([3.0, 4.0]), kind(5), kind(1))
        np.testing.assert_allclose(found, [0.6, 0.8], rtol=8 * 2.0**-23)


def test_rescale_leaves_parts_without_a_norm_alone():
    updates = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.ones(2), "d": jnp.ones(3)}}
    rescaled = optaxclip.rescale(updates, {"a": 5.0, "b": None}, {"a": 1.0, "b": None})
    np.testing.assert_allclose(rescaled["a"], [0.6, 0.8], rtol=1e-6)
    assert all(rescaled["b"][name] is updates["b"][name] for name in "cd")


def test_one_new_norm_for_all_units_of_a_leaf_is_enough():
    updates = {"w": jnp.ones((2, 3)), "b": jnp.ones(4)}
    norms = optaxclip.unitwise_norm(updates)
    rescaled = optaxclip.rescale(updates, norms, {"w": 1.0, "b": 1.0})
    np.testing.assert_allclose(rescaled["w"], np.full((2, 3), 2**-0.5), rtol=1e-6)
    np.testing.assert_allclose(rescaled["b"], np.full(4, 0.5), rtol=1e-6)


@pytest.mark.parametrize(
    "shrink",
    [lambda norm, limit: norm * (limit / norm), lambda norm, limit: limit + 1 / norm],
)
def test_zeros_stay_where_a_shrink_has_no_number_for_them(shrink):
    tree = {"a": jnp.zeros(2), "b": jnp.array([3.0, 4.0])}
    updates, state = apply(optaxclip.clip_by_tensor_norm(1.0, shrink=shrink), tree)
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])
    assert (state.factor[0], state.clipped[0], state.nonfinite[0]) == (1, 0, 0)
    grad = optaxclip.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0, shrink=shrink)
    result = grad(jnp.ones(2), jnp.array([[0.0, 0.0], [3.0, 4.0]]))
    assert jnp.isfinite(result.grads).all() and result.nonfinite == 0


@pytest.mark.parametrize(
    "shrink",
    [
        lambda norm, limit: jnp.minimum(norm * (limit / norm), norm),
        lambda norm, limit: jnp.sqrt(norm * limit),
    ],
)
def test_derivatives_at_0_by_any_shrink_are_finite(shrink):
    tree = {"a": jnp.zeros(2), "b": jnp.array([3.0, 4.0])}
    clipper = optaxclip.clip_by_tensor_norm(1.0, shrink=shrink)
    state, ones = clipper.init(tree), jax.tree.map(jnp.ones_like, tree)
    _, back = jax.vjp(lambda x: clipper.update(x, state)[0], tree)
    _, moved = jax.jvp(lambda x: clipper.update(x, state)[0], (tree,), (ones,))
    # A product of 1 and the derivative, from both sides.
    for name, leaf in back(ones)[0].items():
        assert jnp.isfinite(leaf).all()
        np.testing.assert_allclose(leaf.sum(), moved[name].sum(), rtol=1e-5, atol=1e-6)


def test_a_shrink_that_is_broken_above_0_breaks_the_updates():
    grads = jnp.array([3.0, 4.0])
    clipper = optaxclip.clip_by_global_norm(1.0, shrink=lambda n, c: jnp.sqrt(c - n))
    updates, state = clipper.update(grads, clipper.init(grads))
    assert jnp.isnan(updates).all() and jnp.isnan(state.factor)


def test_a_shrink_that_takes_no_limit_has_its_derivative_at_limit_0():
    grads = jnp.array([3.0, 4.0])
    clipper = optaxclip.clip_by_global_norm(0.0, shrink=lambda n, c: n / 2)
    state = clipper.init(grads)
    slope = jax.jacobian(lambda x: clipper.update(x, state)[0])(grads)
    np.testing.assert_allclose(slope, np.eye(2) / 2, atol=1e-6)


NORMS = np.array([0.0, 1e-30, 0.5, 2.0, 3.0, 1e30])


def smooth(power):
    return lambda n, c: n / (1 + (n / c) ** power) ** (1 / power)


def psac(r):
    return lambda n, c: c * n / (n + r / (n + r))


EQUATIONS = [
    (shrinks.hard, np.minimum),
    (shrinks.drop, lambda n, c: np.where(n <= c, n, 0)),
    (shrinks.normalize, lambda n, c: np.where(n > 0, c, 0)),
    (shrinks.smooth(), smooth(1)),
    (shrinks.smooth(3), smooth(3)),
    (shrinks.smooth(math.inf), np.minimum),
    (shrinks.auto_s(), lambda n, c: c * n / (n + 0.01)),
    (shrinks.auto_s(0), lambda n, c: np.where(n > 0, c, 0)),
    (shrinks.auto_s(1e-45), lambda n, c: np.where(n > 0, c, 0)),
    (shrinks.psac(), psac(0.1)),
    (shrinks.psac(4), psac(4)),
    (shrinks.psac(1e38), lambda n, c: c * n / (n + 1)),
    (shrinks.psac(math.inf), lambda n, c: c * n / (n + 1)),
    # The dtype of the norm holds no such r.
    (shrinks.psac(1e-40), lambda n, c: np.where(n > 0, c, 0)),
    (shrinks.psac(1e-300), lambda n, c: np.where(n > 0, c, 0)),
    (shrinks.psac(0), lambda n, c: np.where(n > 0, c, 0)),
]


def test_every_shrink_is_its_equation():
    for shrink, equation in EQUATIONS:
        # One norm is the limit itself.
        found = shrink(jnp.float32(NORMS), jnp.float32(2.0))
        wanted = equation(NORMS, 2.0)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=repr(shrink))


def test_psac_is_bounded_only_where_float32_holds_its_r():
    norm = jnp.float32(1e-25)
    shrink = shrinks.psac(1e-40)
    assert float(shrink(norm, 1.0) / norm) > 1e24
    assert shrinks.factor_per_limit_of(shrink) == math.inf
    # For r = 1e-6 the quotient norm + r / (norm + r) is least for the norm 1e-3 - 1e-6.
    bound = shrinks.factor_per_limit_of(shrinks.psac(1e-6))
    np.testing.assert_allclose(bound, 1 / (2e-3 - 1e-6), rtol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 1e-45, 0.9e-19, 2e-19, 1e38])
def test_auto_s_has_a_finite_derivative_at_zero(gamma):
    for norm in (0.0, 1e-19, 1.0, 1e38):
        derivative = jax.grad(shrinks.auto_s(gamma))(jnp.float32(norm), 2.0)
        assert np.isfinite(derivative)


def test_shrinks_of_equal_numbers_are_equal_and_pickle():
    for make in (shrinks.smooth, shrinks.auto_s, shrinks.psac):
        copied = pickle.loads(pickle.dumps(make(2)))
        assert copied == make(2.0) and hash(copied) == hash(make(2.0))
        assert copied != make(3)
    assert shrinks.auto_s(2) != shrinks.psac(2)


@pytest.mark.parametrize("power", [1, 3])
def test_a_smooth_shrink_holds_at_the_ends_of_the_range(power):
    shrink = shrinks.smooth(power)
    norms = jnp.float32([3.0, 3.0, 0.0, 3e38])
    limits = jnp.float32([0.0, math.inf, 0.0, 3e38])
    wanted = [0, 3, 0, 3e38 / 2 ** (1 / power)]
    np.testing.assert_allclose(shrink(norms, limits), wanted, rtol=1e-6)
    slopes = jax.grad(lambda norms: jnp.sum(shrink(norms, limits)))(norms)
    assert np.isfinite(slopes).all() and slopes[1] == 1


def test_the_derivative_of_psac_is_finite_at_zero():
    for r in (math.inf, 1e38, 0.1, 1e-30, 1e-300, 0):
        clipper = clip_by_global_norm(1.0, shrink=shrinks.psac(r))

        def total(grads, clipper=clipper):
            return clipper.update(grads, clipper.init(grads))[0].sum()

        for grads in (jnp.zeros(2), jnp.array([3.0, 4.0])):
            assert np.isfinite(jax.grad(total)(grads)).all()


WEIGHTS = jnp.array([1.0, 2.0])
SHRINKS = {"auto_s": shrinks.auto_s(), "psac": shrinks.psac()}
LIMITS = {
    "inf": math.inf,
    "schedule": optax.constant_schedule(math.inf),
    "first norm": rules.growth(),
}


def derivative(clipper, x):
    def total(x):
        return jnp.sum(WEIGHTS * clipper.update(x, clipper.init(x))[0])

    return jax.grad(total)(x)


def test_before_a_rule_has_a_limit_no_shrink_changes_updates():
    grads = jnp.array([3.0, 4.0])
    for shrink in (shrinks.normalize, shrinks.smooth(3), *SHRINKS.values()):
        clipper = optaxclip.clip_by_global_norm(rules.growth(), shrink=shrink)
        updates, state = apply(clipper, grads)
        np.testing.assert_array_equal(updates, grads, err_msg=repr(shrink))
        assert (state.factor, state.clipped, state.nonfinite) == (1, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("shrink", SHRINKS)
def test_an_update_without_limit_has_the_derivative_of_its_input(shrink, limit):
    clipper = optaxclip.clip_by_global_norm(LIMITS[limit], shrink=SHRINKS[shrink])
    for x in (jnp.array([3.0, 4.0]), jnp.zeros(2)):
        np.testing.assert_array_equal(derivative(clipper, x), WEIGHTS)


@pytest.mark.slow
def test_the_sharpest_smooth_shrink_has_the_derivative_of_hard():
    x = jnp.array([3.0, 4.0])
    found = [
        derivative(optaxclip.clip_by_global_norm(1.0, shrink=shrink), x)
        for shrink in (shrinks.smooth(math.inf), shrinks.hard)
    ]
    # x / |x|: (w - u (u w)) / |x|, with u = (0.6, 0.8)
    np.testing.assert_allclose(found[0], [-0.064, 0.048], rtol=1e-5)
    np.testing.assert_array_equal(*found)
