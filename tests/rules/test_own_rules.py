"""Rules that users write: parameters of any kind, what errors call them, rules that
compare a norm with that of all norms together, and one rule at several places.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.helpers import apply

TAPS = jnp.array([0.25, 0.5, 1.0])
NORMS = [1.0, 2.0, 3.0, 4.0]


class FromStart(rules.Rule):
    """A sum that falls by `decay`, and begins where all norms were `start`."""

    start: jax.Array
    decay: float = 0.75

    def init(self, norm):
        return jnp.full_like(norm, self.start.astype(norm.dtype) / (1 - self.decay))

    def update(self, norm, memory, step):
        return memory, self.decay * memory + norm


def test_init_of_a_rule_may_compute_with_its_numbers():
    clipper = optaxclip.clip_by_global_norm(FromStart(jnp.float32(2.0)))
    grads, limits = jnp.ones(1), []
    state = clipper.init(grads)
    for norm in (4.0, 1.0, 1.0):
        _, state = clipper.update(norm * grads, state)
        limits.append(state.limit)
    # 2 / (1 - 0.75) = 8, 0.75 * 8 + 4 = 10, 0.75 * 10 + 1 = 8.5.
    np.testing.assert_array_equal(limits, [8.0, 10.0, 8.5])


class WeighedSum(rules.Rule):
    """A weighed sum of past norms. The weights are an array, or in a dict."""

    taps: jax.Array | dict[str, jax.Array]

    def init(self, norm):
        (taps,) = jax.tree.leaves(self.taps)
        return jnp.zeros((*norm.shape, taps.size))

    def update(self, norm, memory, step):
        (taps,) = jax.tree.leaves(self.taps)
        return memory @ taps, jnp.append(memory[..., 1:], norm[..., None], -1)


# The sums of the last three norms before each, by hand.
EXPECTED = [0.0, 1.0, 2.5, 4.25]


@pytest.mark.parametrize("taps", [TAPS, {"taps": TAPS}], ids=["array", "dict"])
def test_a_rule_may_have_an_array_that_is_no_limit(taps):
    rule = WeighedSum(taps)
    np.testing.assert_allclose(optaxclip.replay.run(rule, NORMS).limits, EXPECTED)
    clippers = [
        optaxclip.clip_by_global_norm(rule),
        optaxclip.clip_by_tensor_norm(rule),
    ]
    for clipper in clippers:
        grads, found = {"w": jnp.ones(1), "b": jnp.ones(1)}, []
        state = clipper.init(grads)
        for norm in NORMS:
            size = norm / 2**0.5 if clipper is clippers[0] else norm
            _, state = clipper.update(
                {"w": jnp.full(1, size), "b": jnp.full(1, size)}, state
            )
            found.append(np.ravel(state.limit)[0])
        np.testing.assert_allclose(found, EXPECTED, rtol=1e-6)
    grads = jnp.ones(1)
    _, state = apply(optaxclip.skip_spikes(optax.sgd(1.0), rule), grads)
    assert state.limit == 0


def test_a_joined_rule_leaves_an_array_that_is_no_limit():
    limits = np.float32([[2.0], [9.0]])
    rule = rules.minimum(limits, WeighedSum(TAPS))
    clipper = optaxclip.clip_by_tensor_norm(rule, stacked=1)
    grads = {"v": jnp.ones((2, 1)), "w": jnp.ones((2, 1))}
    state, found = clipper.init(grads), []
    for norm in NORMS:
        tree = jax.tree.map(lambda x, norm=norm: norm * x, grads)
        _, state = clipper.update(tree, state)
        found.append(state.limit)
    wanted = [[min(x, 2), min(x, 9)] * 2 for x in EXPECTED]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


class EMA(rules.Rule):
    k: float = 2.0

    def update(self, norm, memory, step):
        return self.k * norm, memory


class LimitOfFewerAxes(rules.Rule):
    """A limit for each column of units, which remembers one number for each unit."""

    cap: jax.Array

    def init(self, norm):
        return jnp.zeros(norm.shape)

    def update(self, norm, memory, step):
        return self.cap, memory + 1


def test_a_joined_rule_learns_beside_a_limit_of_fewer_axes():
    rule = LimitOfFewerAxes(jnp.array([1.0, 2.0, 3.0]))
    clipper = optaxclip.clip_by_unitwise_norm(rules.minimum(rule, 5.0))
    _, state = apply(clipper, jnp.ones((4, 3)))
    assert jnp.all(jax.tree.leaves(state.memory)[0] == 1)
    assert state.limit == 1.0


def test_errors_name_a_class_of_the_user_as_it_is():
    with pytest.raises(TypeError, match=r"^EMA: there is no argument 'kk'"):
        EMA(kk=3.0)


class Scaled(rules.Rule):
    k: float = 2.0
    which: str = dataclasses.field(default="mean", metadata={"static": True})

    def update(self, norm, memory, step):
        return (self.k if self.which == "mean" else 1.0) * norm, memory


def test_a_string_or_function_among_traced_fields_is_refused():
    class Texted(rules.Rule):
        which: str = "mean"

    for build in (Texted, lambda: Scaled(k=jnp.sin), lambda: Scaled(k={"a": "b"})):
        with pytest.raises(TypeError, match=r"must be a number.*'static': True"):
            build()
    with pytest.raises(TypeError, match=r"^Texted: which must .* got 'mean'"):
        Texted()
    clipper = optaxclip.clip_by_global_norm(Scaled(which="one"))
    _, state = apply(clipper, jnp.array([3.0, 4.0]))
    assert state.limit == 5.0


class Window(rules.Rule):
    """A memory of two norms, in which several tensors would share a place."""

    def init(self, norm):
        return jnp.zeros(2)

    def update(self, norm, memory, step):
        return memory.sum(), jnp.append(memory[1:], norm)


def test_a_memory_without_the_axes_of_the_norm_is_refused():
    grads = {"w": jnp.ones(1), "b": jnp.ones(1), "c": jnp.ones(1)}
    text = r"^Window: init must return arrays whose first axes .* \(3,\), got .* \(2,\)"
    with pytest.raises(ValueError, match=text):
        optaxclip.clip_by_tensor_norm(Window()).init(grads)


class WithoutInit(rules.Rule):
    """What it remembers would be lost."""

    def update(self, norm, memory, step):
        return jnp.float32(2.0), norm


class WithoutMemory(rules.Rule):
    """A rule may say by None that it remembers nothing."""

    def update(self, norm, memory, step):
        return jnp.float32(2.0), None


def test_a_rule_without_a_memory_may_be_joined():
    joined = rules.minimum(WithoutMemory(), 5.0)
    for rule in (WithoutMemory(), joined):
        _, state = apply(optaxclip.clip_by_global_norm(rule), jnp.full(4, 3.0))
        assert state.limit == 2


class LimitAlone(rules.Rule):
    def update(self, norm, memory, step):
        return norm / 2


class ScalarAsMemory(rules.Rule):
    def update(self, norm, memory, step):
        return norm / 2, jnp.float32(0.0)


def test_a_rule_returns_a_limit_and_a_memory_like_that_of_init():
    grads = {"a": jnp.ones(1), "b": 8 * jnp.ones(1)}
    for rule, text in (
        (LimitAlone(), r"must return \(limit, memory\), got "),
        (ScalarAsMemory(), "must return a memory like that of init, nothing, got"),
    ):
        with pytest.raises(TypeError, match=text):
            apply(optaxclip.clip_by_tensor_norm(rule), grads)


class OneForTwo(rules.Rule):
    """Of two norms each would remember both."""

    def init(self, norm):
        return jnp.zeros((*norm.shape, 2))

    def update(self, norm, memory, step):
        return memory.sum(-1), norm


class Lost(rules.Rule):
    def init(self, norm):
        return {"last": norm}

    def update(self, norm, memory, step):
        return memory["last"], None


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    "rule, forms",
    [
        (WithoutInit(), r"nothing, got float32\[2\]\."),
        (OneForTwo(), r"float32\[2, 2\], got float32\[2\]\."),
        (Lost(), r"\{'last': float32\[2\]\}, got nothing\."),
    ],
)
def test_a_memory_of_another_form_than_before_is_refused(rule, forms, joined):
    grads = {"w": jnp.ones(1), "b": jnp.ones(1)}
    text = rf"^{type(rule).__name__}: update must return a memory like .* {forms}"
    if joined:
        rule = rules.minimum(rule, 5.0)
    clipper = optaxclip.clip_by_tensor_norm(rule)
    with pytest.raises(TypeError, match=text):
        apply(clipper, grads)


@jax.tree_util.register_pytree_node_class
class Last:
    """A memory of a class of the user's, which has no repr of its own."""

    def __init__(self, norm):
        self.norm = norm

    def tree_flatten(self):
        return (self.norm,), None

    @classmethod
    def tree_unflatten(cls, _, arrays):
        return cls(*arrays)


class LimitOfLast(rules.Rule):
    def init(self, norm):
        return Last(norm)

    def update(self, norm, memory, step):
        return jnp.maximum(memory.norm, 1.0), Last(norm)


def test_a_memory_may_be_of_a_class_without_a_repr():
    _, state = apply(optaxclip.clip_by_global_norm(LimitOfLast()), jnp.full(4, 2.0))
    assert state.limit == 1 and state.memory[0].norm == 4


class TwiceTheLast(rules.Rule):
    def init(self, norm):
        return 0.0

    def update(self, norm, last, step):
        return jnp.where(last == 0, jnp.inf, 2 * last), norm


def test_a_memory_may_begin_as_a_python_number():
    skipping = optaxclip.skip_spikes(optax.sgd(1.0), TwiceTheLast(), TwiceTheLast())
    state = skipping.init(jnp.zeros(1))
    for norm in (3.0, 9.0):
        _, state = skipping.update(jnp.array([norm]), state, value=1.0)
    assert (state.limit, state.loss_limit, state.skipped) == (6, 2, 1)


def test_a_tracker_leaves_0_and_inf_at_any_rate():
    for start in (0.0, np.inf):
        rule = rules.quantile_tracker(0.5, 1000.0, start=start)
        limits = np.asarray(optaxclip.replay.run(rule, NORMS).limits)
        assert limits[0] == start and np.isfinite(limits[1:]).all()


@dataclasses.dataclass
class Fixed:
    """A function without a hash, as a dataclass that can be called is one."""

    value: float

    def __call__(self, *args):
        return self.value + 0 * args[0]


def test_functions_without_a_hash_are_told_apart():
    grads = {"w": jnp.array([3.0, 4.0])}

    def norm(clipper):
        updates, _ = clipper.update(grads, clipper.init(grads))
        return float(optaxclip.global_norm(updates))

    first = Fixed(2.0)
    assert norm(optaxclip.clip_by_global_norm(first)) == pytest.approx(2.0)
    first.value = 4.0
    # An object that was 2 and one that always was 4.
    assert norm(optaxclip.clip_by_global_norm(Fixed(4.0))) == pytest.approx(4.0)
    shrunk = optaxclip.clip_by_global_norm(1.0, shrink=Fixed(0.5))
    assert norm(shrunk) == pytest.approx(0.5)


PARTS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0, 12.0])}  # together 13
PARAMS = jax.tree.map(lambda leaf: 10 * leaf, PARTS)


class ShareOfTotal(rules.Rule):
    share: float

    @property
    def needs_total(self):
        return True

    def update(self, norm, memory, step, total):
        return self.share * total, memory


class Both(rules.Rule):
    @property
    def needs_params(self):
        return True

    @property
    def needs_total(self):
        return True

    def update(self, norm, memory, step, params_norm, total):
        return params_norm + 1000 * total, memory


def limits(rule, params=None):
    _, state = apply(optaxclip.clip_by_tensor_norm(rule), PARTS, params)
    return {name: float(entry.limit) for name, entry in state.by_name().items()}


@pytest.mark.parametrize(
    "rule",
    [
        rules.minimum(ShareOfTotal(0.5), 100.0),
        rules.maximum(1.0, ShareOfTotal(0.5)),
        rules.warm_up(1, ShareOfTotal(0.5), 1.0),
        rules.minimum(rules.maximum(ShareOfTotal(0.5), 1.0), 100.0),
    ],
)
def test_a_joined_rule_hands_on_the_norm_of_all(rule):
    assert limits(rule) == {"a": 6.5, "b": 6.5}


def test_a_joined_rule_hands_on_what_each_rule_needs():
    weights = rules.share_of_params(0.1)
    rule = rules.minimum(weights, rules.maximum(ShareOfTotal(0.5), 1.0))
    assert limits(rule, PARAMS) == {"a": 5.0, "b": 6.5}


def test_rules_beside_each_other_get_what_each_needs():
    tree = {"a": ShareOfTotal(0.5), "b": rules.share_of_params(0.5)}
    assert limits(tree, PARAMS) == {"a": 6.5, "b": 60.0}


def test_a_rule_may_need_weights_and_the_norm_of_all():
    assert limits(Both(), PARAMS) == {"a": 13050.0, "b": 13120.0}
    assert limits(rules.minimum(Both(), 13100.0), PARAMS) == {
        "a": 13050.0,
        "b": 13100.0,
    }


@pytest.mark.parametrize(
    "build",
    [
        lambda rule: optaxclip.replay.run(rule, [1.0, 2.0]),
        lambda rule: optaxclip.skip_spikes(optax.sgd(1.0), rule),
        lambda rule: optaxclip.skip_spikes(optax.sgd(1.0), 1.0, rule),
    ],
)
def test_where_there_is_one_norm_the_rule_is_refused(build):
    for rule in (ShareOfTotal(0.5), rules.minimum(ShareOfTotal(0.5), 1.0)):
        with pytest.raises(
            ValueError, match="rule must not compare norms with the total"
        ):
            build(rule)


def test_the_norm_of_all_follows_a_norm_that_is_given():
    clipper = optaxclip.clip_by_tensor_norm(rules.minimum(ShareOfTotal(0.5), 100.0))
    norms = {"a": jnp.float32(6.0), "b": jnp.float32(8.0)}
    _, state = clipper.update(PARTS, clipper.init(PARTS), grad_norm=norms)
    np.testing.assert_allclose(state.limit, 5.0, rtol=1e-6)


# Rules that learn are refused in a tree of limits.
MAKERS = {
    "schedule": lambda: rules.constant(optax.constant_schedule(10.0)),
    "joined": lambda: rules.minimum(optax.linear_schedule(9.0, 1.0, 3), 20.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_one_rule_twice_is_two_equal_rules(name):
    shared, make = MAKERS[name](), MAKERS[name]
    both = optaxclip.clip_by_tensor_norm({"a": shared, "b": shared})
    apart = optaxclip.clip_by_tensor_norm({"a": make(), "b": make()})
    states = [clipper.init(PARTS) for clipper in (both, apart)]
    for size in (1.0, 5.0, 2.0):
        grads = {name: size * leaf for name, leaf in PARTS.items()}
        first, states[0] = both.update(grads, states[0])
        second, states[1] = apart.update(grads, states[1])
        for name in grads:
            np.testing.assert_array_equal(first[name], second[name])
