"""Runs torch's `clip_grad_norm_` again on the cases of `torch.json` beside this file,
for every kind of `norm_type`, and writes down what it computes.

Run with torch 2.13.0 on a CPU. The tests read the JSON, and run torch again where it is
installed. To record again, in an environment of its own:

    python tests/references/record_torch.py

The trees in float64 are those of PyTorch's own test_clip_grad_norm_error_if_nonfinite,
and so are the orders. NaN and inf are the strings "nan" and "inf", which
`np.asarray(values, float)` understands.
"""

import json
import math
from importlib.metadata import version
from pathlib import Path

PATH = Path(__file__).with_name("torch.json")


def main():
    recorded = json.loads(PATH.read_text())
    recorded["versions"] = {"torch": version("torch").split("+")[0]}
    for case in recorded["cases"]:
        case.update(found(case, recorded["trees"][case["tree"]]))
    text = json.dumps(recorded, allow_nan=False).replace('{"tree"', '\n{"tree"')
    PATH.write_text(text + "\n")


def found(case, tree):
    """The norm, the clipped gradients, and whether the norm is an error."""
    import torch  # here, so that importing this file needs no torch

    dtype, params = getattr(torch, tree["dtype"]), []
    for leaf in tree["leaves"]:
        params.append(torch.zeros(len(leaf), dtype=dtype))
        params[-1].grad = torch.tensor([float(x) for x in leaf], dtype=dtype)
    limit, order = float(case["max_norm"]), float(case["norm_type"])
    try:
        torch.nn.utils.get_total_norm([x.grad for x in params], order, True)
        raises = False
    except RuntimeError:
        raises = True
    norm = torch.nn.utils.clip_grad_norm_(params, limit, order)
    digits = 9 if tree["dtype"] == "float32" else 17
    clipped = [rounded(param.grad.tolist(), digits) for param in params]
    return {"norm": rounded(norm.item(), digits), "raises": raises, "clipped": clipped}


def rounded(x, digits):
    if isinstance(x, list):
        return [rounded(value, digits) for value in x]
    return float(f"{x:.{digits}g}") if math.isfinite(x) else str(x)


if __name__ == "__main__":
    main()
