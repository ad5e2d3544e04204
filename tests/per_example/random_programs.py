"""Random losses, whose clipped gradients are compared with float64.

    python -m tests.per_example.random_programs --count 1000 --seed 1

Each program is a chain of random layers over [positions, width], with weights that are
cast, transposed, sliced, stacked, shared over time and tied. The oracle is the plain
gradient of each example by JAX in float64, and clipping in NumPy.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import optaxclip

BATCH = 4
Layer = Callable[[dict[str, Any], Any, Any], Any]  # (params, hidden, tokens) -> hidden


class Maker:
    """Makes layers, and the shapes of their parameters."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        # Few positions and large matrices, many and small ones, and in between.
        self.time = self.dice.choice((1, 3, 9))
        self.width, self.words = self.dice.choice(((6, 7), (24, 60)))
        self.shapes: dict[str, tuple[int, ...]] = {"table": (self.words, self.width)}

    def weight(self, *shape: int) -> str:
        """A parameter of this shape: a new one, or one that there is."""
        known = [name for name, other in self.shapes.items() if other == shape]
        if known and self.dice.random() < 0.3:
            return self.dice.choice(known)
        name = f"w{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def dense(self) -> Layer:
        width = self.width
        name, bias = self.weight(width, width), self.weight(width)
        turned = self.dice.random() < 0.3

        def layer(p, h, tokens):
            return h @ (p[name].T if turned else p[name]) + p[bias]

        return layer

    def scaled(self) -> Layer:
        width = self.width
        scale, bias = self.weight(width), self.weight(width)

        def layer(p, h, tokens):
            h = h - h.mean(-1, keepdims=True)
            h = h * lax.rsqrt(h.var(-1, keepdims=True) + 1)
            return h * p[scale] + p[bias]

        return layer

    def attention(self) -> Layer:
        width = self.width
        names = [self.weight(width, 2, 3) for _ in range(3)]
        back = self.weight(2, 3, width)

        def layer(p, h, tokens):
            q, k, v = (jnp.einsum("td,dhk->htk", h, p[name]) for name in names)
            weights = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2))
            return h + jnp.einsum("htk,hkd->td", weights @ v, p[back])

        return layer

    def convolution(self) -> Layer:
        width = self.width
        groups = self.dice.choice((1, 2, 3))
        name = self.weight(3, width // groups, width)
        options = {
            "rhs_dilation": (self.dice.choice((1, 2)),),
            "feature_group_count": groups,
            "dimension_numbers": ("NWC", "WIO", "NWC"),
        }

        def layer(p, h, tokens):
            return lax.conv_general_dilated(h[None], p[name], (1,), "SAME", **options)[
                0
            ]

        return layer

    def lookup(self) -> Layer:
        def layer(p, h, tokens):
            return h + p["table"][tokens]

        return layer

    def tied(self) -> Layer:
        def layer(p, h, tokens):
            return jax.nn.softmax(h @ p["table"].T) @ p["table"]

        return layer

    def recurrent(self) -> Layer:
        width = self.width
        inward, onward = self.weight(width, width), self.weight(width, width)

        def layer(p, h, tokens):
            def step(state, x):
                state = jnp.tanh(x @ p[inward] + state @ p[onward])
                return state, state

            return lax.scan(step, jnp.zeros_like(h[0]), h)[1]

        return layer

    def stack(self) -> Layer:
        width = self.width
        matrices, biases = self.weight(3, width, width), self.weight(3, width)

        def layer(p, h, tokens):
            def step(h, own):
                return h + jnp.tanh(h @ own[0] + own[1]), None

            return lax.scan(step, h, (p[matrices], p[biases]))[0]

        return layer

    def low_rank(self) -> Layer:
        width = self.width
        down, up = self.weight(width, 2), self.weight(2, width)

        def layer(p, h, tokens):
            return h + h @ (p[down] @ p[up])

        return layer

    def part(self) -> Layer:
        width = self.width
        name = self.weight(2 * width, width)

        def layer(p, h, tokens):
            first, second = jnp.split(p[name], 2)
            return jnp.where(h[:, :1] > 0, h @ first, h @ second)

        return layer

    def branch(self) -> Layer:
        width = self.width
        one, other = self.weight(width, width), self.weight(width, width)

        def layer(p, h, tokens):
            return lax.cond(h[0, 0] > 0, lambda: h @ p[one], lambda: h * p[other][0])

        return layer

    KINDS = (
        *(dense, scaled, attention, convolution, lookup, tied),
        *(recurrent, stack, low_rank, part, branch),
    )
    AROUND = (lambda f: f, jnp.tanh, jax.nn.gelu)

    def loss(self) -> Callable[..., Any]:
        layers = []
        for _ in range(self.dice.randint(2, 5)):
            layer = self.dice.choice(self.KINDS)(self)
            wrapped = self.dice.choice((lambda f: f, jax.checkpoint, jax.jit))(layer)
            layers.append((wrapped, self.dice.choice(self.AROUND)))
        mean = self.dice.random() < 0.5

        def loss(p: dict[str, Any], x: Any, tokens: Any) -> Any:
            h = x + p["table"][tokens]
            for layer, after in layers:
                h = after(layer(p, h, tokens))
            return jnp.mean(h**2) if mean else jnp.sum(h**2) + jnp.sum(h)

        return loss


def check(seed: int) -> None:
    """Raises AssertionError where the program of a seed is wrong."""
    maker = Maker(seed)
    loss, dice = maker.loss(), np.random.default_rng(seed)
    params = {
        name: (dice.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        for name, shape in maker.shapes.items()
    }
    x = dice.standard_normal((BATCH, maker.time, maker.width)).astype(np.float32)
    tokens = dice.integers(0, maker.words, (BATCH, maker.time), np.int32)
    mask = dice.random(BATCH) < 0.8
    of_examples = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    rounded = flat(of_examples(params, x, tokens))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), (params, x))
        exact = flat(of_examples(*wide, tokens))
    norms = np.linalg.norm(exact, axis=1)
    limit = float(np.median(norms))
    # What float32 loses in the plain gradients of examples.
    lost = np.abs(rounded - exact).max() + 1e-6 * norms.max()
    for method in ("ghost", "auto") if seed % 4 == 0 else ("ghost",):
        options = {"method": method, "microbatch": maker.dice.choice((None, 2))}
        grad = optaxclip.clipped_grad(loss, limit, mean=False, **options)
        result = jax.jit(grad)(params, x, tokens, mask=mask)
        close = np.abs(np.asarray(result.norms) - norms)[mask]
        where = f"seed {seed}, {options}"
        assert close.max(initial=0) <= 16 * lost, f"{where}: norms off by {close}"
        factors = np.minimum(1, limit / np.maximum(norms, 1e-300)) * mask
        wanted = factors @ exact
        found = flat(jax.tree.map(lambda leaf: leaf[None], result.grads))[0]
        error = np.abs(found - wanted).max()
        assert error <= 16 * BATCH * lost, f"{where}: the sum is off by {error}"


def flat(tree: Any) -> np.ndarray:
    """[batch, numbers], in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    findings = 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            check(seed)
        except Exception as error:
            findings += 1
            print(
                f"seed {seed}: {type(error).__name__}: {str(error)[:500]}", flush=True
            )
        if seed % 50 == 0:
            jax.clear_caches()
    last = options.seed + options.count - 1
    print(f"{findings} findings in seeds {options.seed} to {last}")


if __name__ == "__main__":
    main()
