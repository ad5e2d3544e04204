"""Names from other libraries: an error says what the thing is called here.

clip_by_global_norm(1.0, axis_name="x")   TypeError that names mesh_axes
optaxclip.clip_grad_norm_                 AttributeError that names clip_grads
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Each function has its own name for a limit. People try those of others too.
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
            # Keras: clipnorm, clipvalue, global_clipnorm. Lightning: gradient_clip_val.
            # Hugging Face: max_grad_norm. TensorFlow Privacy: l2_norm_clip.
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
    # axis_name is that of `jax.pmap` and `lax.psum`.
    **dict.fromkeys(
        ("axes", "axis_name", "axis_names", "mesh_axis"), ("mesh_axes",)
    ),
    # torch's `clip_grad_norm_` has norm_type, its `norm` p.
    **dict.fromkeys(("norm_type", "order", "p"), ("ord",)),
    **dict.fromkeys(("epsilon", "stability_eps"), ("eps",)),
    # NumPy has a_max, torch max, and TensorFlow clip_value_max.
    **dict.fromkeys(
        ("a_max", "clip_value_max", "max", "upper"), ("max_value",)
    ),
    **dict.fromkeys(
        ("a_min", "clip_value_min", "min", "lower"), ("min_value",)
    ),
    **dict.fromkeys(("groups", "param_labels"), ("labels", "scope")),
    # An average may be weighted from either end, so the hint says from which.
    **dict.fromkeys(
        ("alpha", "beta", "momentum", "smoothing"),
        ("decay, the weight of the past: near 1",),
    ),
    # NumPy's `percentile` and `quantile` both call it q.
    "percentile": ("quantile, a share in [0, 1]",),
    "q": ("quantile, a share in [0, 1]", "percentile"),
    # jax_privacy has batch_argnums, microbatch_size and normalize_by, torch
    # error_if_nonfinite, and optax's `apply_if_finite` max_consecutive_errors.
    "batch_argnums": ("shared_argnums, the arguments that are no batches",),
    "error_if_nonfinite": ('nonfinite="raise"',),
    "max_consecutive_errors": ("max_consecutive",),
    "microbatch_size": ("microbatch",),
    "normalize_by": ("mean",),
    "per": ("scope",),
    "rescale_to_unit_norm": ("shrink=optaxclip.shrinks.normalize",),
    # The limit in the paper of QK-Clip.
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


def with_our_names(
    function: Callable[P, T], call: str | None = None
) -> Callable[P, T]:
    """The function, with a TypeError in our words for arguments that do not fit.

    `call` is what users call it, where that is not the function's own name.
    """
    # Made once, since reading a signature takes longer than checking a call.
    own = Signature(call or function.__name__, function)

    # So `help` and `inspect.signature` show the function's own arguments.
    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        count = len(args) - own.hidden
        # Unknown names first: `clip_by_global_norm(clip_norm=1.0)` has no max_norm only
        # because it goes by another name there.
        for name in kwargs:
            if name not in own.known:
                own.raise_unknown(name)
        if count > len(own.positional) and not own.is_endless:
            own.raise_too_many(count)
        for name in own.needed:
            if name not in kwargs and name not in own.positional[:count]:
                own.raise_missing(name)
        return function(*args, **kwargs)

    return checked


class Signature:
    """The arguments of a function, without `self`, and errors about them."""

    def __init__(self, call: str, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        endless = inspect.Parameter.VAR_POSITIONAL
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [each for each in parameters if each.name != "self"]
        named = [each for each in own if each.kind is not endless]
        self.call = call
        # 1 for `self` of a method, which comes with the arguments of each call.
        self.hidden = len(parameters) - len(own)
        self.is_endless = len(named) < len(own)
        self.known = [each.name for each in named]
        self.shown = ["*" * (each.kind is endless) + each.name for each in own]
        self.positional = [each.name for each in named if each.kind is plain]
        self.needed = [
            each.name for each in named if each.default is each.empty
        ]

    def raise_unknown(self, name: str) -> NoReturn:
        candidates = ARGUMENTS.get(name, ())
        # "quantile, a share in [0, 1]" -> "quantile"
        wanted = [x for x in candidates if re.split(r"\W", x)[0] in self.known]
        wanted = wanted or _similar(name, self.known)
        if wanted:
            here = f"Here it is {wanted[0]}."
        # No clipper here has a mask, since optax masks any transformation.
        elif name in ("mask", "trainable"):
            here = f"Wrap the clipper: optax.masked({self.call}(...), mask)."
        else:
            here = f"It takes {', '.join(self.shown) or 'none'}."
        raise TypeError(f"{self.call}: there is no argument {name!r}. {here}")

    def raise_too_many(self, count: int) -> NoReturn:
        by_name = [name for name in self.known if name not in self.positional]
        text = f"{self.call}: {count} positional arguments were given, but it takes "
        text += ", ".join(self.positional) or "none"
        if by_name:
            text += f", and by name {', '.join(by_name)}"
        # `clip_by_global_norm(grads, 1.0)`, as torch and TensorFlow clip.
        if self.call.startswith("clip_by"):
            once = "clip_grads(grads, max_norm)"
            if self.call == "clip_by_value":
                once = "dropin.torch_style.clip_grad_value(grads, max_value)"
            text += (
                ". It makes a transformation with init and update. To clip one tree of "
                f"gradients call optaxclip.{once}"
            )
        raise TypeError(f"{text}.")

    def raise_missing(self, name: str) -> NoReturn:
        places = [each for each in self.needed if each in self.positional]
        named = [
            f"{each}=..."
            for each in self.needed
            if each not in self.positional
        ]
        # Without a default: clip_by_group_norm(max_norm, labels), or aggc(scope=...).
        example = f"{self.call}({', '.join(places + named)})"
        raise TypeError(f"{self.call}: {name} is missing: call {example}.")


def show_public_names(module: str) -> None:
    """Gives a module a `__dir__` of its public names, which editors offer, and a
    `__getattr__`: an AttributeError that names what is meant.

    A module that defined one itself would have every name for type checkers.
    """
    there = sys.modules[module]

    def __getattr__(name: str) -> NoReturn:
        text = f"module {module!r} has no attribute {name!r}."
        # JAX, pickle and others ask for attributes such as __path__.
        if not name.startswith("__"):
            text = f"{text} {_hint(name, there)}".strip()
        raise AttributeError(text, name=name, obj=there)

    def __dir__() -> list[str]:
        return sorted(there.__all__)

    vars(there).update(__getattr__=__getattr__, __dir__=__dir__)


def _hint(name: str, module: ModuleType) -> str:
    package = sys.modules[__package__ or ""]
    similar = "".join(_similar(name, module.__all__))
    # optaxclip.growth -> optaxclip.rules.growth
    if module is package:
        wanted = (
            FUNCTIONS.get(name.lower()) or _place_of(name, package) or similar
        )
        return f"Use {package.__name__}.{wanted}." if wanted else ""
    if similar:
        return f"Use {module.__name__}.{similar}."
    # optaxclip.rules.clip_grads -> optaxclip.clip_grads
    wanted = name if name in package.__all__ else _place_of(name, package)
    if wanted:
        return f"Use {package.__name__}.{wanted}."
    return f"It has {', '.join(module.__all__)}."


def _place_of(name: str, package: ModuleType) -> str | None:
    """Where a name is in the public modules of a package: "rules.growth"."""
    for own in package.__all__:
        inner = getattr(package, own)
        if isinstance(inner, ModuleType) and name in getattr(
            inner, "__all__", ()
        ):
            return f"{own}.{name}"
    return None


def _similar(name: str, known: Iterable[str]) -> list[str]:
    # Imported here, since only errors need it.
    import difflib

    # ZScore and zscore are z_score.
    spelled = {each.lower().replace("_", ""): each for each in known}
    plain = name.lower().replace("_", "")
    close = difflib.get_close_matches(plain, list(spelled), n=1, cutoff=0.75)
    return [spelled[each] for each in close]
