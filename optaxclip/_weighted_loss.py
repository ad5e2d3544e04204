"""Whether a loss is being differentiated whose examples have weights.

A backward pass that is linear carries a weight through to the gradient. That of
`clip_cotangent` is not: it would hold the weighted cotangent to its limit.
"""

import jax

# JAX traces anew where it changes, also what it has differentiated before.
is_weighted = jax.make_user_context(False)


def check_not_weighted(call: str) -> None:
    """Raises ValueError in the backward pass of a weighted loss."""
    if is_weighted.value:
        raise ValueError(
            f'clipped_grad: method must be "one_pass", "ghost" or "auto" for a loss '
            f'with {call}, got "two_pass": its second pass weighs the loss, and {call} '
            "would clip what is weighted."
        )
