"""Faults of five kinds in steps of two small models, and what the autopsy calls them.

    python -m tests.autopsy.faults                100 faults
    python -m tests.autopsy.faults --seed 1       100 others
    python -m tests.autopsy.faults --weak         as weak as is skipped

One model is of flax, the other of equinox. Both have dropout, with a key for each
example, and compute in float32, bfloat16 or float16. Each is trained for some healthy
steps. Then comes a step with a fault of random strength, from 2 to 65,536. One that the
optimizer does not skip is drawn again.

    chip     a flipped bit in a gradient or in a weight that is read, or in one replay
    dtype    a large mean before a normalization, or a loss scale: harmless in float32
    data     inputs, targets or weights of one to three examples, or a NaN in them
    layer    a backward pass that is wrong for one tensor
    model    a learning rate, weights that grew, or a NaN in weights
"""

import argparse
import functools
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip
from optaxclip.autopsy import Verdict, save, why

EXAMPLES, LENGTH, FEATURES, OUTPUTS, WIDTH = 24, 6, 8, 5, 16
STEPS = 40  # of healthy training
KINDS = ("chip", "dtype", "data", "layer", "model")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Batch(NamedTuple):
    """What a loss takes beside the weights."""

    inputs: Any  # float32[EXAMPLES, LENGTH, FEATURES]
    targets: Any  # float32[EXAMPLES, OUTPUTS]
    weights: Any  # float32[EXAMPLES]
    keys: Any  # key[EXAMPLES]: of dropout
    offset: Any  # float32[]: a mean that a normalization takes away again
    loss_scale: Any  # float32[]: by which cotangents are longer inside
    slip: Any  # float32[]: what a wrong backward pass makes of one tensor
    broken: Any  # int32[]: which tensor that is


class Model(NamedTuple):
    """A model and its training."""

    params: Any
    outputs: Callable[..., Any]  # of params, inputs of an example, key, offset
    wide_outputs: Callable[..., Any] | None  # in float32, where outputs convert


def clean_batch(seed: int) -> Batch:
    """A batch without a fault."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(EXAMPLES, LENGTH, FEATURES))
    teacher = np.random.default_rng(0).normal(size=(FEATURES, OUTPUTS))
    return Batch(
        inputs=jnp.float32(inputs),
        targets=jnp.float32(np.tanh(inputs.mean(axis=1) @ teacher)),
        weights=jnp.ones(EXAMPLES),
        keys=jax.random.split(jax.random.key(seed), EXAMPLES),
        offset=jnp.float32(0),
        loss_scale=jnp.float32(1),
        slip=jnp.float32(1),
        broken=jnp.int32(0),
    )


def normalized(hidden: Any, offset: Any) -> Any:
    """By mean and variance, with the variance that cancels: E x^2 - (E x)^2."""
    hidden = hidden + offset.astype(hidden.dtype)
    mean = hidden.mean(axis=-1, keepdims=True)
    variance = (hidden * hidden).mean(axis=-1, keepdims=True) - mean * mean
    variance = jnp.maximum(variance, 0)
    return (hidden - mean) * jax.lax.rsqrt(variance + jnp.asarray(1e-3, hidden.dtype))


# ------------------------------------------------------------------------- two models


class Encoder(nn.Module):
    """A block of a transformer, in flax."""

    dtype: Any

    @nn.compact
    def __call__(self, inputs: Any, offset: Any) -> Any:
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        hidden = dense(WIDTH, name="embed")(inputs)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, dtype=self.dtype, name="attention"
        )
        hidden = hidden + attention(nn.LayerNorm(dtype=self.dtype)(hidden))
        hidden = normalized(hidden, offset)
        wide = nn.gelu(dense(2 * WIDTH, name="up")(hidden))
        hidden = hidden + dense(WIDTH, name="down")(wide)
        hidden = nn.Dropout(0.1, deterministic=False)(hidden)
        return dense(OUTPUTS, name="readout")(hidden.mean(axis=0))


def flax_model(dtype: Any) -> Model:
    def outputs(encoder: Any, params: Any, inputs: Any, key: Any, offset: Any) -> Any:
        return encoder.apply(params, inputs, offset, rngs={"dropout": key})

    narrow, wide = Encoder(dtype), Encoder(jnp.float32)
    batch = clean_batch(0)
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    params = narrow.init(keys, batch.inputs[0], batch.offset)
    return Model(
        params,
        functools.partial(outputs, narrow),
        functools.partial(outputs, wide) if dtype != jnp.float32 else None,
    )


class Recurrent(eqx.Module):
    """A recurrent network, in equinox."""

    cell: eqx.nn.GRUCell
    hidden: eqx.nn.Linear
    readout: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.cell = eqx.nn.GRUCell(FEATURES, WIDTH, key=keys[0])
        self.hidden = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.readout = eqx.nn.Linear(WIDTH, OUTPUTS, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, inputs: Any, key: Any, offset: Any) -> Any:
        inputs = inputs.astype(self.readout.weight.dtype)
        start = jnp.zeros(WIDTH, inputs.dtype)

        def turn(state: Any, x: Any) -> tuple[Any, None]:
            return self.cell(x, state), None

        state, _ = jax.lax.scan(turn, start, inputs)
        state = normalized(state, offset)
        state = jax.nn.silu(self.hidden(state))
        return self.readout(self.dropout(state, key=key))


def equinox_model(dtype: Any) -> Model:
    network = Recurrent(jax.random.key(3))
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def outputs(dtype: Any, params: Any, inputs: Any, key: Any, offset: Any) -> Any:
        if dtype is not None:
            params = jax.tree.map(lambda x: x.astype(dtype), params)
        return eqx.combine(params, static)(inputs, key, offset)

    if dtype == jnp.float16:
        # Weights in float32, of which the loss makes float16.
        narrow = functools.partial(outputs, dtype)
        return Model(params, narrow, functools.partial(outputs, None))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    return Model(params, functools.partial(outputs, None), None)


MODELS = {"flax": flax_model, "equinox": equinox_model}


def loss_of(outputs: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of a batch. Its backward pass is wrong for one tensor, if `slip` is not
    1.
    """

    def loss(params: Any, *fields: Any) -> Any:
        batch = Batch(*fields)
        leaves, structure = jax.tree.flatten(params)
        for place, leaf in enumerate(leaves):
            scale = jnp.where(batch.broken == place, batch.slip, 1) / batch.loss_scale
            leaves[place] = optaxclip.scale_cotangent(leaf, scale)
        params = jax.tree.unflatten(structure, leaves)
        of_all = jax.vmap(outputs, in_axes=(None, 0, 0, None))
        found = of_all(params, batch.inputs, batch.keys, batch.offset)
        errors = (found.astype(jnp.float32) - batch.targets) ** 2
        value = jnp.mean(batch.weights * errors.mean(axis=-1))
        return optaxclip.scale_cotangent(value, batch.loss_scale)

    return loss


# ------------------------------------------------------------------- a step that breaks


class Trained(NamedTuple):
    """A model after healthy steps, before the one that breaks."""

    model: Model
    loss: Callable[..., Any]
    wide: Callable[..., Any] | None
    gradient: Callable[..., Any]
    optimizer: Any
    params: Any
    state: Any


class Fault(NamedTuple):
    """A fault that was skipped, and the step that was saved."""

    name: str
    kind: str
    way: str
    file: Path
    trained: Trained
    loss: Callable[..., Any]  # what is replayed
    examples: list[int]  # that are at fault
    tensor: str  # that is at fault


@functools.cache
def trained(name: str, dtype: Any, has_limit: bool) -> Trained:
    """Trains a model for some healthy steps."""
    model = MODELS[name](dtype)
    loss = loss_of(model.outputs)
    wide = model.wide_outputs and loss_of(model.wide_outputs)
    chain = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(3e-3))
    optimizer: Any = optaxclip.skip_nonfinite(chain)
    if has_limit:
        optimizer = optaxclip.skip_step(chain, window=32)
    gradient = jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def step(params: Any, state: Any, batch: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    params, state = model.params, optimizer.init(model.params)
    for number in range(STEPS):
        params, state = step(params, state, clean_batch(100 + number))
    assert state.skipped == 0, (name, dtype)
    return Trained(model, loss, wide, gradient, optimizer, params, state)


def flipped(array: Any, random: np.random.Generator) -> np.ndarray:
    """An array with one of the four highest bits of an exponent flipped, of a random
    element.
    """
    array = np.array(array)
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    size = 8 * array.dtype.itemsize
    exponent = size - 2 - int(random.integers(4))
    place = int(random.integers(bits.size))
    bits[place] ^= bits.dtype.type(1 << exponent)
    return array


def with_flip(tree: Any, random: np.random.Generator) -> Any:
    """A tree with a flipped bit in one leaf."""
    leaves, structure = jax.tree.flatten(tree)
    place = int(random.integers(len(leaves)))
    leaves[place] = jnp.asarray(flipped(leaves[place], random))
    return jax.tree.unflatten(structure, leaves)


def with_row(array: Any, rows: list[int], change: Callable[[Any], Any]) -> Any:
    """An array in which some rows are changed."""
    array = np.array(array)
    array[rows] = change(array[rows])
    return jnp.asarray(array)


def plant(
    kind: str, name: str, dtype: Any, seed: int, folder: Path, is_weak: bool = False
) -> Fault:
    """A step with a fault that was skipped, in a file. `is_weak`: as weak as such a
    fault can be.
    """
    random = np.random.default_rng([seed, KINDS.index(kind), DTYPES.index(dtype)])
    ways: dict[str, tuple[str, ...]] = {
        "chip": ("gradient", "weight", "replay"),
        "dtype": ("offset", "loss scale")[: 1 + (dtype == jnp.float16)],
        "data": ("inputs", "targets", "weights", "nan"),
        "layer": ("longer", "nan"),
        "model": ("rate", "tensor", "nan", "all"),
    }
    # Every third step has no limit, and only breaks by NaN or inf.
    has_limit = bool(random.integers(3))
    first = seed % len(ways[kind])
    # Normalized, large inputs make no long gradient. Then another fault is planted.
    for way in (*ways[kind][first:], *ways[kind][:first]):
        powers = random.uniform(1, 16, size=16)
        if is_weak:
            powers = np.sort(powers)
        for power, is_limited in product(powers, (has_limit, True)):
            run = trained(name, dtype, is_limited)
            fault = _attempt(kind, way, 2.0**power, run, random, folder)
            if fault:
                return fault._replace(name=f"{name} {np.dtype(dtype).name}")
    raise AssertionError(f"never skipped: {kind} {name} {dtype}")


def _attempt(
    kind: str,
    way: str,
    strength: float,
    run: Trained,
    random: np.random.Generator,
    folder: Path,
) -> Fault | None:
    """A fault of some strength. None if the step is not skipped."""
    batch = clean_batch(int(random.integers(1000, 100_000)))
    params, seen, loss = run.params, None, run.loss
    count = int(random.integers(1, 4))
    rows = sorted(random.choice(EXAMPLES, count, replace=False).tolist())
    examples: list[int] = []
    names = [_name(keys) for keys, _ in jax.tree.leaves_with_path(params)]
    tensor = ""
    if kind == "chip" and way == "weight":
        seen = with_flip(params, random)
    elif kind == "chip" and way == "replay":
        loss = _errs_in_one_run(run.loss, 2 + int(random.integers(2)))
    elif kind == "dtype" and way == "offset":
        # Up to 256, of which float32 keeps enough digits of a variance of 1.
        batch = batch._replace(offset=jnp.float32(16 * strength**0.25))
    elif kind == "dtype":
        batch = batch._replace(loss_scale=jnp.float32(256 * strength))
    elif kind == "data":
        examples = rows
        if way == "inputs":
            inputs = with_row(batch.inputs, rows, lambda x: strength * x)
            batch = batch._replace(inputs=inputs)
        elif way == "targets":
            targets = with_row(batch.targets, rows, lambda x: strength * x)
            batch = batch._replace(targets=targets)
        elif way == "weights":
            weights = with_row(batch.weights, rows, lambda x: strength * x)
            batch = batch._replace(weights=weights)
        else:
            inputs = with_row(batch.inputs, rows, lambda x: x * np.float32(np.nan))
            batch = batch._replace(inputs=inputs)
    elif kind == "layer":
        place = int(random.integers(len(names)))
        tensor = names[place]
        slip = 8 * strength if way == "longer" else np.inf
        batch = batch._replace(slip=jnp.float32(slip), broken=jnp.int32(place))
    elif kind == "model":
        leaves, structure = jax.tree.flatten(params)
        place = int(random.integers(len(leaves)))
        if way == "rate":
            _, grads = run.gradient(params, *clean_batch(1))
            updates, _ = run.optimizer.update(grads, run.state, params)
            updates = jax.tree.map(lambda x: 4 * strength * x, updates)
            leaves = jax.tree.leaves(optax.apply_updates(params, updates))
        elif way == "all":
            leaves = [leaf * jnp.asarray(strength, leaf.dtype) for leaf in leaves]
        else:
            factor = np.nan if way == "nan" else 4 * strength
            leaves[place] = leaves[place] * jnp.asarray(factor, leaves[place].dtype)
            tensor = names[place] if way == "nan" else ""
        params = jax.tree.unflatten(structure, leaves)
    value, grads = run.gradient(params if seen is None else seen, *batch)
    if kind == "chip" and way == "gradient":
        grads = with_flip(grads, random)
    if kind == "chip" and way == "replay":
        grads = jax.tree.map(lambda x: x * 2**15, grads)
    _, state = run.optimizer.update(grads, run.state, params, value=value)
    if not state.consecutive:
        return None
    file = save(folder / "step.npz", params, tuple(batch), state)
    return Fault("", kind, way, file, run, loss, examples, tensor)


def _name(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _errs_in_one_run(loss: Callable[..., Any], number: int) -> Callable[..., Any]:
    """A loss that is wrong in one run, as on a chip that errs now and then."""
    runs = []

    def factor(_: Any) -> np.ndarray:
        runs.append(None)
        return np.array(2**15 if len(runs) == number else 1, np.float32)

    def erring(params: Any, *fields: Any) -> Any:
        value = loss(params, *fields)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        fields_of_call = jax.lax.stop_gradient(fields[0].sum())
        return value * jax.pure_callback(factor, shape, fields_of_call)

    return erring


# ------------------------------------------------------------------------- the verdict


def named(fault: Fault) -> Verdict:
    """What the autopsy says."""
    like = fault.trained.params, tuple(clean_batch(0))
    return why(fault.loss, fault.file, wide=fault.trained.wide, like=like)


def is_right(fault: Fault, verdict: Verdict) -> bool:
    """Whether the kind is named, and the tensor at fault, or first of all examples one
    that is at fault. Of several examples not all may stand out.
    """
    if verdict.cause != fault.kind:
        return False
    if fault.tensor and fault.tensor not in verdict.tensors:
        return False
    return not fault.examples or verdict.examples[0] in fault.examples


def cases(seed: int) -> list[tuple[str, str, Any, int]]:
    """Kind, model, dtype and seed of 100 faults, 20 of each kind."""
    chosen = []
    for kind in KINDS:
        # In float32 no dtype is at fault.
        dtypes = DTYPES[kind == "dtype" :]
        for number in range(20):
            name = ("flax", "equinox")[number % 2]
            dtype = dtypes[number // 2 % len(dtypes)]
            chosen.append((kind, name, dtype, 100 * seed + number // 2))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--weak", action="store_true")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind, name, dtype, seed in cases(options.seed):
            if options.kind in (None, kind):
                place = Path(folder)
                fault = plant(kind, name, dtype, seed, place, options.weak)
                verdict = named(fault)
                counts[kind, verdict.cause] += 1
                right += is_right(fault, verdict)
                print("." if is_right(fault, verdict) else "x", end="", flush=True)
                if not is_right(fault, verdict):
                    planted = f"{fault.kind}: {fault.way}, {fault.name}"
                    print(f"\n{planted} {fault.examples} {fault.tensor}\n{verdict}\n")
    for kind in KINDS:
        row = {cause: n for (planted, cause), n in counts.items() if planted == kind}
        print(f"{kind:6} {row}", flush=True)
    print(f"{right} of {counts.total()} named right, with examples and tensors")


if __name__ == "__main__":
    main()
