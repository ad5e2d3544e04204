"""Limits as Python source: numbers of every dtype over the whole range, schedules."""

from typing import Any

from hypothesis import strategies as st

NUMBERS = ("0.0", "1.0", "1", "7", "inf", "None", "1000000", "1e-20", "1e-30", "1e30")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = ("float16", "float32", "float64")
BEYOND = ("1e39", "1e300", "np.float64(1e39)")  # float32 has no such number


@st.composite
def powers(draw: Any) -> str:
    """A normal float32 number."""
    digit = draw(st.sampled_from((1.0, 1.5, 1.9999)))
    return repr(digit * 2.0 ** draw(st.integers(-126, 127)))


@st.composite
def typed(draw: Any) -> str:
    """A number of some dtype of NumPy or JAX."""
    where = draw(st.sampled_from(("np", "jnp")))
    dtype = draw(st.sampled_from(INTEGERS + FLOATS))
    if where == "jnp" and "64" in dtype:
        dtype = dtype.replace("64", "32")
    value = draw(st.sampled_from((1, 5, 100, 127)))
    return f"{where}.{dtype}({value})"


def numbers() -> Any:
    """The source of a limit that is a number of any dtype."""
    given = st.sampled_from(NUMBERS).filter(lambda text: text != "None")
    return st.one_of(given, powers(), powers(), typed())


def limits(beyond: bool = True) -> Any:
    """The source of a limit of any kind."""
    schedule = numbers().map(lambda text: f"lambda step: {text}")
    falling = st.sampled_from(
        ("lambda step: -1.5", "lambda step: -step", "lambda step: -0.0")
    )
    kinds = [numbers(), numbers(), schedule, falling, st.just("None")]
    return st.one_of(*kinds, *([st.sampled_from(BEYOND)] if beyond else []))


@st.composite
def bounds(draw: Any) -> tuple[str, str]:
    """The source of an upper bound and of a lower one, which may be None."""
    upper = draw(limits(beyond=False).filter(lambda text: text != "None"))
    if draw(st.booleans()):
        return upper, "None"
    dtype = draw(st.sampled_from(("", "np.int8", "np.int16", "np.float32")))
    low, high = draw(st.sampled_from(((-128, 127), (-3, 5), (-100, 0), (1, 2))))
    return (f"{dtype}({high})", f"{dtype}({low})") if dtype else (str(high), str(low))
