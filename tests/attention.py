"""Attention logits in float64 NumPy, in three layouts of heads, for tests of `qk_clip`.

MLA is that of DeepSeek-V2 (arXiv 2405.04434): a head's query and key have a part of
their own, and a rotary part whose key all heads share.
"""

import numpy as np

from optaxclip import Heads

WIDTH, HEAD, ROTARY, VALUE = 12, 6, 4, 5
TOKENS = 9
PATTERNS = {"queries": {"*query/*": -2}, "keys": {"*key/*": -2}}
MLA = {
    "queries": {"*query": Heads(-2, entries=(0, HEAD))},
    "keys": {"*key_value": Heads(-2, entries=(0, HEAD))},
    "rotary": {"*query": Heads(-2, entries=(HEAD, None))},
}


def inputs(seed=0):
    return np.random.default_rng(seed).standard_normal((TOKENS, WIDTH))


def weights(heads, key_heads, seed=1, scale=1.0):
    """Kernels and biases of queries and keys, as flax's attention names them."""
    random = np.random.default_rng(seed)

    def dense(count):
        kernel = scale * random.standard_normal((WIDTH, count, HEAD))
        bias = scale * random.standard_normal((count, HEAD))
        return {"kernel": np.float32(kernel), "bias": np.float32(bias)}

    value = np.float32(random.standard_normal((WIDTH, key_heads, VALUE)))
    return {"query": dense(heads), "key": dense(key_heads), "value": value}


def logits(params, x):
    """float64[heads, TOKENS, TOKENS], of multi-head and grouped-query attention."""
    query, key = (_project(params[name], x) for name in ("query", "key"))
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    return np.einsum("thd,shd->hts", query, key) / np.sqrt(HEAD)


def _project(dense, x):
    kernel, bias = (np.asarray(dense[name], np.float64) for name in ("kernel", "bias"))
    return np.einsum("td,dhe->the", x, kernel) + bias


def mla_weights(heads, seed=2, scale=1.0):
    random = np.random.default_rng(seed)
    shapes = {
        "query": (WIDTH, heads, HEAD + ROTARY),
        "key_value": (WIDTH, heads, HEAD + VALUE),
        "shared_rotary_key": (WIDTH, ROTARY),
    }
    return {
        name: np.float32(scale * random.standard_normal(shape))
        for name, shape in shapes.items()
    }


def mla_logits(params, x):
    wide = {name: np.asarray(weight, np.float64) for name, weight in params.items()}
    query = np.einsum("td,dhe->the", x, wide["query"])
    key = np.einsum("td,dhe->the", x, wide["key_value"])[..., :HEAD]
    own = np.einsum("thd,shd->hts", query[..., :HEAD], key)
    shared = np.einsum("thd,sd->hts", query[..., HEAD:], x @ wide["shared_rotary_key"])
    return (own + shared) / np.sqrt(HEAD + ROTARY)


def largest(values):
    """float32[heads]: what an attention reports."""
    return np.float32(values.max((-1, -2)))
