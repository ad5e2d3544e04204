"""Counts beyond int32, which mean never, and step counters at the largest int32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import with_rows

MOST = np.iinfo(np.int32).max
GRADS = jnp.array([3.0, 4.0])


LARGE, TRACE = 10**10, optax.trace(0.9)
# A transformation with a large count, and what it returns for GRADS.
COUNTS = {
    "skip": (optaxclip.skip_nonfinite(TRACE, LARGE), [3.0, 4.0]),
    "adagc": (optaxclip.adagc(warmup=LARGE), [0.6, 0.8]),
    "zclip": (optaxclip.zclip(warmup=LARGE), [3.0, 4.0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_beyond_int32_is_never_reached(name):
    optimizer, expected = COUNTS[name]
    updates, _ = jax.jit(optimizer.update)(GRADS, optimizer.init(GRADS))
    np.testing.assert_allclose(updates, expected, rtol=2e-6)


def counters(state):
    """The integers of a state but for those of an inner one and of memories."""
    return {name: getattr(state, name) for name in state.ROWS.counts}


def test_counters_of_steps_stay_at_their_largest_number():
    for optimizer in (
        optaxclip.skip_spikes(optax.sgd(0.1), 1.0),
        optaxclip.record_spikes(window=1),
    ):
        state = optimizer.init(GRADS)
        most = {key: MOST for key in counters(state) if key != "spiked"}
        assert len(most) >= 2
        # NaN is skipped, a spike and not finite, so that each of them counts.
        _, after = optimizer.update(GRADS * jnp.nan, with_rows(state, **most))
        for key in most:
            assert int(counters(after)[key]) == MOST, key
        found = optaxclip.metrics(after)
        shares = [x for key, x in found.items() if "share" in key or "score" in key]
        assert shares and all(0 <= float(x) <= 1 for x in shares)
        _, good = optimizer.update(GRADS / 10, after)
        for key in most.keys() - {"consecutive"}:
            assert int(counters(good)[key]) == MOST, key
