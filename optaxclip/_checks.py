"""Argument checks. Every error names the function, the argument, the value it got, and
what is allowed.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeGuard, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import Partial

# What becomes of updates whose norm is NaN or inf.
Nonfinite = Literal["propagate", "zero", "raise"]
NONFINITE = get_args(Nonfinite)
NUMBERS = (int, float, np.generic, np.ndarray, jax.Array)
Tree = TypeVar("Tree")  # what comes back as it went in
LAST_STEP = 2**31 - 1  # where the step of a state stays
BEGIN = "Begin with a new one: state = optimizer.init(params)."
KEEP_THE_REST = (
    "To keep the rest of the old state, such as moments of Adam, replace only this "
    "part of it."
)
BEGIN_ANEW = f"{BEGIN} {KEEP_THE_REST}"


def shown(value: Any) -> str:
    """A value as errors show it: shortened, as a tree of gradients must be."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


# -------------------------------------------------------------------------- numbers


def check_real(argument: str, value: Any, *, is_scalar: bool = False) -> None:
    """Refuses what is no real number, or array of them. NaN passes."""
    dtype = getattr(value, "dtype", np.dtype(np.float64))
    # True is an int in Python. As a limit it is a slip.
    is_real = isinstance(value, NUMBERS) and not isinstance(value, bool)
    # Ints of more than 64 bits are objects to NumPy. A key has no such kind.
    if is_real and getattr(dtype, "kind", "") != "O":
        is_real = any(jnp.issubdtype(dtype, x) for x in (jnp.floating, jnp.integer))
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
    value: Any,
    *,
    lowest: float = 0.0,
    highest: float = np.inf,
    is_limit: bool = False,
    is_scalar: bool = False,
) -> None:
    """Refuses what is known to be no number, NaN, or beyond a range. What only a traced
    program knows passes.

    `is_limit`: it is a limit, or a number that limits are computed from.

    Raises:
      TypeError: a bool, a string, or another thing that is no real number.
      ValueError: NaN, or beyond the range. A finite limit that no norm's dtype holds,
        since as inf it would be none.
    """
    check_real(argument, value, is_scalar=is_scalar)
    # Of a number that jit traces only the dtype is known.
    if isinstance(value, Tracer):
        return
    # float32, or float64 where jax_enable_x64 is set.
    widest = jnp.finfo(jnp.result_type(float))
    if isinstance(value, int) and value.bit_length() > 1024:
        must = f"{argument} must be a number that {widest.dtype} can hold"
        raise ValueError(f"{must}, got {shown(value)}.")
    known, must = np.asarray(value).astype(np.float64), ""
    if np.isnan(known).any():
        must = "not be NaN"
    elif (known < lowest).any():
        must = f"be at least {lowest:g}"
    # 1e39 would be inf in float32, and so no limit at all.
    elif is_limit and (np.isfinite(known) & (abs(known) > widest.max)).any():
        must = (
            f"be at most {float(widest.max):g} in size, the largest number of "
            f"{widest.dtype}, or inf for no limit"
        )
    elif (known > highest).any():
        must = f"be at most {highest:.10g}"
    if must:
        raise ValueError(f"{argument} must {must}, got {shown(value)}.")


# A limit, or a number that limits are computed from.
check_limit = partial(check_number, is_limit=True)


def check_given_norm(argument: str, norm: Any) -> None:
    """Refuses what is no norm. NaN is one."""
    check_real(argument, norm)
    # What is in an array is not asked, since that would wait for its device.
    if not isinstance(norm, jax.Array) and np.less(norm, 0).any():
        raise ValueError(f"{argument} must be at least 0, got {shown(norm)}.")


def check_length(argument: str, value: Any, least: int = 1) -> None:
    """Refuses what is not a whole number, at least `least`."""
    # XLA ends the process where the size of an array leaves the range of int32.
    check_number(argument, value, lowest=least, highest=LAST_STEP)
    # A traced length passes here. Windows, whose shape it is, refuse it in `init`.
    if isinstance(value, Tracer):
        return
    if np.ndim(value) or not float(value).is_integer():
        raise ValueError(f"{argument} must be a whole number, got {shown(value)}.")


def check_known(argument: str, value: Any) -> None:
    """Refuses what only a traced program knows."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{argument} must be known when the clipper is built; under "
            "inject_hyperparams name it in static_args."
        )


def check_flag(argument: str, value: Any, allowed: str = "True or False") -> None:
    """Refuses what is neither True nor False. A traced value passes."""
    if isinstance(value, Tracer):
        return
    is_number = isinstance(value, NUMBERS) and not np.ndim(value)
    # Of NumPy, since jit traces what is done with a known array of JAX.
    if not is_number or np.asarray(value) not in (0, 1):
        raise TypeError(f"{argument} must be {allowed}, got {shown(value)}.")


def check_choice(argument: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses what is none of some strings."""
    if value not in allowed:
        raise ValueError(
            f"{argument} must be one of {', '.join(map(repr, allowed))}, got "
            f"{shown(value)}."
        )


def check_order(call: str, lower: tuple[str, Any], upper: tuple[str, Any]) -> None:
    """Raises ValueError for two bounds, (name, value), that are known to leave no room
    between them: the lower one is above the upper one.
    """
    low, high = lower[1], upper[1]
    # A schedule or a traced bound is not compared.
    if any(callable(x) or isinstance(x, Tracer) for x in (low, high)):
        return
    low, high = np.asarray(low), np.asarray(high)
    # Arrays of two shapes may be for different leaves, so they are not compared.
    alike = low.shape == high.shape or 0 in (low.ndim, high.ndim)
    if alike and np.any(low > high):
        raise ValueError(
            f"{call}: {lower[0]} must be at most {upper[0]}, got "
            f"{lower[0]}={shown(lower[1])} and {upper[0]}={shown(upper[1])}."
        )


def number_for_jit(number: Any) -> Any:
    """A number as jit takes it: ints beyond int32 become floats.

    Without x64 jit refuses such an int of Python, and one of NumPy would wrap.
    """
    if not isinstance(number, (int, np.integer, np.ndarray)):
        return number
    known = np.asarray(number)
    # NumPy has no dtype for ints of more than 64 bits, and keeps them as objects.
    if known.dtype.kind not in "iuO":
        return number
    wide = known.astype(np.float64)
    if (np.abs(wide) <= LAST_STEP).all():
        return number
    # A float of Python, since one of NumPy would widen what it meets.
    return wide if wide.ndim else float(wide)


def held_in(dtype: Any, number: Any) -> Any:
    """Returns a number in this float dtype. A finite one stays finite: beyond the range
    it becomes the largest number of the dtype, since a limit of inf is no limit.
    """
    # Clipped in float64, since a conversion to float32 makes inf of 1e39.
    is_jax = isinstance(number, jax.Array)
    array = number if is_jax else np.asarray(number).astype(np.float64)
    # Only float64 has finite numbers beyond the range of float32.
    if array.dtype == np.float64 and dtype == np.float32:
        array = kept_finite(dtype, array)
    return jnp.asarray(array.astype(dtype))


def kept_finite(dtype: Any, number: Any) -> Any:
    """A number of a wider dtype, such that a finite one stays finite in this float
    dtype. NaN and inf stay.
    """
    numpy = jnp if isinstance(number, jax.Array) else np
    most = float(jnp.finfo(dtype).max)
    held = numpy.clip(number, -most, most)
    return numpy.where(numpy.isinf(number), number, held)


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Can an array of this shape stand beside one of the target's without enlarging
    it?
    """
    # (3,) and (1, 3) broadcast to (4, 3). (4,) does not: the last axes meet.
    pairs = zip(shape[::-1], target[::-1])
    return len(shape) <= len(target) and all(a in (1, b) for a, b in pairs)


def check_shape(shape: Any, own: tuple[int, ...], argument: str) -> None:
    """Raises where a limit does not broadcast to a norm."""
    if not broadcasts_to(shape, own):
        raise ValueError(
            f"{argument} must be a number for each norm: its shape {shape} does not "
            f"fit norms of shape {own}."
        )


# ------------------------------------------------------------------------ functions

# Names of parameters that are no step.
NOT_STEPS = {"grad", "gradient", "grads", "gradients", "params", "tree", "updates"}
NOT_STEPS |= {"norm", "norms"}


def check_schedule(argument: str, function: Callable[..., Any], hint: str = "") -> None:
    """Refuses a shrink, and a function that cannot be called with a step alone."""
    # Such as `smooth`, which can be called with one number.
    if getattr(function, "__module__", None) == "optaxclip.shrinks":
        raise TypeError(f"{argument} must be a limit, got a shrink: set shrink=.")
    must = f"{argument}: a schedule must take the step alone"
    check_takes(must, function, 1, hint)
    try:
        signature = inspect.signature(function)
    except ValueError:  # one of C has no signature
        return
    first = next(iter(signature.parameters))
    # `lambda grads: 0.1 * global_norm(grads)` would be called with the step.
    if first in NOT_STEPS:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{argument}: a schedule takes the step, and not {first}, got "
            f"{name}{signature}. A norm of your own goes to optaxclip.clip_by(norm, "
            "limit), and a limit that follows norms is a rule of optaxclip.rules."
        )


def check_takes(
    must: str, function: Callable[..., Any], count: int, hint: str = ""
) -> None:
    """Refuses a function that cannot be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # one of C has no signature
        return
    except TypeError:
        name = getattr(function, "__name__", repr(function))
        text = f"{must}, got {name}{inspect.signature(function)}. {hint}"
        raise TypeError(text.strip()) from None


def check_norm(call: str, norm: Any) -> None:
    """Raises TypeError for what is not a function."""
    if not callable(norm):
        raise TypeError(
            f"{call}: norm must be a function from a tree to its norms, such as "
            f"optaxclip.global_norm, got {shown(norm)}."
        )


def as_partial(function: Callable[..., Any]) -> Partial:
    """The function as a node of a pytree, so that JAX can carry it into a compiled
    call. What already is one stays: wrapped again, its arrays would count as code, and
    compile anew at every call.
    """
    if isinstance(function, Partial):
        return function
    return Partial(with_hash(function))


def with_hash(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or one that does the same and can be a static argument."""
    try:
        hash(function)
    except TypeError:
        # Such as a dataclass that can be called. JAX would compare what it holds now.
        # Its bound method has a hash, and equals that of the same object only.
        return function.__call__
    return function


def is_function(x: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether it is a function, and no tree of options that can be called, such as an
    equinox module with a limit in the place of each array.
    """
    if not callable(x) or isinstance(x, Partial):
        return callable(x)
    # A function is a leaf. What equinox wraps around one has it as its only leaf.
    return all(map(callable, jax.tree.leaves(x, is_leaf=lambda y: y is None)))


# ------------------------------------------------- optimizers, their states and params


def check_transformation(argument: str, value: Any, noun: str = "an optimizer") -> None:
    """Raises TypeError for what has no `init` and `update`."""
    has_both = hasattr(value, "init") and hasattr(value, "update")
    # A rule has both as well, for norms, and so have a class in the place of an object
    # and a function of ours in the place of what it makes.
    is_rule = hasattr(value, "needs_params")
    is_maker = isinstance(value, type) or inspect.isfunction(value)
    if has_both and not is_rule and not is_maker:
        return
    got = shown(value)
    # `skip_nonfinite(optax.sgd)` for `skip_nonfinite(optax.sgd(0.1))`.
    if callable(value):
        name = getattr(value, "__name__", repr(value))
        got = f"the function {name}: call it, as in {name}(...)"
    raise TypeError(f"{argument} must be {noun} with init and update, got {got}.")


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


def begins_anew(call: str, state: Any, numbers: Any) -> bool:
    """Whether there is no state, as in a clipper of optax, and none is needed.

    Raises:
      TypeError: a schedule is among the limits, which cannot tell its step.
    """
    if not is_without_state(state):
        return False
    # A schedule counts steps in the state, and would stay at step 0 without one.
    if any(map(callable, jax.tree.leaves(numbers, is_leaf=is_function))):
        raise TypeError(no_state(call, state, "follows a schedule of steps"))
    return True


def no_state(call: str, state: Any, why: str) -> str:
    return (
        f"{call}: its limit {why}, so update needs the state of the step before, got "
        f"{state}. Begin with state = clipper.init(params), and hand on the state that "
        f"update returns. {KEEP_THE_REST} To clip once, to a fixed limit, call "
        "optaxclip.clip_grads(grads, max_norm)."
    )


def check_state(call: str, state: Any, kind: type) -> None:
    """Refuses the wrong state.

    Raises:
      TypeError: a state that another transformation made.
      ValueError: the states of several models, or devices, at once.
    """
    if not isinstance(state, kind):
        raise TypeError(_foreign_state(call, state, kind))
    shape = jnp.shape(getattr(state, "step", 0))
    if shape:
        raise ValueError(
            f"{call}: state is of several models, since its counter of steps has the "
            f"shape {shape}, as under jax.vmap or jax.pmap. Call update under it too, "
            "such as jax.vmap(optimizer.update)(grads, state, params), or take one of "
            "them, jax.tree.map(lambda x: x[0], state)."
        )


def _foreign_state(call: str, state: Any, kind: type) -> str:
    """The error about a state that another transformation made."""
    got = state if is_without_state(state) else type(state).__name__
    advice = BEGIN_ANEW
    # A wrapper holds the moments. So does optax.apply_if_finite.
    if hasattr(kind, "inner_state"):
        old = "old.inner_state" if hasattr(state, "inner_state") else "old"
        advice = (
            f"{BEGIN} To keep moments of Adam, put the old state of inner into it: "
            f"state._replace(inner_state={old})."
        )
    # A chain hands on states by position, so with one more link in front each gets
    # its neighbour's.
    return (
        f"{call}: state must be the {kind.__name__} that its init returned, got {got}. "
        f"Hand on what update returns, at its place of the chain. {advice}"
    )
