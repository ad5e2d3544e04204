"""What is handed over as an optimizer, as its state and as its params: each check says
what would be right.
"""

import inspect
from typing import Any

import optax


def check_transformation(
    argument: str, value: Any, noun: str = "an optimizer"
) -> None:
    """Raises TypeError for what has no `init` and `update`."""
    has_both = hasattr(value, "init") and hasattr(value, "update")
    # A rule has both as well, for norms, and so has a class in the place of an object.
    is_rule = has_both and hasattr(value, "needs_params")
    if has_both and not is_rule and not isinstance(value, type):
        return
    text = f"{argument} must be {noun} with init and update"
    if is_rule:
        raise TypeError(
            f"{text}, got a rule: optaxclip.clip_by_global_norm(rule) is a clipper "
            "whose limit it is."
        )
    # `skip_nonfinite(optax.sgd)` for `skip_nonfinite(optax.sgd(0.1))`.
    if callable(value):
        name = getattr(value, "__name__", repr(value))
        raise TypeError(
            f"{text}, got the function {name}: call it, as in {name}(...)."
        )
    raise TypeError(f"{text}, got {value!r}.")


def with_extra_args(
    argument: str, value: Any, noun: str = "an optimizer"
) -> optax.GradientTransformationExtraArgs:
    """The transformation, checked, with an `update` that may be given extra arguments.

    It gets all of them if it takes them, and none otherwise.
    """
    check_transformation(argument, value, noun)
    parameters = inspect.signature(value.update).parameters.values()
    # optax.MultiSteps takes them and is not marked as one that does, whether it is
    # converted by gradient_transformation() or not: optax would drop them.
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return optax.GradientTransformationExtraArgs(value.init, value.update)
    return optax.with_extra_args_support(value)


def is_without_state(state: Any) -> bool:
    """Whether this is what a clipper of optax has in the place of a state."""
    # A checkpoint of a chain of optax has EmptyState where a clipper was.
    return state is None or isinstance(state, optax.EmptyState)


def check_state(call: str, state: Any, kind: type) -> None:
    """Raises TypeError for a state that another transformation made."""
    if is_without_state(state):
        raise TypeError(
            f"{call}: state must be the {kind.__name__} of the step before, got "
            f"{state}. Begin with state = optimizer.init(params), and hand on the "
            "state that update returns."
        )
    # A chain hands on states by position, so with one more link in front each gets
    # its neighbour's.
    if not isinstance(state, kind):
        raise TypeError(
            f"{call}: state must be the {kind.__name__} that its init returned, got "
            f"{type(state).__name__}: the state of another transformation, or at "
            "another place of the chain."
        )


def check_params(call: str, params: Any, updates: str = "gradients") -> None:
    """Raises ValueError where there are no weights to compare with."""
    # `clippy` and `qk_clip` come after the optimizer, and compare its updates.
    if params is None:
        given = "grads" if updates == "gradients" else updates
        raise ValueError(
            f"{call} compares {updates} with weights: call "
            f"update({given}, state, params)."
        )
