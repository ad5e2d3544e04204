"""A case: a method, its limit, the trees of some steps, all as source text."""

from typing import Any, NamedTuple

import optax
from hypothesis import strategies as st

import optaxclip
from tests.fuzz import limits, trees
from tests.methods import METHODS, Method

trees.NAMES.update(oc=optaxclip, optax=optax)

SHRINKS = (
    "",
    "shrink=oc.shrinks.smooth()",
    "shrink=oc.shrinks.drop",
    "shrink=oc.shrinks.normalize",
)


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

    def clipper(self) -> Any:
        """The clipper, built anew."""
        make = trees.evaluate("lambda make: make(" + self.arguments() + ")")
        return make(self.kind.make)

    def weights(self) -> Any:
        """The params."""
        return trees.evaluate(self.params)

    def updates(self) -> list[Any]:
        """The trees of all steps."""
        return [trees.evaluate(text) for text in self.steps]


def limit_of(method: Method, structure: str) -> Any:
    """A strategy of the source of limits that the method takes.

    Each dtype and each schedule is compiled for itself, so only one structure has them.
    """
    if method.limit is None:
        return st.none()
    if method.norm != "element" and structure != "float32":
        return limits.powers()
    if not method.schedules:
        return limits.numbers()
    if method.norm == "element" and method.wraps is None:
        return limits.bounds().map(lambda pair: pair[0])
    if method.floor is not None:  # a share of the weights, and never none
        return limits.limits(beyond=False).filter(lambda text: text != "None")
    return limits.limits()


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
    some = found["limit"] in limits.BEYOND or draw(st.integers(0, 7)) == 7
    broken = some and powers == trees.WHOLE_RANGE
    history = [draw(trees.trees(leaves, powers, broken)) for _ in range(steps)]
    if name == "clip_by_value" and "limit" not in fixed:
        found["limit"] = ", ".join(draw(limits.bounds()))
    if method.shrinks and method.ord != "spectral" and "options" not in fixed:
        found["options"] = draw(st.sampled_from(SHRINKS))
    return Case(name, tuple(history), draw(trees.weights(leaves)), **found)
