"""The same models in PyTorch, clipped by Opacus: with hooks, which make the gradients
of examples, and by ghost clipping, which runs backward twice. Imported where torch and
opacus are installed.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .losses import HEADS, WORDS, Case
from .methods import PLAIN_IN_TORCH, as_in_torch

THREADS = 2
Run = Callable[[], dict[str, Any]]  # returns the gradient, by the parameters' names


def of_torch(case: Case) -> dict[str, Run]:
    """All methods for one model, the gradient of the mean first."""
    if case.kind not in KINDS:
        return {}
    torch.set_num_threads(THREADS)
    return {
        PLAIN_IN_TORCH: _plain(case),
        "Opacus, hooks": _with_hooks(case),
        "Opacus, ghost": _with_ghost(case),
    }


def _plain(case: Case) -> Run:
    module = model_of(case)
    inputs, labels = _batch(case)

    def run() -> dict[str, Any]:
        module.zero_grad()
        _losses(module(inputs), labels).mean().backward()
        return _grads(module)

    return run


def _with_hooks(case: Case) -> Run:
    module = model_of(case)
    opacus = import_module("opacus")
    inputs, labels = _batch(case)
    hooked = opacus.grad_sample.GradSampleModule(module)
    optimizer = _only_clips(opacus.optimizers.DPOptimizer, module, case)

    def run() -> dict[str, Any]:
        optimizer.zero_grad()
        _losses(hooked(inputs), labels).mean().backward()
        optimizer.pre_step()
        return _grads(module)

    return run


def _with_ghost(case: Case) -> Run:
    module = model_of(case)
    opacus = import_module("opacus")
    utils = import_module("opacus.utils.fast_gradient_clipping_utils")
    inputs, labels = _batch(case)
    hooked = opacus.grad_sample.GradSampleModuleFastGradientClipping(
        module, max_grad_norm=case.limit, use_ghost_clipping=True
    )
    optimizer = _only_clips(
        opacus.optimizers.DPOptimizerFastGradientClipping, module, case
    )

    def run() -> dict[str, Any]:
        optimizer.zero_grad()
        losses = _losses(hooked(inputs), labels)
        utils.DPTensorFastGradientClipping(hooked, optimizer, losses).backward()
        optimizer.pre_step()
        return _grads(module)

    return run


def _only_clips(optimizer_class: Any, module: nn.Module, case: Case) -> Any:
    """An optimizer of Opacus without noise. Its steps are not taken."""
    return optimizer_class(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=case.limit,
        expected_batch_size=case.size,
    )


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each example: the mean over the words of a text."""
    rows = logits.reshape(-1, logits.shape[-1])
    losses = functional.cross_entropy(rows, labels.reshape(-1), reduction="none")
    return losses.reshape(len(labels), -1).mean(1)


def _grads(module: nn.Module) -> dict[str, Any]:
    return {name: param.grad for name, param in module.named_parameters()}


def _batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = (torch.from_numpy(np.array(x)) for x in case.batch)
    if case.kind == "convolution":
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    return inputs, labels.long()


def model_of(case: Case) -> nn.Module:
    """The model, with the parameters of the case."""
    module = KINDS[case.kind](**case.sizes)
    with torch.no_grad():
        for name, param in module.named_parameters():
            value = as_in_torch(name, case.params[name])
            param.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    return module


def _perceptron(width: int) -> nn.Module:
    hidden = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def _convolution(size: int, channels: tuple[int, ...]) -> nn.Module:
    layers = []
    for stride, fan_in, fan_out in zip((1, 2, 2), channels, channels[1:]):
        layers += [nn.Conv2d(fan_in, fan_out, 3, stride, 1), nn.ReLU()]
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, *pool, nn.Linear(channels[-1], 10))


class _Transformer(nn.Module):
    def __init__(self, width: int, length: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1]).repeat(len(words), 1)
        return self.head(self.blocks(self.words(words) + self.places(places)))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        mixed = functional.scaled_dot_product_attention(
            self._heads(self.query(y)),
            self._heads(self.key(y)),
            self._heads(self.value(y)),
            is_causal=True,
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(y)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


KINDS: dict[str, Callable[..., Any]] = {
    "perceptron": _perceptron,
    "convolution": _convolution,
    "transformer": _Transformer,
}
