"""Losses of many forms: a released step of SGD is minus the gradient of `jax.grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from optaxclip import release
from tests.release.training import assert_close, norm, released_run, usual_run

LAYERS, WIDTH = 3, 4


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 2)


X = {"shape": (2, WIDTH)}


def dense(x, w):
    return jnp.tanh(x @ w) + x, None


def plain(params, x):
    x, _ = lax.scan(dense, x, params["layers"])
    return jnp.sum(x**2)


def twice(params, x):
    """Two stacks, of which the second reads the outputs of the first, backwards."""

    def encode(x, w):
        x, _ = dense(x, w)
        return x, x

    def decode(x, inputs):
        w, skip = inputs
        return jnp.tanh(x @ w) + skip, None

    x, skips = lax.scan(encode, x, params["layers"])
    x, _ = lax.scan(
        decode, x * params["rest"][None], (params["more"], skips), reverse=True
    )
    return jnp.sum(x**2)


def cross(params, x):
    """A stack whose layers all read what another one has made."""
    memory, _ = lax.scan(dense, x, params["more"])

    def layer(x, w):
        return jnp.tanh(x @ w + memory * params["rest"][None]), None

    x, _ = lax.scan(layer, x, params["layers"])
    return jnp.sum(x**2) + 0.1 * jnp.sum(memory)


def laid_out(params, x):
    """Layers on axis 1, in a smaller dtype, in groups, and flat."""

    def layer(x, inputs):
        w, group, flat, wide = inputs
        for row in group:
            x, _ = dense(x, row)
        return jnp.tanh(x @ w.astype(x.dtype) @ flat + wide), None

    w = jnp.moveaxis(params["second"], 1, 0).astype(jnp.float32)
    groups = params["groups"].reshape(LAYERS, 2, WIDTH, WIDTH)
    flat = params["flat"].reshape(LAYERS, WIDTH, WIDTH)
    wide = params["wide"].reshape(LAYERS, 1, WIDTH)
    x, _ = lax.scan(layer, x, (w, groups, flat, wide))
    return jnp.sum(x**2)


def nested(params, x):
    """A scan in a layer, in checkpoints and jits."""

    @jax.jit
    @jax.checkpoint
    def layer(x, inputs):
        w, steps = inputs
        x, _ = lax.scan(lambda x, s: (jnp.tanh(x * s[None]), None), x, steps)
        return dense(x, w)[0], jnp.sum(x)

    @jax.checkpoint
    def run(params, x):
        return lax.scan(layer, x, (params["layers"], params["more"]), unroll=2)

    x, sizes = run(params, x)
    return jnp.sum(x**2) + jnp.sum(sizes * params["rest"][:LAYERS])


def carried(params, x):
    """Integers, keys and weights in the carry, and a loss that is added up there."""

    def layer(carry, inputs):
        x, key, count, shared, total = carry
        w, number = inputs
        key, use = jax.random.split(key)
        x = dense(x * jax.random.uniform(use, x.shape), w)[0] * shared[None] + count
        return (x, key, count + number, shared, total + jnp.sum(x)), number

    begin = x, jax.random.key(0), jnp.array(1), params["rest"], 0.0
    inputs = params["layers"], jnp.arange(LAYERS)
    (x, _, count, _, total), _ = lax.scan(layer, begin, inputs)
    return jnp.sum(x**2) * count + total


def rounded(params, x):
    """A carry of integers alone, which has no derivative."""

    def layer(count, w):
        return count + jnp.round(10 * jnp.sum(w)).astype(int), None

    count, _ = lax.scan(layer, 0, params["layers"])
    return jnp.sum(x * params["rest"][None]) * count


def over_nothing(params, x):
    """A scan without turns before the stack."""
    none = params["rest"][None][:0].reshape(0, 2, 2)
    x, _ = lax.scan(lambda x, row: (x + jnp.sum(row), None), x, none)
    return plain(params, x)


def alone(params, x):
    """Nothing but a stack, in which weights have no input."""
    _, ys = lax.scan(
        lambda carry, w: (carry, jnp.sum(jnp.sin(w))), (), params["layers"]
    )
    return jnp.sum(ys**2)


def in_part(params, x):
    """One leaf of the layers is read elsewhere too, and one is changed before."""

    def layer(x, inputs):
        w, more, wide = inputs
        return jnp.tanh(x @ w @ more + wide[None]), None

    inputs = params["layers"], 1 + params["more"], params["wide"]
    x, _ = lax.scan(layer, x, inputs)
    return jnp.sum(x**2) + 0.1 * jnp.sum(params["wide"] ** 2)


def transposed_on_the_way(params, x):
    """By a reshape, which JAX lets transpose as well."""

    def layer(x, inputs):
        w, more = inputs
        return jnp.tanh(x @ w @ more), None

    more = lax.reshape(params["more"], (LAYERS, WIDTH, WIDTH), dimensions=(0, 2, 1))
    x, _ = lax.scan(layer, x, (params["layers"], more))
    return jnp.sum(x**2)


def joined_on_the_way(params, x):
    """A reshape makes one axis of stages and of the layers in them."""
    x, _ = lax.scan(dense, x, params["layers"])
    x, _ = lax.scan(dense, x, params["stages"].reshape(-1, WIDTH, WIDTH))
    return jnp.sum(x**2)


def without_derivative(params, x):
    """Layers read the batch through a loop and a callback that JAX cannot transpose,
    behind `stop_gradient`.
    """

    def halved(array):
        array = lax.stop_gradient(array)
        return lax.while_loop(lambda y: jnp.max(y) > 0.1, lambda y: y / 2, array)

    def doubled(array):
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return jax.pure_callback(
            lambda y: 2 * np.asarray(y),
            shape,
            lax.stop_gradient(array),
            vmap_method="sequential",
        )

    def layer(y, inputs):
        w, row, wide = inputs
        bias = halved(x) + doubled(row)[None] + halved(wide)[None]
        return jnp.tanh(y @ w + bias) * params["rest"][None], None

    rows = jnp.stack([x[0]] * LAYERS)
    x_out, _ = lax.scan(layer, x, (params["layers"], rows, params["wide"]))
    return jnp.sum(x_out**2) + jnp.sum(params["wide"])


def complex_numbers(params, x):
    def layer(x, w):
        return jnp.exp(1j * x.real) * x @ w, None

    x, _ = lax.scan(layer, x + 0j, params["complex"])
    return jnp.sum(jnp.abs(x) ** 2)


def own_gradient(params, x):
    """A layer with a gradient of its own, and one that stops."""

    @jax.custom_vjp
    def half(x):
        return x

    half.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))

    def layer(x, w):
        return half(dense(x, w)[0]) + lax.stop_gradient(x), None

    x, _ = lax.scan(layer, x, params["layers"])
    return jnp.sum(x**2)


def of_each_example(params, x):
    losses = jax.vmap(lambda x: plain(params, x[None]))(x)
    return losses.mean()


STACK = numbers(LAYERS, WIDTH, WIDTH)
PARAMS = {
    "layers": STACK,
    "more": STACK[:, ::-1] * 0.9,
    "rest": numbers(WIDTH, seed=1),
    "second": numbers(WIDTH, LAYERS, WIDTH),
    "groups": numbers(2 * LAYERS, WIDTH, WIDTH),
    "stages": numbers(LAYERS, 2, WIDTH, WIDTH),
    "flat": numbers(LAYERS * WIDTH, WIDTH),
    "wide": numbers(LAYERS, WIDTH),
    "complex": STACK + 1j * STACK[::-1],
}
LOSSES = {
    plain: ["layers"],
    twice: ["layers", "more"],
    cross: ["layers", "more"],
    laid_out: ["flat", "groups", "second", "wide"],
    nested: ["layers", "more"],
    carried: ["layers"],
    rounded: ["layers"],
    alone: ["layers"],
    over_nothing: ["layers"],
    in_part: ["layers"],
    transposed_on_the_way: ["layers"],
    joined_on_the_way: ["layers"],
    without_derivative: ["layers"],
    complex_numbers: ["complex"],
    own_gradient: ["layers"],
    of_each_example: ["layers"],
}
REST = {twice: ["rest"], cross: ["rest"], nested: ["rest"], carried: ["rest"]}
REST[in_part] = ["more", "wide"]
REST[without_derivative] = ["rest", "wide"]
REST[transposed_on_the_way] = ["more"]
REST[joined_on_the_way] = ["stages"]
REST[over_nothing] = REST[rounded] = ["rest"]


def check_step(loss, params, x, **options):
    trainer = release(loss, optax.sgd(1.0), **options)
    state = trainer.init(params, x)
    new, _, value = jax.jit(trainer.step)(params, state, x)
    wanted, grads = jax.jit(jax.value_and_grad(loss))(params, x)
    # jax.grad of complex weights is the conjugate of the direction of descent.
    assert_close(new, jax.tree.map(lambda p, g: p - g, params, grads), 1e-12)
    assert_close(value, wanted, 1e-12)
    return trainer.released(params, x)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_step_of_sgd_is_minus_the_gradient(loss):
    params = {name: PARAMS[name] for name in (*LOSSES[loss], *REST.get(loss, []))}
    released = check_step(loss, params, numbers(2, WIDTH, seed=2))
    assert released == LOSSES[loss]


def test_params_may_be_nested_lists_and_tuples():
    def loss(params, x):
        (scale, shift), layers = params
        x, _ = lax.scan(dense, x, layers)
        return jnp.sum((x * scale + shift) ** 2)

    outer = numbers(1, WIDTH, seed=1), numbers(1, WIDTH, seed=2)
    for params in ([[*outer], STACK], (outer, STACK)):
        assert check_step(loss, params, numbers(2, WIDTH)) == ["1"]


def test_params_that_are_one_array_are_called_params():
    def loss(params, x):
        x, _ = lax.scan(dense, x, params)
        return jnp.sum(x**2)

    assert check_step(loss, STACK, numbers(2, WIDTH)) == ["params"]


def test_weight_decay_of_params_that_are_one_array():
    """The last update has no weights, and an optimizer may take no None for params."""

    def loss(params, x):
        x, _ = lax.scan(dense, x, params)
        return jnp.sum(x**2)

    model = loss, STACK, lambda seed: (numbers(2, WIDTH, seed=seed),)
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    params, states, _ = released_run(model, optimizer, 3)
    wanted, state, *_ = usual_run(model, optimizer, lambda grads: grads, 3)
    assert_close(params, wanted, 1e-12)
    assert_close(states[-1].optimizer, state, 1e-12)


def test_a_second_stack_in_a_checkpoint_is_not_released():
    """The checkpoint stays. Opening it would keep more for the backward pass."""

    def loss(params, x):
        x, _ = lax.scan(dense, x, params["layers"])
        more = jax.checkpoint(lambda x, more: lax.scan(dense, x, more)[0])
        return jnp.sum(more(x, params["more"]) ** 2)

    params = {name: PARAMS[name] for name in ("layers", "more")}
    assert check_step(loss, params, numbers(2, WIDTH)) == ["layers"]


def test_a_moment_follows_the_leaf_of_its_shape():
    """Its path may also end with the path of another leaf."""

    def init(params):
        return {"layers": jax.tree.map(jnp.zeros_like, params)}

    def update(grads, state, params):
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["layers"], grads)
        return jax.tree.map(lambda m: -0.01 * m, moments), {"layers": moments}

    def loss(params, x):
        x, _ = lax.scan(dense, x, params["layers"]["w"])
        return jnp.sum((x * params["w"][None]) ** 2)

    params = {"layers": {"w": STACK / 4}, "w": numbers(WIDTH)}
    model = loss, params, lambda seed: (numbers(2, WIDTH, seed=seed),)
    optimizer = optax.GradientTransformation(init, update)
    found, states, _ = released_run(model, optimizer, 3)
    wanted, moments, _, _ = usual_run(
        model, optimizer, lambda grads: grads, 3, has_aux=False
    )
    assert_close(found, wanted, 1e-12)
    assert_close(states[-1].optimizer, moments, 1e-12)


sections = st.lists(
    st.fixed_dictionaries(
        {
            "is_stack": st.booleans(),
            "length": st.integers(1, 3),
            "reverse": st.booleans(),
            "axis": st.integers(0, 2),
            "checkpoint": st.booleans(),
            "jit": st.booleans(),
            "reads_rest": st.booleans(),
            "adds_to_loss": st.booleans(),
            "unroll": st.integers(1, 2),
        }
    ),
    min_size=1,
    max_size=4,
).filter(lambda sections: any(section["is_stack"] for section in sections))


def random_model(sections):
    """A loss of these sections, and its params."""
    params = {"rest": numbers(WIDTH, seed=9)}
    for index, section in enumerate(sections):
        stack = numbers(section["length"], WIDTH, WIDTH, seed=index)
        axis = section["axis"] if section["is_stack"] else 0
        params[str(index)] = jnp.moveaxis(stack, 0, axis)

    def loss(params, x):
        total = jnp.sum(params["rest"] ** 2)
        for index, section in enumerate(sections):
            weights = params[str(index)]
            if not section["is_stack"]:
                x = jnp.tanh(x @ weights[0]) * params["rest"][None]
                continue

            def layer(x, w, section=section):
                x, _ = dense(x, w)
                if section["reads_rest"]:
                    x = x * params["rest"][None]
                return x, jnp.mean(x**2)

            layer = jax.checkpoint(layer) if section["checkpoint"] else layer
            layer = jax.jit(layer) if section["jit"] else layer
            x, sizes = lax.scan(
                layer,
                x,
                jnp.moveaxis(weights, section["axis"], 0),
                reverse=section["reverse"],
                unroll=section["unroll"],
            )
            if section["adds_to_loss"]:
                total = total + sizes.sum()
        return total + jnp.sum(x**2)

    return loss, params


@settings(deadline=None, max_examples=15)
@given(sections)
def test_random_programs_have_the_gradients_of_jax(sections):
    loss, params = random_model(sections)
    released = check_step(loss, params, numbers(2, WIDTH, seed=8))
    is_stack = [section["is_stack"] for section in sections]
    assert released == [str(k) for k, flag in enumerate(is_stack) if flag]


def test_the_loss_is_traced_once():
    calls = []

    def loss(params, x):
        calls.append(1)
        return plain(params, x)

    params, x = {"layers": STACK}, numbers(2, WIDTH)
    trainer = release(loss, optax.adam(0.1), max_norm=1.0, passes=2)
    state = trainer.init(params, x)
    before = len(calls)
    step = jax.jit(trainer.step)
    step(params, state, x)
    step(params, state, x)
    # JAX may have the program still from init.
    assert before == 1 and len(calls) <= 2


@pytest.mark.parametrize("passes", [1, 2])
def test_a_sweep_may_vmap_params_learning_rates_and_limits(passes):
    """The update of a layer closes over traced numbers then."""
    x = numbers(2, WIDTH)

    def step(params, rate, limit):
        trainer = release(plain, optax.adam(rate), max_norm=limit, passes=passes)
        return trainer.step(params, trainer.init(params, x), x)

    rates, limits = jnp.array([0.1, 0.2]), jnp.array([0.05, 1e3])
    params = {"layers": jnp.stack([STACK, STACK / 2])}
    new, state, _ = jax.jit(jax.vmap(step))(params, rates, limits)
    step_alone = jax.jit(step)
    for index in range(2):
        wanted, wanted_state, _ = step_alone(
            {"layers": params["layers"][index]}, rates[index], limits[index]
        )
        assert_close(new["layers"][index], wanted["layers"], 1e-6)
        assert_close(state.clip.norm[index], wanted_state.clip.norm, 1e-6)


def test_a_step_without_jit_is_the_same():
    params, x = {"layers": STACK}, numbers(2, WIDTH)
    trainer = release(plain, optax.adam(0.1), max_norm=1.0)
    state = trainer.init(params, x)
    assert_close(
        trainer.step(params, state, x), jax.jit(trainer.step)(params, state, x), 1e-12
    )


def test_init_needs_shapes_of_the_batch_only():
    params, x = {"layers": STACK}, numbers(2, WIDTH)
    trainer = release(plain, optax.adam(0.1), max_norm=1.0)
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype)
    assert_close(trainer.init(params, shapes), trainer.init(params, x), 0)


def test_aux_may_be_any_tree_and_comes_back():
    def loss(params, x):
        def layer(x, w):
            return dense(x, w)[0], jnp.sum(x)

        x, ys = lax.scan(layer, x, params["layers"])
        # Aux may also read the weights of the layers.
        norm = jnp.sqrt(jnp.sum(params["layers"] ** 2))
        aux = {"x": x, "ys": ys, "norm": norm, "none": None, "n": 7}
        return jnp.sum(x**2), (aux, params["layers"][0], jax.random.key(3))

    params, x = {"layers": STACK}, numbers(2, WIDTH)
    trainer = release(loss, optax.sgd(1.0))
    new, _, found = jax.jit(trainer.step)(params, trainer.init(params, x), x)
    wanted = jax.jit(loss)(params, x)
    (*found_arrays, found_key), (*arrays, key) = found[1], wanted[1]
    assert found_key == key
    assert_close((found[0], found_arrays), (wanted[0], arrays), 1e-12)
    grads, _ = jax.grad(loss, has_aux=True)(params, x)
    assert_close(new, {"layers": STACK - grads["layers"]}, 1e-12)


def test_a_scan_for_aux_alone_leaves_the_other_a_stack():
    """Whichever of the two runs first."""

    def before(params, x):
        y, _ = lax.scan(dense, x + 1, params["layers"])
        return plain(params, x), y

    def after(params, x):
        loss = plain(params, x)
        y, _ = lax.scan(dense, x + 1, params["layers"])
        return loss, y

    params, x = {"layers": STACK}, numbers(2, WIDTH)
    grads = jax.grad(plain)(params, x)
    for loss in (before, after):
        trainer = release(loss, optax.sgd(1.0))
        assert trainer.released(params, x) == ["layers"]
        new, _, outputs = jax.jit(trainer.step)(params, trainer.init(params, x), x)
        assert_close(new, {"layers": STACK - grads["layers"]}, 1e-12)
        assert_close(outputs, jax.jit(loss)(params, x), 1e-12)


def test_a_leaf_that_a_scan_reads_for_aux_alone_is_none_of_its_layers():
    """Its gradient comes from outside of the scan."""

    def loss(params, x):
        layers = params["layers"], params["scale"]
        x, logged = lax.scan(dense_that_logs, x, layers)
        return jnp.sum(x**2) * jnp.sum(params["scale"] ** 2), logged

    assert_step_is_gradient(
        loss, {"layers": STACK, "scale": jnp.arange(1.0, LAYERS + 1)}
    )


def test_a_stack_that_another_scan_reads_for_aux_has_its_gradient_once():
    def loss(params, x):
        layers = params["layers"], params["others"]
        x, logged = lax.scan(dense_that_logs, x, layers)
        x, _ = lax.scan(dense, x, params["others"])
        return jnp.sum(x**2), logged

    assert_step_is_gradient(loss, {"layers": STACK, "others": STACK / 2})


def dense_that_logs(x, weights):
    w, logged = weights
    return x + jnp.tanh(x @ w), jnp.sum(logged)


def assert_step_is_gradient(loss, params):
    x = numbers(2, WIDTH)
    trainer = release(loss, optax.sgd(1.0))
    new, _, _ = jax.jit(trainer.step)(params, trainer.init(params, x), x)
    grads, _ = jax.grad(loss, has_aux=True)(params, x)
    assert_close(new, jax.tree.map(jnp.subtract, params, grads), 1e-12)


def test_a_checkpoint_of_the_head_stays_one():
    @jax.checkpoint
    def head(x, table):
        x, _ = lax.scan(lambda x, row: (jnp.tanh(x + row[None]), None), x, table)
        return jnp.sum(x**2)

    def loss(params, x):
        x, _ = lax.scan(dense, x, params["layers"])
        return head(x, params["table"])

    params, x = {"layers": STACK, "table": STACK[:, 0]}, numbers(2, WIDTH)
    assert check_step(loss, params, x) == ["layers"]
    trainer = release(loss, optax.sgd(1.0))
    program = jax.make_jaxpr(trainer.step)(params, trainer.init(params, x), x)
    names = {equation.primitive.name for equation in program.eqns}
    assert names & {"checkpoint", "remat2"}


@pytest.mark.parametrize("passes", [1, 2])
def test_layers_of_several_stacks_are_groups_of_their_own(passes):
    # In float32, as the arrays of this file are.
    params = {name: PARAMS[name] for name in ("layers", "more", "rest")}
    x = numbers(2, WIDTH)
    trainer = release(twice, optax.sgd(1.0), max_norm=0.1, passes=passes)
    state = trainer.init(params, x)
    new, state, _ = jax.jit(trainer.step)(params, state, x)
    np.testing.assert_allclose(state.clip.norm, norm(jax.grad(twice)(params, x)), 1e-6)
    moved = norm(jax.tree.map(lambda x, y: x - y, new, params))
    assert 0.05 < moved < 0.1 * (1 + 1e-5)
    np.testing.assert_allclose(moved, state.clip.norm * state.clip.factor, 1e-5)


def test_one_pass_clips_each_layer_by_its_share():
    """In the order of the backward pass, which a reversed scan turns around."""
    params = {name: PARAMS[name] for name in ("layers", "more", "rest")}
    trainer = release(twice, optax.sgd(0.1), max_norm=0.1)
    state, run_step = trainer.init(params, numbers(2, WIDTH)), jax.jit(trainer.step)
    shares = np.full(2 * LAYERS + 1, 1 / (2 * LAYERS + 1))
    for step in range(1, 5):
        x = numbers(2, WIDTH, seed=step)
        grads = {name: np.array(x) for name, x in jax.grad(twice)(params, x).items()}
        groups = [*grads["more"], *grads["layers"][::-1], grads["rest"]]
        squares = np.array([np.sum(gradient**2) for gradient in groups])
        left = 0.1**2
        for group, gradient in enumerate(groups):
            portion = left * shares[group] / shares[group:].sum()
            # In place, so that `grads` changes.
            gradient *= min(1, np.sqrt(portion / squares[group]))
            left -= min(portion, squares[group])
        shares += (squares / squares.sum() - shares) / step
        wanted = {name: params[name] - 0.1 * grads[name] for name in params}
        params, state, _ = run_step(params, state, x)
        # Shares are float32.
        assert_close(params, wanted, 1e-7)


def test_a_step_with_jit_disabled_is_the_same():
    params = {"layers": numbers(LAYERS, WIDTH, WIDTH)}
    model = plain, params, lambda seed: (numbers(2, WIDTH, seed=seed),)
    wanted, *_ = released_run(model, optax.sgd(0.1), steps=2, max_norm=0.1)
    with jax.disable_jit():
        result, *_ = released_run(model, optax.sgd(0.1), steps=2, max_norm=0.1)
    assert_close(result, wanted, 1e-9)
