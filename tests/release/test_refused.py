"""What is refused, and what is left alone: optimizers, leaves, losses."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import release
from tests.release.models import plain
from tests.release.training import assert_close, norm, released_run, shortened

SGD = optax.sgd(1.0)
X = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
PARAMS = {
    "layers": {"w": jnp.full((3, 2, 2), 0.5), "bias": jnp.full((3, 2), 0.1)},
    "bias": jnp.full(2, 0.1),
}


def dense(x, own):
    return x + jnp.tanh(x @ own["w"] + own["bias"][None]), None


def loss(params, x):
    x, _ = jax.lax.scan(dense, x, params["layers"])
    return jnp.mean((x + params["bias"][None]) ** 2)


# ------------------------------------------------------------------------- optimizers


def with_state(init):
    return optax.GradientTransformation(init, lambda grads, state, _: (grads, state))


def with_zeros_of_each_weight(dtype):
    def init(params):
        return {"mask": jax.tree.map(lambda x: jnp.zeros_like(x, dtype), params)}

    return with_state(init)


def one_row_of_each_leaf(params):
    return jax.tree.map(lambda x: jnp.zeros_like(x[:1]), params)


def with_last_row(grads, state, _):
    return grads, jax.tree.map(lambda x: x[-1:], grads)


MIXES = {
    "clip": (
        optax.chain(optax.clip_by_global_norm(1.0), SGD),
        "its 'bias' depends on 'layers/bias', 'layers/w'.",
    ),
    "our clip": (
        optax.chain(optaxclip.clip_by_global_norm(1.0), SGD),
        "its 'bias' depends on 'layers/bias', 'layers/w'",
    ),
    "skip_nonfinite": (optaxclip.skip_nonfinite(SGD), "its 'bias' depends on"),
    "skip_step": (optaxclip.skip_step(SGD), "its 'bias' depends on"),
    "apply_if_finite": (optax.apply_if_finite(SGD, 3), "its 'bias' depends on"),
    "noise": (
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        "but '[1].rng_key' is key<fry>[]. All layers would draw the same",
    ),
    "legacy key": (
        with_state(lambda params: jax.random.PRNGKey(0)),
        "but '[1]' is uint32[2]. All layers would draw the same",
    ),
    "state by shape": (
        with_state(lambda params: {f"rows_{params['layers']['w'].shape[0]}": 0.0}),
        "shaped like a leaf, but \"[1]['rows_1']\" is float32[].",
    ),
    "adafactor": (
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        "is float32[1, 2]. adafactor(factored=False) has no such array.",
    ),
    "int8 of each weight": (
        with_zeros_of_each_weight(jnp.int8),
        "but \"[1]['mask']['layers']['bias']\" is int8[1, 2]. Integers and bools of "
        "each layer cannot pass through the backward pass.",
    ),
    "bool of each weight": (
        with_zeros_of_each_weight(bool),
        "is bool[1, 2]. Integers and bools of each layer",
    ),
    "prodigy": (optax.contrib.prodigy(0.1), "depends on 'layers/bias', 'layers/w'."),
    "novograd": (
        optax.novograd(0.1),
        "optimizer must keep no number that depends on gradients, unless each weight "
        "has one of its own, but \"[1][0].nu['layers']['bias']\" depends on "
        "'layers/bias'.",
    ),
    "mean of all layers": (
        optax.GradientTransformation(one_row_of_each_leaf, with_last_row),
        "optimizer must keep no number that depends on gradients, unless each weight "
        "has one of its own, but \"[1]['layers']['bias']\" depends on 'layers/bias'.",
    ),
    "plateau": (
        optax.chain(SGD, optax.contrib.reduce_on_plateau()),
        "optimizer is called with gradients, state and params alone, and with None in "
        "the place of some leaves. It raised: reduce_on_plateau",
    ),
    "sm3": (optax.sm3(0.1), "\"[1][0].mu['layers']['bias'][0]\" is float32[1]."),
}


@pytest.mark.parametrize("name", MIXES)
def test_an_optimizer_that_mixes_layers_is_named_with_its_reason(name):
    optimizer, text = MIXES[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        release(loss, optimizer).init(PARAMS, X)


def test_only_adafactor_is_told_what_adafactor_can_do():
    hinted = []
    for name, (optimizer, _) in MIXES.items():
        with pytest.raises((TypeError, ValueError)) as refused:
            release(loss, optimizer).init(PARAMS, X)
        if "adafactor" in str(refused.value).lower():
            hinted.append(name)
    assert hinted == ["adafactor"]


def clipped_by_weights_of_layers():
    """It multiplies the update of 'bias' by a norm of other weights."""

    def update(grads, state, params):
        total = optax.tree.norm(params["layers"])
        return grads | {"bias": grads["bias"] / total}, state

    return optax.GradientTransformation(lambda params: (), update)


def test_other_weights_must_not_depend_on_layers():
    text = "its 'bias' depends on 'layers/bias', 'layers/w'."
    with pytest.raises(ValueError, match=re.escape(text)):
        release(loss, clipped_by_weights_of_layers()).init(PARAMS, X)


def test_an_optimizer_may_mix_weights_outside_of_the_layers():
    def loss(params, x):
        x, _ = jax.lax.scan(dense, x, params["layers"])
        return jnp.mean((x * params["scale"][None] + params["bias"][None]) ** 2)

    def labels_of(params):
        names = {"layers": "layer", "bias": "other", "scale": "other"}
        return {name: names[name] for name in params}

    clip = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(0.1))
    optimizer = optax.partition({"layer": optax.adam(0.1), "other": clip}, labels_of)
    params = PARAMS | {"scale": jnp.full(2, 0.5)}
    trainer = release(loss, optimizer)
    step = jax.jit(trainer.step)

    @jax.jit
    def usual_step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params, X), state, params)
        return optax.apply_updates(params, updates), state

    found, state = params, trainer.init(params, X)
    wanted, usual = params, optimizer.init(params)
    for _ in range(3):
        found, state, _ = step(found, state, X)
        wanted, usual = usual_step(wanted, usual)
    assert_close(found, wanted, 1e-4)


def test_an_optimizer_that_wants_every_leaf_is_refused():
    """The galore of optax 0.2.8 reads the dtype of each leaf, also of None."""

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + x @ w, None), x, params["layers"])
        return jnp.sum(x * params["scale"][None])

    params = {"layers": PARAMS["layers"]["w"], "scale": jnp.ones(2)}
    with pytest.raises(TypeError, match="with None in the place of some leaves"):
        release(loss, optax.contrib.galore(0.1)).init(params, X)


def test_an_optimizer_whose_init_wants_every_leaf_is_refused():
    """Leaves of integers are not trained, so galore finds None in their place."""

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + x @ w, None), x, params["layers"])
        return jnp.sum(x)

    params = {"layers": PARAMS["layers"]["w"], "index": jnp.arange(2)}
    with pytest.raises(TypeError, match="with None in the place of some leaves"):
        release(loss, optax.contrib.galore(0.1)).init(params, X)


def test_an_optimizer_that_fails_on_one_of_two_stacks_is_refused():
    def loss(params, x):
        for name in ("encoder", "decoder"):
            x, _ = jax.lax.scan(lambda x, w: (x + x @ w, None), x, params[name])
        return jnp.sum(x)

    params = {"encoder": PARAMS["layers"]["w"], "decoder": PARAMS["layers"]["w"]}
    with pytest.raises(TypeError, match="with None in the place of some leaves"):
        release(loss, optax.contrib.galore(0.1)).init(params, X)


def divided_by(function):
    """SGD whose gradients are divided by one number of each leaf, or by several."""

    def divided(grads, params):
        return jax.tree.map(
            lambda g: -g / (2 + function(abs(g)).reshape(-1)[-1]), grads
        )

    return optax.stateless(divided)


ACROSS = {
    "lamb": optax.lamb(0.01),
    "lars": optax.lars(0.01),
    "adafactor": optax.adafactor(0.01, factored=False),
    "trust": optax.chain(optax.trace(0.9), optax.scale_by_trust_ratio()),
    "rms": optax.chain(optax.clip_by_block_rms(1e-3), SGD),
    "median": divided_by(jnp.median),
    "least": divided_by(jnp.min),
    "sum": divided_by(jnp.cumsum),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_looks_across_a_leaf_warns_and_sees_one_layer(name):
    """It is the run of a list of layers."""
    optimizer = ACROSS[name]
    rows = {"w": PARAMS["layers"]["w"]}
    trainer = release(row_loss, optimizer)
    with pytest.warns(UserWarning, match="optimizer looks at several numbers of 'w'"):
        state = trainer.init(rows, X)
    step = jax.jit(trainer.step)

    @jax.jit
    def usual_step(layers, state):
        grads = jax.grad(lambda ws: row_loss({"w": jnp.concatenate(ws)}, X))(layers)
        updates, state = optimizer.update(grads, state, layers)
        return optax.apply_updates(layers, updates), state

    found = rows
    layers = [rows["w"][k][None] for k in range(3)]
    usual = optimizer.init(layers)
    for _ in range(3):
        found, state, _ = step(found, state, X)
        layers, usual = usual_step(layers, usual)
    np.testing.assert_allclose(found["w"], jnp.concatenate(layers), rtol=1e-4)


OTHER_REDUCTIONS = {
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
    "product": jnp.prod,
    "running product": jnp.cumprod,
    "running most": jax.lax.cummax,
    "running least": jax.lax.cummin,
    "running log of sums": jax.lax.cumlogsumexp,
    "largest": lambda array: jax.lax.top_k(array, 1)[0],
}


@pytest.mark.parametrize("name", OTHER_REDUCTIONS)
def test_every_reduction_warns(name):
    optimizer = divided_by(OTHER_REDUCTIONS[name])
    with pytest.warns(UserWarning, match="optimizer looks at several numbers of 'w'"):
        release(row_loss, optimizer).init({"w": PARAMS["layers"]["w"]}, X)


def test_a_learning_rate_that_is_a_sum_does_not_warn(recwarn):
    """The sum is over the parts of the schedule, and not over numbers of a leaf."""
    rate = optax.cosine_onecycle_schedule(20, 0.1)
    release(row_loss, optax.adam(rate)).init({"w": PARAMS["layers"]["w"]}, X)
    assert not recwarn.list


MIXED_DTYPES = {
    "layers": jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS["layers"]),
    "bias": PARAMS["bias"],
}
ADAM_WITH_ARRAYS = {
    "inject": optax.inject_hyperparams(optax.adam)(0.1),
    "array": optax.adam(0.1, b1=jnp.float32(0.9)),
}


def mixed_loss(params, x):
    x, _ = jax.lax.scan(dense, x.astype(jnp.bfloat16), params["layers"])
    return jnp.mean((x + params["bias"][None]) ** 2)


@pytest.mark.parametrize("name", ADAM_WITH_ARRAYS)
def test_a_state_whose_dtype_changes_in_an_update_is_refused(name):
    text = r"must keep .* dtypes of .* state, but .*mu\['layers'\]\['bias'\] is "
    text += r"float32\[1, 2\] in place of bfloat16\[1, 2\]"
    with pytest.raises(ValueError, match=text):
        release(mixed_loss, ADAM_WITH_ARRAYS[name]).init(MIXED_DTYPES, X)


def with_last_gradients(init):
    return optax.GradientTransformation(init, lambda grads, state, _: (grads, grads))


def without_first_count(grads, state, params):
    return grads, {"count": state["count"] + 1}


OTHER_ENTRIES = {
    "more": (
        with_last_gradients(lambda params: None),
        "[1]['bias'] is float32[2] in place of nothing",
    ),
    "fewer": (
        optax.GradientTransformation(
            lambda params: {"count": jnp.zeros(()), "first": jnp.zeros(())},
            without_first_count,
        ),
        "[1]['first'] is nothing in place of float32[]",
    ),
}


@pytest.mark.parametrize("name", OTHER_ENTRIES)
def test_a_state_that_gains_or_loses_entries_is_refused(name):
    optimizer, entries = OTHER_ENTRIES[name]
    text = "release: optimizer must keep the entries, shapes and dtypes of weights and "
    text += f"state, but after an update {entries}."
    with pytest.raises(ValueError, match=re.escape(text)):
        release(loss, optimizer).init(PARAMS, X)


def test_a_factor_of_each_layer_in_an_array_is_refused():
    """The update of one layer would have the shape of all, and overwrite them."""
    factors = jnp.array([0.25, 0.5, 1.0])[:, None]

    def scaled(updates, params):
        layers = updates["layers"]
        if layers["bias"] is None:
            return updates
        return updates | {"layers": layers | {"bias": factors * layers["bias"]}}

    optimizer = optax.chain(optax.stateless(scaled), optax.sgd(0.1))
    shape = PARAMS["layers"]["bias"].shape
    one, all_layers = [1, *shape[1:]], [*shape]
    text = "release: optimizer must keep the entries, shapes and dtypes of weights and "
    text += f"state, but after an update [0]['layers']['bias'] is float32{all_layers} "
    text += f"in place of float32{one}."
    with pytest.raises(ValueError, match=re.escape(text)):
        release(loss, optimizer).init(PARAMS, X)


def test_hyperparameters_that_are_numbers_keep_the_dtypes_of_moments():
    """The cure in the error above."""
    inject = optax.inject_hyperparams(
        optax.adam, static_args=("b1", "b2", "eps", "eps_root")
    )
    trainer = release(mixed_loss, inject(0.1))
    start = trainer.init(MIXED_DTYPES, X)
    _, state, _ = jax.jit(trainer.step)(MIXED_DTYPES, start, X)
    dtypes = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (state, start)]
    assert dtypes[0] == dtypes[1]


def test_muon_looks_across_the_layers_of_a_vector():
    with pytest.warns(UserWarning, match="several numbers of 'layers/bias' together"):
        release(loss, optax.contrib.muon(0.01)).init(PARAMS, X)


def test_muon_with_its_axes_is_the_usual_run():
    """It looks at numbers of one layer, so the warning says "if"."""
    axes = optax.contrib.MuonDimensionNumbers(1, 2)
    muon = optax.contrib.muon(0.01, muon_weight_dimension_numbers={"w": axes})
    params = {"w": PARAMS["layers"]["w"]}
    trainer = release(row_loss, muon)
    with pytest.warns(UserWarning, match="If it joins numbers of several layers"):
        state = trainer.init(params, X)
    found, _, _ = jax.jit(trainer.step)(params, state, X)
    grads = jax.grad(row_loss)(params, X)
    updates, _ = muon.update(grads, muon.init(params), params)
    assert_close(found, optax.apply_updates(params, updates), 1e-5)


def row_loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["w"])
    return jnp.mean((x - 1) ** 2)


# ------------------------------------------------------------------------------ leaves


def with_statistics(params, x, is_trained=True):
    """Layers with statistics of BatchNorm, which normalize by the batch."""

    def layer(x, own):
        mean = x.mean(0, keepdims=True)
        moved = 0.9 * own["mean"] + 0.1 * mean[0]
        return x + jnp.tanh((x - mean) @ own["w"]), moved

    x, means = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(x**2), means


def test_a_float_leaf_that_the_loss_does_not_read_is_refused():
    layers = {"w": jnp.ones((4, 2, 2)), "mean": jnp.ones((4, 2)), "n": jnp.arange(4)}
    params = {"layers": layers, "table": jnp.ones(5), "empty": jnp.ones((0, 2))}
    trainer = release(with_statistics, optax.adamw(0.1))
    text = r"release: the loss must depend .* but does not on 'layers/mean', 'table'\."
    with pytest.raises(ValueError, match=text):
        trainer.init(params, X)


MASKS = {
    "prefix": {"layers": {"w": True, "mean": False}, "table": False},
    "function": lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params),
}


@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_masked_and_come_back_as_aux(name):
    params = {
        "layers": {"w": jnp.ones((4, 2, 2)) / 2, "mean": jnp.ones((4, 2))},
        "table": jnp.ones(5),
    }
    adamw = optax.adamw(0.1)
    trainer = release(with_statistics, adamw, trainable=MASKS[name])
    state, found = trainer.init(params, X), params
    trained, usual = params["layers"]["w"], adamw.init(params["layers"]["w"])

    def loss_of(w, means):
        return with_statistics({"layers": {"w": w, "mean": means}}, X)

    step = jax.jit(trainer.step)

    @jax.jit
    def usual_step(trained, state, means):
        grads, means = jax.grad(loss_of, has_aux=True)(trained, means)
        updates, state = adamw.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, means

    means = new_means = params["layers"]["mean"]
    for _ in range(3):
        found, state, (_, new_means) = step(found, state, X)
        found["layers"]["mean"] = new_means
        trained, usual, means = usual_step(trained, usual, means)
    np.testing.assert_allclose(found["layers"]["w"], trained, rtol=1e-5)
    np.testing.assert_allclose(new_means, means, rtol=1e-5)
    assert (found["table"] == params["table"]).all()
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert [x.shape for x in moments] == [(4, 2, 2)] * 2


def test_leaves_without_elements_have_no_moments_and_stay():
    layers = PARAMS["layers"] | {"empty": jnp.ones((3, 0))}
    params = {"layers": layers, "bias": PARAMS["bias"]}
    trainer = release(loss, optax.adam(0.1))
    state = trainer.init(params, X)
    assert state.optimizer[0].mu["layers"]["empty"] is None
    new, _, _ = jax.jit(trainer.step)(params, state, X)
    assert new["layers"]["empty"].shape == (3, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """Weights that can be called, as those of equinox."""

    layers: jax.Array
    frozen: jax.Array

    def __call__(self, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, self.layers)
        return x * self.frozen[None]


def test_a_mask_may_be_a_module_that_can_be_called():
    params = Module(PARAMS["layers"]["w"], jnp.ones(2))
    trainer = release(
        lambda module, x: jnp.mean(module(x) ** 2), SGD, trainable=Module(True, False)
    )
    new, _, _ = jax.jit(trainer.step)(params, trainer.init(params, X), X)
    assert (new.layers != params.layers).all() and (new.frozen == params.frozen).all()


def test_a_frozen_stack_has_no_moments_and_stays():
    def two(params, x):
        x, _ = jax.lax.scan(dense, x, params["frozen"])
        return loss(params, x)

    params = PARAMS | {"frozen": PARAMS["layers"]}
    mask = {"layers": True, "bias": True, "frozen": False}
    trainer = release(two, optax.adam(0.1), max_norm=1.0, passes=2, trainable=mask)
    assert trainer.released(params, X) == ["layers/bias", "layers/w"]
    state = trainer.init(params, X)
    new, state, _ = jax.jit(trainer.step)(params, state, X)
    trained = {"layers": params["layers"], "bias": params["bias"]}
    grads = jax.grad(lambda own: two(own | {"frozen": params["frozen"]}, X))(trained)
    np.testing.assert_allclose(state.clip.norm, norm(grads), rtol=1e-5)
    assert_close(new["frozen"], params["frozen"], 0)
    adam = optax.adam(0.1)
    updates, _ = adam.update(shortened(grads, 1.0), adam.init(trained), trained)
    wanted = optax.apply_updates(trained, updates)
    assert_close({k: new[k] for k in trained}, wanted, 1e-4)


def test_statistics_of_nnx_are_masked():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, key):
            self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(key))
            self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(key))

        def __call__(self, x):
            return x + jnp.tanh(self.linear(self.norm(x)))

    model = nnx.vmap(Block)(jax.random.split(jax.random.key(0), 3))
    graph, weights, statistics = nnx.split(model, nnx.Param, ...)

    def loss(weights, statistics, x):
        def layer(x, own):
            block = nnx.merge(graph, *own, copy=True)
            x = block(x)
            return x, nnx.state(block, nnx.BatchStat)

        x, statistics = jax.lax.scan(layer, x, (weights, statistics))
        return jnp.mean(x**2), statistics

    x = 5 + jax.random.normal(jax.random.key(1), (32, 6))
    trainer = release(loss, SGD, max_norm=1.0, passes=2)
    state, step = trainer.init(weights, statistics, x), jax.jit(trainer.step)
    first = weights
    for _ in range(30):
        weights, state, (_, statistics) = step(weights, state, statistics, x)
    # The first layer sees the batch as it is, and flax averages over 100 steps.
    wanted = x.mean(0) * (1 - 0.99**30)
    np.testing.assert_allclose(statistics["norm"]["mean"][...][0], wanted, rtol=1e-4)
    assert not (jax.tree.leaves(weights)[0] == jax.tree.leaves(first)[0]).all()

    def everything(params, x):
        return loss(*params, x)

    with pytest.raises(ValueError, match=r"not on '1/norm/mean.*', '1/norm/var.*'"):
        release(everything, SGD).init((first, statistics), x)


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        ({"layers": True}, "trainable has no value for the leaf 'bias'"),
        ({"layers": "no", "bias": True}, "trainable must be True or False, got 'no'"),
        ({"layers": True, "bias": True, "c": True}, "trainable has a value for 'c'"),
        (False, "no scan of loss goes through layers"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(trainable, text):
    with pytest.raises((TypeError, ValueError), match=f"release: {text}"):
        release(loss, SGD, trainable=trainable).init(PARAMS, X)


# ------------------------------------------------------------------------------ losses


def without_scan(params, x):
    for index in range(3):
        own = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        x, _ = dense(x, own)
    return jnp.mean((x + params["bias"][None]) ** 2)


def over_numbers(params, x):
    def body(x, index):
        own = jax.tree.map(lambda leaf: leaf[index], params["layers"])
        return dense(x, own)

    x, _ = jax.lax.scan(body, x, jnp.arange(3))
    return jnp.mean((x + params["bias"][None]) ** 2)


def over_time(params, x):
    def body(carry, row):
        return carry + row, None

    total, _ = jax.lax.scan(body, jnp.zeros(2), x)
    return without_scan(params, x) + total.sum()


def with_decay(params, x):
    return loss(params, x) + optax.tree.norm(params, squared=True)


def in_branch(params, x):
    return jax.lax.cond(x[0, 0] > 0, loss, lambda *args: 2 * loss(*args), params, x)


SCANS = {
    without_scan: [],
    over_numbers: [3],
    over_time: [4],
    with_decay: [3],
    in_branch: [3],
}


@pytest.mark.parametrize("loss", SCANS, ids=lambda loss: loss.__name__)
def test_a_loss_without_a_stack_says_which_scans_there_are(loss):
    with pytest.raises(ValueError, match="release: no scan of loss goes") as caught:
        release(loss, SGD).init(PARAMS, X)
    scans = r"one of length (\d+) \(\S*test_refused.py:\d+\)"
    lengths = [int(length) for length in re.findall(scans, str(caught.value))]
    assert sorted(set(lengths)) == SCANS[loss]
    assert ("no scan at all" in str(caught.value)) == (loss is without_scan)


@pytest.mark.parametrize(
    "value", [X, jnp.ones((), int), 1j, {"loss": jnp.ones(())}, (X, {})]
)
def test_a_loss_that_is_not_a_real_scalar_is_refused(value):
    with pytest.raises(TypeError, match="release: loss must return a real scalar"):
        release(lambda params, x: value, SGD).init(PARAMS, X)


def test_weights_behind_stop_gradient_have_a_gradient_of_0():
    """LoRA: the loss depends on the weights, and has no gradient by them."""

    def lora(params, x):
        def layer(h, own):
            frozen = jax.lax.stop_gradient(own["w"])
            return h + jnp.tanh(h @ frozen + h @ own["a"]), None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(h**2)

    params = {"w": PARAMS["layers"]["w"], "a": PARAMS["layers"]["w"] / 2}
    adamw = optax.adamw(0.1, weight_decay=0.1)
    trainer = release(lora, adamw)
    step = jax.jit(trainer.step)

    @jax.jit
    def usual_step(params, state):
        updates, state = adamw.update(jax.grad(lora)(params, X), state, params)
        return optax.apply_updates(params, updates), state

    found, state = params, trainer.init(params, X)
    wanted, usual = params, adamw.init(params)
    for _ in range(3):
        found, state, _ = step(found, state, X)
        wanted, usual = usual_step(wanted, usual)
    assert_close(found, wanted, 1e-4)


def test_a_rule_is_asked_with_the_norm_of_the_step_before():
    rule = optaxclip.rules.windowed_mean(1.0, 4)
    model = plain(jnp.float32)
    _, states, _ = released_run(model, optax.sgd(0.1), 5, max_norm=rule)
    clipper = optaxclip.clip_by_global_norm(rule)
    state = clipper.init(jnp.zeros(()))
    for found in states:
        known = jnp.where(state.norm > 0, state.norm, 3e38)
        _, ahead = clipper.update(jnp.zeros(()), state, grad_norm=known)
        np.testing.assert_allclose(found.clip.limit, ahead.limit, rtol=1e-6)
        _, state = clipper.update(jnp.zeros(()), state, grad_norm=found.clip.norm)
        assert_close(found.clip.memory, state.memory, 1e-6)


RULES = sorted(
    set(optaxclip.rules.__all__)
    - {"Rule", "constant", "maximum", "minimum", "warm_up", "share_of_params"}
)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_lets_through_what_it_does_in_the_usual_step(name):
    """In the first step, and after a broken one, no norm before it is known."""
    rule = getattr(optaxclip.rules, name)()
    trainer = release(loss, optax.sgd(1e-3), max_norm=rule, nonfinite="zero")
    clipper = optaxclip.clip_by_global_norm(rule, nonfinite="zero")
    params, state = PARAMS, trainer.init(PARAMS, X)
    usual, step = clipper.init(PARAMS), jax.jit(trainer.step)
    gradient = jax.jit(jax.grad(loss))
    for x in (X, X, X * jnp.nan, X):
        wanted, usual = clipper.update(gradient(params, x), usual)
        new, state, _ = step(params, state, x)
        moved = norm(jax.tree.map(np.subtract, new, params))
        assert moved > 0.5e-3 * norm(wanted) - 1e-9
        assert state.clip.nonfinite == usual.nonfinite
        if jnp.isnan(usual.norm):
            assert state.clip.factor == usual.factor == 0
        params = new


@pytest.mark.parametrize("passes", [1, 2])
def test_a_state_of_another_number_of_layers_is_refused(passes):
    def params_of(layers):
        stack = {"w": jnp.ones((layers, 2, 2)), "bias": jnp.ones((layers, 2))}
        return {"layers": stack, "bias": jnp.ones(2)}

    trainer = release(loss, SGD, max_norm=1.0, passes=passes)
    state = trainer.init(params_of(4), X)
    text = r"but its \.shares is float32\[5\] in place of float32\[7\]: make it by init"
    with pytest.raises(ValueError, match=text):
        trainer.step(params_of(6), state, X)
    trainer.step(params_of(4), state, X)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (SGD, optax.adam(0.1), r"\[0\]\.count is nothing in place of int32\[\]"),
        (optax.adam(0.1), SGD, r"\[0\]\.count is int32\[\] in place of nothing"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(before, after, text):
    state = release(loss, before).init(PARAMS, X)
    text = rf"release: state must be of this optimizer, .* but its \.optimizer{text}"
    with pytest.raises(ValueError, match=text):
        release(loss, after).step(PARAMS, state, X)


def test_a_state_of_params_of_other_shapes_is_refused():
    def params_of(width):
        stack = {"w": jnp.ones((3, width, width)), "bias": jnp.ones((3, width))}
        return {"layers": stack, "bias": jnp.ones(width)}

    trainer = release(loss, optax.adam(0.1))
    state = trainer.init(params_of(2), X)
    text = r"but its .*mu\['bias'\].* is float32\[2\] in place of float32\[4\]"
    with pytest.raises(ValueError, match=text):
        trainer.step(params_of(4), state, jnp.ones((5, 4)))


def test_a_state_of_another_dtype_is_refused():
    trainer = release(loss, optax.adam(0.1))
    state = trainer.init(PARAMS, X)
    moments = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.ndim else x, state.optimizer
    )
    text = r"mu\['bias'\].* is bfloat16\[2\] in place of float32\[2\]: make it by init"
    with pytest.raises(ValueError, match=text):
        trainer.step(PARAMS, state._replace(optimizer=moments), X)


def test_a_state_whose_clip_is_none_is_named():
    trainer = release(loss, SGD)
    state = trainer.init(PARAMS, X)._replace(clip=None)
    with pytest.raises(TypeError, match="release: state must be the ClipState"):
        trainer.step(PARAMS, state, X)
