"""Whether a loss is being differentiated whose examples have weights.

A backward pass that is linear carries a weight through to the gradient. That of
`clip_cotangent` is not: it would hold the weighted cotangent to its limit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_weighted = ContextVar("is_weighted", default=False)


@contextmanager
def weighted_loss() -> Iterator[None]:
    """Where cotangents have the weights of their examples."""
    token = _is_weighted.set(True)
    try:
        yield
    finally:
        _is_weighted.reset(token)


def check_not_weighted(call: str) -> None:
    """Raises ValueError in the backward pass of a weighted loss."""
    if _is_weighted.get():
        raise ValueError(
            f'clipped_grad: method must be "one_pass", "ghost" or "auto" for a loss '
            f'with {call}, got "two_pass": its second pass weighs the loss, and {call} '
            "would clip what is weighted."
        )
