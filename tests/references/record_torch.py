"""Runs torch's `clip_grad_norm_` for every kind of `norm_type`, and writes down what it
computes, to `torch.json` beside this file.

Run with torch 2.13.0 on a CPU. The tests read the JSON, and run torch again where it is
installed. To record again, in an environment of its own:

    python tests/references/record_torch.py

The trees in float64 are those of PyTorch's own test_clip_grad_norm_error_if_nonfinite,
and so are the orders. NaN and inf are the strings "nan" and "inf", which
`np.asarray(values, float)` understands.
"""

import itertools
import json
import math
from importlib.metadata import version
from pathlib import Path

FLOAT32 = {
    "plain": [[0.5, -3.0], [4.0]],
    "a zero": [[0.5, 0.0], [4.0]],
    "a tensor of zeros": [[0.5, -3.0], [0.0]],
    "zeros": [[0.0, 0.0], [0.0]],
    "nan": [[0.5, math.nan], [4.0]],
    "nan and zero": [[0.0, math.nan], [0.0]],
    "inf": [[0.5, -math.inf], [4.0]],
    "inf and zero": [[0.0, math.inf], [4.0]],
    "inf and nan": [[math.nan, math.inf], [4.0]],
    "inf alone": [[math.inf, -math.inf], [math.inf]],
    "tiny": [[1e-30, -2e-30], [4e-30]],
    "huge": [[1e30, -2e30], [4e30]],
    "tiny and huge": [[1e-37, 3e38], [1.0]],
}
ORDERS = (-math.inf, -3.5, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.5, math.inf)
LIMITS = (0.0, 1e-7, 0.5, math.inf)
SCALARS = (math.inf, -math.inf, math.nan, 2e22, -2e22, 2e200, -2e200)
ORDERS_OF_PYTORCH = (-3.5, -2.0, -1.0, -0.1, 0.0, 0.1, 1.0, 2.0, 3.5, math.inf)


def main():
    trees = {name: {"dtype": "float32", "leaves": x} for name, x in FLOAT32.items()}
    cases = [
        run(name, trees[name], *settings)
        for name in FLOAT32
        for settings in itertools.product(ORDERS, LIMITS)
    ]
    for scalar, alone, beside_one in itertools.product(
        SCALARS, (False, True), (False, True)
    ):
        name = f"{scalar}, {1 if alone else 10} of 10{', beside 1' * beside_one}"
        leaf = [0.0, scalar] + [0.0] * 8 if alone else [scalar] * 10
        leaves = [[1.0], leaf] if beside_one else [leaf]
        trees[name] = {"dtype": "float64", "leaves": leaves}
        cases += [run(name, trees[name], order, 1.0) for order in ORDERS_OF_PYTORCH]
    recorded = {"versions": {"torch": version("torch").split("+")[0]}}
    recorded |= {"trees": trees, "cases": cases}
    text = json.dumps(plain(recorded), allow_nan=False).replace('{"tree"', '\n{"tree"')
    Path(__file__).with_name("torch.json").write_text(text + "\n")


def run(name, tree, norm_type, max_norm):
    """One case: the norm, the clipped gradients, and whether the norm is an error."""
    import torch  # here, so that importing this file needs no torch

    params = []
    for leaf in tree["leaves"]:
        grad = torch.tensor(leaf, dtype=getattr(torch, tree["dtype"]))
        params.append(torch.zeros_like(grad))
        params[-1].grad = grad
    try:
        torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, True)
        raises = False
    except RuntimeError:  # nothing has been clipped then
        raises = True
    for param, leaf in zip(params, tree["leaves"]):
        param.grad = torch.tensor(leaf, dtype=param.dtype)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    digits = 9 if tree["dtype"] == "float32" else 17
    return {
        "tree": name,
        "norm_type": norm_type,
        "max_norm": max_norm,
        "norm": rounded(norm.item(), digits),
        "raises": raises,
        "clipped": [rounded(param.grad.tolist(), digits) for param in params],
    }


def rounded(x, digits):
    if isinstance(x, list):
        return [rounded(value, digits) for value in x]
    return float(f"{x:.{digits}g}")


def plain(x):
    """The value as JSON holds it."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, list):
        return [plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


if __name__ == "__main__":
    main()
