"""Argument checks. Every error names the function, the argument, the value it got, and
what is allowed. It begins with the `argument` of a check, such as "spam: decay", or
with the `call`, "spam".
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from .._numbers import LARGEST_INT32
from .functions import is_function
from .reprs import LONGEST_TEXT, short_repr

# What becomes of updates whose norm is NaN or inf.
Nonfinite = Literal["propagate", "zero", "raise"]
NONFINITE = get_args(Nonfinite)
NUMBER_TYPES = (int, float, np.generic, np.ndarray, Array)
REAL_DTYPES = (jnp.floating, jnp.integer)
# Ends of errors about states.
BEGIN = "Begin with a new one: state = optimizer.init(params)."
KEEP_THE_REST = (
    "To keep the rest of the old state, such as moments of Adam, replace only this "
    "part of it."
)
BEGIN_ANEW = f"{BEGIN} {KEEP_THE_REST}"


def shown(value: object) -> str:
    """A value as errors show it: shortened, as a tree of gradients must be."""
    text = repr(value)
    # In a long text the shapes of arrays say more than their numbers. JAX cannot read
    # a dict whose keys do not sort, and raises ValueError.
    if len(text) > LONGEST_TEXT or "\n" in text:
        with suppress(ValueError):
            text = " ".join(short_repr(value).split())
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def warn_user(text: str) -> None:
    """Warns, and shows the user's line: the nearest one that is not in this library,
    optax or JAX, which may call it.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("optaxclip", "optax", "jax"):
            break
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function as errors show it. A model of flax or equinox can be
    called too, and has none: it is shown as a value.
    """
    return getattr(function, "__name__", shown(function))


# ---------------------------------------------------------------- numbers and options


def check_real(argument: str, value: Any, *, is_scalar: bool = False) -> None:
    """Refuses anything but a real number or an array of real numbers. NaN passes."""
    # True is an int in Python. As a limit it is a slip.
    is_number = isinstance(value, NUMBER_TYPES) and not isinstance(value, bool)
    dtype = getattr(value, "dtype", np.dtype(np.float64))
    # The dtype of a value that is no number, such as a tensor of torch, may be one
    # that `issubdtype` does not take.
    is_real = is_number and any(jnp.issubdtype(dtype, real) for real in REAL_DTYPES)
    if not is_real:
        is_traced = isinstance(value, Tracer)
        got = f"an array of {dtype}" if is_traced else shown(value)
        raise TypeError(f"{argument} must be a real number, got {got}.")
    if is_scalar and jnp.ndim(value):
        raise ValueError(
            f"{argument} must be a scalar, got an array of shape {jnp.shape(value)}."
        )


# A single number, which may be NaN, as a norm may be.
check_scalar = partial(check_real, is_scalar=True)


def check_number(
    argument: str,
    value: object,
    *,
    lowest: float = 0.0,
    highest: float = np.inf,
    is_limit: bool = False,
    is_scalar: bool = False,
) -> None:
    """Refuses anything but a real number in a range, or an array of such numbers. Of a
    traced number only the dtype is checked.

    `is_limit`: it is a limit, or a number that limits are computed from.

    Raises:
      TypeError: a bool, a string, or something else that is not a real number.
      ValueError: NaN, or beyond the range. With `is_limit` also a finite number above
        the largest float32 (float64 under x64): converted it would be inf, which is no
        limit.
    """
    check_real(argument, value, is_scalar=is_scalar)
    if isinstance(value, Tracer):
        return
    # The widest dtype of a norm: float32, or float64 where jax_enable_x64 is set.
    widest = jnp.finfo(jnp.result_type(float))
    numbers = np.asarray(value).astype(np.float64)
    is_too_large = np.isfinite(numbers) & (abs(numbers) > widest.max)
    if np.isnan(numbers).any():
        demand = "not be NaN"
    elif (numbers < lowest).any():
        demand = f"be at least {lowest:g}"
    elif (numbers > highest).any():
        demand = f"be at most {highest:.10g}"
    elif is_limit and is_too_large.any():
        demand = (
            f"be at most {float(widest.max):g} in size, the largest number of "
            f"{widest.dtype}, or inf for no limit"
        )
    else:
        return
    raise ValueError(f"{argument} must {demand}, got {shown(value)}.")


# A limit, or a number that limits are computed from.
check_limit = partial(check_number, is_limit=True)


def check_given_norm(
    argument: str, norm: ArrayLike, *, is_scalar: bool = False
) -> None:
    """Refuses a given norm that is not a real number, or is below 0. NaN passes."""
    check_real(argument, norm, is_scalar=is_scalar)
    # The value of a `jax.Array` is not checked: that would wait for the device.
    if not isinstance(norm, Array) and np.less(norm, 0).any():
        raise ValueError(f"{argument} must be at least 0, got {shown(norm)}.")


def check_whole_number(argument: str, value: Any, least: int = 1) -> None:
    """Refuses anything but a whole number, at least `least`."""
    # Some become sizes of arrays. XLA ends the process for a size beyond int32.
    check_number(argument, value, lowest=least, highest=LARGEST_INT32)
    # A traced number passes. Only a window needs its value, and its `init` refuses a
    # traced one.
    if isinstance(value, Tracer):
        return
    if np.ndim(value) or not float(value).is_integer():
        raise ValueError(f"{argument} must be a whole number, got {shown(value)}.")


def check_key(argument: str, key: Any) -> None:
    """Refuses anything but one key of `jax.random`, old or new.

    Raises:
      TypeError: something that is not a key. ValueError: several keys.
    """
    try:
        jax.eval_shape(lambda: jax.random.fold_in(key, 0))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{argument} must be one key of jax.random, such as jax.random.key(0), got "
            f"{shown(key)}."
        ) from error


def check_concrete(argument: str, value: object) -> None:
    """Refuses a traced value."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{argument} must be known when the clipper is built; under "
            "inject_hyperparams name it in static_args."
        )


def check_flag(argument: str, value: object, allowed: str = "True or False") -> None:
    """Refuses anything but True and False, 1 and 0, and a traced value."""
    check_concrete(argument, value)
    is_number = isinstance(value, NUMBER_TYPES) and not np.ndim(value)
    # Compared in NumPy: inside jit JAX would trace the comparison.
    if not is_number or np.asarray(value) not in (0, 1):
        raise TypeError(f"{argument} must be {allowed}, got {shown(value)}.")


def check_choice(argument: str, value: object, allowed: Sequence[str]) -> None:
    """Refuses anything but the allowed strings."""
    if value not in allowed:
        raise ValueError(
            f"{argument} must be one of {', '.join(map(repr, allowed))}, got "
            f"{shown(value)}."
        )


def check_order(call: str, lower: tuple[str, Any], upper: tuple[str, Any]) -> None:
    """Raises ValueError where the lower of two bounds, each (name, value), is above the
    upper one. Schedules and traced bounds pass.
    """
    low_name, low = lower
    high_name, high = upper
    if any(callable(bound) or isinstance(bound, Tracer) for bound in (low, high)):
        return
    # Arrays of two shapes may be for different leaves, so they are not compared.
    if np.ndim(low) and np.ndim(high) and np.shape(low) != np.shape(high):
        return
    if np.any(np.asarray(low) > np.asarray(high)):
        raise ValueError(
            f"{call}: {low_name} must be at most {high_name}, got "
            f"{low_name}={shown(low)} and {high_name}={shown(high)}."
        )


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of this shape broadcasts to the target shape: (3,) and (1, 3) to
    (4, 3), and (4,) does not.
    """
    try:
        return jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def check_shape(
    argument: str, shape: tuple[int, ...], norm_shape: tuple[int, ...]
) -> None:
    """Raises ValueError for a limit whose shape does not broadcast to the norm's."""
    if not broadcasts_to(shape, norm_shape):
        raise ValueError(
            f"{argument} must be a number for each norm: its shape {shape} does not "
            f"fit norms of shape {norm_shape}."
        )


# ------------------------------------------------------------------------ functions

# A function whose first parameter has such a name does not take the step.
NAMES_OF_TREES = {"grad", "gradient", "grads", "gradients", "params", "tree", "updates"}
NAMES_OF_NORMS = {"norm", "norms"}


def check_schedule(argument: str, function: Callable[..., Any]) -> None:
    """Refuses a shrink, a function that cannot be called with a step alone, and one
    whose first parameter is named like a tree or a norm.
    """
    # Some shrinks, such as `smooth`, can be called with one number.
    if getattr(function, "__module__", None) == "optaxclip.shrinks":
        raise TypeError(f"{argument} must be a limit, got a shrink: set shrink=.")
    error_start = f"{argument}: a schedule must take the step alone"
    signature = check_takes(error_start, function, 1)
    if signature is None:
        return
    first = next(iter(signature.parameters))
    # `lambda grads: 0.1 * global_norm(grads)` would be called with the step.
    if first in NAMES_OF_TREES | NAMES_OF_NORMS:
        name = function_name(function)
        raise TypeError(
            f"{argument}: a schedule takes the step, and not {first}, got "
            f"{name}{signature}. A norm of your own goes to optaxclip.clip_by(norm, "
            "limit), and a limit that follows norms is a rule of optaxclip.rules."
        )


def check_takes(
    error_start: str, function: Callable[..., Any], count: int
) -> inspect.Signature | None:
    """Refuses a function that cannot be called with `count` arguments.

    Returns its signature, None for a function written in C.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None
    try:
        signature.bind(*range(count))
    except TypeError:
        name = function_name(function)
        raise TypeError(f"{error_start}, got {name}{signature}.") from None
    return signature


def check_norm_function(call: str, norm: object) -> None:
    """Raises TypeError for a norm that is not a function."""
    if not callable(norm):
        raise TypeError(
            f"{call}: norm must be a function from a tree to its norms, such as "
            f"optaxclip.global_norm, got {shown(norm)}."
        )


# ------------------------------------------------- optimizers, their states and params


def check_transformation(argument: str, value: object) -> None:
    """Raises TypeError for anything but an object with `init` and `update`."""
    has_both = hasattr(value, "init") and hasattr(value, "update")
    # Rules have `init` and `update` too, for norms. So has the class of a
    # transformation.
    is_rule = hasattr(value, "needs_params")
    if has_both and not is_rule and not isinstance(value, type):
        return
    got = shown(value)
    # `skip_nonfinite(optax.sgd)` for `skip_nonfinite(optax.sgd(0.1))`.
    if callable(value) and hasattr(value, "__name__"):
        name = value.__name__
        got = f"the function {name}: call it, as in {name}(...)"
    raise TypeError(
        f"{argument} must be a transformation with init and update, got {got}."
    )


def check_is_no_optimizer(argument: str, value: object) -> None:
    """Refuses an optimizer in the place of a limit. It would be a tree of schedules."""
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{argument} must be a limit, got a transformation. An optimizer goes "
            "behind the clip: optax.chain(optaxclip.clip_by_global_norm(1.0), "
            "optimizer)."
        )


def with_extra_args(
    argument: str, value: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The transformation, checked, with an `update` that accepts extra arguments. A
    transformation that takes none does not get them.
    """
    check_transformation(argument, value)
    # `optax.with_extra_args_support` goes by the type. optax.MultiSteps, and what its
    # gradient_transformation() returns, take extra arguments but have another type, so
    # they would lose them.
    for parameter in inspect.signature(value.update).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return optax.GradientTransformationExtraArgs(value.init, value.update)
    return optax.with_extra_args_support(value)


def is_without_state(state: object) -> bool:
    """Whether this stands for no state: None, or the state of a clipper of optax."""
    # A checkpoint of a chain of optax has EmptyState where a clipper was.
    return state is None or isinstance(state, optax.EmptyState)


def can_begin_anew(call: str, state: object, numbers: Any) -> bool:
    """Whether no state was given, as to a clipper of optax, and none is needed.

    Raises:
      TypeError: a schedule is among the numbers. Its step is in the state.
    """
    if not is_without_state(state):
        return False
    for number in jax.tree.leaves(numbers, is_leaf=is_function):
        # Without a state the schedule would stay at step 0.
        if callable(number):
            raise TypeError(
                missing_state_error(call, state, "follows a schedule of steps")
            )
    return True


def missing_state_error(call: str, state: object, why: str) -> str:
    """The error about a limit that needs a state."""
    return (
        f"{call}: its limit {why}, so update needs the state of the step before, got "
        f"{state}. Begin with state = clipper.init(params), and hand on the state that "
        f"update returns. {KEEP_THE_REST} To clip once, to a fixed limit, call "
        "optaxclip.clip_grads(grads, max_norm)."
    )


def check_state(call: str, state: object, state_type: type) -> None:
    """Refuses the wrong state.

    Raises:
      TypeError: a state that another transformation made.
      ValueError: the states of several models, or devices, at once.
    """
    if not isinstance(state, state_type):
        raise TypeError(foreign_state_error(call, state, state_type))
    check_one_model(f"{call}: state", state)


def check_one_model(
    argument: str,
    state: object,
    call_for_many_models: str = "jax.vmap(optimizer.update)(grads, opt_state, params)",
) -> None:
    """Raises ValueError for the states of several models, or devices, at once. The
    error names the call that maps over them.
    """
    # An array [members, rows, N] would be read as [rows, N].
    shape = jnp.shape(getattr(state, "step", 0))
    if shape:
        raise ValueError(
            f"{argument} must be of one model, but its counter of steps has the shape "
            f"{shape}, as under jax.vmap or jax.pmap. Map over them, "
            f"{call_for_many_models}, or take one, "
            "jax.tree.map(lambda x: x[0], opt_state)."
        )


def foreign_state_error(call: str, state: object, state_type: type) -> str:
    """The error about a state that another transformation made."""
    got = state if is_without_state(state) else type(state).__name__
    advice = BEGIN_ANEW
    # The state of a wrapper holds the moments, as the state of optax.apply_if_finite
    # does.
    if hasattr(state_type, "inner_state"):
        old = "old.inner_state" if hasattr(state, "inner_state") else "old"
        advice = (
            f"{BEGIN} To keep moments of Adam, put the old state of inner into it: "
            f"state._replace(inner_state={old})."
        )
    # A chain hands on states by position. With a new link in front, each link is given
    # the state of the link before it.
    return (
        f"{call}: state must be the {state_type.__name__} that its init returned, got "
        f"{got}. Hand on what update returns, at its place of the chain. {advice}"
    )
