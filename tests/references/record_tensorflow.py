"""Runs TensorFlow's clipping functions and the clipping of Keras optimizers again on
the cases of `tensorflow.json` beside this file, and writes down what they compute.

Run with tensorflow-cpu 2.21.0 and keras 3.15.1 on a CPU. The tests read only the JSON.
To record again, in an environment of its own:

    python tests/references/record_tensorflow.py

A case has the function, its arguments (tensors as {"dtype", "values"}, None as null),
and either the outputs or the error. NaN and inf are the strings "nan" and "inf", which
`np.asarray(values, float)` understands.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("tensorflow.json")


def main():
    recorded = json.loads(PATH.read_text())
    recorded["versions"] = {name: version(name) for name in recorded["versions"]}
    functions = new_functions()
    for case in recorded["cases"]:
        args, options = decoded(case["args"]), decoded(case["options"])
        case.pop("output", case.pop("error", None))
        try:
            case["output"] = plain(functions[case["function"]](*args, **options))
        except Exception as error:
            case["error"] = type(error).__name__
    text = json.dumps(recorded, allow_nan=False).replace('{"function"', '\n{"function"')
    PATH.write_text(text + "\n")


def new_functions():
    import keras  # here, so that importing this file needs no TensorFlow
    import tensorflow as tf

    def global_norm(tensors, limit, use_norm=None):
        # TensorFlow wants this norm as a tensor.
        norm = None if use_norm is None else tf.constant(use_norm)
        return tf.clip_by_global_norm(tensors, limit, norm)

    def of_keras(grads, settings):
        """What the optimizer would apply."""
        optimizer = keras.optimizers.SGD(**settings)
        return optimizer._clip_gradients([tf.constant(grad) for grad in grads])

    return {
        "clip_by_value": tf.clip_by_value,
        "clip_by_norm": tf.clip_by_norm,
        "clip_by_average_norm": tf.compat.v1.clip_by_average_norm,
        "clip_by_global_norm": global_norm,
        "global_norm": tf.linalg.global_norm,
        "keras": of_keras,
    }


def decoded(x):
    if isinstance(x, dict) and "values" in x:
        return np.asarray(np.asarray(x["values"], float), x["dtype"])
    if isinstance(x, dict) and "real" in x:
        return np.asarray(
            np.asarray(x["real"]) + 1j * np.asarray(x["imag"]), x["dtype"]
        )
    if isinstance(x, dict):
        return {key: decoded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [decoded(value) for value in x]
    return float(x) if x in ("nan", "inf") else x


def plain(x):
    """The value as JSON holds it."""
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if x is None:
        return x
    array = np.asarray(x)
    if np.iscomplexobj(array):
        parts = {"real": array.real.tolist(), "imag": array.imag.tolist()}
        return {"dtype": str(array.dtype), **parts}
    return {"dtype": str(array.dtype), "values": finite_or_text(array.tolist())}


def finite_or_text(values):
    if isinstance(values, list):
        return [finite_or_text(value) for value in values]
    return values if np.isfinite(values) else str(values)


if __name__ == "__main__":
    main()
