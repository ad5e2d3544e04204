"""Public modules whose errors say what a wrong name is called here.

clip_by_global_norm(1.0, axis_name="x")   TypeError that names mesh_axes
optaxclip.clip_grad_norm_                 AttributeError that names clip_grads

Each public module calls `with_helpful_errors(__name__)` at its end.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import optax

from .other_names import FUNCTIONS, NO_ARGUMENTS, OUR_NAMES, REMARKS
from .reprs import call_repr


def with_helpful_errors(
    module_name: str, later: Mapping[str, str] | None = None
) -> None:
    """Gives a public module helpful errors: a TypeError in our words for arguments that
    do not fit its functions, an AttributeError that names what is meant, and a
    `__dir__` of its public names, which editors offer.

    `later`: public name -> the submodule that it is imported from at its first use.
    """
    later = later or {}
    module = sys.modules[module_name]
    public_names = [name for name in vars(module) if not name.startswith("_")]
    vars(module).setdefault("__all__", sorted([*public_names, *later]))

    def publish(name: str, value: object) -> object:
        """Sets a name of the module. A function is wrapped to raise our errors."""
        if inspect.isfunction(value):
            value = with_argument_errors(value)
            # pickle looks there for the function.
            value.__module__ = module_name
        setattr(module, name, value)
        return value

    for name in set(module.__all__).difference(later):
        publish(name, getattr(module, name))

    def __getattr__(name: str) -> Any:
        if name in later:
            owner = importlib.import_module(f"{module_name}.{later[name]}")
            return owner if name == later[name] else publish(name, getattr(owner, name))
        text = f"module {module_name!r} has no attribute {name!r}."
        # pickle asks for __path__, IPython for _repr_html_. A hint imports all modules.
        if not name.startswith("_"):
            text = f"{text} {_hint_for_attribute(name, module)}".strip()
        raise AttributeError(text, name=name, obj=module)

    def __dir__() -> list[str]:
        return sorted(module.__all__)

    # With a `__getattr__` in its source a module would have every name for type
    # checkers.
    vars(module).update(__getattr__=__getattr__, __dir__=__dir__)


# Cached, so that a function in two modules is one object.
@functools.cache
def with_argument_errors(
    function: Callable[..., Any], call: str = ""
) -> Callable[..., Any]:
    """The function, with a TypeError in our words for arguments that do not fit.

    `call` is the name in errors. "" is the function's own name.
    """
    signature = inspect.signature(function)
    call = call or function.__name__

    # `help` and `inspect.signature` show the arguments of the function.
    @functools.wraps(function)
    def checked_call(*args: object, **kwargs: object) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            text = _error_in_arguments(call, function, error, kwargs)
            raise TypeError(f"{call}: {text}") from None
        result = function(*args, **kwargs)
        if isinstance(result, optax.GradientTransformationExtraArgs):
            # Python shows these names in its errors about missing arguments.
            for name, method in result._asdict().items():
                if "<locals>" in getattr(method, "__qualname__", ""):
                    method.__qualname__ = f"{call}.{name}"
            clipper = Clipper(*result)
            clipper.call = (call, bound.arguments)
            return clipper
        return result

    return checked_call


class Clipper(optax.GradientTransformationExtraArgs):
    """A transformation whose `repr` is the call that made it."""

    call: tuple[str, dict[str, Any]] | None = None  # the function's name and arguments

    def __repr__(self) -> str:
        return call_repr(*self.call) if self.call else super().__repr__()


# Python's error for `clipper(grads)` shows the name of the class. With a `__call__`
# that raises, optax.inject_hyperparams would take a clipper for a schedule.
Clipper.__name__ = (
    "transformation with init and update (for one tree: optaxclip.clip_grads)"
)


def _error_in_arguments(
    call: str, function: Callable[..., Any], error: TypeError, kwargs: Mapping[str, Any]
) -> str:
    """Which argument of a call is wrong, and what would be right."""
    signature = inspect.signature(function)
    # The first argument of a method is its object.
    parameters = [name for name in signature.parameters if name != "self"]
    hint = f"It takes {_shown_parameters(signature)}."
    # Unknown names first: in `clip_by_global_norm(clip_norm=1.0)` max_norm is missing
    # only because it has another name there.
    for name in kwargs:
        if name not in parameters:
            hint = _hint_for_argument(call, name, parameters) or hint
            return f"there is no argument {name!r}. {hint}"
    # `clip_by_global_norm(grads, 1.0)`, as torch and TensorFlow clip.
    returned = function.__annotations__.get("return")
    has_more = call.startswith("clip_by") and "too many" in str(error)
    if has_more and "GradientTransformation" in str(returned):
        hint += (
            " It makes a transformation with init and update. To clip one tree of "
            "gradients call optaxclip.clip_grads(grads, max_norm), or "
            "optaxclip.dropin.torch_style.clip_grad_value(grads, max_value)."
        )
    return f"{error}. {hint}"


def _shown_parameters(signature: inspect.Signature) -> str:
    """Such as "max_norm, and by name ord, eps". "none" if there are none."""
    names: list[str] = []
    keyword_names: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            keyword_names.append(name)
        elif name != "self":
            names.append(name)
    parts = [", ".join(names)] if names else []
    if keyword_names:
        parts.append(f"by name {', '.join(keyword_names)}")
    return ", and ".join(parts) or "none"


def _hint_for_argument(call: str, name: str, parameters: list[str]) -> str:
    """What to write for an argument that the call does not have, or ""."""
    ours = [our for our in OUR_NAMES.get(name, ()) if our in parameters]
    if ours:
        return f"Here it is {ours[0]}{REMARKS.get(ours[0], '')}."
    similar_name = _most_similar(name, parameters)
    if similar_name:
        return f"Here it is {similar_name}."
    return NO_ARGUMENTS.get(name, "").format(call=call)


def _hint_for_attribute(name: str, module: ModuleType) -> str:
    """What to use for an attribute that the module does not have, or ""."""
    package = sys.modules["optaxclip"]
    is_package = module is package
    plain_name = name.lower().rstrip("_")
    if is_package and plain_name in FUNCTIONS:
        return f"Use {package.__name__}.{FUNCTIONS[plain_name]}."
    # `optaxclip.chain`
    if is_package and callable(vars(optax).get(name)):
        return f"Use optax.{name}."
    public_values = [getattr(package, public_name) for public_name in package.__all__]
    module_of_name = {}
    # Where several modules have a name, the module that was asked counts: it is last.
    for owner in (*public_values, package, module):
        # Modules have public names, functions have none.
        public_names = getattr(owner, "__all__", ())
        module_of_name |= dict.fromkeys(public_names, owner.__name__)
    similar = _most_similar(name, module_of_name)
    if similar:
        return f"Use {module_of_name[similar]}.{similar}."
    return "" if is_package else f"It has {', '.join(module.__all__)}."


def _most_similar(name: str, names: Iterable[str]) -> str | None:
    """The one of several names that is spelled most like a name, if one is close."""
    # Imported here, since only errors need it.
    import difflib

    # ZScore and zscore are z_score.
    by_letters = {other.lower().replace("_", ""): other for other in names}
    letters = name.lower().replace("_", "")
    close = difflib.get_close_matches(letters, by_letters, n=1, cutoff=0.75)
    return by_letters[close[0]] if close else None
