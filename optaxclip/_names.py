"""Names from other libraries: an error says what the thing is called here.

clip_by_global_norm(1.0, axis_name="x")   TypeError that names mesh_axes
optaxclip.clip_grad_norm_                 AttributeError that names clip_grads

Each public module calls `with_our_names(__name__)` at its end.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import optax

from ._exported import call_repr

# Each function has its own name for a limit. People try those of others too.
_LIMITS = (
    "max_norm max_rms max_value max_delta max_logit clipping limit threshold cap rule"
)
# Our names for an argument, and what people try for it. The first that a function has
# is named.
_OURS = {
    # Keras: clipnorm, clipvalue, global_clipnorm. Lightning: gradient_clip_val.
    # Hugging Face: max_grad_norm. TensorFlow Privacy: l2_norm_clip.
    _LIMITS: f"""{_LIMITS} clip clip_norm clip_value clipnorm clipvalue delta
        global_clipnorm grad_clip gradient_clip_val l2_clip_norm l2_norm_clip
        max_grad_norm max_l2_norm norm value""",
    # axis_name is that of `jax.pmap` and `lax.psum`.
    "mesh_axes": "axes axis_name axis_names mesh_axis",
    # torch's `clip_grad_norm_` has norm_type, its `norm` p.
    "ord": "norm_type order p",
    "eps": "epsilon stability_eps",
    # NumPy has a_max, torch max, and TensorFlow clip_value_max.
    "max_value": "a_max clip_value_max max upper",
    "min_value": "a_min clip_value_min min lower",
    "labels scope": "groups param_labels",
    "decay": "alpha beta momentum smoothing",
    # NumPy's `percentile` and `quantile` both call it q.
    "quantile": "percentile",
    "quantile percentile": "q",
    # jax_privacy has batch_argnums, microbatch_size and normalize_by, torch
    # error_if_nonfinite, and optax's `apply_if_finite` max_consecutive_errors.
    "shared_argnums": "batch_argnums",
    "nonfinite": "error_if_nonfinite",
    "max_consecutive": "max_consecutive_errors",
    "microbatch": "microbatch_size",
    "mean": "normalize_by",
    "scope": "per",
    "shrink": "rescale_to_unit_norm",
    # The limit in the paper of QK-Clip.
    "max_logit": "tau",
    # Numbers in the papers and code of AdaGC, AGC, SPAM and ZClip.
    "max_norm": "lambda_abs",
    "ratio": "lambda_rel",
    "clipping": "clip_factor",
    "threshold": "theta",
    "warmup": "warmup_steps",
    "z": "z_score z_thresh",
    # Where there are deviations, a threshold counts them, and is no limit.
    f"z sigmas {_LIMITS}": "threshold",
    "sigma": "noise_multiplier stddev",
}
ARGUMENTS: dict[str, list[str]] = {}
for _ours, _others in _OURS.items():
    ARGUMENTS |= dict.fromkeys(_others.split(), _ours.split())
# What people give `update` for `limit` and `value`. A chain hands every argument to all
# of its links, so only names that mean nothing else are here.
_OF_UPDATE = {
    "limit": """clip_norm clipnorm global_clipnorm gradient_clip_val l2_clip_norm
        l2_norm_clip max_grad_norm max_l2_norm max_norm max_rms""",
    "value": "loss loss_value losses train_loss",
}
OF_UPDATE = {ours: frozenset(others.split()) for ours, others in _OF_UPDATE.items()}
# What is said beside one of ours.
_MORE = {
    # An average may be weighted from either end.
    "decay": ", the weight of the past: near 1",
    "quantile": ", a share in [0, 1]",
    "shared_argnums": ", the arguments that are no batches",
    "nonfinite": '="raise"',
    "shrink": "=optaxclip.shrinks.normalize",
    "sigma": ", a standard deviation: the noise multiplier times the limit",
    "sigmas": ", in standard deviations",
    "z": ", in standard deviations",
}
# What people try for an argument, and is none.
_NO_ARGUMENTS = {
    # No clipper here has a mask, since optax masks any transformation.
    "mask": "Wrap the clipper: optax.masked({call}(...), mask).",
    "trainable": "Wrap the clipper: optax.masked({call}(...), mask).",
    "noise_multiplier": "optaxclip.add_noise(result, noise_multiplier * max_norm, key) "
    "adds the noise.",
    "prefix": "optax.named_chain gives clippers names of their own in the keys.",
}
# Names that people try for a function, and the call to use.
FUNCTIONS = {
    "agc": "adaptive_grad_clip",
    "apply_if_finite": "skip_nonfinite",
    "clip_by_layer": "clip_by_tensor_norm, or clip_by_group_norm",
    "clip_by_norm": "clip_by_tensor_norm, or dropin.tensorflow_style.clip_by_norm",
    "clip_by_percentile": "autoclip",
    "clip_grad_norm": "clip_grads(grads, max_norm), or dropin.torch_style",
    "clip_grad_value": "clip_by_value, or dropin.torch_style.clip_grad_value",
    "clip_grads_with_norm": "dropin.torch_style.clip_grads_with_norm",
    "clip_gradient": "clip_cotangent",
    "clip_gradients_by_norm": "clip_by_tensor_norm",
    "clip_norm": "clip_by_global_norm",
    "clipper": "clip_by_global_norm",
    "dp_sgd": "clipped_grad(loss, max_norm, mean=False) and add_noise",
    "get_total_norm": "global_norm, or dropin.torch_style.get_total_norm",
    "ghost_clipping": 'clipped_grad(loss, max_norm, method="ghost")',
    "grad_norm": "global_norm(grads), or metrics(state) for a log",
    "gradient_clipping": "clip_by_global_norm",
    "log_norm": "record_norm",
    "make_private": "clipped_grad(loss, max_norm, mean=False) and add_noise",
    "muon_clip": "qk_clip",
    "noise_multiplier": "add_noise(result, noise_multiplier * max_norm, key)",
    "norm": "global_norm",
    "per_sample_clip": "clipped_grad",
    "privacyengine": "clipped_grad(loss, max_norm, mean=False) and add_noise",
    "skip_nan": "skip_nonfinite",
    "unitwise_clip": "clip_by_unitwise_norm",
    "zero_nans": 'clip_by_global_norm(..., nonfinite="zero")',
}
# What is found in another library.
ELSEWHERE = {
    "account": "dp-accounting, as docs/private_training.md shows",
    "chain": "optax.chain",
    "epsilon": "dp-accounting, as docs/private_training.md shows",
}


def with_our_names(module: str, later: Sequence[str] = ()) -> None:
    """Gives a public module its answers: a TypeError in our words for arguments that do
    not fit its functions, an AttributeError that names what is meant, and a `__dir__`
    of its public names, which editors offer. `later` are modules in it that are
    imported when they are asked for.
    """
    there = sys.modules[module]
    public = [name for name in vars(there) if not name.startswith("_")]
    vars(there).setdefault("__all__", sorted([*public, *later]))
    for name in set(there.__all__).difference(later):
        value = getattr(there, name)
        if inspect.isfunction(value):
            if "GradientTransformation" in str(value.__annotations__.get("return")):
                _set_init_and_update(value, name)
            answering = checked(value)
            # Where pickle finds it.
            answering.__module__ = module
            setattr(there, name, answering)

    def __getattr__(name: str) -> ModuleType:
        if name in later:
            return importlib.import_module(f"{module}.{name}")
        text = f"module {module!r} has no attribute {name!r}."
        # JAX, pickle and others ask for attributes such as __path__.
        if not name.startswith("__"):
            text = f"{text} {_hint(name, there)}".strip()
        raise AttributeError(text, name=name, obj=there)

    def __dir__() -> list[str]:
        return sorted(there.__all__)

    # A module that defined one itself would have every name for type checkers.
    vars(there).update(__getattr__=__getattr__, __dir__=__dir__)


# Cached, so that a function which two modules show is one object.
@functools.cache
def checked(function: Callable[..., Any], call: str = "") -> Callable[..., Any]:
    """The function, with a TypeError in our words for arguments that do not fit.

    `call` is what users call it, where that is not the function's own name.
    """
    signature = inspect.signature(function)
    call = call or function.__name__

    # So `help` and `inspect.signature` show the function's own arguments.
    @functools.wraps(function)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            # The first argument of a method is its object.
            known = [name for name in signature.parameters if name != "self"]
            text = _misfit(call, error, known, kwargs)
            raise TypeError(f"{call}: {text}") from None
        made = function(*args, **kwargs)
        if isinstance(made, optax.GradientTransformationExtraArgs):
            made = clipper_of_call(call, given.arguments, made)
        return made

    return answering


class Clipper(optax.GradientTransformationExtraArgs):
    """A transformation that is shown as the call that made it."""

    call: tuple[str, Any] | None = None

    def __repr__(self) -> str:
        return call_repr(*self.call) if self.call else super().__repr__()


# Python's error for `clipper(grads)` shows the name of the class. With a `__call__`
# that raises, optax.inject_hyperparams would take a clipper for a schedule.
Clipper.__name__ = "transformation with init and update"


def clipper_of_call(
    call: str, arguments: Any, made: optax.GradientTransformationExtraArgs
) -> Clipper:
    """The transformation that a call made, which errors and notebooks show as it."""
    init = _naming_misfits(call, "init", made.init)
    clipper = Clipper(init, _naming_misfits(call, "update", made.update))
    clipper.call = call, arguments
    return clipper


def _naming_misfits(
    call: str, method: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`init` or `update`, with a TypeError in our words for a missing argument."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            # Only now, since a check in each update would take time.
            _check_arguments(call, method, function, args, kwargs)
            raise

    return named


def _check_arguments(
    call: str,
    method: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{call}: {method}: {error}. Call state = init(params) once, and updates, "
            "state = update(grads, state, params) in each step."
        ) from None


def _set_init_and_update(function: Callable[..., Any], call: str) -> None:
    """Gives a function that makes a transformation an `init` and an `update` that say
    so: `optax.chain(clip_by_global_norm, adam)` looks for them.
    """

    def uncalled(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"{call}: must be a transformation with init and update, got the function "
            f"{call}: call it, as in {call}(...)."
        )

    vars(function).update(init=uncalled, update=uncalled)


def _misfit(call: str, error: TypeError, known: list[str], kwargs: Any) -> str:
    """Which argument of a call is wrong, and what would be right."""
    takes = f"It takes {', '.join(known) or 'none'}."
    # Unknown names first: `clip_by_global_norm(clip_norm=1.0)` has no max_norm only
    # because it goes by another name there.
    for name in kwargs:
        if name not in known:
            here = _instead(call, name, known) or takes
            return f"there is no argument {name!r}. {here}"
    # `clip_by_global_norm(grads, 1.0)`, as torch and TensorFlow clip.
    if call.startswith("clip_by"):
        takes += (
            " It makes a transformation with init and update. To clip one tree of "
            "gradients call optaxclip.clip_grads(grads, max_norm), or "
            "optaxclip.dropin.torch_style.clip_grad_value(grads, max_value)."
        )
    return f"{error}. {takes}"


def _instead(call: str, name: str, known: list[str]) -> str:
    wanted = [ours for ours in ARGUMENTS.get(name, ()) if ours in known]
    wanted += _similar(name, {each: each for each in known})
    if wanted:
        return f"Here it is {wanted[0]}{_MORE.get(wanted[0], '')}."
    return _NO_ARGUMENTS.get(name, "").format(call=call)


def _hint(name: str, module: ModuleType) -> str:
    package = sys.modules[__package__ or ""]
    plain = name.lower().rstrip("_")
    if module is package and plain in FUNCTIONS:
        return f"Use {package.__name__}.{FUNCTIONS[plain]}."
    if module is package and plain in ELSEWHERE:
        return f"Use {ELSEWHERE[plain]}."
    modules = [getattr(package, own) for own in package.__all__]
    # A command has no names.
    modules = [each for each in modules if hasattr(each, "__all__")]
    # Of names that are equally similar, the module's own.
    places = {}
    for each in (*modules, package, module):
        places |= {own: f"{each.__name__}.{own}" for own in each.__all__}
    for place in _similar(name, places):
        return f"Use {place}."
    return "" if module is package else f"It has {', '.join(module.__all__)}."


def _similar(name: str, known: dict[str, str]) -> list[str]:
    """What the name stands for that is spelled most alike."""
    # Imported here, since only errors need it.
    import difflib

    # ZScore and zscore are z_score.
    spelled = {each.lower().replace("_", ""): known[each] for each in known}
    plain = name.lower().replace("_", "")
    close = difflib.get_close_matches(plain, spelled, n=1, cutoff=0.75)
    return [spelled[each] for each in close]
