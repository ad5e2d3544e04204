"""A case: a method, its limit, the trees of some steps, all as source text."""

from typing import Any, NamedTuple

import optax
from hypothesis import strategies as st

import optaxclip
from tests.fuzz import trees
from tests.methods import METHODS, Method

trees.NAMES.update(oc=optaxclip, optax=optax)

SHRINKS = (
    "",
    "shrink=oc.shrinks.smooth()",
    "shrink=oc.shrinks.drop",
    "shrink=oc.shrinks.normalize",
)
NUMBERS = ("0.0", "1.0", "1", "7", "inf", "1000000", "1e-20", "1e-30", "1e30")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = ("float16", "float32", "float64")
FALLING = ("lambda step: -1.5", "lambda step: -step", "lambda step: -0.0")
BEYOND = ("1e39", "1e300", "np.float64(1e39)")  # float32 has no such number


class Case(NamedTuple):
    """What a check is given."""

    method: str
    steps: tuple[str, ...]  # the source of the updates of each step
    params: str
    limit: str | None = None  # None: the usual settings
    options: str = ""

    @property
    def kind(self) -> Method:
        """The entry of the registry."""
        return METHODS[self.method]

    def arguments(self) -> str:
        """The arguments of the call, as written by a user."""
        return ", ".join(text for text in (self.limit, self.options) if text)

    def limits(self) -> tuple[Any, ...]:
        """The positional arguments of the call."""
        collect = trees.evaluate(f"lambda make: make({self.arguments()})")
        return collect(lambda *limits, **options: limits)

    def clipper(self) -> Any:
        """The clipper, built anew."""
        return trees.evaluate(f"lambda make: make({self.arguments()})")(self.kind.make)

    def weights(self) -> Any:
        """The params."""
        return trees.evaluate(self.params)

    def updates(self) -> list[Any]:
        """The trees of all steps."""
        return [trees.evaluate(text) for text in self.steps]


@st.composite
def powers(draw: Any) -> str:
    """A normal float32 number."""
    digit = draw(st.sampled_from((1.0, 1.5, 1.9999)))
    return repr(digit * 2.0 ** draw(st.integers(-126, 127)))


@st.composite
def typed(draw: Any) -> str:
    """A number of some dtype of NumPy or JAX."""
    where, dtype = draw(st.sampled_from(("np", "jnp"))), draw(st.sampled_from(FLOATS))
    dtype = draw(st.sampled_from((dtype, *INTEGERS)))
    if where == "jnp":
        dtype = dtype.replace("64", "32")
    return f"{where}.{dtype}({draw(st.sampled_from((1, 5, 100, 127)))})"


def numbers() -> Any:
    """The source of a limit that is a number of any dtype."""
    return st.one_of(st.sampled_from(NUMBERS), powers(), powers(), typed())


def limits_of_any_kind(*more: str) -> Any:
    schedule = numbers().map(lambda text: f"lambda step: {text}")
    kinds = [numbers(), numbers(), schedule, st.sampled_from((*FALLING, *more))]
    return st.one_of(*kinds)


@st.composite
def bounds(draw: Any) -> tuple[str, str]:
    """The source of an upper bound and of a lower one, which may be None."""
    if draw(st.booleans()):
        return draw(limits_of_any_kind()), "None"
    dtype = draw(st.sampled_from(("float", "np.int8", "np.int16", "np.float32")))
    low, high = draw(st.sampled_from(((-128, 127), (-3, 5), (-100, 0), (1, 2))))
    return f"{dtype}({high})", f"{dtype}({low})"


def limit_of(method: Method, structure: str) -> Any:
    """A strategy of the source of limits that the method takes.

    Each dtype and each schedule is compiled for itself, so only one structure has them.
    """
    if method.limit is None:
        return st.none()
    if method.norm != "element" and structure != "float32":
        return powers()
    if not method.schedules:
        return numbers()
    if method.norm == "element" and method.wraps is None:
        return bounds().map(lambda pair: pair[0])
    if method.floor is not None:  # a share of the weights, and never none
        return limits_of_any_kind()
    return limits_of_any_kind("None", *BEYOND)


@st.composite
def cases(
    draw: Any,
    name: str,
    structure: str,
    steps: int = 1,
    powers: tuple[int, int] = trees.WHOLE_RANGE,
    **fixed: Any,
) -> Case:
    """Cases of one method and one structure.

    Every eighth has broken numbers, and all with a limit beyond float32, which differs
    from no limit only there.
    """
    method, leaves = METHODS[name], trees.STRUCTURES[structure]
    found = {"limit": draw(limit_of(method, structure)), "options": ""} | fixed
    some = found["limit"] in BEYOND or draw(st.integers(0, 7)) == 7
    broken = some and powers == trees.WHOLE_RANGE
    history = [draw(trees.trees(leaves, powers, broken)) for _ in range(steps)]
    if name == "clip_by_value" and "limit" not in fixed:
        found["limit"] = ", ".join(draw(bounds()))
    if method.shrinks and method.ord != "spectral" and "options" not in fixed:
        found["options"] = draw(st.sampled_from(SHRINKS))
    return Case(name, tuple(history), draw(trees.weights(leaves)), **found)
