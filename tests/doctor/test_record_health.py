"""`record_health` against float64 NumPy, in every dtype and sharding, and its state."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from tests.helpers import apply

RANDOM = np.random.default_rng(0)


def array(shape, dtype=np.float32, size=1.0):
    real, imag = RANDOM.normal(size=(2, *shape))
    is_complex = np.issubdtype(dtype, np.complexfloating)
    return (size * (real + 1j * imag if is_complex else real)).astype(dtype)


def wide(x):
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def signs_of(x, w):
    """The equations, of one tensor."""
    tiny = float(ml_dtypes.finfo(x.dtype).tiny) if not np.iscomplexobj(x) else 1e-37
    x, w = wide(x), wide(w)
    size = np.abs(x)
    norm, weight_norm = np.sqrt(np.sum(size**2)), np.sqrt(np.sum(np.abs(w) ** 2))
    return {
        "norm": norm,
        "weight_norm": weight_norm,
        "ratio": norm / weight_norm,
        "zeros": np.mean(size == 0),
        "subnormals": np.mean((size > 0) & (size < tiny)),
        "nonfinite": np.sum(~np.isfinite(size)),
    }


def recorded(recorder, grads, params, steps=1):
    state = recorder.init(params)
    for _ in range(steps):
        _, state = recorder.update(grads, state, params)
    return state


def found_in(state, **options):
    return optaxclip.metrics(state, floats=True, **options)


def assert_signs(found, wanted, tensor, rel=1e-5):
    for sign, value in wanted.items():
        name = f"health/{sign}/{tensor}".rstrip("/")
        assert found[name] == pytest.approx(value, rel=rel, abs=1e-6), name


def test_each_sign_is_that_of_numpy():
    grads, params = {}, {}
    for dtype in ("float32", "float16", "bfloat16", "complex64"):
        kind = np.dtype(dtype)
        grads |= {f"{dtype} w": array((9, 7), kind), f"{dtype} b": array((5,), kind)}
        params |= {f"{dtype} w": array((9, 7), kind), f"{dtype} b": array((5,), kind)}
        grads[f"{dtype} w"][2:4] = 0
    grads["float16 w"][5] = 3e-6
    # Not 0, though its real part is.
    grads["complex64 w"][5] = 2j
    found = found_in(recorded(optaxclip.record_health(), grads, params))
    for name in grads:
        assert_signs(found, signs_of(grads[name], params[name]), name)


def test_subnormals_are_counted_where_a_cpu_takes_them_for_0():
    for kind in (np.float32, ml_dtypes.bfloat16, np.float16):
        tiny = float(ml_dtypes.finfo(kind).tiny)
        x = np.array([tiny, tiny / 2, -tiny / 4, 0.0, -0.0, 1.0, np.inf, np.nan], kind)
        found = found_in(recorded(optaxclip.record_health(weights=False), x, x))
        shares = [found[f"health/{x}"] for x in ("subnormals", "zeros", "nonfinite")]
        assert shares == [0.25, 0.25, 2]


@pytest.mark.slow
def test_more_elements_than_float32_counts_are_counted():
    x = jnp.zeros(2**24 + 2**20).at[: 2**20].set(1.0)
    found = found_in(recorded(optaxclip.record_health(weights=False), x, x))
    assert found["health/zeros"] == pytest.approx(2**24 / x.size, rel=2**-23)


def test_norms_of_0_have_no_ratio():
    zero, one = jnp.zeros(3), jnp.ones(3)
    recorder = optaxclip.record_health()
    for grads, params, ratio in ((zero, zero, 0), (zero, one, 0), (one, zero, np.inf)):
        found = found_in(recorded(recorder, grads, params))
        assert found["health/ratio"] == ratio


def test_each_layer_has_its_own_signs():
    """Along the first axis of one leaf, and along the second of the other."""
    grads = {"first": array((3, 6, 5)), "second": array((3, 6, 5))}
    params = {name: array(x.shape) for name, x in grads.items()}
    grads["first"][1, 2] = grads["second"][1, 2] = 0
    stacked = {"first": 1, "second": (1,)}
    recorder = optaxclip.record_health(stacked=stacked)
    state = recorded(recorder, grads, params)
    found, whole = found_in(state, layers=True), found_in(state)
    summary = found_in(state, summary=True)
    together = []
    for axis, name in enumerate(grads):
        every = []
        for layer in range(grads[name].shape[axis]):
            own = np.take(grads[name], layer, axis)
            wanted = signs_of(own, np.take(params[name], layer, axis))
            every.append(wanted)
            assert_signs(found, wanted, f"{name}/{layer}")
        together += every
        # Without `layers` the largest, with its sign.
        assert_signs(whole, worst_of(every), name)
    assert_signs(summary, worst_of(together), "")


def worst_of(every):
    worst = {}
    for sign in every[0]:
        values = [wanted[sign] for wanted in every]
        worst[sign] = max(values, key=abs)
    return worst


def test_the_summary_is_the_largest_of_all_tensors():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0, 1.0])}
    state = recorded(optaxclip.record_health(), grads, grads)
    found = found_in(state, summary=True)
    assert found["health/norm"] == 5.0
    # A share is the square of a rounded root.
    assert found["health/zeros"] == pytest.approx(0.5, rel=2**-23)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_updates_below_a_quarter_of_the_rounding_are_mostly_lost(dtype):
    weights = array((300, 200), np.dtype(dtype))
    signs = np.sign(array(weights.shape))
    rounding = float(ml_dtypes.finfo(weights.dtype).eps)
    for size, is_lost in ((rounding / 8, True), (rounding, False)):
        updates = np.float32(size * signs)
        found = found_in(recorded(optaxclip.record_health(), updates, weights))
        assert found["health/rounding"] == np.float32(rounding)
        assert (found["health/ratio"] < 0.25 * rounding) == is_lost
        new = optax.apply_updates(weights, updates)
        assert (np.mean(np.asarray(new) == weights) > 0.5) == is_lost


def test_a_row_is_dead_after_steps_without_a_gradient():
    recorder = optaxclip.record_health(
        weights=False, values=False, embeddings="table", patience=3
    )
    rows = [[0, 1], [0], [0], [2], [1, 2], [2]]
    state, seen, last = recorder.init({"table": jnp.zeros((4, 2))}), [], [-1] * 4
    wanted = []
    for step, alive in enumerate(rows):
        grads = np.zeros((4, 2), np.float32)
        grads[alive, 1] = -1e-30
        _, state = recorder.update({"table": grads}, state)
        seen.append(found_in(state)["health/dead_rows/table"])
        for row in alive:
            last[row] = step
        wanted.append(np.mean([step - x >= 3 for x in last]))
    # Before there were as many steps nobody knows.
    assert seen[:2] == [-np.inf] * 2
    assert seen[2:] == wanted[2:] and max(wanted[2:]) == 0.5


def test_the_first_steps_have_no_nan_for_debug_nans():
    recorder = optaxclip.record_health(embeddings="t")
    with jax.debug_nans(True):
        state = recorded(recorder, {"t": jnp.ones(3)}, {"t": jnp.ones(3)}, steps=1)
    assert found_in(state)["health/dead_rows/t"] == -np.inf


# --------------------------------------------------------------------------- devices

GRADS = {"split": array((8, 6)), "layers": array((2, 8, 4)), "whole": array((3,))}
GRADS["split"][3] = 0
PARAMS = {name: array(x.shape) for name, x in GRADS.items()}
SPECS = {"split": P("x", "y"), "layers": P(None, ("x", "y")), "whole": P()}
STACKED = {"split": None, "layers": 1, "whole": None}
MESH = {"shape": (4, 2), "names": ("x", "y")}


def mesh_of(kind=AxisType.Auto):
    devices = np.array(jax.devices()[:8]).reshape(MESH["shape"])
    return Mesh(devices, MESH["names"], axis_types=(kind,) * 2)


def assert_as_numpy(state):
    found = found_in(state, layers=True)
    for name in ("split", "whole"):
        assert_signs(found, signs_of(GRADS[name], PARAMS[name]), name)
    for layer in range(2):
        wanted = signs_of(GRADS["layers"][layer], PARAMS["layers"][layer])
        assert_signs(found, wanted, f"layers/{layer}")


@pytest.mark.parametrize("typed", [True, False])
def test_signs_are_those_of_all_devices_in_shard_map(typed):
    recorder = optaxclip.record_health(stacked=STACKED, mesh_axes=SPECS)

    def step(grads, params):
        return recorder.update(grads, recorder.init(params), params)[1]

    mapped = jax.shard_map(
        step, mesh=mesh_of(), in_specs=(SPECS, SPECS), out_specs=P(), check_vma=typed
    )
    assert_as_numpy(jax.jit(mapped)(GRADS, PARAMS))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_signs_are_those_of_all_devices_under_jit(kind):
    mesh = mesh_of(kind)
    place = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    options = {"embeddings": "split", "patience": 1}
    recorder = optaxclip.record_health(stacked=STACKED, **options)
    alone = recorder.update(GRADS, recorder.init(PARAMS), PARAMS)[1].signs["rounding"]
    with jax.set_mesh(mesh):
        grads, params = jax.device_put((GRADS, PARAMS), (place, place))

        def step(state, _):
            return recorder.update(grads, state, params)[1], None

        scan = jax.jit(lambda state: lax.scan(step, state, None, 2)[0])
        state = scan(recorder.init(params))
    assert_as_numpy(state)
    np.testing.assert_allclose(state.signs["rounding"], alone, rtol=1e-5)
    assert found_in(state)["health/dead_rows/split"] == 1 / 8


def test_dead_rows_of_a_whole_leaf_are_counted_beside_split_leaves():
    specs = SPECS | {"split": P()}
    recorder = optaxclip.record_health(
        stacked=STACKED, mesh_axes=specs, embeddings="split", patience=1
    )

    def step(grads, params):
        return recorder.update(grads, recorder.init(params), params)[1]

    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(specs, specs), out_specs=P())
    state = jax.jit(mapped)(GRADS, PARAMS)
    assert_as_numpy(state)
    assert found_in(state)["health/dead_rows/split"] == 1 / 8


def test_what_needs_whole_leaves_refuses_parts():
    # Each device has a part of the tensor, or whole layers of it.
    splits = ("split", SPECS), ("layers", SPECS | {"layers": P("y")})
    for name, specs in splits:
        recorder = optaxclip.record_health(
            weights=False, stacked=STACKED, mesh_axes=specs, embeddings=name
        )

        def step(grads, recorder=recorder):
            return recorder.update(grads, recorder.init(grads))[1]

        mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(specs,), out_specs=P())
        error = "record_health: embeddings needs whole leaves"
        with pytest.raises(ValueError, match=error):
            jax.jit(mapped)(GRADS)


# ------------------------------------------------------------------------- the state


def test_updates_pass_through_bit_for_bit():
    grads = {"w": jnp.array([jnp.nan, -0.0, 1e-40]), "n": jnp.array([3])}
    params = {"w": jnp.ones(3), "n": jnp.array([1])}
    recorder = optaxclip.record_health(embeddings="w")
    updates, _ = recorder.update(grads, recorder.init(params), params)
    assert updates is grads


def test_the_state_is_one_of_optax():
    recorder = optaxclip.record_health(stacked={"a": 1, "b": None}, embeddings="b")
    params = {"a": jnp.ones((2, 3, 3)), "b": jnp.ones((4, 2))}
    state = recorder.init(params)
    mapped = optax.tree_map_params(recorder.init, lambda x: x, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


def test_several_models_have_their_own_signs():
    grads, params = array((3, 4)), array((3, 4))
    recorder = optaxclip.record_health()

    def signs(x, w):
        return optaxclip.metrics(recorder.update(x, recorder.init(w), w)[1])

    found = jax.vmap(signs)(grads, params)
    for member in range(3):
        own = {name: value[member] for name, value in found.items()}
        assert_signs(own, signs_of(grads[member], params[member]), "")


def test_without_weights_no_params_are_needed():
    _, state = apply(optaxclip.record_health(weights=False), jnp.ones(2))
    assert "health/weight_norm" not in found_in(state)


def test_embeddings_that_are_no_paths_are_refused():
    for embeddings in (True, None):
        with pytest.raises(TypeError, match=f"embeddings must .* got {embeddings}"):
            optaxclip.record_health(embeddings=embeddings)


def test_gradients_of_16_bits_meet_other_weights_under_strict_promotion():
    weights = {x: jnp.array([3.0, 4.0], x) for x in ("float32", "float16")}
    grads = {name: jnp.array([4.0, 3.0], jnp.bfloat16) for name in weights}
    recorder = optaxclip.record_health()
    with jax.numpy_dtype_promotion("strict"):
        _, state = recorder.update(grads, recorder.init(weights), weights)
    np.testing.assert_allclose(state.signs["weight_norm"], [5.0, 5.0], rtol=1e-6)


def test_patience_may_be_an_array():
    recorder = optaxclip.record_health(embeddings="t", patience=jnp.int32(2))
    state = recorded(recorder, {"t": jnp.zeros(3)}, {"t": jnp.ones(3)}, steps=2)
    assert found_in(state)["health/dead_rows/t"] == 1.0


def test_embeddings_that_are_no_paths_of_tables_are_refused():
    # Only leaves with rows are named.
    recorder = optaxclip.record_health(embeddings="scale")
    with pytest.raises(ValueError, match=r"got 'scale'. There are 't'\.$"):
        recorder.init({"scale": jnp.ones(()), "t": jnp.ones(3)})
