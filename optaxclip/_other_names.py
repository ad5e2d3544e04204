"""Names from other libraries: an error says what the thing is called here.

clip_by_global_norm(1.0, axis_name="x")   TypeError that names mesh_axes
optaxclip.clip_grad_norm_                 AttributeError that names clip_grads
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

OUR_LIMITS = (
    "max_norm",
    "max_rms",
    "max_value",
    "max_delta",
    "max_logit",
    "clipping",
    "limit",
    "threshold",
    "cap",
    "rule",
)
# Names that people try for an argument, and ours, the first that the function has.
ARGUMENTS = {
    **dict.fromkeys(
        (
            *OUR_LIMITS,
            "clip",
            "clip_norm",
            "clip_value",
            "clipnorm",
            "clipvalue",
            "delta",
            "global_clipnorm",
            "grad_clip",
            "gradient_clip_val",
            "l2_clip_norm",
            "l2_norm_clip",
            "max_grad_norm",
            "max_l2_norm",
            "norm",
            "value",
        ),
        OUR_LIMITS,
    ),
    **dict.fromkeys(("axes", "axis_name", "axis_names", "mesh_axis"), ("mesh_axes",)),
    **dict.fromkeys(("norm_type", "order", "p"), ("ord",)),
    **dict.fromkeys(("epsilon", "stability_eps"), ("eps",)),
    **dict.fromkeys(("a_max", "clip_value_max", "max", "upper"), ("max_value",)),
    **dict.fromkeys(("a_min", "clip_value_min", "min", "lower"), ("min_value",)),
    **dict.fromkeys(("groups", "param_labels"), ("labels", "scope")),
    "batch_argnums": ("shared_argnums, the arguments that are no batches",),
    "error_if_nonfinite": ('nonfinite="raise"',),
    "max_consecutive_errors": ("max_consecutive",),
    "microbatch_size": ("microbatch",),
    "normalize_by": ("mean",),
    "per": ("scope",),
    "rescale_to_unit_norm": ("shrink=optaxclip.shrinks.normalize",),
    "tau": ("max_logit",),
}
# Names that people try for a function, and the call to use.
FUNCTIONS = {
    "adaptive_gradient_clip": "adaptive_grad_clip",
    "agc": "adaptive_grad_clip",
    "apply_if_finite": "skip_nonfinite",
    "clip_by_unit_norm": "clip_by_unitwise_norm",
    "clip_by_norm": "clip_by_tensor_norm, or dropin.tensorflow_style.clip_by_norm",
    "clip_grad_norm": "clip_grads(grads, max_norm), or dropin.torch_style",
    "clip_grad_norm_": "clip_grads(grads, max_norm), or dropin.torch_style",
    "clip_grad_value": "clip_by_value, or dropin.torch_style.clip_grad_value",
    "clip_grad_value_": "clip_by_value, or dropin.torch_style.clip_grad_value",
    "clip_grads_with_norm_": "dropin.torch_style.clip_grads_with_norm",
    "clip_gradient": "clip_cotangent",
    "clip_gradients": "clip_grads",
    "clip_gradients_by_norm": "clip_by_tensor_norm",
    "clip_norm": "clip_by_global_norm",
    "least": "rules.minimum",
    "at_least": "rules.maximum",
    "measure": "record_norm",
    "muon_clip": "qk_clip",
    "unit_norm": "unitwise_norm",
    "unitwise_clip": "clip_by_unitwise_norm",
    "zero_nans": 'clip_by_global_norm(..., nonfinite="zero")',
}


def with_our_names(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with a TypeError that names the argument meant by a wrong one."""
    parameters = inspect.signature(function).parameters
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [name for name, each in parameters.items() if each.kind is plain]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in parameters:
                _raise_unknown(function.__name__, name, list(parameters))
        if len(args) > len(positional):
            _raise_too_many(function.__name__, len(args), positional, list(parameters))
        return function(*args, **kwargs)

    return checked


def _raise_unknown(call: str, name: str, known: list[str]) -> NoReturn:
    candidates = ARGUMENTS.get(name, ())
    wanted = [x for x in candidates if re.split(r"\W", x)[0] in known]
    wanted = wanted or _similar(name, known)
    if wanted:
        here = f"Here it is {wanted[0]}."
    elif name in ("mask", "trainable"):
        here = f"Wrap the clipper: optax.masked({call}(...), mask)."
    else:
        here = f"It takes {', '.join(known)}."
    raise TypeError(f"{call}: there is no argument {name!r}. {here}")


def _raise_too_many(
    call: str, count: int, positional: list[str], known: list[str]
) -> NoReturn:
    rest = [name for name in known if name not in positional]
    text = f"{call}: {count} positional arguments were given, but it takes "
    text += f"{', '.join(positional)}"
    if rest:
        text += f", and by name {', '.join(rest)}"
    if call.startswith("clip_by"):
        text += (
            ". It makes a transformation with init and update. To clip one tree of "
            "gradients call optaxclip.clip_grads(grads, max_norm)"
        )
    raise TypeError(f"{text}.")


def raise_no_attribute(name: str, module: ModuleType) -> NoReturn:
    """Raises AttributeError that names the public function or module that is meant."""
    text = f"module {module.__name__!r} has no attribute {name!r}"
    if not name.startswith("__"):
        wanted = FUNCTIONS.get(name) or _place_of(name, module)
        wanted = wanted or "".join(_similar(name, module.__all__))
        text += f". Use {module.__name__}.{wanted}." if wanted else "."
    raise AttributeError(text, name=name, obj=module)


def _place_of(name: str, module: ModuleType) -> str | None:
    """Where a name is in the public modules of a module: "rules.growth"."""
    for own in module.__all__:
        inner = getattr(module, own)
        if isinstance(inner, ModuleType) and name in getattr(inner, "__all__", ()):
            return f"{own}.{name}"
    return None


def _similar(name: str, known: Iterable[str]) -> list[str]:
    # Imported here, since only errors need it.
    import difflib

    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
