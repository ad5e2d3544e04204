"""Trees of torch weights and NumPy arrays, histories of them, and their text. A tree is
a dict from the names of `SHAPES`; a history is a list of trees.
"""

import json
import math
import textwrap

import numpy as np
import torch

SHAPES = {"matrix": (3, 4), "vector": (5,)}


def zeros():
    return weights_of({name: np.zeros(shape) for name, shape in SHAPES.items()})


def weights_of(values):
    return {
        name: torch.nn.Parameter(torch.tensor(value)) for name, value in values.items()
    }


def set_grads(weights, grads):
    for name, weight in weights.items():
        weight.grad = torch.tensor(grads[name])


def grads_of(weights):
    return {name: copy(weight.grad) for name, weight in weights.items()}


def copies_of(weights):
    return {name: copy(weight) for name, weight in weights.items()}


def copy(tensor):
    return tensor.detach().numpy().copy()


def steps_of(stream):
    return [at(stream, step) for step in range(1, len(stream["matrix"]) + 1)]


def at(stream, step):
    return {name: grads[step - 1] for name, grads in stream.items()}


def norms_of(tree):
    return {name: np.linalg.norm(value) for name, value in tree.items()}


def global_norm(tree):
    return math.hypot(*norms_of(tree).values())


def differs(tree, other):
    return any(not np.array_equal(tree[name], other[name]) for name in tree)


def named_lists():
    return {name: [] for name in SHAPES}


def append(lists, values):
    for name, value in values.items():
        lists[name].append(value)


def together(history):
    return {name: np.stack([tree[name] for tree in history]) for name in history[0]}


def shown(history, steps):
    steps = [step for step in steps if step <= len(history)]
    return {
        "steps": steps,
        **(together([history[step - 1] for step in steps]) if steps else {}),
    }


def digits(value, count):
    """Rounded to so many digits, elementwise."""
    return np.vectorize(lambda number: float(f"{number:.{count}g}"), otypes=[float])(
        value
    )


def text(value, depth=0):
    """JSON with one key a line and lists filled up to 160 columns; no list holds a
    string with a space, so that only numbers are parted.
    """
    if isinstance(value, dict) and any(
        isinstance(item, (dict, list, np.ndarray)) for item in value.values()
    ):
        pad = " " * (depth + 1)
        return (
            "{\n"
            + ",\n".join(
                f"{pad}{json.dumps(key)}: {text(item, depth + 1)}"
                for key, item in value.items()
            )
            + f"\n{pad[1:]}}}"
        )
    line = json.dumps(plain(value), allow_nan=False)
    return (
        line
        if len(line) <= 140
        else "\n"
        + textwrap.fill(line, 160, break_long_words=False, break_on_hyphens=False)
    )


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    return value
