"""A released step is the usual step: the same weights, states and norms, in float64."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import release

LAYERS, WIDTH, WORDS, STEPS = 4, 6, 9, 6
TIGHT = 0.05  # which every norm of the runs below exceeds


def embed(rest, tokens, mask):
    return rest["table"][tokens]


def layer(own, x, tokens, mask):
    # Of a stack, an integer is a constant of its layer.
    hidden = jnp.tanh(x @ own["up"] + own["bias"][None, None])
    hidden = hidden * mask[:, :, None]
    return x + hidden @ own["down"] / (1 + own["number"])


def head(rest, x, tokens, mask):
    # The table is used twice, so its gradient has two parts.
    logits = x @ rest["table"].T + rest["bias"][None, None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, ::-1])
    return losses.mean()


def usual_loss(params, *batch):
    layers, rest = params
    x = embed(rest, *batch)
    for number in range(LAYERS):
        own = jax.tree.map(lambda leaf, number=number: leaf[number], layers)
        x = layer(own, x, *batch)
    return head(rest, x, *batch)


def new_params(dtype=np.float64):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    layers = {
        "up": normal(LAYERS, WIDTH, 8),
        "bias": normal(LAYERS, 8),
        "down": normal(LAYERS, 8, WIDTH),
        "number": jnp.arange(LAYERS),
    }
    return layers, {"table": normal(WORDS, WIDTH), "bias": normal(WORDS)}


def batches(dtype=np.float64):
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        tokens = random.integers(WORDS, size=(8, 5))
        yield jnp.asarray(tokens), jnp.asarray(random.random((8, 5)), dtype)


def norm(tree):
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.sqrt(sum(np.sum(x * x) for x in leaves))


def shortened(tree, limit):
    factor = min(1, limit / norm(tree))
    return jax.tree.map(lambda x: x * factor, tree)


def by_layer(clip, grads):
    """Applies a function to the gradient of each layer, and to that of the rest."""
    layers, rest = grads
    each = []
    for number in range(LAYERS):
        each.append(clip(jax.tree.map(lambda x, i=number: x[i], layers)))
    return jax.tree.map(lambda *own: np.stack(own), *each), clip(rest)


def each_tensor(grads):
    def clip(tree):
        return jax.tree.map(lambda x: shortened(x, TIGHT), tree)

    return by_layer(clip, grads)


def each_layer(grads):
    return by_layer(partial(shortened, limit=TIGHT), grads)


def everything(grads):
    return shortened(grads, TIGHT)


def tensors_first(grads):
    return everything(each_tensor(grads))


OPTIMIZERS = {
    "adam": optax.adam(0.03),
    "adamw": optax.adamw(0.03, weight_decay=0.1),
    # Moments, weights and a counter.
    "momentum": optax.chain(
        optax.trace(0.9),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(lambda count: -1.0 / (1 + count)),
    ),
    "lion": optax.lion(0.03),
    "schedule": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.03, 0.0, STEPS)
    ),
    "two": optax.partition(
        {"matrix": optax.adam(0.03), "vector": optax.sgd(1.0)},
        lambda tree: {name: "vector" if name == "bias" else "matrix" for name in tree},
    ),
}
TENSORS = optaxclip.clip_by_tensor_norm(TIGHT)
LIMITS = {
    "none": ({}, lambda grads: grads),
    "tensors": ({"layer_clip": TENSORS}, each_tensor),
    "layers": ({"layer_clip": optaxclip.clip_by_global_norm(TIGHT)}, each_layer),
    "global": ({"max_norm": TIGHT}, everything),
    "both": ({"max_norm": TIGHT, "layer_clip": TENSORS}, tensors_first),
}


def split(layers):
    return layers | {"number": None}, {"number": layers["number"]}


def usual_run(optimizer, clip):
    """The usual step: all gradients by jax.grad, clipped by NumPy, applied by optax."""
    layers, rest = new_params()
    trained, constant = split(layers)
    states = optimizer.init(trained), optimizer.init(rest)
    update, seen = jax.jit(optimizer.update), []

    @jax.jit
    def gradient(trained, rest, *batch):
        def loss(trained, rest):
            return usual_loss((trained | constant, rest), *batch)

        return jax.value_and_grad(loss, (0, 1))(trained, rest)

    for batch in batches():
        loss, grads = gradient(trained, rest, *batch)
        grads = jax.tree.map(np.asarray, grads)
        seen.append((loss, grads))
        params, new = [], []
        for grad, state, own in zip(clip(grads), states, (trained, rest)):
            grad = jax.tree.map(jnp.asarray, grad)
            updates, state = update(grad, state, own)
            params.append(optax.apply_updates(own, updates))
            new.append(state)
        (trained, rest), states = params, tuple(new)
    return (trained | constant, rest), states, seen


def released_run(optimizer, **limits):
    trainer = release(embed, layer, head, optimizer, **limits)
    step = jax.jit(trainer.step)
    params = new_params()
    state, losses, states = trainer.init(params), [], []
    for batch in batches():
        params, state, loss = step(params, state, *batch)
        losses.append(loss)
        states.append(state)
    return params, states, losses


def assert_close(found, wanted, rtol=1e-9):
    """Six steps multiply the roundings of float64 (2e-16) by less than 1e6: Adam makes
    a gradient of 1e-6 as large as one of 1.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol, rtol)


PAIRS = [*product(OPTIMIZERS, ["tensors", "global"]), ("adam", "none")]
PAIRS += product(["adam", "momentum"], ["layers", "both"])


@pytest.mark.parametrize(("optimizer", "limits"), PAIRS)
def test_six_steps_are_those_of_the_usual_step(optimizer, limits):
    options, clip = LIMITS[limits]
    with jax.enable_x64(True):
        wanted, moments, seen = usual_run(OPTIMIZERS[optimizer], clip)
        params, states, losses = released_run(OPTIMIZERS[optimizer], **options)
        start = new_params()
    assert_close(params, wanted)
    assert_close((states[-1].layers, states[-1].rest), moments)
    assert_close(losses, [loss for loss, _ in seen])
    assert norm(params[0]["up"] - start[0]["up"]) > 0.1


def test_a_delayed_factor_is_that_of_the_step_before():
    factor = 1.0

    def clip(grads):
        nonlocal factor
        grads = each_tensor(grads)
        delayed = jax.tree.map(lambda x, f=factor: x * f, grads)
        factor = min(1, TIGHT / norm(grads))
        return delayed

    options = {"max_norm": TIGHT, "layer_clip": TENSORS, "delayed": True}
    with jax.enable_x64(True):
        wanted, _, seen = usual_run(OPTIMIZERS["momentum"], clip)
        params, states, _ = released_run(OPTIMIZERS["momentum"], **options)
    assert_close(params, wanted)
    for state, (_, grads) in zip(states, seen):
        np.testing.assert_allclose(state.clip.norm, norm(each_tensor(grads)), 1e-9)


def test_a_delayed_factor_is_that_which_was_reported():
    parts = (
        lambda rest, x: rest,
        lambda weights, h, x: h + weights,
        lambda rest, h, x: jnp.sum(h * x),
    )
    rule = optaxclip.rules.windowed_mean(3.0, 4)
    options = {"max_norm": rule, "layer_clip": optax.identity(), "delayed": True}
    trainer = optaxclip.release(*parts, optax.sgd(1.0), **options)
    params, reported = (jnp.zeros((1, 1)), jnp.zeros(1)), 1.0
    state, step = trainer.init(params), jax.jit(trainer.step)
    for x in (1.0, 1.01, 0.99, 1.0, 50.0, 1.0, 1.0):
        new, state, _ = step(params, state, jnp.array([x]))
        applied = float(params[0][0, 0] - new[0][0, 0]) / x
        np.testing.assert_allclose(applied, reported, rtol=1e-4)
        params, reported = new, float(state.clip.factor)
        assert x != 50 or reported < 0.1


def test_a_rule_learns_from_the_norm_of_everything():
    rule = optaxclip.rules.windowed_quantile(0.3, 3)
    history, sgd = [], optax.sgd(0.5)
    with jax.enable_x64(True):
        _, states, _ = released_run(sgd, max_norm=rule)
        clipper = optaxclip.clip_by_global_norm(rule)
        state = clipper.init(jnp.zeros(()))

        def clip(grads):
            nonlocal state
            clipped, state = clipper.update(grads, state)
            history.append(state)
            return clipped

        usual_run(sgd, clip)
        assert min(state.factor for state in history) < 1
        for found, wanted in zip(states, history):
            assert_close(found.clip, wanted)


def test_metrics_show_norms_of_layers_rest_and_everything():
    with jax.enable_x64(True):
        _, _, seen = usual_run(OPTIMIZERS["momentum"], tensors_first)
        _, states, _ = released_run(OPTIMIZERS["momentum"], **LIMITS["both"][0])
        report = optaxclip.metrics(states[-1], layers=True, floats=True)
        worst = optaxclip.metrics(states[-1], floats=True)
    layers, rest = seen[-1][1]
    for name in ("up", "down", "bias"):
        norms = [norm(x) for x in layers[name]]
        for number, wanted in enumerate(norms):
            key = f"clip/layers/norm_before/{name}/{number}"
            assert report[key] == pytest.approx(wanted, rel=1e-9)
        assert worst[f"clip/layers/norm_before/{name}"] == pytest.approx(max(norms))
    assert report["clip/rest/norm_before/table"] == pytest.approx(norm(rest["table"]))
    assert report["clip/norm_before"] == pytest.approx(norm(each_tensor(seen[-1][1])))
    assert report["clip/limit"] == TIGHT and report["clip/clipped_count"] == STEPS


def programs_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from programs_of(inner)


@pytest.mark.parametrize("limits", LIMITS)
def test_no_array_of_the_program_holds_all_gradients(limits):
    trainer = release(embed, layer, head, optax.adam(0.1), **LIMITS[limits][0])
    params = new_params(np.float32)
    batch = next(batches(np.float32))
    program = jax.make_jaxpr(trainer.step)(params, trainer.init(params), *batch)
    makes = set()
    for eqn in programs_of(program.jaxpr):
        if any(x.aval.shape == params[0]["up"].shape for x in eqn.outvars):
            makes.add(eqn.primitive.name)
    # Weights and moments, which are carried and written in place.
    assert makes <= {"while", "scan", "dynamic_update_slice", "jit", "pjit"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_of_weights_and_moments_stay(dtype):
    trainer = release(embed, layer, head, optax.adam(0.1), **LIMITS["both"][0])
    params = new_params(dtype)
    start = trainer.init(params)
    batch = next(batches(dtype))
    new, state, loss = jax.jit(trainer.step)(params, start, *batch)
    old, new = (params, start), (new, state)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(old)):
        assert jax.typeof(one) == jax.typeof(other)
    assert jnp.isfinite(loss)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_norm": 1.0, "nonfinite": "zero"}, True),
        ({"max_norm": 1.0}, False),
        ({"layer_clip": optaxclip.clip_by_global_norm(1.0, nonfinite="zero")}, True),
        ({"layer_clip": optaxclip.clip_by_global_norm(1.0)}, False),
    ],
)
def test_a_broken_step_does_what_nonfinite_says(options, kept):
    params = new_params(np.float32)
    trainer = release(embed, layer, head, optax.sgd(0.1), **options)
    tokens, mask = next(batches(np.float32))
    state = trainer.init(params)
    new, state, _ = jax.jit(trainer.step)(params, state, tokens, mask * jnp.nan)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(params)):
        if kept or jnp.issubdtype(one.dtype, jnp.integer):
            np.testing.assert_array_equal(one, other)
        else:
            assert jnp.isnan(one).all()
    found = optaxclip.metrics(state, only="nonfinite_count", floats=True)
    assert set(found.values()) == {1.0}


def test_a_norm_that_is_not_finite_can_raise():
    from jax.experimental import checkify

    trainer = release(
        embed, layer, head, optax.sgd(0.1), max_norm=1.0, nonfinite="raise"
    )
    params = new_params(np.float32)
    step = jax.jit(checkify.checkify(trainer.step))
    tokens, mask = next(batches(np.float32))
    error, _ = step(params, trainer.init(params), tokens, mask)
    assert error.get() is None
    error, _ = step(params, trainer.init(params), tokens, mask * jnp.nan)
    assert "norm of order 2 of the updates is not finite" in error.get()


def test_x_may_be_a_tree_with_keys_and_weights_may_have_keys():
    """Dropout: a key for each layer in the stack, another one that is carried."""

    def first(rest, tokens):
        return {"x": rest[tokens], "key": jax.random.key(0), "count": jnp.array(0)}

    def middle(own, carried, tokens):
        key, use = jax.random.split(carried["key"])
        drawn = [jax.random.uniform(k, ()) for k in (use, own["key"])]
        x = carried["x"] + jnp.tanh(carried["x"] @ own["w"]) * drawn[0] * drawn[1]
        return {"x": x, "key": key, "count": carried["count"] + 1}

    def last(rest, carried, tokens):
        return jnp.sum(carried["x"] ** 2) * carried["count"]

    def loss(params, tokens):
        layers, rest = params
        carried = first(rest, tokens)
        for number in range(LAYERS):
            own = {"w": layers["w"][number], "key": keys[number]}
            carried = middle(own, carried, tokens)
        return last(rest, carried, tokens)

    keys = jax.random.split(jax.random.key(1), LAYERS)
    layers = {"w": jnp.full((LAYERS, 3, 3), 0.5), "key": keys}
    rest, tokens = jnp.ones((4, 3)), jnp.arange(4)
    trainer = release(first, middle, last, optax.sgd(0.01))
    params = layers, rest
    new, _, _ = jax.jit(trainer.step)(params, trainer.init(params), tokens)
    grads = jax.grad(loss)(({"w": layers["w"]}, rest), tokens)
    np.testing.assert_allclose(new[0]["w"], 0.5 - 0.01 * grads[0]["w"], rtol=1e-5)
    np.testing.assert_allclose(new[1], 1 - 0.01 * grads[1], rtol=1e-5)


# Several devices.

SPECS = (
    {
        "up": P(None, None, "x"),
        "bias": P(None, "x"),
        "down": P(None, "x", None),
        "number": P(),
    },
    {"table": P(), "bias": P()},
)


def one_step(params, trainer, batch):
    params, state, loss = jax.jit(trainer.step)(params, trainer.init(params), *batch)
    return params, state.clip.norm, loss


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_weights_and_batch_that_jit_splits_give_the_same_step(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType[kind],) * 2)
    trainer = release(embed, layer, head, optax.adam(0.1), **LIMITS["both"][0])
    params, batch = new_params(np.float32), next(batches(np.float32))
    wanted = one_step(params, trainer, batch)

    def placed(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    specs = SPECS if kind == "Auto" else jax.tree.map(lambda _: P(), params)
    with jax.set_mesh(mesh):
        params = jax.tree.map(placed, params, specs)
        batch = tuple(placed(x, P("y")) for x in batch)
        if kind == "Explicit":
            batch = tuple(placed(x, P()) for x in batch)
        found = one_step(params, trainer, batch)
    # Adam's first step is the sign of each gradient times 0.1, so roundings count
    # where a gradient is 0 but for roundings. None is here.
    assert_close(found, wanted, 1e-4)


def test_clips_of_layers_begin_in_the_step_on_an_explicit_mesh():
    trainer = release(
        lambda rest, x: x @ rest,
        lambda weights, hidden, x: hidden + jnp.tanh(hidden @ weights),
        lambda rest, hidden, x: jnp.mean(hidden**2),
        optax.sgd(0.1),
        layer_clip=optaxclip.clip_by_tensor_norm(0.1),
    )
    params, batch = (jnp.ones((3, 4, 4)), jnp.ones((2, 4))), jnp.ones((8, 2))

    @jax.jit
    def first(params, batch):
        return trainer.step(params, trainer.init(params), batch)[0]

    wanted, mesh = first(params, batch), jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        assert_close(first(params, batch), wanted, 1e-6)


def test_a_typed_shard_map_adds_up_gradients():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def mean_head(rest, x, *batch):
        return jax.lax.pmean(head(rest, x, *batch), "x")

    params, batch = new_params(np.float32), next(batches(np.float32))
    limits = LIMITS["both"][0]
    trainer = release(embed, layer, head, optax.sgd(1.0), **limits)
    wanted = one_step(params, trainer, batch)
    trainer = release(embed, layer, mean_head, optax.sgd(1.0), **limits)
    specs = {"in_specs": (P(), P(), P("x")), "out_specs": P()}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, **specs)
    def step(params, state, batch):
        params, state, loss = trainer.step(params, state, *batch)
        return params, state.clip.norm, loss

    found = step(params, trainer.init(params), batch)
    assert_close(found, wanted, 1e-4)


def test_where_gradients_would_not_be_added_up_it_raises():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    trainer = release(embed, layer, head, optax.sgd(1.0))
    params, batch = new_params(np.float32), next(batches(np.float32))
    state = trainer.init(params)
    specs = {"in_specs": (P(), P(), P("x")), "out_specs": P(), "check_vma": False}
    step = jax.shard_map(
        lambda params, state, batch: trainer.step(params, state, *batch),
        mesh=mesh,
        **specs,
    )
    with pytest.raises(ValueError, match=r"mesh axes \('x',\).*check_vma=True"):
        step(params, state, batch)
    step = jax.pmap(trainer.step, axis_name="x", in_axes=(None, None, 0, 0))
    halves = [x.reshape(2, 4, *x.shape[1:]) for x in batch]
    with pytest.raises(ValueError, match=r"mesh axes \('x',\).*check_vma=True"):
        step(params, state, *halves)


# What is refused.

SGD = optax.sgd(1.0)
PAUSES = {
    "optax.MultiSteps": optax.MultiSteps(SGD, 2),
    "optax.apply_every": optax.chain(optax.apply_every(2), SGD),
    "optax.conditionally_mask": optax.conditionally_mask(SGD, lambda step: step > 3),
    "optax.apply_if_finite": optax.apply_if_finite(SGD, 3),
    "skip_nonfinite": optaxclip.skip_nonfinite(SGD),
    "skip_step": optaxclip.skip_step(SGD),
}


def labels(tree):
    return {name: "b" if name == "bias" else "a" for name in tree}


WRAPPED = {
    "alone": lambda inner: inner,
    "chain": lambda inner: optax.chain(optax.identity(), inner, optax.scale(0.5)),
    "masked": lambda inner: optax.masked(inner, lambda tree: dict.fromkeys(tree, True)),
    "partition": lambda inner: optax.partition({"a": inner, "b": SGD}, labels),
    "inject": lambda inner: optax.inject_hyperparams(
        lambda rate: optax.chain(inner, optax.scale(rate))
    )(0.5),
}


@pytest.mark.parametrize("name", PAUSES)
def test_an_optimizer_that_leaves_out_steps_is_refused(name):
    inner = PAUSES[name]
    inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    for wrapped in WRAPPED.values():
        trainer = release(embed, layer, head, wrapped(inner), max_norm=1.0)
        with pytest.raises(ValueError, match=f"optimizer must .*every step.*{name}"):
            trainer.init(new_params(np.float32))


def with_statistics(own, x, keeps):
    """A layer with the float buffers of a BatchNorm, which it normalizes without."""
    mean = x["h"].mean(0, keepdims=True)
    moved = 0.9 * own["mean"] + 0.1 * mean[0]
    h = x["h"] + jnp.tanh((x["h"] - mean) @ own["w"])
    # What a layer hands on that nobody reads leads nowhere either.
    return {"h": h, "moved": moved if keeps else x["moved"]}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_float_leaf_that_the_loss_does_not_read_is_refused(keeps):
    trainer = release(
        lambda rest, x: {"h": x @ rest["in"], "moved": jnp.zeros(3)},
        lambda own, h, x: with_statistics(own, h, keeps),
        lambda rest, h, x: jnp.mean(h["h"] ** 2),
        optax.adamw(0.1, weight_decay=0.1),
    )
    layers = {"w": jnp.ones((4, 3, 3)), "mean": jnp.ones((4, 3)), "n": jnp.arange(4)}
    rest = {"in": jnp.ones((2, 3)), "table": jnp.ones(5), "empty": jnp.ones((0, 2))}
    params, x = (layers, rest), jnp.linspace(-1, 1, 8).reshape(4, 2)
    wanted = r"release: the loss must depend .* but does not on '0/mean', '1/table'\."
    with pytest.raises(ValueError, match=wanted):
        jax.jit(trainer.step)(params, trainer.init(params), x)


def test_statistics_of_nnx_go_into_a_closure():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, key):
            self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(key))
            self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(key))

        def __call__(self, x):
            return x + jnp.tanh(self.linear(self.norm(x)))

    def step(layer, stack):
        sgd = optax.sgd(0.1)
        trainer = release(lambda rest, x: x @ rest, layer, mean_square, sgd)
        params = stack, jnp.eye(6)
        return jax.jit(trainer.step)(params, trainer.init(params), x)

    def mean_square(rest, h, x):
        return jnp.mean(h**2)

    x = 5 + jax.random.normal(jax.random.key(1), (32, 6))
    model = nnx.vmap(Block)(jax.random.split(jax.random.key(0), 3))
    graph, everything = nnx.split(model)
    with pytest.raises(ValueError, match="not on '0/norm/mean', '0/norm/var'"):
        step(lambda own, h, x: nnx.merge(graph, own)(h), everything)
    graph, weights, others = nnx.split(model, nnx.Param, ...)
    others = jax.tree.map(lambda leaf: leaf[0], others)

    def layer(own, h, x):
        return nnx.merge(graph, own, others, copy=True)(h)

    (new, _), _, loss = step(layer, weights)

    def usual(weights):
        h = x
        for number in range(3):
            own = jax.tree.map(lambda leaf, number=number: leaf[number], weights)
            h = layer(own, h, x)
        return jnp.mean(h**2)

    wanted, grads = jax.value_and_grad(usual)(weights)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    found = jax.tree.map(lambda old, new: (old - new) / 0.1, weights, new)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(grads)):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-4)


FREEZING = {
    "decayed": optax.adamw(0.1, weight_decay=0.1),
    "frozen": optax.partition(
        {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()},
        lambda tree: {name: "frozen" if name == "w" else "trained" for name in tree},
    ),
}


@pytest.mark.parametrize("optimizer", FREEZING)
def test_weights_behind_stop_gradient_are_those_of_the_usual_step(optimizer):
    """LoRA: the loss depends on the weights, and has no gradient by them."""

    def layer(own, h, x):
        return h + jnp.tanh(h @ jax.lax.stop_gradient(own["w"]) + h @ own["a"])

    def loss(params, x):
        h = x @ params[1]["in"]
        for number in range(2):
            h = layer({name: own[number] for name, own in params[0].items()}, h, x)
        return jnp.mean(h**2)

    with jax.enable_x64(True):
        random, adam = np.random.default_rng(0), FREEZING[optimizer]
        layers = {name: random.normal(size=(2, 3, 3)) for name in ("w", "a")}
        params = layers, {"in": random.normal(size=(2, 3))}
        x = random.normal(size=(4, 2))
        params = jax.tree.map(jnp.asarray, params)
        trainer = release(
            lambda rest, x: x @ rest["in"],
            layer,
            lambda rest, h, x: jnp.mean(h**2),
            adam,
        )
        found, state = params, trainer.init(params)
        wanted, states = params, [adam.init(tree) for tree in params]
        for _ in range(3):
            found, state, _ = jax.jit(trainer.step)(found, state, x)
            trees = []
            for number, grads in enumerate(jax.grad(loss)(wanted, x)):
                own = wanted[number]
                updates, states[number] = adam.update(grads, states[number], own)
                trees.append(optax.apply_updates(own, updates))
            wanted = tuple(trees)
        assert_close(found, wanted)
        is_kept = bool((found[0]["w"] == params[0]["w"]).all())
    assert is_kept == (optimizer == "frozen")
