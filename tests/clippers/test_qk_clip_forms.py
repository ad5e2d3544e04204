"""`qk_clip` on weights in other layouts, and what it keeps and reports."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optaxclip import ClipState, Heads, metrics, qk_clip, rules
from tests import attention

FACTORS = np.float32([1.0, 0.25])
LOGITS = jnp.array([20.0, 80.0])  # with a limit of 20
ROOT = np.sqrt(FACTORS)
# For each layout of two heads of three entries: (shape, Heads, what it becomes of ones)
LAYOUTS = {
    "(in, heads, entries)": ((4, 2, 3), -2, np.broadcast_to(ROOT[:, None], (4, 2, 3))),
    "(heads, entries)": ((2, 3), 0, np.broadcast_to(ROOT[:, None], (2, 3))),
    "(in, heads x entries)": (
        (4, 6),
        Heads(-1, width=3),
        np.broadcast_to(ROOT.repeat(3), (4, 6)),
    ),
    "(heads x entries, in), as in torch": (
        (6, 4),
        Heads(0, width=3),
        np.broadcast_to(ROOT.repeat(3)[:, None], (6, 4)),
    ),
    "with values behind each head": (
        (4, 2, 5),
        Heads(1, entries=(0, 3)),
        np.broadcast_to([[r, r, r, 1, 1] for r in ROOT], (4, 2, 5)),
    ),
    "with values, on one axis": (
        (4, 10),
        Heads(1, width=5, entries=(0, 3)),
        np.broadcast_to(np.ravel([[r, r, r, 1, 1] for r in ROOT]), (4, 10)),
    ),
}


def shrunk(params, max_logits, **where):
    """The weights after a step of 0 with the limit 20."""
    clipper = qk_clip(20.0, **where)
    zero = jax.tree.map(jnp.zeros_like, params)
    state = clipper.init(params)
    updates, state = clipper.update(zero, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), state


def test_heads_are_where_they_are_said_to_be():
    for layout, (shape, heads, wanted) in LAYOUTS.items():
        params = {"q": jnp.ones(shape), "k": jnp.ones(shape)}
        new, _ = shrunk(params, LOGITS, queries={"q": heads}, keys={"k": heads})
        for name in ("q", "k"):
            np.testing.assert_allclose(new[name], wanted, rtol=1e-6, err_msg=layout)


def test_lists_are_as_good_as_tuples():
    """A config in YAML or JSON has no tuples."""
    params = {"q": jnp.ones((2, 4, 5)), "k": jnp.ones((2, 4, 5))}
    logits = jnp.array([[20.0, 80.0], [80.0, 20.0]])
    results = []
    for form in (tuple, list):
        heads = Heads(form((0, 1)), heads=form((1, 3)), entries=form((0, 3)))
        new, _ = shrunk(params, logits, queries={"q": heads}, keys={"k": heads})
        results.append(new)
    from_tuples, from_lists = results
    assert float(from_tuples["q"].min()) < 1
    for name in ("q", "k"):
        np.testing.assert_array_equal(from_lists[name], from_tuples[name])
    new, _ = shrunk(params, jnp.ones((2, 4)), queries={"q": [0, 1]}, keys={"k": [0, 1]})
    np.testing.assert_array_equal(new["q"], 1)


@pytest.mark.parametrize("joint", ["/", "."])
def test_one_key_may_hold_the_names_of_several_modules(joint):
    """As in Haiku ("/") and in state dicts of torch (".")."""
    matrix = jnp.ones((4, 2))
    params = {}
    for layer in ("h0", "h1"):
        for leaf in ("q", "k"):
            params[joint.join(("model", layer, leaf))] = matrix
    new, _ = shrunk(
        params,
        {
            joint.join(("model", "h0")): LOGITS,
            joint.join(("model", "h1")): LOGITS[::-1],
        },
        queries={"*q": 1},
        keys={"*k": 1},
    )
    for path, leaf in new.items():
        roots = ROOT if "h0" in path else ROOT[::-1]
        np.testing.assert_allclose(leaf, np.tile(roots, (4, 1)), rtol=1e-6)


def test_queries_keys_and_values_may_share_a_leaf():
    params = {"qkv": jnp.ones((4, 18))}
    queries = {"qkv": Heads(-1, width=3, heads=(0, 2))}
    keys = {"qkv": Heads(-1, width=3, heads=(2, 4))}
    new, _ = shrunk(params, LOGITS, queries=queries, keys=keys)
    wanted = np.concatenate([ROOT.repeat(3), ROOT.repeat(3), np.ones(6)])
    np.testing.assert_allclose(new["qkv"], np.tile(wanted, (4, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "queries", "keys"),
    [
        # `entries` of the queries are forgotten.
        ((4, 2, 9), Heads(-2), Heads(-2, entries=(3, 6))),
        # 0 to 11 and 6 to 17.
        ((4, 18), Heads(-1, width=3, heads=(0, 4)), Heads(-1, width=6, heads=(1, 3))),
        ((2, 6), Heads(0), Heads(1, width=3)),
    ],
)
def test_entries_with_two_roles_are_refused_in_any_layout(shape, queries, keys):
    clipper = qk_clip(20.0, queries={"w": queries}, keys={"w": keys})
    with pytest.raises(ValueError, match="keys names entries of the leaf 'w' that"):
        clipper.init({"w": jnp.ones(shape)})


def test_two_layouts_may_share_a_leaf():
    params = {"qk": jnp.ones((4, 24))}
    queries = {"qk": Heads(-1, width=3, heads=(0, 4))}
    keys = {"qk": Heads(-1, width=6, heads=(2, 4))}
    logits = jnp.array([20.0, 20.0, 80.0, 20.0])
    new, _ = shrunk(params, logits, queries=queries, keys=keys)
    wanted = np.concatenate([ROOT.repeat(6), ROOT.repeat(6)])
    np.testing.assert_allclose(new["qk"], np.tile(wanted, (4, 1)), rtol=1e-6)


def test_a_fused_kernel_and_its_fused_bias_are_one_attention():
    # GPT-2's c_attn: queries, keys and values, each of two heads of three entries.
    layer = {"c_attn": {"kernel": jnp.ones((4, 18)), "bias": jnp.ones(18)}}
    params = {"h_0": layer, "h_1": layer}
    queries = {"*/c_attn/*": Heads(-1, width=3, heads=(0, 2))}
    keys = {"*/c_attn/*": Heads(-1, width=3, heads=(2, 4))}
    logits = {"h_0": LOGITS, "h_1": LOGITS[::-1]}
    new, state = shrunk(params, logits, queries=queries, keys=keys)
    assert list(state.by_name()) == ["h_0/c_attn", "h_1/c_attn"]
    for name, roots in (("h_0", ROOT), ("h_1", ROOT[::-1])):
        wanted = np.concatenate([roots.repeat(3), roots.repeat(3), np.ones(6)])
        for array in new[name]["c_attn"].values():
            wanted_array = np.broadcast_to(wanted, array.shape)
            np.testing.assert_allclose(array, wanted_array, rtol=1e-6)


def test_a_fused_kernel_may_have_separate_biases():
    # BEiT's attention: keys have no bias.
    params = {"attn": {"qkv": jnp.ones((4, 18)), "q_bias": jnp.ones(6)}}
    queries = {
        "attn/qkv": Heads(-1, width=3, heads=(0, 2)),
        "attn/q_bias": Heads(-1, width=3),
    }
    keys = {"attn/qkv": Heads(-1, width=3, heads=(2, 4))}
    new, state = shrunk(params, LOGITS, queries=queries, keys=keys)
    assert list(state.by_name()) == ["attn"]
    np.testing.assert_allclose(new["attn"]["q_bias"], ROOT.repeat(3), rtol=1e-6)


def test_fused_kernels_side_by_side_are_attentions_of_their_own():
    params = {"first": jnp.ones((4, 12)), "second": jnp.ones((4, 12))}
    queries = {"*": Heads(-1, width=3, heads=(0, 2))}
    keys = {"*": Heads(-1, width=3, heads=(2, 4))}
    logits = {"first": LOGITS, "second": LOGITS / 8}
    new, state = shrunk(params, logits, queries=queries, keys=keys)
    assert list(state.by_name()) == ["first", "second"]
    np.testing.assert_array_equal(new["second"], np.ones((4, 12)))


def test_each_array_of_logits_belongs_to_one_attention():
    one = {"q": jnp.ones((4, 2)), "k": jnp.ones((4, 2))}
    params = {"layer": {"self": one, "cross": one}}
    where = {"queries": {"*/q": 1}, "keys": {"*/k": 1}}
    for logits in (
        # The first array is for both attentions, and the second for none.
        {"layer": LOGITS, "other": LOGITS},
        {"layer": {"self": LOGITS}, "other": LOGITS},
        {"layer": LOGITS},
        {"layer": {"self": LOGITS, "cross": LOGITS}, "other": LOGITS},
    ):
        with pytest.raises(ValueError, match="must have one array for each of"):
            shrunk(params, logits, **where)


def test_an_attention_within_another_has_logits_of_its_own():
    inner = {"query": {"kernel": jnp.ones((4, 2, 3))}}
    inner["key"] = inner["query"]
    outer = inner | {"attention": inner}
    high, low = jnp.array([20.0, 80.0]), jnp.array([80.0, 20.0])
    for attention_logits in (
        {"max_logits": (high,), "attention": {"max_logits": (low,)}},
        {"max_logits": high, "attention": low},
    ):
        params, logits = {"attention": outer}, {"attention": attention_logits}
        new, _ = shrunk(params, logits, **attention.PATTERNS)
        for module, roots in (
            (new["attention"], [1, 0.5]),
            (new["attention"]["attention"], [0.5, 1]),
        ):
            kernel = module["key"]["kernel"]
            np.testing.assert_allclose(kernel[0, :, 0], roots, rtol=1e-6)
    # An array that is above both says of neither.
    with pytest.raises(ValueError, match="must have one array for each of"):
        shrunk({"layer": {"attention": outer}}, {"layer": high}, **attention.PATTERNS)


def test_groups_of_two_queries_a_key_and_a_value_share_a_leaf():
    # Megatron's layout: for each key head its queries, the key and the value.
    params = {"qkv": jnp.ones((4, 2 * 12))}
    queries = {"qkv": Heads(-1, width=12, entries=(0, 6))}
    keys = {"qkv": Heads(-1, width=12, entries=(6, 9))}
    max_logits = jnp.array([5.0, 20.0, 80.0, 7.0])
    new, _ = shrunk(params, max_logits, queries=queries, keys=keys)
    wanted = np.concatenate([np.ones(12), np.full(9, 0.5), np.ones(3)])
    np.testing.assert_allclose(new["qkv"], np.tile(wanted, (4, 1)), rtol=1e-6)


def test_layers_are_on_any_axis():
    ones = jnp.ones((4, 2, 3))
    max_logits = jnp.array([[20.0, 80.0], [80.0, 20.0], [1.0, 2.0]])
    # On axis 3 they come behind the heads.
    for axis, heads in ((0, Heads((0, 2))), (1, Heads((1, 2))), (3, Heads((3, 1)))):
        params = {"q": jnp.stack([ones] * 3, axis), "k": jnp.stack([ones] * 3, axis)}
        new, state = shrunk(params, max_logits, queries={"q": heads}, keys={"k": heads})
        for layer, roots in enumerate(([1, 0.5], [0.5, 1], [1, 1])):
            wanted = np.broadcast_to(np.array(roots)[:, None], (4, 2, 3))
            for name in ("q", "k"):
                found = np.take(np.asarray(new[name]), layer, axis)
                np.testing.assert_allclose(found, wanted, rtol=1e-6)
        np.testing.assert_array_equal(state.clipped, [0, 1, 1, 0, 0, 0])


def model(layers=2):
    ones = {"kernel": jnp.ones((4, 2, 3)), "bias": jnp.ones((2, 3))}
    layer = {"attention": {"query": ones, "key": ones}, "mlp": jnp.ones((4, 4))}
    return {f"layer_{number}": layer for number in range(layers)}


def test_each_attention_has_its_own_logits():
    first, second = jnp.array([20.0, 80.0]), jnp.array([80.0, 20.0])
    # As flax's `sow` returns them.
    sown = {
        "layer_1": {"attention": {"max_logits": (second,)}},
        "layer_0": {"attention": {"max_logits": (first,)}},
    }
    new, state = shrunk(model(), sown, **attention.PATTERNS)
    for name, roots in (("layer_0", [1, 0.5]), ("layer_1", [0.5, 1])):
        kernel = new[name]["attention"]["key"]["kernel"]
        np.testing.assert_allclose(kernel[0, :, 0], roots, rtol=1e-6)
        np.testing.assert_array_equal(new[name]["mlp"], np.ones((4, 4)))
    assert list(state.by_name()) == ["layer_0/attention", "layer_1/attention"]


@pytest.mark.slow
def test_logits_may_be_what_flax_sows():
    nn = pytest.importorskip("flax.linen")

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, logits):
            self.sow("intermediates", "max_logits", logits)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, logits):
            Attention(name="attention")(logits)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, logits):
            Layer(name="layer_1")(logits[::-1])
            Layer(name="layer_0")(logits)

    _, sown = Model().apply({}, LOGITS, mutable=["intermediates"])
    new, _ = shrunk(model(), sown["intermediates"], **attention.PATTERNS)
    for name, roots in (("layer_0", [1, 0.5]), ("layer_1", [0.5, 1])):
        kernel = new[name]["attention"]["key"]["kernel"]
        np.testing.assert_allclose(kernel[0, :, 0], roots, rtol=1e-6)


def test_one_key_head_in_each_of_two_attentions():
    one = {"q": jnp.ones((4, 2)), "k": jnp.ones((4, 1))}
    logits = {"a": LOGITS, "b": LOGITS / 8}
    where = {"queries": {"*/q": 1}, "keys": {"*/k": 1}}
    new, _ = shrunk({"a": one, "b": one}, logits, **where)
    np.testing.assert_allclose(new["a"]["q"], np.full((4, 2), 0.5), rtol=1e-6)
    np.testing.assert_array_equal(new["b"]["q"], np.ones((4, 2)))


def test_the_first_pattern_that_fits_a_leaf_counts():
    params = {"q": jnp.ones((2, 4)), "k": jnp.ones((2, 4))}
    # Of the second pattern q would have four heads.
    queries = {"q": 0, "*q*": 1}
    new, _ = shrunk(params, LOGITS, queries=queries, keys={"k": 0})
    np.testing.assert_allclose(new["q"], np.broadcast_to(ROOT[:, None], (2, 4)))


def test_where_heads_are_may_be_a_function():
    def heads_of(kind):
        return lambda path, leaf: leaf.ndim - 2 if f"/{kind}/" in path else None

    queries, keys = heads_of("query"), heads_of("key")
    logits = {"layer_0": LOGITS, "layer_1": LOGITS}
    new, _ = shrunk(model(), logits, queries=queries, keys=keys)
    bias = new["layer_1"]["attention"]["query"]["bias"]
    np.testing.assert_allclose(bias[:, 0], ROOT, rtol=1e-6)


def test_metrics_show_the_worst_head_of_each_attention():
    logits = {"layer_0": LOGITS, "layer_1": LOGITS / 8}
    _, state = shrunk(model(), logits, **attention.PATTERNS)
    assert isinstance(state, ClipState)
    found = {name: float(value) for name, value in metrics(state).items()}
    assert found["clip/norm_before/layer_0/attention"] == 80.0
    assert found["clip/limit/layer_0/attention"] == 20.0
    assert found["clip/factor/layer_0/attention"] == pytest.approx(0.25, rel=1e-6)
    assert found["clip/clipped_share/layer_0/attention"] == 0.5
    assert found["clip/clipped_count/layer_1/attention"] == 0


def test_the_limit_may_be_a_schedule_or_a_rule():
    params = {"q": jnp.ones((4, 2)), "k": jnp.ones((4, 2))}
    where = {"queries": {"q": 1}, "keys": {"k": 1}}
    zero = jax.tree.map(jnp.zeros_like, params)
    clippers = {
        "schedule": (qk_clip(lambda step: 40.0 + 60.0 * step, **where), [40.0, 100.0]),
        "rule": (qk_clip(rules.growth(1.5), **where), [np.inf, 30.0]),
    }
    for clipper, wanted in clippers.values():
        state, limits = clipper.init(params), []
        for most in (20.0, 90.0):
            max_logits = jnp.full(2, most)
            _, state = clipper.update(zero, state, params, max_logits=max_logits)
            limits.append(float(state.limit[0]))
        np.testing.assert_allclose(limits, wanted, rtol=1e-6)


def test_its_numbers_may_be_hyperparameters():
    params = {"q": jnp.ones((4, 2)), "k": jnp.ones((4, 2))}
    injected = optax.inject_hyperparams(qk_clip)
    clipper = injected(20.0, queries={"q": 1}, keys={"k": 1}, alpha=1.0)
    zero = jax.tree.map(jnp.zeros_like, params)
    state = clipper.init(params)
    state.hyperparams["max_logit"] = jnp.float32(40.0)
    updates, _ = clipper.update(zero, state, params, max_logits=jnp.full(2, 80.0))
    np.testing.assert_allclose(params["q"] + updates["q"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(params["k"] + updates["k"], 1.0, rtol=1e-6)


def test_no_copy_of_the_updates_is_made():
    kernel = jax.ShapeDtypeStruct((256, 4, 64), jnp.float32)
    params = {name: {"kernel": kernel} for name in ("query", "key")}
    chain = optax.chain(optax.adam(0.1), qk_clip(20.0, **attention.PATTERNS))

    def step(params, state, grads, max_logits):
        updates, state = chain.update(grads, state, params, max_logits=max_logits)
        return optax.apply_updates(params, updates), state

    logits = jax.ShapeDtypeStruct((4,), jnp.float32)
    state = jax.eval_shape(chain.init, params)
    program = jax.jit(step, donate_argnums=(0, 1))
    compiled = program.lower(params, state, params, logits).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 0.01 * 2 * 4 * kernel.size


def test_the_state_has_one_form_from_shapes_on():
    params = attention.weights(6, 2)
    clipper = qk_clip(20.0, **attention.PATTERNS)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    first = clipper.init(shapes)
    _, later = clipper.update(params, first, params, max_logits=jnp.ones(6))
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, later)
    assert first.norm.shape == (2,)


def test_tree_map_params_passes_it():
    params = attention.weights(4, 4)
    chain = optax.chain(optax.adam(0.1), qk_clip(20.0, **attention.PATTERNS))
    state = chain.init(params)
    mapped = optax.tree_map_params(chain, lambda x: x + 1, state)
    jax.tree.map(np.testing.assert_array_equal, mapped[1], state[1])


def test_every_pattern_must_find_a_leaf():
    params = {"a": {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}}
    with pytest.raises(ValueError, match=r"queries='a/typo' finds no leaf"):
        qk_clip(20.0, queries={"a/q": 1, "a/typo": 0}, keys={"a/k": 1}).init(params)
    # A pattern finds a leaf also where an earlier one has it.
    clipper = qk_clip(20.0, queries={"a/q": 1, "*/q": 0}, keys={"*/k": 1})
    assert clipper.init(params).norm.shape == (2,)
