"""Windows that no array can hold, and numbers that must be finite."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

BUILDERS = {
    "windowed_mean": lambda window: rules.windowed_mean(window=window),
    "windowed_quantile": lambda window: rules.windowed_quantile(window=window),
    "autoclip": lambda window: optaxclip.autoclip(window=window),
    "record_spikes": lambda window: optaxclip.record_spikes(window=window),
    "skip_step": lambda window: optaxclip.skip_step(optax.sgd(1.0), window=window),
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("window", [2**31, 2**62, 1e30, np.int64(2**40)])
def test_a_window_beyond_all_arrays_is_refused(name, window):
    with pytest.raises(ValueError, match=f"^{name}: window must be at most 2147483647"):
        BUILDERS[name](window)


@pytest.mark.parametrize("decay", [math.inf, jnp.float32(math.inf)])
def test_larc_takes_a_finite_weight_decay(decay):
    with pytest.raises(
        ValueError,
        match=r"^larc: weight_decay must be at most .*, got .*inf",
    ):
        optaxclip.larc(0.1, weight_decay=decay)
