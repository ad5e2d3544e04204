"""Runs public implementations of adaptive clipping again, on the gradients and with the
arguments of `recorded.json` beside this file, and writes down what they compute.

Run with torch 2.13.0, numpy 2.4.6, autoclip 0.2.1, pytorch_optimizer 4.1.0 and zclip
1.0.0, in float64 on a CPU. The tests read only the JSON: none of these packages is
needed for them. To record again, in an environment of its own (autoclip and
pytorch_optimizer with `--no-deps`):

    python tests/references/record.py

The gradients do not follow the parameters: they are a fixed stream, so that a
difference at one step is not carried to the next by the problem. Step t is at index
t - 1 of a list; lists beside `steps` hold those steps alone. Numbers have nine digits,
which hold a float32; inf and nan are the strings "inf" and "nan", which
`np.asarray(values, float)` understands.
"""

import json
import math
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from autoclip.torch import QuantileClip, StandardClip
from pytorch_optimizer import SPAM, AdaGC, StableSPAM
from pytorch_optimizer.optimizer.agc import agc
from pytorch_optimizer.optimizer.spam import CosineDecay
from zclip import ZClip

PATH = Path(__file__).with_name("recorded.json")
SCALE = "torch.nn.utils.clip_grad_norm_"


class Run:
    """Weights whose gradients are those of the stream, step by step, and a history of
    what is seen after each step: numbers, or trees of numbers.
    """

    def __init__(self, stream):
        self.stream = {name: np.asarray(x, float) for name, x in stream.items()}
        self.weights = {
            name: torch.nn.Parameter(torch.zeros(x.shape[1:], dtype=torch.float64))
            for name, x in self.stream.items()
        }
        self.history = {}

    def steps(self):
        for step in range(len(self.stream["matrix"])):
            for name, weight in self.weights.items():
                weight.grad = torch.tensor(self.stream[name][step])
            yield step

    def see(self, **values):
        for field, value in values.items():
            self.history.setdefault(field, []).append(value)

    def grads(self):
        return {name: copied(weight.grad) for name, weight in self.weights.items()}

    def states(self, optimizer, field):
        found = {}
        for name, weight in self.weights.items():
            value = torch.as_tensor(optimizer.state[weight][field])
            like = weight if value.numel() > 1 else value
            found[name] = copied(value).reshape(like.shape)
        return found


def copied(tensor):
    return tensor.detach().numpy().copy()


def norms_of(tree):
    return {name: np.linalg.norm(value) for name, value in tree.items()}


def of_autoclip(make, args, stream):
    run = Run(stream)
    clip = make(run.weights.values(), **args)
    for _ in run.steps():
        with mock.patch(SCALE, wraps=torch.nn.utils.clip_grad_norm_) as scale:
            clip.step()
        limits = [call.kwargs["max_norm"] for call in scale.call_args_list]
        clipped = run.grads()
        norms = norms_of(clipped)
        if args.get("global_threshold"):
            run.see(limit=limits[0], clipped_norm=math.hypot(*norms.values()))
        else:
            run.see(limit=dict(zip(norms, limits)), clipped_norm=norms)
        run.see(clipped=clipped)
    return run.history


def of_zclip(args, stream):
    """`mean` and `var` are those after the step; they are nan until the warm-up is
    over.
    """
    run = Run(stream)
    model, clip = torch.nn.ParameterList(run.weights.values()), ZClip(**args)
    for _ in run.steps():
        clip.step(model)
        clipped = run.grads()
        run.see(clipped=clipped, clipped_norm=math.hypot(*norms_of(clipped).values()))
        for field, value in {"mean": clip.mean, "var": clip.var}.items():
            run.see(**{field: math.nan if value is None else value})
    return run.history


def of_adagc(args, stream):
    """The clipped gradient is seen in the first moment, which is the gradient itself
    for a decay of 0; `gamma` is that after the step.
    """
    run = Run(stream)
    settings = {"betas": (0.0, 0.999), "weight_decay": 0.0, "foreach": False}
    optimizer = AdaGC(run.weights.values(), **settings, **args)
    for _ in run.steps():
        optimizer.step()
        clipped = run.states(optimizer, "exp_avg")
        gamma = run.states(optimizer, "gamma")
        run.see(clipped=clipped, clipped_norm=norms_of(clipped), gamma=gamma)
    return run.history


def of_spam(args, stream):
    """The second moment comes from a run with Adam's decays, the clipped gradients from
    one whose first moment is the gradient. Density is 1, so every mask is full; `scale`
    is the factor of the learning rate after a reset.
    """
    death_rate, run = CosineDecay.get_death_rate, Run(stream)
    settings = args | {"density": 1.0, "foreach": False}
    optimizer = SPAM(run.weights.values(), **settings)

    def watched(decay, step):
        rate = death_rate(decay, step)
        run.see(scale=1 - rate)
        return rate

    with mock.patch.object(CosineDecay, "get_death_rate", watched):
        for _ in run.steps():
            optimizer.step()
            run.see(exp_avg_sq=run.states(optimizer, "exp_avg_sq"))
    bare = Run(stream)
    optimizer = SPAM(bare.weights.values(), **settings | {"betas": (0.0, 0.999)})
    for _ in bare.steps():
        optimizer.step()
        run.see(clipped=bare.states(optimizer, "exp_avg"))
    return run.history


def of_stable_spam(args, stream):
    """`clipped` is the gradient after AdaClip, `update` the gradient after AdaGN too;
    the averages are those after the step.
    """
    run, norm, between = Run(stream), torch.linalg.norm, []
    optimizer = StableSPAM(run.weights.values(), foreach=False, **args)

    def watched(grad):
        between.append(copied(grad))
        return norm(grad)

    with mock.patch("torch.linalg.norm", watched):
        for _ in run.steps():
            optimizer.step()
            run.see(clipped=dict(zip(run.weights, between[-2:])), update=run.grads())
            for average in ("m_max_t", "m_norm_t"):
                run.see(**{average: run.states(optimizer, average)})
    return run.history


def of_agc(args, grads, params):
    """Unit-wise, with a row of zero weights and a row of zero gradients in the matrix;
    reduces dimension 1, from rank 4 on all but the first.
    """
    trees = [
        {name: torch.tensor(x, dtype=torch.float64) for name, x in tree.items()}
        for tree in (params, grads)
    ]
    return {name: agc(x, trees[1][name], **args) for name, x in trees[0].items()}


def recorded_as(old, history):
    """The steps that the old record has, or all."""
    if not isinstance(old, dict):
        return history
    steps = old.get("steps", range(1, len(history) + 1))
    found = {"steps": steps} if "steps" in old else {}
    for name in history[0]:
        if name in old:
            found[name] = [history[step - 1][name] for step in steps]
    return found


def plain(value):
    """The value as JSON holds it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    return value


def text(value, depth=0):
    """JSON with one key a line, down to the leaves of a tree."""
    if depth == 4 or not isinstance(value, dict):
        return json.dumps(value, allow_nan=False)
    pad = " " * depth
    lines = [f"{pad} {json.dumps(k)}: {text(v, depth + 1)}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{pad}}}"


RECORDERS = {
    "quantile": lambda *case: of_autoclip(QuantileClip, *case),
    "standard": lambda *case: of_autoclip(StandardClip, *case),
    "zclip": of_zclip,
    "adagc": of_adagc,
    "spam": of_spam,
    "stable spam": of_stable_spam,
}


def main():
    recorded = json.loads(PATH.read_text())
    for package in recorded["versions"]:
        recorded["versions"][package] = version(package).split("+")[0]
    for name, case in recorded["cases"].items():
        if name == "agc":
            case["clipped"] = of_agc(case["args"], case["grads"], case["params"])
            continue
        kind = name.partition(",")[0].removeprefix("global ")
        stream = recorded["streams"]["zeros" if name.endswith("zeros") else "main"]
        history = RECORDERS[kind](case["args"], stream)
        for field in case.keys() - {"args"}:
            case[field] = recorded_as(case[field], history[field])
    PATH.write_text(text(plain(recorded)) + "\n")


if __name__ == "__main__":
    main()
