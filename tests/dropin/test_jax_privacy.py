"""`dropin.jax_privacy.clipped_grad` gives the sums of a float64 oracle, in the form of
jax_privacy. `python -m tests.suites` runs their tests on it.
"""

import enum
import inspect
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import per_example
from optaxclip.dropin.jax_privacy import clipped_grad
from optaxclip.per_example import explain_clipped_grad

SIZE = 7
EPS = float(jnp.finfo(jnp.float32).eps)
# A residual has 4 rounded products, a norm 4 squares, and the sum SIZE terms. The
# factor is up to 5 eps below limit / norm.
RTOL = 20 * EPS
# Bounds are rounded up to hold in float32.
UP = 3 * EPS
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SIZE, 3)).astype(np.float32)
Y = RNG.normal(size=SIZE).astype(np.float32)
PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.25)}


def loss(params, x, y):
    residual = x @ params["w"] + params["b"] - y
    return 0.5 * jnp.mean(residual**2)


def gradients():
    """The gradient of each example in float64: [batch, 3] and [batch]."""
    w, b = (np.asarray(PARAMS[name], np.float64) for name in "wb")
    residual = X.astype(np.float64) @ w + b - Y
    return {"w": residual[:, None] * X, "b": residual}


def norms_of(grads):
    return np.sqrt(np.sum(grads["w"] ** 2, 1) + grads["b"] ** 2)


def summed(grads, factors):
    return {name: np.tensordot(factors, x, axes=1) for name, x in grads.items()}


def assert_near(found, wanted):
    size = sum(np.abs(x).max() for x in wanted.values())
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=RTOL * SIZE * size)


def make(**options):
    given = {"l2_clip_norm": 1.5, "batch_argnums": (1, 2)} | options
    return clipped_grad(loss, **given)


@pytest.mark.parametrize("limit", [0, 1e-3, 1.5, math.inf])
@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
@pytest.mark.parametrize("rescale", [False, True])
def test_the_sum_is_that_of_the_oracle(limit, microbatch_size, rescale):
    grads = gradients()
    norms = norms_of(grads)
    factors = np.minimum(1, limit / norms)
    if rescale:
        factors = factors / limit if limit else 1 / norms
    options = {"rescale_to_unit_norm": rescale, "microbatch_size": microbatch_size}
    grad = make(l2_clip_norm=limit, normalize_by=4.0, return_grad_norms=True, **options)
    found, seen = jax.jit(grad)(PARAMS, X, Y)
    assert_near(found, summed(grads, factors / 4))
    np.testing.assert_allclose(seen.grad_norms, norms, rtol=RTOL)
    wanted = (1.0 if rescale else limit) / 4 * proved(SIZE)
    if rescale and limit == 0:
        # Nothing is proved of a factor without an end.
        wanted = math.inf
    assert grad.l2_norm_bound == pytest.approx(wanted, rel=1e-5)


def test_microbatch_size_is_how_many_are_differentiated_at_once():
    for size, turns in ((1, 7), (3, 3), (None, None)):
        program = str(jax.make_jaxpr(make(microbatch_size=size))(PARAMS, X, Y))
        lengths = set(re.findall(r"\blength=(\d+)", program))
        assert lengths == ({str(turns)} if turns else set())


def test_padding_contributes_nothing():
    padding = np.arange(SIZE) % 3 == 1
    grads = gradients()
    factors = np.minimum(1, 1.5 / norms_of(grads)) * ~padding
    found = make()(PARAMS, X, Y, is_padding_example=padding)
    assert_near(found, summed(grads, factors))


def test_parts_with_limits_of_their_own_are_clipped_separately():
    grads = gradients()
    norms = {"w": np.linalg.norm(grads["w"], axis=1), "b": np.abs(grads["b"])}
    limits = {"w": 0.75, "b": 0.5}
    factors = {name: np.minimum(1, limits[name] / x) for name, x in norms.items()}
    grad = make(l2_clip_norm=limits, return_grad_norms=True)
    found, seen = grad(PARAMS, X, Y)
    assert_near(found, {k: np.tensordot(factors[k], grads[k], 1) for k in grads})
    for name, x in norms.items():
        np.testing.assert_allclose(seen.grad_norms[name], x, rtol=RTOL)
    wanted = math.hypot(0.75, 0.5) * proved(SIZE)
    assert grad.l2_norm_bound == pytest.approx(wanted, rel=UP)


def test_a_transform_changes_what_is_clipped():
    grads = gradients()
    changed = {"u": 0.1 * grads["w"], "v": grads["b"]}
    norms = np.sqrt(np.sum(changed["u"] ** 2, 1) + changed["v"] ** 2)

    def transform(grads):
        # It may write to its argument.
        grads["u"] = 0.1 * grads.pop("w")
        grads["v"] = grads.pop("b")
        return grads

    grad = make(pre_clipping_transform=transform, return_grad_norms=True)
    found, seen = jax.jit(grad)(PARAMS, X, Y)
    assert_near(found, summed(changed, np.minimum(1, 1.5 / norms)))
    # As in jax_privacy the norms are those before the transform.
    np.testing.assert_allclose(seen.grad_norms, norms_of(grads), rtol=RTOL)


def test_with_a_transform_the_norms_of_padding_are_zero():
    padding = np.arange(SIZE) % 3 == 1
    halved = partial(jax.tree.map, lambda grad: grad / 2)
    grad = make(pre_clipping_transform=halved, return_grad_norms=True)
    _, seen = grad(PARAMS, X, Y, is_padding_example=padding)
    wanted = norms_of(gradients()) * ~padding
    np.testing.assert_allclose(seen.grad_norms, wanted, rtol=RTOL)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transform", [lambda grads: grads, partial(jax.tree.map, abs)])
def test_a_batch_over_devices_is_that_of_one(kind, transform):
    def scaled(params, scale, x, y):
        return scale * loss(params, x, y)

    options = {"batch_argnums": (2, 3), "pre_clipping_transform": transform}
    grad = clipped_grad(scaled, l2_clip_norm=1.5, **options)
    whole, batch = (PARAMS, jnp.float32(2.0)), (X[:4], Y[:4])
    grads = {name: 2 * x[:4] for name, x in gradients().items()}
    wanted = summed(transform(grads), np.minimum(1, 1.5 / norms_of(grads)))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))

    def run(whole, batch):
        total = grad(*whole, *batch)
        return jax.lax.psum(total, "data") if kind is AxisType.Auto else total

    if kind is AxisType.Auto:
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with jax.set_mesh(mesh):
        args = jax.device_put(whole, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        assert_near(jax.jit(run)(args, batch), wanted)


def test_several_arguments_are_differentiated():
    def of_two(w, x, b, y):
        return loss({"w": w, "b": b}, x, y)

    options = {"l2_clip_norm": 1.5, "batch_argnums": (1, 3)}
    w, b = PARAMS["w"], PARAMS["b"]
    both = clipped_grad(of_two, (0, 2), **options)(w, X, b, Y)
    wanted = make()(PARAMS, X, Y)
    assert_near(dict(zip("wb", both)), wanted)
    (one,) = clipped_grad(of_two, [2], **options)(w, X, b, Y)
    factors = np.minimum(1, 1.5 / np.abs(gradients()["b"]))
    assert_near({"b": one}, summed({"b": gradients()["b"]}, factors))


@pytest.mark.parametrize("place", [np.int64(0), np.int32(0)])
def test_an_argument_may_be_named_by_an_int_of_numpy(place):
    assert_near(make(argnums=place)(PARAMS, X, Y), make()(PARAMS, X, Y))
    arrays = clipped_grad(lambda w, x: w * jnp.sum(x), place, l2_clip_norm=1.0)
    assert jnp.shape(arrays(jnp.array(0.5), X)) == ()


def test_arguments_may_be_named_by_a_range():
    def of_two(w, b, x, y):
        return loss({"w": w, "b": b}, x, y)

    args = PARAMS["w"], PARAMS["b"], X, Y
    both = clipped_grad(of_two, range(2), l2_clip_norm=1.5, batch_argnums=range(2, 4))
    assert_near(dict(zip("wb", both(*args))), make()(PARAMS, X, Y))
    grad = per_example.clipped_grad(of_two, 1.5, argnums=range(2), mean=False)
    assert_near(dict(zip("wb", grad(*args).grads)), make()(PARAMS, X, Y))


def test_a_random_key_that_is_named_from_the_end_is_refused():
    with pytest.raises(ValueError, match="prng_argnum=-1 must be at least 0"):
        make(prng_argnum=-1)


def test_a_missing_argument_is_named():
    text = r"batch_argnums=\(1, 2\).* called with 2 positional arguments"
    with pytest.raises(TypeError, match=text):
        make()(PARAMS, X)


def test_keywords_have_an_entry_for_each_example():
    shapes = []

    def weighted(params, x, *, y, weight):
        shapes.append((x.shape, y.shape, weight.shape))
        return jnp.sum(weight * loss(params, x, y))

    weights = np.arange(SIZE, dtype=np.float32)
    grad = clipped_grad(weighted, l2_clip_norm=1.5)
    found = grad(PARAMS, X, y=Y, weight=weights)
    assert {*shapes} == {((1, 3), (), ())}
    grads = {k: (weights * x.T).T for k, x in gradients().items()}
    norms = np.maximum(norms_of(grads), 1e-30)
    assert_near(found, summed(grads, np.minimum(1, 1.5 / norms)))


@pytest.mark.parametrize(("keep", "shape"), [(True, (1, 3)), (False, (3,))])
def test_the_axis_of_the_batch_is_kept_if_wanted(keep, shape):
    def with_aux(params, x, scale):
        assert x.shape == shape
        assert scale is None
        aux = {"x": x, "first": x.ravel()[0], "one": x.ravel()[:1]}
        return jnp.sum((x @ params["w"]) ** 2), aux

    options = {"l2_clip_norm": 1.0, "keep_batch_dim": keep, "return_values": True}
    grad = clipped_grad(with_aux, has_aux=True, **options)
    _, seen = grad(PARAMS, X, None)
    np.testing.assert_array_equal(seen.aux["x"], X)
    np.testing.assert_array_equal(seen.aux["first"], X[:, 0])
    # An axis of size 1 is removed where the axis of the batch was kept, and not else.
    np.testing.assert_array_equal(seen.aux["one"], X[:, 0] if keep else X[:, :1])
    values = (X.astype(np.float64) @ np.asarray(PARAMS["w"], np.float64)) ** 2
    np.testing.assert_allclose(seen.values, values, rtol=RTOL, atol=RTOL)
    assert seen.grad_norms is None


def test_only_the_sum_comes_back_where_nothing_more_is_wanted():
    assert set(make()(PARAMS, X, Y)) == {"w", "b"}
    assert not make().has_aux
    grad = make(return_values=True)
    assert grad.has_aux
    _, (values, norms, aux) = grad(PARAMS, X, Y)
    assert values.shape == (SIZE,)
    assert norms is None
    assert aux is None


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make(prng_argnum=3)(PARAMS, X[:0], Y[:0], jax.random.key(0))


def test_a_flag_by_keyword_is_refused_with_what_to_do():
    text = "at least 1, got 7 and no axis.* by position, outside of batch_argnums"
    with pytest.raises(ValueError, match=text):
        make()(PARAMS, X, Y, training=True)


def test_errors_name_the_arguments_of_jax_privacy():
    with pytest.raises(ValueError, match="microbatch_size must be at least 1, got 0"):
        make(microbatch_size=0)
    with pytest.raises(ValueError, match=r"is_padding_example .* got 7 and 3"):
        make()(PARAMS, X, Y, is_padding_example=np.zeros(3, bool))
    one_axis = r"^clipped_grad: is_padding_example must have .*, got \(7, 1\)\.$"
    with pytest.raises(ValueError, match=one_axis):
        make()(PARAMS, X, Y, is_padding_example=np.zeros((7, 1), bool))


def test_a_broken_example_is_left_out_unless_it_should_show():
    broken = X.copy()
    broken[2] = np.nan
    grads = gradients()
    factors = np.minimum(1, 1.5 / norms_of(grads)) * (np.arange(SIZE) != 2)
    assert_near(make()(PARAMS, broken, Y), summed(grads, factors))
    shown = make(nan_safe=False)(PARAMS, broken, Y)
    assert np.isnan(shown["w"]).all()
    assert np.isnan(shown["b"])
    grad = make(nan_safe=False)
    assert_near(grad(PARAMS, X, Y), make()(PARAMS, X, Y))
    assert grad.sensitivity() == math.inf


def test_each_example_has_its_own_key():
    def noise(w, x, key):
        return w * jax.random.normal(key)

    grad = clipped_grad(noise, l2_clip_norm=math.inf, prng_argnum=2)
    key = jax.random.key(3)
    found = grad(jnp.ones(()), X, key)
    each = jax.vmap(jax.random.normal)(jax.random.split(key, SIZE))
    wanted = np.sum(np.asarray(each, np.float64))
    np.testing.assert_allclose(found, wanted, atol=RTOL * SIZE)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bits_hold_the_bound(dtype):
    """jax_privacy takes this norm for 0 in float16, and adds the gradient unclipped."""

    def of_one(w, x):
        return jnp.sum(w * x)

    x = np.full((1, 4000), 1e-4, dtype)
    options = {"l2_clip_norm": 2e-3, "keep_batch_dim": False}
    grad = clipped_grad(of_one, return_grad_norms=True, **options)
    found, seen = jax.jit(grad)(jnp.zeros(4000, dtype), x)
    exact = np.linalg.norm(x.astype(np.float64))
    np.testing.assert_allclose(seen.grad_norms, [exact], rtol=RTOL)
    total = np.linalg.norm(np.asarray(found, np.float64))
    assert 2e-3 * (1 - 10 * EPS) <= total <= 2e-3
    assert found.dtype == jnp.float32
    narrow = clipped_grad(of_one, dtype=dtype, **options)
    assert narrow(jnp.zeros(4000, dtype), x).dtype == dtype


class Relation(enum.Enum):
    """As `dp_accounting.NeighboringRelation`."""

    ADD_OR_REMOVE_ONE = 1
    REPLACE_ONE = 2
    REPLACE_SPECIAL = 3
    OTHER = 4


def proved(size):
    """Over the limit, of gradients that are made and then added up: see "What one
    example adds" in docs/numerics.md.
    """
    unit = 2.0**-24
    # Roundings on the way to a factor that it is not shortened by.
    of_factor = 7 * unit / (1 - 7 * unit)
    # Additions of a microbatch and of all of them, here of one, and products.
    count = size + 1 + 4
    of_sum = (1 + of_factor) * count * unit / (1 - count * unit)
    excess = of_factor + of_sum
    change = 1 + excess + 2 * (size - 1) * of_sum
    # Division and cast round the sums with and without the example.
    return change + 2 * size * (1 + excess) * unit


def test_sensitivity_is_what_is_proved():
    grad = make(normalize_by=3.0)
    jax.eval_shape(grad, PARAMS, X, Y)
    assert grad.sensitivity() == pytest.approx(0.5 * proved(SIZE), rel=UP)
    assert grad.l2_norm_bound == grad.sensitivity() >= 0.5 * proved(SIZE)
    # The largest counts of all batches that it was called with.
    jax.jit(grad)(PARAMS, np.concatenate([X, X]), np.concatenate([Y, Y]))
    grad(PARAMS, X[:2], Y[:2])
    assert grad.sensitivity() == pytest.approx(0.5 * proved(2 * SIZE), rel=UP)
    unit = make(l2_clip_norm={"w": 3.0, "b": 4.0}, rescale_to_unit_norm=True)
    jax.eval_shape(unit, PARAMS, X, Y)
    assert unit.sensitivity() == pytest.approx(2**0.5 * proved(SIZE), rel=UP)


def products(weight, x, y):
    return jnp.sum((x @ weight) * y)


def cancelling(seed):
    """An example of which two halves nearly cancel, so that its norm is mostly made of
    rounding: two matrices [positions, rows] whose product is its gradient.
    """
    random = np.random.default_rng(seed)
    x = np.tile(random.uniform(1, 2, 512), (64, 1))
    y = np.tile(random.uniform(1, 2, 512), (64, 1))
    x[32:] *= np.float32(random.uniform(1, 2))
    y[32:] *= -1
    x = x.astype(np.float32)
    first = x[:32].astype(np.float64).T @ y[:32]
    other = x[32:].astype(np.float64).T @ y[32:]
    y[32:] *= -np.sum(first * other) / np.sum(other**2) * (1 - 1 / 4)
    return x[None], y[None].astype(np.float32)


def test_products_that_cancel_change_the_sum_by_what_is_proved():
    options = {"batch_argnums": (1, 2), "keep_batch_dim": False}
    grad = clipped_grad(products, l2_clip_norm=1.0, **options)
    run, weight = jax.jit(grad), jnp.zeros((512, 512))
    found = [run(weight, *cancelling(seed)) for seed in range(20)]
    # Without its one example the sum is 0.
    change = max(np.linalg.norm(np.float64(total)) for total in found)
    assert 0.999 < change <= grad.sensitivity() < 1.0003
    explain = explain_clipped_grad(products)(weight, *cancelling(0))
    # The sums with and without the example are rounded by 2^-24 when they are cast.
    wanted = 1 + explain.change + 2.0**-23
    assert grad.sensitivity() == pytest.approx(wanted, rel=UP)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_that_is_rounded_to_16_bits_has_no_bound(dtype):
    """In bfloat16 one example changes it by two limits."""
    grad = clipped_grad(lambda w, x: jnp.sum(w * x), l2_clip_norm=1.0, dtype=dtype)
    ones = np.ones((302, 1), np.float32)
    sums = [float(grad(jnp.zeros(()), x)) for x in (ones, ones[1:], ones[2:])]
    assert (max(abs(np.diff(sums))) > 1.5) == (dtype == "bfloat16")
    assert grad.sensitivity() == math.inf


def test_the_bound_covers_a_cast_to_float32():
    with jax.enable_x64(True):
        grad = clipped_grad(
            lambda w, x: jnp.sum(w * x), l2_clip_norm=1.0, dtype=np.float32
        )
        changes = []
        # The sum passes 256, above which float32 has half as many numbers.
        batch = np.ones((257, 1))
        mask = np.arange(257) == 256
        for number in np.random.default_rng(0).uniform(0, 1, 20):
            batch[0] = number
            without = grad(jnp.zeros(()), batch, is_padding_example=mask)
            changes.append(float(grad(jnp.zeros(()), batch)) - float(without))
        assert 1.00001 < max(changes) <= grad.sensitivity() < 1.0001


@pytest.mark.parametrize("number", [float, np.float32, jnp.float32])
@pytest.mark.parametrize("limit", [1e-4, 1e20, 1e30])
def test_a_unit_norm_has_the_bound_one_of_any_limit(number, limit):
    grad = make(l2_clip_norm=number(limit), rescale_to_unit_norm=True)
    jax.eval_shape(grad, PARAMS, X, Y)
    assert grad.sensitivity() == pytest.approx(proved(SIZE), rel=UP)


@pytest.mark.parametrize("limit", [1e20, 1e37, 1e38])
def test_a_limit_with_which_sums_are_finite_has_a_bound(limit):
    grad = make(l2_clip_norm=limit)
    jax.eval_shape(grad, PARAMS, X, Y)
    # Of seven examples
    wanted = limit * proved(SIZE) if 7 * limit < 3.4e38 else math.inf
    assert grad.sensitivity() == pytest.approx(wanted, rel=UP)


def test_the_function_is_jitted_with_a_limit_that_is_an_array():
    total = jax.jit(make(l2_clip_norm=jnp.array(1.5)))(PARAMS, X, Y)
    assert_near(total, make()(PARAMS, X, Y))


def test_sensitivity_without_a_program_is_the_limit_and_warns():
    # As the execution plan of jax_privacy asks.
    grad = clipped_grad(lambda: None, l2_clip_norm=1.5, normalize_by=2.0)
    with pytest.warns(UserWarning, match="sensitivity: .* 0.75 .*eval_shape"):
        assert grad.sensitivity() == 0.75
    with pytest.warns(UserWarning, match="^l2_norm_bound: .* 0.75 .*eval_shape"):
        assert grad.l2_norm_bound == 0.75


def test_a_traced_limit_clips():
    def run(limit):
        return make(l2_clip_norm=limit)(PARAMS, X, Y)

    factors = np.minimum(1, 0.5 / norms_of(gradients()))
    assert_near(jax.jit(run)(0.5), summed(gradients(), factors))


def test_sensitivity_of_a_traced_limit_is_the_limit_and_warns():
    def run(limit):
        grad = make(l2_clip_norm=limit)
        grad(PARAMS, X, Y)
        return grad.sensitivity()

    with pytest.warns(UserWarning, match="^sensitivity: .*limit that jit traces"):
        assert jax.jit(run)(0.5) == 0.5


def test_sensitivity_follows_the_relation():
    grad = make(normalize_by=2.0)
    jax.eval_shape(grad, PARAMS, X, Y)
    one = grad.l2_norm_bound
    assert grad.sensitivity() == one
    assert grad.sensitivity(Relation.ADD_OR_REMOVE_ONE) == one
    assert grad.sensitivity(Relation.REPLACE_SPECIAL) == one
    assert grad.sensitivity(Relation.REPLACE_ONE) == 2 * one
    assert grad.sensitivity("REPLACE_ONE") == 2 * one
    with pytest.raises(ValueError, match=r"^sensitivity: neighboring_relation .*OTHER"):
        grad.sensitivity(Relation.OTHER)


# jax_privacy 2.0.0 calls it. Since optax 0.2.8 it warns.
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
def test_their_function_gives_the_same():
    theirs = pytest.importorskip("jax_privacy").clipped_grad
    ours = inspect.signature(clipped_grad).parameters
    assert {*inspect.signature(theirs).parameters} - {*ours} <= {"grid_scale"}
    options = {"l2_clip_norm": 1.5, "batch_argnums": (1, 2), "normalize_by": 3.0}
    options |= {"return_values": True, "return_grad_norms": True}
    for more in ({}, {"rescale_to_unit_norm": True}, {"microbatch_size": 1}):
        found, seen = clipped_grad(loss, **options, **more)(PARAMS, X, Y)
        wanted, wanted_seen = theirs(loss, **options, **more)(PARAMS, X, Y)
        assert_near(found, wanted)
        np.testing.assert_allclose(seen.values, wanted_seen.values, rtol=RTOL)
        norms = wanted_seen.grad_norms
        np.testing.assert_allclose(seen.grad_norms, norms, rtol=RTOL)


def test_limits_of_narrow_dtypes_have_their_own_length():
    """The square of 300 leaves float16, and that of 50,000 int32."""
    for limit in (np.float16(300), jnp.int32(50_000), 1e-30):
        grad = clipped_grad(lambda w, x: w * jnp.sum(x), l2_clip_norm=limit)
        assert grad.limit == pytest.approx(float(limit), rel=1e-6)
