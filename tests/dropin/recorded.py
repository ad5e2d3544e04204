"""Numbers of torch and TensorFlow: run where torch is installed, recorded elsewhere."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip.dropin import keras, tensorflow_style
from tests.helpers import apply
from tests.references.record_tensorflow import decoded

NAN, INF = math.nan, math.inf


def tree(seed=0, dtype=np.float32, size=3.0):
    random = np.random.default_rng(seed)
    return {
        name: (size * random.standard_normal(shape)).astype(dtype)
        for name, shape in {"a": (2, 3), "b": (4,), "c": ()}.items()
    }


def close(ours, theirs, dtype=np.float32):
    np.testing.assert_allclose(
        np.asarray(ours, np.float64),
        np.asarray(theirs, np.float64),
        8 * float(jnp.finfo(dtype).eps),
        equal_nan=True,
    )


def in_torch(torch, grads):
    """Parameters with these gradients; None makes one without."""
    params = []
    for grad in grads:
        like = torch.zeros(1) if grad is None else torch.tensor(grad)
        params.append(torch.zeros_like(like))
        params[-1].grad = None if grad is None else like
    return params


REFERENCES = Path(__file__).parents[1] / "references"
FUNCTIONS = {
    "clip_by_value": tensorflow_style.clip_by_value,
    "clip_by_norm": tensorflow_style.clip_by_norm,
    "clip_by_average_norm": tensorflow_style.clip_by_average_norm,
    "clip_by_global_norm": tensorflow_style.clip_by_global_norm,
    "global_norm": tensorflow_style.global_norm,
    "keras": lambda grads, settings: optaxclip_of_keras(grads, **settings),
}


def optaxclip_of_keras(grads, **settings):
    return apply(keras.clip_gradients(**settings), grads)[0]


def limit_of(case):
    """The limit of a norm or of Keras; None where there are two bounds or none."""
    limit = decoded(case["args"])[1] if len(case["args"]) == 2 else None
    if isinstance(limit, dict):
        return next(iter(limit.values()), None)
    return limit if isinstance(limit, float) else None


def run(case):
    with jax.enable_x64("float64" in json.dumps(case)):
        return FUNCTIONS[case["function"]](
            *decoded(case["args"]), **decoded(case["options"])
        )


def name(case):
    return f"{case['function']}-{limit_of(case)}"
