"""Reading traced programs."""

from typing import Any


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that stands in the program."""
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import Literal

    return isinstance(atom, Literal)
