"""PyTorch's clip_grad_norm_ before its fused Adam, in turns with JAX's Adam step on the
same shapes. Each framework is measured against its own Adam.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import optax

from . import models, steps, timing
from .report import Table

THREADS = 2
ALONE = "torch: Adam(fused=True)"


def table(quick: bool) -> Table:
    """JAX's step without and with clipping and, where PyTorch is installed,
    PyTorch's.
    """
    tree = models.gpt2(quick)
    entrants = steps.field(optax.adam(1e-3), steps.GLOBAL, tree)
    jax_steps = {
        _jax_name(name): contestant
        for (name, grads), contestant in entrants.contestants.items()
        if grads == "active"
    }
    bases = dict.fromkeys(jax_steps, _jax_name("none"))
    torch_steps = _torch_contestants(tree) if find_spec("torch") else {}
    bases |= dict.fromkeys(torch_steps, ALONE)
    seconds = timing.race(jax_steps | torch_steps, 2 if quick else 7)
    rows = [
        {
            "step": name,
            "time": timing.ratio(times, seconds[bases[name]]),
            "step_seconds": times,
        }
        for name, times in seconds.items()
    ]
    missing = "" if torch_steps else " PyTorch is not installed: its rows are left out."
    note = (
        "Against Adam alone in the same framework. All clip. PyTorch runs on the CPU "
        f"with {THREADS} threads and never skips the multiplication.{missing}"
    )
    return Table(
        f"clipping by the global norm and Adam, {len(jax.tree.leaves(tree))} leaves, "
        "float32",
        ("step", "time"),
        rows,
        note,
    )


def _jax_name(clipper: str) -> str:
    return "jax: optax.adam" if clipper == "none" else f"jax: {clipper}, optax.adam"


def _torch_contestants(tree: Any) -> dict[str, timing.Contestant]:
    import torch

    torch.set_num_threads(THREADS)
    params = [
        torch.nn.Parameter(0.02 * torch.randn(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    ]
    grads = [torch.randn(param.shape) for param in params]
    optimizer = torch.optim.Adam(params, lr=1e-3, fused=True)

    def restore() -> None:
        """Clipping works in place, so each run needs its gradients back."""
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone() if param.grad is None else param.grad.copy_(grad)

    def contestant(foreach: bool | None = None) -> timing.Contestant:
        return timing.Contestant(_torch_step(optimizer, params, foreach), restore)

    clipped = {
        f"torch: clip_grad_norm_(foreach={foreach}), Adam(fused=True)": contestant(
            foreach
        )
        for foreach in (True, False)
    }
    return {ALONE: contestant(), **clipped}


def _torch_step(
    optimizer: Any, params: list[Any], foreach: bool | None
) -> Callable[[], None]:
    from torch.nn.utils import clip_grad_norm_

    def run() -> None:
        if foreach is not None:
            clip_grad_norm_(params, steps.LIMIT, foreach=foreach)
        optimizer.step()

    return run
