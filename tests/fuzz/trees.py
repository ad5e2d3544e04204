"""Trees as Python source: few structures, so that compiled programs are shared."""

import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

NAMES = {"jax": jax, "jnp": jnp, "np": np, "inf": math.inf, "nan": math.nan}


class Leaf(NamedTuple):
    """One leaf of a structure. A dtype may also be a kind of leaf, see `SPECIAL`."""

    dtype: str
    shape: tuple[int, ...] = ()


SPECIAL = {  # what is no array of numbers
    "none": "None",
    "key": "jax.random.key(0)",
    "float0": "np.zeros((2,), jax.dtypes.float0)",
}
# Types without a negative zero. The plain machine code of tests/conftest.py, not that
# which users get, makes NaN of a negative number that underflows in them.
FNUZ = ("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz")
NARROW = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    *(FNUZ if os.environ.get("FULL_CODE") else ()),
)
INTEGERS = (
    *("int2", "int4", "int8", "int16", "int32"),
    *("uint2", "uint4", "uint8", "uint16", "uint32", "bool"),
)

Structure = dict[str, Leaf]
STRUCTURES: dict[str, Structure] = {
    "float32": {"a": Leaf("float32", (2, 3)), "b": Leaf("float32")},
    "sixteen": {"a": Leaf("bfloat16", (3,)), "b": Leaf("float16", (2, 1, 2))},
    "mixed": {
        "a": Leaf("float32", (1, 4)),
        "b": Leaf("complex64", (2,)),
        "c": Leaf("int32", (3,)),
        "d": Leaf("bool", (2,)),
        "e": Leaf("none"),
        "f": Leaf("float32", (0, 3)),
    },
    "complex": {"a": Leaf("complex64", (2, 2)), "b": Leaf("bfloat16", (1,))},
    "large": {"a": Leaf("float32", (300, 256)), "b": Leaf("float32", (1,))},
    "python": {"a": Leaf("python"), "b": Leaf("float32", (2,))},
    "key": {"a": Leaf("float32", (2,)), "b": Leaf("key")},
    "float0": {"a": Leaf("float32", (2,)), "b": Leaf("float0")},
    **{dtype: {"a": Leaf(dtype, (3,))} for dtype in NARROW},
    **{dtype: {"a": Leaf(dtype, (3,)), "b": Leaf("float32")} for dtype in INTEGERS},
    "float64": {"a": Leaf("float64", (2, 3)), "b": Leaf("complex128", (2,))},
}
PLAIN = ("float32", "sixteen", "complex", "large")  # floats and complex numbers only

EDGES = (0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-126, -(2.0**-126), 3.4028234e38)
EDGES += (-3.4028234e38, 1e-20, -1e20, 65504.0, 255.0, -128.0, 127.0)
BROKEN = (math.nan, math.inf, -math.inf)
WHOLE_RANGE = (-149, 127)  # powers of 2, from the smallest subnormal number on


def evaluate(text: str) -> Any:
    """What the source text makes."""
    return eval(text, dict(NAMES))


@st.composite
def scales(draw: Any, low: int, high: int) -> Any:
    """A strategy of numbers that are near each other, or far apart."""
    middle, spread = (
        draw(st.integers(low, high)),
        draw(st.sampled_from((0, 3, 40, 250))),
    )
    exponents = st.integers(max(low, middle - spread), min(high, middle + spread))
    digits = st.sampled_from((1.0, -1.0, 1.5, -1.25, 1.9999999, -1.1))
    return st.builds(lambda x, power: x * 2.0**power, digits, exponents)


def inside(number: float, dtype: str) -> Any:
    """The number as the dtype can hold it, without becoming inf or NaN."""
    if dtype == "bool":
        return number > 0
    if dtype.startswith(("int", "uint")):
        number = 0 if math.isnan(number) else number
        info = ml_dtypes.iinfo(dtype)
        return int(min(max(number, int(info.min)), int(info.max)))
    most = float(ml_dtypes.finfo(dtype).max)
    return min(max(number, -most), most) if math.isfinite(number) else number


def source(leaf: Leaf, numbers: list[float]) -> str:
    """The source of a leaf that repeats the numbers."""
    if leaf.dtype in SPECIAL:
        return SPECIAL[leaf.dtype]
    if leaf.dtype == "python":
        return repr(numbers[0])
    if leaf.dtype.startswith("complex"):
        part = "float32" if leaf.dtype == "complex64" else "float64"
        real = source(leaf._replace(dtype=part), numbers)
        return (
            f"jax.lax.complex({real}, {source(Leaf(part, leaf.shape), numbers[::-1])})"
        )
    held = [inside(x, leaf.dtype) for x in numbers]
    if math.prod(leaf.shape) > 12:
        array = f"np.array({held}, '{leaf.dtype}')"
        return f"jnp.asarray(np.resize({array}, {leaf.shape}))"
    values = np.resize(np.array(held), leaf.shape).tolist()
    return f"jnp.asarray(np.array({values}, '{leaf.dtype}'))" + reshaped(leaf.shape)


def reshaped(shape: tuple[int, ...]) -> str:
    """What nested lists cannot say: the shape of a leaf without elements."""
    return f".reshape{shape}" if 0 in shape else ""


@st.composite
def trees(draw: Any, structure: Structure, powers: Any, broken: bool) -> str:
    """The source of a tree: finite numbers, or some that are not."""
    numbers = draw(scales(*powers))
    edges = st.sampled_from(EDGES if powers == WHOLE_RANGE else (0.0, 1.0, -1.0))
    any_number = st.one_of(numbers, numbers, edges)
    if broken:
        any_number = st.one_of(any_number, st.sampled_from(BROKEN))
    found = {}
    for name, leaf in structure.items():
        drawn = draw(st.lists(any_number, min_size=1, max_size=3))
        found[name] = source(leaf, drawn)
    return written(found)


@st.composite
def weights(draw: Any, structure: Structure) -> str:
    """The source of weights of moderate size, zeros among them."""
    numbers = st.one_of(draw(scales(-20, 10)), st.just(0.0))
    lists = st.lists(numbers, min_size=1, max_size=2)
    return written(
        {name: source(leaf, draw(lists)) for name, leaf in structure.items()}
    )


def written(texts: dict[str, str]) -> str:
    """The source of a dict."""
    return "{" + ", ".join(f"{name!r}: {text}" for name, text in texts.items()) + "}"
