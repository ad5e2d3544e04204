"""A primitive that is traced when the platform is known: when JAX lowers a program.

Its derivative and its form under vmap are those of `lax.platform_dependent`, which
traces the ways of all platforms.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ._platform import Ways

_way = Primitive("optaxclip_way")
_way.multiple_results = True


def chosen_when_lowered(
    ways: Ways, traced: Any, treedef: Any, leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """The result of one of the ways, flat.

    Args:
      ways: functions of a tree.
      traced: the jaxpr of the CPU's way.
      treedef: the structure of the arguments.
      leaves: the arguments, flat.
    """
    others = (partial(_flat, way, treedef) for way in (ways.gpu, ways.tpu))
    flat = Ways(jaxpr_as_fun(traced), *others)
    return _way.bind(*leaves, ways=flat, types=tuple(traced.out_avals))


def _flat(way: Callable[..., Any], treedef: Any, *leaves: Any) -> list[Any]:
    return jax.tree.leaves(way(*treedef.unflatten(leaves)))


@_way.def_abstract_eval
def _(*_: Any, ways: Ways, types: Sequence[Any]) -> Sequence[Any]:
    return types


@_way.def_impl
def _switch(*leaves: Any, ways: Ways, types: Any) -> list[jax.Array]:
    return ways.switch(*leaves)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    changes = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(partial(_switch, **params), tuple(primals), changes)


def _batched(leaves: Any, axes: Any, **params: Any) -> Any:
    found = jax.vmap(partial(_switch, **params), axes)(*leaves)
    return found, [0] * len(found)


def _way_of(
    name: str, *leaves: Any, ways: Ways, types: Any
) -> list[jax.Array]:
    return getattr(ways, name)(*leaves)


ad.primitive_jvps[_way] = _jvp
batching.primitive_batchers[_way] = _batched
# JAX knows GPUs as cuda and rocm. None: all other platforms.
for name, way in {
    "cpu": "cpu",
    "cuda": "gpu",
    "rocm": "gpu",
    None: "tpu",
}.items():
    mlir.register_lowering(_way, mlir.lower_fun(partial(_way_of, way)), name)
