"""The same models in PyTorch, clipped by Opacus: with hooks, which make the gradients
of examples, and by ghost clipping, which runs backward twice.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from .losses import HEADS, WORDS, Case

PLAIN = "torch, not clipped"
THREADS = 2
PACKAGES = ("torch", "opacus")

Run = Callable[[], dict[str, Any]]  # returns the gradient, by the parameters' names


def missing() -> list[str]:
    """Packages without which there are no rows."""
    return [name for name in PACKAGES if find_spec(name) is None]


def of_torch(case: Case) -> dict[str, Run]:
    """All methods for one model, the gradient of the mean first."""
    if missing() or case.kind not in KINDS:
        return {}
    import torch

    torch.set_num_threads(THREADS)
    return {
        PLAIN: _plain(case),
        "Opacus, hooks": _with_opacus(case, is_ghost=False),
        "Opacus, ghost": _with_opacus(case, is_ghost=True),
    }


def as_in_torch(name: str, x: Any) -> np.ndarray:
    """A parameter, or a gradient by it, in the layout of PyTorch."""
    x = np.array(x)
    if name in ("words.weight", "places.weight"):
        return x
    return x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T


def _plain(case: Case) -> Run:
    module = model_of(case)
    inputs, labels = _batch(case)
    criterion = _criterion()

    def run() -> dict[str, Any]:
        module.zero_grad()
        criterion(module(inputs), labels).mean().backward()
        return _grads(module)

    return run


def _with_opacus(case: Case, *, is_ghost: bool) -> Run:
    import torch

    module, criterion = model_of(case), _criterion()
    inputs, labels = _batch(case)
    kind = "FastGradientClipping" if is_ghost else ""
    ghost = {"max_grad_norm": case.limit, "use_ghost_clipping": True}
    layers, optimizers = map(_opacus, ("grad_sample", "optimizers"))
    wrapped = getattr(layers, f"GradSampleModule{kind}")
    hooked = wrapped(module, **(ghost if is_ghost else {}))
    # Only clips: it adds no noise, and its steps are not taken.
    optimizer = getattr(optimizers, f"DPOptimizer{kind}")(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=case.limit,
        expected_batch_size=case.size,
    )
    loss_of = _opacus("utils.fast_gradient_clipping_utils").DPTensorFastGradientClipping

    def run() -> dict[str, Any]:
        optimizer.zero_grad()
        losses = criterion(hooked(inputs), labels)
        if is_ghost:
            loss_of(hooked, optimizer, losses).backward()
        else:
            losses.mean().backward()
        optimizer.pre_step()
        return _grads(module)

    return run


def _opacus(name: str) -> Any:
    return import_module(f"opacus.{name}")


def _criterion() -> Callable[[Any, Any], Any]:
    """The loss of each example: the mean over the words of a text."""
    from torch.nn import functional

    def losses(logits: Any, labels: Any) -> Any:
        rows = logits.reshape(-1, logits.shape[-1])
        each = functional.cross_entropy(rows, labels.reshape(-1), reduction="none")
        return each.reshape(len(labels), -1).mean(1)

    return losses


def _grads(module: Any) -> dict[str, Any]:
    return {name: param.grad for name, param in module.named_parameters()}


def _batch(case: Case) -> tuple[Any, Any]:
    import torch

    inputs, labels = (torch.from_numpy(np.array(x)) for x in case.batch)
    if case.kind == "convolution":
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    return inputs, labels.long()


def model_of(case: Case) -> Any:
    """The model, with the parameters of the case."""
    import torch

    module = KINDS[case.kind](**case.sizes)
    with torch.no_grad():
        for name, param in module.named_parameters():
            value = as_in_torch(name, case.params[name])
            param.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    return module


def _perceptron(width: int) -> Any:
    from torch import nn

    hidden = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def _convolution(size: int, channels: tuple[int, ...]) -> Any:
    from torch import nn

    layers = []
    for stride, fan_in, fan_out in zip((1, 2, 2), channels, channels[1:]):
        layers += [nn.Conv2d(fan_in, fan_out, 3, stride, 1), nn.ReLU()]
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, *pool, nn.Linear(channels[-1], 10))


def _transformer(width: int, length: int, layers: int) -> Any:
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, width)
            self.places = nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(_block(width) for _ in range(layers)))
            self.head = nn.Linear(width, WORDS, bias=False)

        def forward(self, words: Any) -> Any:
            places = torch.arange(length).repeat(len(words), 1)
            return self.head(self.blocks(self.words(words) + self.places(places)))

    return Transformer()


def _block(width: int) -> Any:
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query = nn.Linear(width, width, bias=False)
            self.key = nn.Linear(width, width, bias=False)
            self.value = nn.Linear(width, width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
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

        def _heads(self, x: Any) -> Any:
            return x.unflatten(2, (HEADS, -1)).transpose(1, 2)

    return Block()


KINDS: dict[str, Callable[..., Any]] = {
    "perceptron": _perceptron,
    "convolution": _convolution,
    "transformer": _transformer,
}
