"""Runs TensorFlow's clipping functions and the clipping of Keras optimizers, and writes
down what they compute, to `tensorflow.json` beside this file.

Run with tensorflow-cpu 2.21.0 and keras 3.15.1 on a CPU. The tests read only the JSON.
To record again, in an environment of its own:

    python tests/references/record_tensorflow.py

A case has the function, its arguments (tensors as {"dtype", "values"}, None as null),
and either the outputs or the error. NaN and inf are the strings "nan" and "inf", which
`np.asarray(values, float)` understands.
"""

import itertools
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

SPECIAL = {
    "zero": [0.0, 0.0],
    "nan": [3.0, np.nan],
    "inf": [3.0, np.inf],
    "both": [3.0, -4.0],
}
LIMITS = (0.0, 1.0, 5.0, np.inf)


def main():
    import tensorflow as tf  # here, so that importing this file needs no TensorFlow

    random = np.random.default_rng(0)

    def tensor(*shape, dtype="float32"):
        return (random.standard_normal(shape) * 4).astype(dtype)

    functions = {
        "clip_by_value": tf.clip_by_value,
        "clip_by_norm": tf.clip_by_norm,
        "clip_by_average_norm": tf.compat.v1.clip_by_average_norm,
        # TensorFlow wants this norm as a tensor.
        "clip_by_global_norm": lambda ts, limit, use_norm=None: tf.clip_by_global_norm(
            ts, limit, None if use_norm is None else tf.constant(use_norm)
        ),
        "global_norm": tf.linalg.global_norm,
        "keras": lambda grads, settings: keras_clips(tf, grads, settings),
    }
    calls = [
        ("clip_by_value", [tensor(3, 4), -1.5, 2.5], {}),
        ("clip_by_value", [tensor(3, 4), tensor(4) - 4, np.float32(3)], {}),
    ]
    calls += [
        (
            "clip_by_value",
            [np.array([np.nan, np.inf, -np.inf, 0.5], "float32"), -1.0, 2.0],
            {},
        ),
        ("clip_by_value", [tensor(3), 2.0, 1.0], {}),
    ]
    calls += [
        ("clip_by_value", [np.array([-5, 2, 7], "int32"), -1, 3], {}),
        ("clip_by_value", [tensor(3), tensor(2, 3), 1.0], {}),
    ]
    for dtype, limit in itertools.product(
        ("float16", "float32", "float64"), (0.5, 5.0, 1e3)
    ):
        calls += [
            (name, [tensor(2, 3, dtype=dtype), limit], {})
            for name in ("clip_by_norm", "clip_by_average_norm")
        ]
        calls += [
            (
                "clip_by_global_norm",
                [
                    [
                        tensor(2, 3, dtype=dtype),
                        None,
                        tensor(4, dtype=dtype),
                        tensor(dtype=dtype),
                    ],
                    limit,
                ],
                {},
            )
        ]
    calls += [
        ("clip_by_norm", [tensor(2, 3, 4), 3.0], {"axes": axes})
        for axes in (0, [0], [1], [-1], [0, 2], [0, 1, 2])
    ]
    calls += [
        (
            "clip_by_norm",
            [tensor(2, 3), np.array([[0.5], [50.0]], "float32")],
            {"axes": [1]},
        ),
        ("clip_by_norm", [tensor(2, 3), 1.0], {"axes": [2]}),
    ]
    calls += [
        ("clip_by_global_norm", [[tensor(2, 3), tensor(4)], 5.0], {"use_norm": norm})
        for norm in (4.0, 10.0, np.nan)
    ]
    calls += [
        ("global_norm", [[tensor(2, 3), None, tensor(4)]], {}),
        ("global_norm", [[]], {}),
        ("clip_by_global_norm", [[], 1.0], {}),
    ]
    for values, limit in itertools.product(SPECIAL.values(), (*LIMITS, -1.0, np.nan)):
        special = np.array(values, "float32")
        calls += [
            (name, [special, limit], {})
            for name in ("clip_by_norm", "clip_by_average_norm")
        ] + [("clip_by_global_norm", [[special, np.ones(1, "float32")], limit], {})]
    calls += [
        ("clip_by_norm", [np.full(4, 300, "float16"), 1.0], {}),
        ("clip_by_norm", [np.full(2, 1e20, "float32"), 1.0], {}),
    ]
    calls += [
        ("clip_by_global_norm", [[np.full(4, 300, "float16")], 1.0], {}),
        ("clip_by_global_norm", [[tensor(2), tensor(2, dtype="float64")], 1.0], {}),
    ]
    calls += [
        ("clip_by_norm", [np.array([3, 4], "int32"), 1.0], {}),
        ("clip_by_norm", [np.array([3 + 4j], "complex64"), 1.0], {}),
    ]
    for setting, limit in itertools.product(
        ("clipnorm", "clipvalue", "global_clipnorm"),
        (0.0, -1.0, np.nan, 0.5, 5.0, np.inf),
    ):
        calls += [("keras", [[tensor(2, 3), tensor(4)], {setting: limit}], {})]
    calls += [
        ("keras", [[tensor(2)], {}], {}),
        ("keras", [[tensor(2)], {"clipnorm": 1.0, "clipvalue": 1.0}], {}),
    ]
    calls += [
        (
            "keras",
            [[np.array(values, "float32"), np.ones(1, "float32")], {name: 1.0}],
            {},
        )
        for values in SPECIAL.values()
        for name in ("clipnorm", "global_clipnorm")
    ]

    cases = [run(name, functions[name], args, options) for name, args, options in calls]
    recorded = {
        "versions": {
            package: version(package) for package in ("tensorflow-cpu", "keras")
        },
        "cases": cases,
    }
    text = json.dumps(recorded, allow_nan=False).replace('{"function"', '\n{"function"')
    (Path(__file__).parent / "tensorflow.json").write_text(text + "\n")


def run(name, function, args, options):
    case = {"function": name, "args": plain(args), "options": plain(options)}
    try:
        return {**case, "output": plain(function(*args, **options))}
    except Exception as error:
        return {**case, "error": type(error).__name__}


def keras_clips(tf, grads, settings):
    """What the optimizer would apply."""
    import keras

    return keras.optimizers.SGD(**settings)._clip_gradients(
        [tf.constant(grad) for grad in grads]
    )


def plain(x):
    """The value as JSON holds it."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if x is None or isinstance(x, (str, int)):
        return x
    if isinstance(x, float):
        return x if np.isfinite(x) else str(x)
    array = np.asarray(x)
    if np.iscomplexobj(array):
        return {
            "dtype": str(array.dtype),
            "real": array.real.tolist(),
            "imag": array.imag.tolist(),
        }
    return {"dtype": str(array.dtype), "values": finite_or_text(array.tolist())}


def finite_or_text(values):
    return (
        [finite_or_text(value) for value in values]
        if isinstance(values, list)
        else values
        if np.isfinite(values)
        else str(values)
    )


if __name__ == "__main__":
    main()
