"""A released step is the usual step: the same weights, states and norms, in float64."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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


def loss(params, *batch):
    """As a trainer writes it, by lax.scan."""
    layers, rest = params
    x = embed(rest, *batch)
    x, _ = jax.lax.scan(lambda x, own: (layer(own, x, *batch), None), x, layers)
    return head(rest, x, *batch)


def usual_loss(params, *batch):
    """The same without a scan."""
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


def everything(grads):
    return shortened(grads, TIGHT)


def labels(tree):
    def label(path, _):
        return "vector" if "bias" in jax.tree_util.keystr(path) else "matrix"

    return jax.tree.map_with_path(label, tree)


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
        {"matrix": optax.adam(0.03), "vector": optax.sgd(1.0)}, labels
    ),
}
LIMITS = {
    "none": ({}, lambda grads: grads),
    "global": ({"max_norm": TIGHT, "passes": 2}, everything),
}


def split(layers):
    return layers | {"number": None}, {"number": layers["number"]}


def usual_run(optimizer, clip):
    """The usual step: all gradients by jax.grad, clipped by NumPy, applied by optax."""
    layers, rest = new_params()
    trained, constant = split(layers)
    state = optimizer.init((trained, rest))
    update = jax.jit(optimizer.update)
    apply_updates = jax.jit(optax.apply_updates)
    seen = []

    @jax.jit
    def gradient(trained, rest, *batch):
        def loss(trained, rest):
            return usual_loss((trained | constant, rest), *batch)

        return jax.value_and_grad(loss, (0, 1))(trained, rest)

    for batch in batches():
        value, grads = gradient(trained, rest, *batch)
        grads = jax.tree.map(np.asarray, grads)
        seen.append((value, grads))
        clipped = jax.tree.map(jnp.asarray, clip(grads))
        updates, state = update(clipped, state, (trained, rest))
        trained, rest = apply_updates((trained, rest), updates)
    return (trained | constant, rest), state, seen


def released_run(optimizer, **limits):
    trainer = release(loss, optimizer, **limits)
    step = jax.jit(trainer.step)
    params = new_params()
    state, losses, states = trainer.init(params, *next(batches())), [], []
    for batch in batches():
        params, state, value = step(params, state, *batch)
        losses.append(value)
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


PAIRS = [*product(OPTIMIZERS, ["global"]), ("adam", "none")]


@pytest.mark.parametrize(("optimizer", "limits"), PAIRS)
def test_six_steps_are_those_of_the_usual_step(optimizer, limits):
    options, clip = LIMITS[limits]
    with jax.enable_x64(True):
        wanted, moments, seen = usual_run(OPTIMIZERS[optimizer], clip)
        params, states, losses = released_run(OPTIMIZERS[optimizer], **options)
        start = new_params()
    assert_close(params, wanted)
    assert_close(states[-1].optimizer, moments)
    assert_close(losses, [loss for loss, _ in seen])
    assert norm(params[0]["up"] - start[0]["up"]) > 0.1


def test_a_rule_learns_from_the_norm_of_everything():
    rule = optaxclip.rules.windowed_quantile(0.3, 3)
    history, sgd = [], optax.sgd(0.5)
    with jax.enable_x64(True):
        _, states, _ = released_run(sgd, max_norm=rule, passes=2)
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


def test_metrics_show_the_norm_of_everything():
    with jax.enable_x64(True):
        _, _, seen = usual_run(OPTIMIZERS["momentum"], everything)
        options, _ = LIMITS["global"]
        _, states, _ = released_run(OPTIMIZERS["momentum"], **options)
        report = optaxclip.metrics(states[-1], floats=True)
    _, grads = seen[-1]
    assert report["clip/norm_before"] == pytest.approx(norm(grads), rel=1e-9)
    assert report["clip/limit"] == TIGHT and report["clip/clipped_count"] == STEPS


RULES = {
    "ema": optaxclip.rules.ema(0.9),
    "ema_band": optaxclip.rules.ema_band(),
    "z_score": optaxclip.rules.z_score(target="adaptive"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_step_after_a_broken_one_has_the_usual_limit(rule, broken):
    """With one pass a rule is asked before the norm of the step is known."""

    def loss(params, scale):
        total, _ = jax.lax.scan(lambda x, w: (x + jnp.sum(w), None), 0.0, params["w"])
        return scale * total

    params = {"w": jnp.zeros((2, 3))}
    trainer = release(loss, optax.sgd(0.0), max_norm=RULES[rule])
    state, step = trainer.init(params, 1.0), jax.jit(trainer.step)
    scales = 1 + np.random.default_rng(0).random(30) / 10
    for scale in scales:
        _, state, _ = step(params, state, np.float32(scale))
    usual_limit = state.clip.limit
    _, state, _ = step(params, state, np.float32(broken))
    _, state, _ = step(params, state, np.float32(1.0))
    # `ema_band` may bring a norm down to 0.9 of it. The others stay where they were.
    lowest = 0.89 if rule == "ema_band" else 0.98
    assert lowest < state.clip.limit / usual_limit < 1.02


def programs_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from programs_of(inner)


@pytest.mark.parametrize("limits", [*LIMITS, "budget"])
def test_no_array_of_the_program_holds_all_gradients(limits):
    options = {"max_norm": TIGHT} if limits == "budget" else LIMITS[limits][0]
    trainer = release(loss, optax.adam(0.1), **options)
    params = new_params(np.float32)
    batch = next(batches(np.float32))
    state = trainer.init(params, *batch)
    program = jax.make_jaxpr(trainer.step)(params, state, *batch)
    makes = set()
    for eqn in programs_of(program.jaxpr):
        if any(x.aval.shape == params[0]["up"].shape for x in eqn.outvars):
            makes.add(eqn.primitive.name)
    # Weights and moments, which are carried and written in place.
    assert makes <= {"while", "scan", "dynamic_update_slice", "jit", "pjit"}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_of_weights_and_moments_stay(dtype, passes):
    trainer = release(loss, optax.adam(0.1), max_norm=TIGHT, passes=passes)
    params = new_params(dtype)
    batch = next(batches(dtype))
    start = trainer.init(params, *batch)
    new, state, value = jax.jit(trainer.step)(params, start, *batch)
    old, new = (params, start), (new, state)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(old)):
        assert jax.typeof(one) == jax.typeof(other)
    assert jnp.isfinite(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_pass_never_steps_by_more_than_the_limit(dtype):
    """Also in the first step, in a spike of one layer, and after it."""
    trainer = release(loss, optax.sgd(1.0), max_norm=TIGHT)
    params, step = new_params(dtype), jax.jit(trainer.step)
    state = trainer.init(params, *next(batches(dtype)))
    for number, batch in enumerate(batches(dtype)):
        spiked = jax.tree.map(jnp.array, params)
        if number == 3:
            spiked[0]["up"] = spiked[0]["up"].at[1].multiply(1000)
        new, state, _ = step(spiked, state, *batch)
        moved = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), new, spiked)
        # Weights are rounded, so only their first digits show in the difference.
        most = TIGHT + float(jnp.finfo(dtype).eps) * norm(spiked)
        assert norm(moved) <= most
        assert state.clip.norm * state.clip.factor <= TIGHT * (1 + 1e-5)
        assert state.clip.limit == np.float32(TIGHT) and state.clip.factor < 1
        params = new


def test_one_pass_moves_weights_whose_share_of_the_norm_is_tiny():
    """Their share of the square is below the precision of float32."""

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + x @ w, None), x, params["layers"])
        return jnp.sum(x) + 3e-4 * jnp.sum(params["shift"])

    params = {"layers": jnp.full((3, 4, 4), 0.1), "shift": jnp.ones(4)}
    x = jnp.arange(1.0, 5.0)
    grads = jax.tree.map(np.float64, jax.grad(loss)(params, x))
    assert norm(grads["shift"]) ** 2 < 1e-9 * norm(grads) ** 2
    wanted = -1e3 * grads["shift"] / norm(grads)
    trainer = release(loss, optax.sgd(1e3), max_norm=1.0)
    state, step = trainer.init(params, x), jax.jit(trainer.step)
    # In the first step all shares are alike.
    new = params
    for _ in range(3):
        new, state, _ = step(params, state, x)
    moved = np.float64(new["shift"]) - np.float64(params["shift"])
    # The weights are 1, of which 1e-7 is lost.
    np.testing.assert_allclose(moved, wanted, rtol=1e-5, atol=2e-7)


def test_shares_are_the_mean_of_the_steps_that_are_not_broken():
    params = new_params(np.float32)
    trainer = release(loss, optax.sgd(0.0), max_norm=1.0, nonfinite="zero")
    tokens, mask = next(batches(np.float32))
    start, step = trainer.init(params, tokens, mask), jax.jit(trainer.step)
    state = start
    for _ in range(3):
        _, state, _ = step(params, state, tokens, mask * jnp.nan)
    np.testing.assert_array_equal(state.shares, start.shares)
    _, state, _ = step(params, state, tokens, mask)
    _, wanted, _ = step(params, start, tokens, mask)
    np.testing.assert_allclose(state.shares, wanted.shares, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_norm": 1.0, "nonfinite": "zero", "passes": 2}, True),
        ({"max_norm": 1.0, "nonfinite": "zero"}, True),
        ({"max_norm": 1.0, "passes": 2}, False),
        ({"max_norm": 1.0}, False),
    ],
)
def test_a_broken_step_does_what_nonfinite_says(options, kept):
    params = new_params(np.float32)
    trainer = release(loss, optax.sgd(0.1), **options)
    tokens, mask = next(batches(np.float32))
    state = trainer.init(params, tokens, mask)
    new, state, _ = jax.jit(trainer.step)(params, state, tokens, mask * jnp.nan)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(params)):
        if kept or jnp.issubdtype(one.dtype, jnp.integer):
            np.testing.assert_array_equal(one, other)
        else:
            assert jnp.isnan(one).all()
    found = optaxclip.metrics(state, only="nonfinite_count", floats=True)
    assert set(found.values()) == {1.0}


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_one_pass_replaces_only_the_layer_that_is_broken(nonfinite, broken):
    """The others move as if its gradient were 0."""

    def loss(params, factors):
        def layer(x, row):
            weights, factor = row
            weights = optaxclip.scale_cotangent(weights, factor)
            return x + jnp.tanh(x @ weights), None

        x, _ = jax.lax.scan(layer, jnp.ones(3), (params["layers"], factors))
        return jnp.sum((x * params["out"]) ** 2)

    params = {"layers": jnp.full((4, 3, 3), 0.3), "out": jnp.ones(3)}
    trainer = release(loss, optax.sgd(1.0), max_norm=0.5, nonfinite=nonfinite)
    factors, step = jnp.ones(4), jax.jit(trainer.step)
    start = trainer.init(params, factors)
    new, state, _ = step(params, start, factors.at[2].set(broken))
    wanted, _, _ = step(params, start, factors.at[2].set(0.0))
    layers = wanted["layers"]
    if nonfinite == "propagate":
        layers = layers.at[2].set(jnp.nan)
    np.testing.assert_array_equal(new["layers"], layers)
    np.testing.assert_array_equal(new["out"], wanted["out"])
    assert 0.4 < norm(jax.tree.map(jnp.subtract, wanted, params)) < 0.5 * (1 + 1e-6)
    factor = optaxclip.metrics(state, floats=True)["clip/factor"]
    assert factor == 0.0 if nonfinite == "zero" else np.isnan(factor)


@pytest.mark.parametrize("passes", [1, 2])
def test_without_a_limit_the_factor_of_a_broken_step_is_1(passes):
    trainer = release(loss, optax.sgd(0.1), passes=passes, nonfinite="zero")
    params = new_params(np.float32)
    tokens, mask = next(batches(np.float32))
    state = trainer.init(params, tokens, mask)
    _, state, _ = jax.jit(trainer.step)(params, state, tokens, mask * jnp.nan)
    report = optaxclip.metrics(state, floats=True)
    assert report["clip/factor"] == 1.0 and report["clip/limit"] == np.inf


@pytest.mark.parametrize("passes", [1, 2])
def test_a_norm_that_is_not_finite_can_raise(passes):
    from jax.experimental import checkify

    options = {"max_norm": 1.0, "passes": passes, "nonfinite": "raise"}
    trainer = release(loss, optax.sgd(0.1), **options)
    params = new_params(np.float32)
    step = jax.jit(checkify.checkify(trainer.step))
    tokens, mask = next(batches(np.float32))
    state = trainer.init(params, tokens, mask)
    error, _ = step(params, state, tokens, mask)
    assert error.get() is None
    error, _ = step(params, state, tokens, mask * jnp.nan)
    assert "norm of order 2 of the updates is not finite" in error.get()


def test_carries_and_weights_may_have_keys_and_counters():
    """Dropout: a key for each layer in the stack, another one that is carried."""

    def loss(params, tokens):
        def layer(carried, own):
            key, use = jax.random.split(carried["key"])
            drawn = [jax.random.uniform(k, ()) for k in (use, own["key"])]
            x = carried["x"] + jnp.tanh(carried["x"] @ own["w"]) * drawn[0] * drawn[1]
            return {"x": x, "key": key, "count": carried["count"] + 1}, None

        x = params["table"][tokens]
        carried = {"x": x, "key": jax.random.key(0), "count": jnp.array(0)}
        carried, _ = jax.lax.scan(layer, carried, params["layers"])
        return jnp.sum(carried["x"] ** 2) * carried["count"]

    layers = {
        "w": jnp.full((LAYERS, 3, 3), 0.5),
        "key": jax.random.split(jax.random.key(1), LAYERS),
    }
    params, tokens = {"layers": layers, "table": jnp.ones((4, 3))}, jnp.arange(4)
    trainer = release(loss, optax.sgd(0.01))
    new, _, _ = jax.jit(trainer.step)(params, trainer.init(params, tokens), tokens)
    wanted = jax.grad(loss, allow_int=True)(params, tokens)
    np.testing.assert_allclose(
        new["layers"]["w"], 0.5 - 0.01 * wanted["layers"]["w"], rtol=1e-5
    )
    np.testing.assert_allclose(new["table"], 1 - 0.01 * wanted["table"], rtol=1e-5)
    assert (new["layers"]["key"] == layers["key"]).all()


def test_strict_promotion_lets_layers_and_other_weights_differ_in_dtype():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        params = {"layers": jnp.ones((3, 2)), "out": jnp.ones(2, jnp.float32)}

        def loss(params):
            x, _ = jax.lax.scan(
                lambda x, w: (x * w, None), jnp.ones(2), params["layers"]
            )
            return jnp.sum(x * params["out"].astype(x.dtype))

        trainer = release(loss, optax.sgd(1.0), max_norm=0.5)
        new, _, _ = jax.jit(trainer.step)(params, trainer.init(params))
    squares = 0.0
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True):
        squares += np.sum((np.asarray(x, float) - np.asarray(y, float)) ** 2)
    # The four groups have gradients of the same length, as is their usual share.
    np.testing.assert_allclose(squares, 0.5**2, 1e-6)
