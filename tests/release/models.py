"""Small models as trainers write them: each is `(loss, params, batch of a seed)`.

    plain      a decoder of arrays and lax.scan, with tied embeddings, a bias that all
               layers share, a loss of the router of each layer, and jax.checkpoint
    linen      flax's nn.scan over nn.remat, as in MaxText: layers on axis 1, dropout
               keys that are split, outputs of each layer
    nnx        blocks from nnx.vmap, run by nnx.scan and nnx.remat
    equinox    blocks from eqx.filter_vmap, scanned as haliax does

No bias of keys, and none before a normalization: their gradients are roundings, of
which Adam makes steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH, HEADS, WORDS, LENGTH = 4, 8, 2, 11, 6


def tokens_of(seed):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(WORDS, size=(8, LENGTH + 1)))


def cross_entropy(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def normalized(x, scale):
    return (
        x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale[None, None]
    )


def attention(qkv):
    shape = (*qkv.shape[:2], HEADS, -1)
    q, k, v = (y.reshape(shape) for y in jnp.split(qkv, 3, axis=-1))
    # Not jax.nn.dot_product_attention, which computes in float32.
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    is_later = jnp.triu(jnp.ones(logits.shape[-2:], bool), 1)
    chances = jax.nn.softmax(jnp.where(is_later[None, None], -jnp.inf, logits))
    mixed = jnp.einsum("bhts,bshd->bthd", chances, v)
    return mixed.reshape(*qkv.shape[:2], WIDTH)


# ------------------------------------------------------------------------------- plain


def plain(dtype=jnp.float64, compute_dtype=None, checkpoint=True):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape) / WIDTH**0.5, dtype)

    params = {
        "table": normal(WORDS, WIDTH),
        "layers": {
            "scale": 1 + normal(LAYERS, WIDTH),
            "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
            "experts": normal(LAYERS, 2, WIDTH, WIDTH),
            "router": normal(LAYERS, WIDTH, 2),
            "number": jnp.arange(LAYERS),
        },
        "shared": normal(WIDTH),
        "scale": 1 + normal(WIDTH),
    }
    compute_dtype = compute_dtype or dtype

    def layer(x, inputs, shared):
        weights, key = inputs
        weights = jax.tree.map(
            lambda w: w.astype(compute_dtype) if w.dtype == dtype else w, weights
        )
        h = attention(normalized(x, weights["scale"]) @ weights["qkv"])
        keep = jax.random.bernoulli(key, 0.9, h.shape)
        x = x + jnp.where(keep, h, 0) / (1 + weights["number"]).astype(x.dtype)
        chances = jax.nn.softmax(x @ weights["router"])
        mixed = jnp.einsum("btd,edf,bte->btf", x, weights["experts"], chances)
        x = x + jnp.tanh(mixed + shared[None, None])
        balance = jnp.sum(chances.mean((0, 1)) ** 2)
        return x, (balance, chances.argmax(-1))

    def loss(params, tokens, key):
        shared = params["shared"].astype(compute_dtype)

        def body(x, inputs):
            return layer(x, inputs, shared)

        x = params["table"].astype(compute_dtype)[tokens[:, :-1]]
        keys = jax.random.split(key, LAYERS)
        body = jax.checkpoint(body) if checkpoint else body
        x, (balances, chosen) = jax.lax.scan(body, x, (params["layers"], keys))
        x = normalized(x, params["scale"].astype(compute_dtype))
        logits = (x @ params["table"].astype(compute_dtype).T).astype(dtype)
        value = cross_entropy(logits, tokens)
        balance = balances.astype(dtype).sum()
        return value + 0.1 * balance, {"cross_entropy": value, "chosen": chosen}

    return loss, params, lambda seed: (tokens_of(seed), jax.random.key(seed))


# ------------------------------------------------------------------------------- linen


def linen(axis=1):
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            h = nn.RMSNorm(param_dtype=x.dtype)(x)
            qkv = nn.Dense(3 * WIDTH, use_bias=False, param_dtype=x.dtype)(h)
            x = x + attention(qkv)
            h = nn.gelu(nn.Dense(2 * WIDTH, param_dtype=x.dtype)(x))
            h = nn.Dropout(0.1)(h, deterministic=deterministic)
            x = x + nn.Dense(WIDTH, param_dtype=x.dtype)(h)
            return x, jnp.mean(x**2)

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens, deterministic=False):
            embed = nn.Embed(WORDS, WIDTH, param_dtype=jnp.float64)
            stack = nn.scan(
                nn.remat(Block, static_argnums=(2,), prevent_cse=False),
                variable_axes={"params": axis},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=LAYERS,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, sizes = stack(name="layers")(embed(tokens), deterministic)
            x = nn.RMSNorm(param_dtype=x.dtype)(x)
            return embed.attend(x), sizes

    model = Decoder()
    params = model.init(jax.random.key(0), tokens_of(0)[:, :-1], True)

    def loss(params, tokens, key):
        logits, sizes = model.apply(params, tokens[:, :-1], rngs={"dropout": key})
        value = cross_entropy(logits, tokens)
        return value + 1e-3 * sizes.sum(), {"cross_entropy": value, "sizes": sizes}

    return loss, params, lambda seed: (tokens_of(seed), jax.random.key(seed))


# --------------------------------------------------------------------------------- nnx


def nnx():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            dtype = jnp.float64
            self.norm = nnx.RMSNorm(WIDTH, param_dtype=dtype, rngs=rngs)
            self.qkv = nnx.Linear(
                WIDTH, 3 * WIDTH, use_bias=False, param_dtype=dtype, rngs=rngs
            )
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, param_dtype=dtype, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, param_dtype=dtype, rngs=rngs)

        def __call__(self, x):
            x = x + attention(self.qkv(self.norm(x)))
            return x + self.down(nnx.gelu(self.up(x)))

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(WORDS, WIDTH, param_dtype=jnp.float64, rngs=rngs)

            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap(in_axes=0, out_axes=0)
            def blocks(rngs):
                return Block(rngs)

            self.blocks = blocks(rngs)

        def __call__(self, tokens):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @nnx.remat
            def forward(x, block):
                return block(x)

            return self.embed.attend(forward(self.embed(tokens), self.blocks))

    graph, params = nnx.split(Decoder(nnx.Rngs(0)))

    def loss(params, tokens):
        model = nnx.merge(graph, params)
        return cross_entropy(model(tokens[:, :-1]), tokens)

    return loss, params, lambda seed: (tokens_of(seed),)


# ----------------------------------------------------------------------------- equinox


def equinox():
    import equinox as eqx

    class Block(eqx.Module):
        qkv: jax.Array
        mlp: eqx.nn.MLP
        norm: eqx.nn.RMSNorm

        def __init__(self, key):
            keys = jax.random.split(key)
            self.qkv = jax.random.normal(keys[0], (WIDTH, 3 * WIDTH)) / WIDTH**0.5
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=keys[1])
            self.norm = eqx.nn.RMSNorm(WIDTH)

        def __call__(self, x, key):
            x = x + attention(jax.vmap(jax.vmap(self.norm))(x) @ self.qkv)
            x = eqx.nn.Dropout(0.1)(x, key=key)
            return x + jax.vmap(jax.vmap(self.mlp))(x)

    class Decoder(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: Block

        def __init__(self, key):
            keys = jax.random.split(key)
            self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
            make = eqx.filter_vmap(Block)
            self.blocks = make(jax.random.split(keys[1], LAYERS))

        def __call__(self, tokens, key):
            arrays, static = eqx.partition(self.blocks, eqx.is_array)

            @eqx.filter_checkpoint
            def step(carry, inputs):
                arrays, number = inputs
                block = eqx.combine(arrays, static)
                return block(carry, jax.random.fold_in(key, number)), None

            x = jax.vmap(jax.vmap(self.embed))(tokens)
            x, _ = jax.lax.scan(step, x, (arrays, jnp.arange(LAYERS)))
            return x @ self.embed.weight.T

    params, static = eqx.partition(Decoder(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, tokens, key):
        model = eqx.combine(params, static)
        return cross_entropy(model(tokens[:, :-1], key), tokens)

    return loss, params, lambda seed: (tokens_of(seed), jax.random.key(seed))


MODELS = {"plain": plain, "linen": linen, "nnx": nnx, "equinox": equinox}
