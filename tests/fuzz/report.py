"""A finding, as about ten lines of Python that reproduce it."""

import inspect
import re
from typing import Any

from tests.fuzz import checks, own_cases, transformations
from tests.fuzz.cases import Case
from tests.fuzz.switches import SWITCHES

HEAD = """import jax, jax.numpy as jnp, numpy as np, optax, optaxclip as oc
from math import inf, nan"""
LOOP = """for updates in steps:
    updates, state = clipper.update(updates, state, params)
    print(updates)"""
HESSIAN = """def loss(b):
    updates, _ = clipper.update({'b': b}, clipper.init({'b': b}))
    return jnp.array([1.0, -2.0, 3.0, 1.0]) @ updates['b']
print(jax.hessian(loss)(steps[0]['b']))"""
IMPORTS = """import pickle
from functools import cache, partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.fuzz.transformations import jitted, on_mesh
# eight devices: XLA_FLAGS=--xla_force_host_platform_device_count=8"""


def built(case: Case) -> str:
    """The call that builds the clipper, as a user writes it where that can be."""
    method, quick = case.kind, case.kind.quick
    if method.build is method.function and not any(map(callable, quick.values())):
        options = [f"{name}={value!r}" for name, value in quick.items()]
        arguments = ", ".join(text for text in (case.arguments(), *options) if text)
        usual = "" if arguments or method.limit is None else repr(method.limit)
        return f"clipper = oc.{method.function.__name__}({arguments or usual})"
    table = "from tests.methods import METHODS\n"
    return f"{table}clipper = METHODS[{case.method!r}].make({case.arguments()})"


def program(cell: Any, case: Case) -> str:
    """The source that shows the finding."""
    module = inspect.getmodule(cell.check)
    # These checks build their clippers themselves.
    if module is own_cases:
        imports = "from tests.fuzz import own_cases\nfrom tests.fuzz.cases import Case"
        return f"{imports}\nown_cases.{cell.check.__name__}({case!r})"
    steps = ",\n    ".join(case.steps)
    lines = [HEAD, built(case), f"params = {case.params}", f"steps = [{steps}]"]
    if "optimizer" in getattr(cell.check, "keywords", {}):
        del lines[1]
    return "\n".join([*lines, *rest_of(cell)])


def rest_of(cell: Any) -> list[str]:
    """What is done with the clipper, by the kind of check."""
    arguments = getattr(cell.check, "keywords", {})
    start = "state = clipper.init(params)"
    if "way" in arguments:
        way = arguments["way"]
        sources = map(inspect.getsource, (transformations.plain, way))
        calls = ("clipper", f"{way.__name__}(clipper)")
        prints = [f"print(plain({call}, steps, params))" for call in calls]
        return [IMPORTS, *(text.replace("Any", "object") for text in sources), *prints]
    if "switch" in arguments:
        inner = "\n".join([start, LOOP, "print(oc.metrics(state))"])
        block = "\n".join(f"    {line}" for line in inner.splitlines())
        return [f"with {SWITCHES[arguments['switch']]}:", block]
    if "optimizer" in arguments:
        inner = checks.OPTIMIZERS[arguments["optimizer"]]
        return [f"clipper = oc.skip_nonfinite({inner})", start, LOOP]
    if cell.check is checks.hessian:
        return [HESSIAN]
    return [start, LOOP, "print(oc.metrics(state))"]


def told(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, AssertionError) and error.args:
        text = error.args[0]
        text = " ".join(map(str, text)) if isinstance(text, tuple) else str(text)
    else:
        text = str(error)
    line = " ".join(text.split())
    return f"{type(error).__name__}: {line[:400]}"


def signature(cell: Any, error: BaseException) -> str:
    """What findings have in common that are probably one: no numbers in it."""
    words = re.sub(r"\(*(expected|updates).*", "", told(error))
    words = re.sub(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|nan|inf|\[.*?\]", "", words)
    kind = cell.name.partition(",")[0]
    return f"{kind}: {re.sub(r'float[^ ]*|complex[^ ]*', '', words)[:70]}"
