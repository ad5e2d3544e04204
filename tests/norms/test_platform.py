"""The function of a platform: which is traced when, and that all have one result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optaxclip._norms._platform import FORCED, per_platform
from tests.sharded import on_two_devices

pytestmark = pytest.mark.skipif(bool(FORCED), reason="one way is forced")

X = {"a": np.arange(1.0, 4, dtype=np.float32), "b": np.float32(2)}


def ways(traced):
    """For each platform x -> (x^2 b, 2 x), which also tells that it is traced."""

    def way(name):
        def call(x):
            traced.append(name)
            return {"square": x["a"] ** 2 * x["b"], "twice": 2 * x["a"]}

        return call

    return {name: way(name) for name in ("cpu", "gpu", "tpu")}


def apply(x, traced=None):
    return per_platform(x, **ways([] if traced is None else traced))


def expected(x=X):
    return {"square": x["a"] ** 2 * x["b"], "twice": 2 * x["a"]}


def assert_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(
    ("platform", "own"),
    [("cpu", []), ("cuda", ["gpu"]), ("rocm", ["gpu"]), ("tpu", ["tpu"])],
)
def test_a_program_traces_its_own_way_and_the_short_one_for_types(platform, own):
    traced = []
    program = jax.jit(lambda x: apply(x, traced)).trace(X)
    assert traced == ["cpu"]
    program.lower(lowering_platforms=(platform,))
    assert traced == ["cpu", *own]


def test_an_export_for_several_platforms_holds_the_way_of_each():
    traced = []
    function = jax.jit(lambda x: apply(x, traced))
    program = jax.export.export(function, platforms=["cpu", "cuda", "tpu"])(X)
    assert sorted(traced) == ["cpu", "gpu", "tpu"]
    assert_equal(program.call(X), expected())


@pytest.mark.parametrize("call", [apply, jax.jit(apply)], ids=["eager", "jit"])
def test_results_keep_their_structure(call):
    assert_equal(call(X), expected())


def test_derivatives_and_vmap_are_those_of_the_function():
    def total(x):
        return jnp.sum(jax.jit(apply)(x)["square"])

    assert_equal(jax.grad(total)(X), {"a": 2 * X["a"] * X["b"], "b": 14})
    assert_equal(jax.jit(jax.grad(total))(X), {"a": 2 * X["a"] * X["b"], "b": 14})
    many = {"a": np.stack([X["a"], 2 * X["a"]]), "b": X["b"]}
    found = jax.vmap(jax.jit(apply), ({"a": 0, "b": None},))(many)
    assert_equal(found, expected(many))
    slopes = jax.vmap(jax.grad(total), ({"a": 0, "b": None},))(many)
    assert_equal(slopes["a"], 2 * many["a"] * X["b"])


@pytest.mark.parametrize(
    ("platform", "own"), [("cpu", 101), ("cuda", 102), ("rocm", 102), ("tpu", 103)]
)
def test_vmap_takes_the_way_of_the_platform(platform, own):
    def call(x):
        return per_platform(
            x, cpu=lambda x: x + 101, gpu=lambda x: x + 102, tpu=lambda x: x + 103
        )

    program = jax.jit(jax.vmap(call)).trace(np.ones(3, np.float32))
    text = program.lower(lowering_platforms=(platform,)).as_text()
    assert [n for n in (101, 102, 103) if f"<{n / 100:.6f}e+02>" in text] == [own]


def test_a_value_that_is_not_differentiated_may_be_an_integer():
    def total(x, count):
        def way(x, count):
            return x * count

        return per_platform(x, count, cpu=way, gpu=way, tpu=way)

    assert jax.jit(jax.grad(total))(2.0, 3) == 3


def summed(x):
    def way(x):
        return jax.lax.psum(x, "x")

    return per_platform(x, cpu=way, gpu=way, tpu=way)


@pytest.mark.parametrize("typed", [True, False])
def test_a_way_may_hold_a_collective(typed):
    x = np.arange(4, dtype=np.float32)
    found = on_two_devices(summed, P("x"), P(), x, check_vma=typed)
    np.testing.assert_array_equal(found, x[:2] + x[2:])


def test_a_way_may_hold_a_collective_of_vmap():
    x = np.arange(4, dtype=np.float32)
    found = jax.jit(jax.vmap(summed, axis_name="x"))(x)
    np.testing.assert_array_equal(found, [6, 6, 6, 6])


def test_a_loop_takes_the_way_of_its_platform():
    def total(x):
        return jax.lax.scan(
            lambda s, _: (s + apply(x)["twice"], None), x["a"], length=3
        )

    np.testing.assert_array_equal(jax.jit(total)(X)[0], 7 * X["a"])
