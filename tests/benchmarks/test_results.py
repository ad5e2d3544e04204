"""What is raced against each other is the same."""

import jax.numpy as jnp
import pytest

from benchmarks import timing
from benchmarks.per_example import methods, rows


def gradient(size):
    return lambda: {"w": size * jnp.arange(1.0, 4.0)}


def test_a_race_of_different_gradients_is_refused():
    runs = {methods.OPTAX: gradient(1.0), "another": gradient(1.001)}
    with pytest.raises(ValueError, match=r"another: 0\.001 from optax's gradient"):
        rows._differences(runs)


def test_what_clips_nothing_may_differ():
    runs = {methods.OPTAX: gradient(1.0), methods.PLAIN: gradient(2.0)}
    assert rows._differences(runs) == {methods.OPTAX: 0.0}


@pytest.mark.parametrize(("seconds", "calls"), [(0.05, 5), (0.01, 1), (0.001, 1)])
def test_a_run_is_repeated_until_it_fills_the_time(monkeypatch, seconds, calls):
    monkeypatch.setattr(timing, "_seconds", lambda contestant: 0.01)
    runs = []
    contestant = timing.repeated(lambda: runs.append(None), seconds)
    assert contestant.calls == calls
    before = len(runs)
    contestant.run()
    assert len(runs) - before == calls
