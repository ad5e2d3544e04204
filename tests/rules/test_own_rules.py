"""Rules that users write: parameters of any kind, and what errors call them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

TAPS = jnp.array([0.25, 0.5, 1.0])
NORMS = [1.0, 2.0, 3.0, 4.0]


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
    skipping = optaxclip.skip_spikes(optax.sgd(1.0), rule)
    grads = jnp.ones(1)
    _, state = skipping.update(grads, skipping.init(grads))
    assert state.limit == 0


class EMA(rules.Rule):
    k: float = 2.0

    def update(self, norm, memory, step):
        return self.k * norm, memory


def test_errors_name_a_class_of_the_user_as_it_is():
    with pytest.raises(TypeError, match=r"^EMA: there is no argument 'kk'"):
        EMA(kk=3.0)


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
