"""Runs public implementations of adaptive clipping and writes down what they compute,
to `recorded.json` beside this file.

Run with torch 2.13.0, numpy 2.4.6, autoclip 0.2.1, pytorch_optimizer 4.1.0 and zclip
1.0.0, in float64 on a CPU. The tests read only the JSON: none of these packages is
needed for them. To record again, in an environment of its own (autoclip and
pytorch_optimizer with `--no-deps`):

    python tests/references/record.py

The gradients do not follow the parameters: they are a fixed stream, stored with four
digits, so that a difference at one step is not carried to the next by the problem. Step
t is at index t - 1 of a list; lists beside `steps` hold those steps alone. Numbers have
nine digits, which hold a float32; inf and nan are the strings "inf" and "nan", which
`np.asarray(values, float)` understands.
"""

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
from trees import (
    SHAPES,
    append,
    at,
    copies_of,
    copy,
    differs,
    digits,
    global_norm,
    grads_of,
    named_lists,
    norms_of,
    set_grads,
    shown,
    steps_of,
    text,
    weights_of,
    zeros,
)
from zclip import ZClip

PACKAGES = ("torch", "numpy", "autoclip", "pytorch_optimizer", "zclip")
AGC_SHAPES = {
    "scalar": (),
    "vector": (5,),
    "matrix": (3, 4),
    "stack": (2, 3, 4),
    "filters": (3, 2, 2, 2),
}
STEPS = 100
# Every step near the start, the spikes and the resets (at 40 and 80), and a few
# between.
MANY = (
    *range(1, 13),
    *range(13, 33, 4),
    *range(33, 49),
    *range(49, 73, 4),
    *range(76, 93),
    96,
    100,
)
# Steps whose clipped gradients are stored whole where a rule only scales: the norms of
# all steps are there besides.
SHOWN = (33, 57)


def main():
    random = np.random.default_rng(0)
    streams = {"main": main_stream(random), "zeros": stream_with_zeros(random)}
    params = {
        name: digits(random.standard_normal(shape), 4) for name, shape in SHAPES.items()
    }
    recorded = {
        "versions": {package: version(package).split("+")[0] for package in PACKAGES},
        "streams": streams,
        "params": params,
        "cases": {
            **of_scaling(streams["main"]),
            **of_adagc(streams),
            **of_spam(streams["main"], params),
            **of_stable_spam(streams, params),
            "agc": of_agc(random),
        },
    }
    Path(__file__).with_name("recorded.json").write_text(text(recorded) + "\n")


def main_stream(random):
    """Norms that wander around 2, now and then below 1, and spikes of every kind: of a
    coordinate, of a tensor, of the tree, two in a row.
    """
    scale = (
        0.6 * np.exp(0.4 * random.standard_normal(STEPS)) * np.linspace(1.2, 0.8, STEPS)
    )
    scale[3:6] *= 0.2
    matrix = random.standard_normal((STEPS, 3, 4)) * scale[:, None, None]
    vector = random.standard_normal((STEPS, 5)) * 0.4 * scale[:, None]
    matrix[32, 1, 2] *= 1000
    matrix[40], vector[40] = matrix[40] * 20, vector[40] * 20
    matrix[56] *= 30
    vector[75] *= 50
    matrix[83:85] *= 15
    vector[89, 3] *= 1000
    return {"matrix": digits(matrix, 4), "vector": digits(vector, 4)}


def stream_with_zeros(random):
    """Twelve steps in which the vector's gradient is zero at steps 3 and 8."""
    matrix, vector = random.standard_normal((12, 3, 4)), random.standard_normal((12, 5))
    vector[[2, 7]] = 0
    return {"matrix": digits(matrix, 4), "vector": digits(vector, 4)}


def of_scaling(stream):
    """Rules that scale a tensor or the tree by one number: AutoClip, QuantileClip,
    StandardClip and ZClip.
    """
    cases = {"autoclip paper": of_autoclip(stream, p=10)}
    for length in (1000, 20):
        cases[f"quantile, {length}"] = of_local_clip(
            QuantileClip, stream, quantile=0.9, history_length=length
        )
        cases[f"global quantile, {length}"] = of_global_clip(
            QuantileClip,
            stream,
            quantile=0.9,
            history_length=length,
            global_threshold=True,
        )
    short = {name: grads[:4] for name, grads in stream.items()}
    cases["standard"] = of_local_clip(StandardClip, short, deviations=2.0)
    cases["global standard"] = of_global_clip(
        StandardClip, short, deviations=2.0, global_threshold=True
    )
    cases["zclip"] = of_zclip(stream, max_grad_norm=None)
    cases["zclip, capped"] = of_zclip(stream, max_grad_norm=1.0)
    cases["zclip, to the mean"] = of_zclip(
        stream, max_grad_norm=None, clip_option="mean"
    )
    cases["zclip, percentile"] = of_zclip(stream, max_grad_norm=None, mode="percentile")
    cases["zclip, skipping spikes"] = of_zclip(
        stream, max_grad_norm=None, skip_update_on_spike=True
    )
    cases["zclip, aggressive"] = of_zclip(
        stream,
        max_grad_norm=None,
        alpha=0.9,
        z_thresh=2.0,
        warmup_steps=10,
        clip_factor=0.7,
    )
    return cases


def of_autoclip(stream, p):
    """The paper's eight lines have no package: the percentile of all norms up to and
    with this one, by NumPy.
    """
    norms = [global_norm(grads) for grads in steps_of(stream)]
    return {
        "args": {"p": p},
        "limit": [np.percentile(norms[: step + 1], p) for step in range(len(norms))],
    }


def of_local_clip(clipper, stream, **args):
    weights, limits, after, clipped = zeros(), named_lists(), named_lists(), []
    clip = clipper(weights.values(), **args)
    for grads in steps_of(stream):
        set_grads(weights, grads)
        with mock.patch(
            "torch.nn.utils.clip_grad_norm_", wraps=torch.nn.utils.clip_grad_norm_
        ) as scale:
            clip.step()
        append(
            limits,
            {
                name: call.kwargs["max_norm"]
                for name, call in zip(SHAPES, scale.call_args_list)
            },
        )
        append(after, norms_of(grads_of(weights)))
        clipped.append(grads_of(weights))
    return {
        "args": args,
        "limit": limits,
        "clipped_norm": after,
        "clipped": shown(clipped, SHOWN),
    }


def of_global_clip(clipper, stream, **args):
    weights, limits, after, clipped = zeros(), [], [], []
    clip = clipper(weights.values(), **args)
    for grads in steps_of(stream):
        set_grads(weights, grads)
        with mock.patch(
            "torch.nn.utils.clip_grad_norm_", wraps=torch.nn.utils.clip_grad_norm_
        ) as scale:
            clip.step()
        limits.append(scale.call_args.kwargs["max_norm"])
        after.append(global_norm(grads_of(weights)))
        clipped.append(grads_of(weights))
    return {
        "args": args,
        "limit": limits,
        "clipped_norm": after,
        "clipped": shown(clipped, SHOWN),
    }


def of_zclip(stream, **args):
    """`mean` and `var` are those after the step; they are nan until the warm-up is
    over.
    """
    weights, case, clipped = zeros(), {"clipped_norm": [], "mean": [], "var": []}, []
    model, clip = torch.nn.ParameterList(weights.values()), ZClip(**args)
    for grads in steps_of(stream):
        set_grads(weights, grads)
        clip.step(model)
        after = {
            "clipped_norm": global_norm(grads_of(weights)),
            "mean": clip.mean,
            "var": clip.var,
        }
        append(
            case,
            {key: math.nan if value is None else value for key, value in after.items()},
        )
        clipped.append(grads_of(weights))
    return {"args": args, **case, "clipped": shown(clipped, SHOWN)}


def of_adagc(streams):
    return {
        "adagc": adagc_case(
            streams["main"], warmup_steps=10, lambda_abs=1.0, lambda_rel=1.05, beta=0.98
        ),
        "adagc, slow": adagc_case(
            streams["main"], warmup_steps=26, lambda_abs=2.0, lambda_rel=1.04, beta=0.99
        ),
        "adagc, zeros": adagc_case(
            streams["zeros"], warmup_steps=6, lambda_abs=1.0, lambda_rel=1.05, beta=0.98
        ),
    }


def adagc_case(stream, **args):
    """The clipped gradient is seen in the first moment, which is the gradient itself
    for a decay of 0; `gamma` is that after the step.
    """
    weights, case, clipped = (
        zeros(),
        {"clipped_norm": named_lists(), "gamma": named_lists()},
        [],
    )
    optimizer = AdaGC(
        weights.values(), betas=(0.0, 0.999), weight_decay=0.0, foreach=False, **args
    )
    for grads in steps_of(stream):
        set_grads(weights, grads)
        optimizer.step()
        clipped.append(
            {
                name: copy(optimizer.state[weight]["exp_avg"])
                for name, weight in weights.items()
            }
        )
        append(case["clipped_norm"], norms_of(clipped[-1]))
        append(
            case["gamma"],
            {
                name: optimizer.state[weight]["gamma"].item()
                for name, weight in weights.items()
            },
        )
    return {"args": args, **case, "clipped": shown(clipped, SHOWN)}


def of_spam(stream, params):
    """The parameters and the second moment come from a run with Adam's decays, the
    clipped gradients from one whose first moment is the gradient.
    """
    args = {
        "lr": 0.01,
        "threshold": 5000,
        "grad_accu_steps": 10,
        "update_proj_gap": 40,
        "warmup_epoch": 8,
        "eps": 1e-6,
    }
    run, bare = (
        spam_run(stream, params, betas=(0.9, 0.999), **args),
        spam_run(stream, params, betas=(0.0, 0.999), **args),
    )
    spikes = [
        step
        for step in range(1, STEPS + 1)
        if differs(bare["exp_avg"][step - 1], at(stream, step))
    ]
    around_resets = (10, 39, 40, 41, 50, 79, 80, 81, 100)
    return {
        "spam": {
            "args": {**args, "betas": (0.9, 0.999)},
            "scale": run["scale"],
            "params": shown(run["params"], MANY),
            "exp_avg_sq": shown(run["exp_avg_sq"], around_resets),
            "clipped": shown(bare["exp_avg"], spikes),
        }
    }


def spam_run(stream, params, **args):
    """Density is 1, so every mask is full; `scale` is the factor of the learning rate
    after a reset.
    """
    weights, seen, rates = (
        weights_of(params),
        {"params": [], "exp_avg": [], "exp_avg_sq": []},
        [],
    )
    optimizer, death_rate = (
        SPAM(weights.values(), foreach=False, density=1.0, **args),
        CosineDecay.get_death_rate,
    )

    def watched(decay, step):
        rates.append(death_rate(decay, step))
        return rates[-1]

    with mock.patch.object(CosineDecay, "get_death_rate", watched):
        for grads in steps_of(stream):
            set_grads(weights, grads)
            optimizer.step()
            seen["params"].append(copies_of(weights))
            for moment in ("exp_avg", "exp_avg_sq"):
                seen[moment].append(
                    {
                        name: copy(optimizer.state[weight][moment]).reshape(
                            SHAPES[name]
                        )
                        for name, weight in weights.items()
                    }
                )
    return {**seen, "scale": [1 - rate for rate in rates]}


def of_stable_spam(streams, params):
    defaults = {
        "lr": 0.01,
        "betas": (0.9, 0.999),
        "gamma1": 0.7,
        "gamma2": 0.9,
        "theta": 0.999,
        "update_proj_gap": 40,
        "eps": 1e-8,
    }
    few = (1, 2, 3, 12, 33, 57, 76, 90)
    return {
        "stable spam": stable_spam_case(streams["main"], params, MANY, **defaults),
        "stable spam, fast limit": stable_spam_case(
            streams["main"],
            params,
            few,
            **{**defaults, "gamma1": 0.85, "gamma2": 0.99999, "theta": 0.9},
        ),
        "stable spam, zeros": stable_spam_case(
            streams["zeros"], params, range(1, 13), **defaults
        ),
    }


def stable_spam_case(stream, params, steps, **args):
    """`clipped` is the gradient after AdaClip where it changed one, `update` the
    gradient after AdaGN too; the three averages are those after the step.
    """
    weights, averages, seen = (
        weights_of(params),
        ("m_max_t", "m_norm_t", "v_norm_t"),
        {"clipped": [], "update": [], "params": []},
    )
    optimizer, state, norm, between = (
        StableSPAM(weights.values(), foreach=False, **args),
        {},
        torch.linalg.norm,
        [],
    )

    def watched(grad):
        between.append(copy(grad))
        return norm(grad)

    with mock.patch("torch.linalg.norm", watched):
        for grads in steps_of(stream):
            set_grads(weights, grads)
            optimizer.step()
            seen["clipped"].append(dict(zip(SHAPES, between[-2:])))
            seen["update"].append(grads_of(weights))
            seen["params"].append(copies_of(weights))
            for average in averages:
                append(
                    state.setdefault(average, named_lists()),
                    {
                        name: optimizer.state[weight][average].item()
                        for name, weight in weights.items()
                    },
                )
    changed = [
        step for step in steps if differs(seen["clipped"][step - 1], at(stream, step))
    ]
    around_resets = [
        step
        for step in (1, 2, 3, 12, 39, 40, 41, 42, 79, 80, 81, 100)
        if step <= len(seen["params"])
    ]
    return {
        "args": args,
        **state,
        "clipped": shown(seen["clipped"], changed),
        "update": shown(seen["update"], steps),
        "params": shown(seen["params"], around_resets),
    }


def of_agc(random):
    """Unit-wise, with a row of zero weights and a row of zero gradients in the matrix;
    reduces dimension 1, from rank 4 on all but the first.
    """
    params = {
        name: digits(random.standard_normal(shape), 4)
        for name, shape in AGC_SHAPES.items()
    }
    grads = {
        name: digits(random.standard_normal(shape) * 0.05, 4)
        for name, shape in AGC_SHAPES.items()
    }
    params["matrix"][0], grads["matrix"][2] = 0, 0
    pairs = {
        name: (torch.tensor(params[name]), torch.tensor(grads[name]))
        for name in AGC_SHAPES
    }
    args = {"agc_clip_val": 0.05, "agc_eps": 1e-3, "eps": 1e-6}
    return {
        "args": args,
        "params": params,
        "grads": grads,
        "clipped": {name: agc(*pair, **args).numpy() for name, pair in pairs.items()},
    }


if __name__ == "__main__":
    main()
