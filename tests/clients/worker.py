"""One run of one package, whose losses, metrics and checkpoint are written as JSON.

    python -m tests.clients.worker RESULT.json CLIENT theirs|ours|none

A process of its own, since what is replaced cannot be put back.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

from .trained import CLIENTS

CLIPS = {
    "theirs": optax.clip_by_global_norm,
    "ours": optaxclip.clip_by_global_norm,
    "none": lambda max_norm: optax.identity(),
}


def main(result: str, name: str, whose: str) -> None:
    optax.clip_by_global_norm = CLIPS[whose]
    with tempfile.TemporaryDirectory() as folder:
        trained = CLIENTS[name].train(Path(folder))
    found = optaxclip.metrics(trained.state) if whose == "ours" else {}
    report = {
        "losses": trained.losses,
        "metrics": {key: float(value) for key, value in found.items()},
        "restored": same(trained.state, trained.restored),
    }
    Path(result).write_text(json.dumps(report))


def same(saved: Any, restored: Any) -> bool:
    """Are they one structure with the same bits in each leaf?"""
    pairs = zip(leaves(saved), leaves(restored), strict=True)
    equal = [a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs]
    return all(equal) and jax.tree.structure(saved) == jax.tree.structure(restored)


def leaves(tree: Any) -> list[np.ndarray]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return [np.asarray(bits(leaf)) for leaf in arrays]


def bits(leaf: Any) -> Any:
    """A random key as the numbers that it consists of."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


if __name__ == "__main__":
    main(*sys.argv[1:])
