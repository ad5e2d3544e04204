"""How `clipped_grad` computes the gradient of a loss, as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .. import _trees as prefix
from .._checks import check_choice
from ._book import kept_numbers
from ._choose import METHODS, Choice, choose
from ._ghost import Ghost
from ._problem import Problem, Question, check_microbatch, check_unnamed
from ._roles import Places


class ExplainedLeaf(NamedTuple):
    """How the norms of the gradients by one parameter are found."""

    name: str  # its path in the parameters
    shape: tuple[int, ...]
    way: str  # a word of the table in `explain_clipped_grad`
    # the operations that it goes into, such as "gather, dot_general"
    uses: str
    # bytes kept of the microbatch from forward and backward pass, for this parameter
    kept: int
    made: int  # bytes made of each example to find its norm


class Explanation(NamedTuple):
    """What `clipped_grad` does. Its text is a table with a line for each parameter."""

    method: str
    microbatch: int | None
    leaves: list[ExplainedLeaf]

    def __str__(self) -> str:
        width = self.microbatch or "the whole batch"
        head = ("parameter", "shape", "norm by", "uses", "kept", "made")
        rows = [tuple(map(str, leaf)) for leaf in self.leaves]
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = [f"method {self.method}, microbatch: {width}"]
        for row in (head, *rows):
            cells = [cell.ljust(size) for cell, size in zip(row, widths)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def explain_clipped_grad(
    loss: Callable[..., Any],
    *,
    argnums: Places = 0,
    shared_argnums: Places = (),
    has_aux: bool = False,
    microbatch: int | None = None,
    method: str = "auto",
) -> Callable[..., Explanation]:
    """Makes a function that says how `clipped_grad` computes its gradient: by which
    method, and from what the norms of each parameter's gradients are found.

    Nothing is computed. The loss is traced, and shapes are looked at.

    Args:
      loss: the loss of one example, as in `clipped_grad`.
      argnums: which arguments to differentiate.
      shared_argnums: which arguments are the same for all examples.
      has_aux: whether the loss returns something beside its value.
      microbatch: how many examples are differentiated at once, or None.
      method: "auto", "ghost", "one_pass" or "two_pass".

    Returns:
      A function of the arguments of `loss`, with batches for examples. It returns an
      `Explanation`, whose text is a table. `kept` is the bytes of the inputs and
      cotangents of a parameter's uses, for one microbatch. `made` is the bytes that one
      example adds while its norm is computed.

    | norm by | is | for |
    |---|---|---|
    | product | abs(a) abs(c), of input a and cotangent c | one position |
    | gram | sqrt(sum_ts (a_t . a_s)(c_t . c_s)) | few positions, large matrices |
    | matrix | abs(sum_t a_t c_t') | many positions, convolutions |
    | gradient | abs(g), g by JAX's own derivative | biases, scales, all else |
    | unused | 0 | parameters that the loss does not depend on |

    In one pass and two passes it is "gradient" for all.

    Raises:
      ValueError: an unknown method, a microbatch below 1. From the function: batches
        whose first axes are missing or differ.
      TypeError: from the function: a loss that is not one real number.

    Example:
      >>> def loss(params, x):
      ...     return jnp.sum((x @ params["w"] + params["b"]) ** 2)
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
      >>> explain = optaxclip.per_example.explain_clipped_grad(loss)
      >>> print(explain(params, jnp.ones((4, 3))))
      method ghost, microbatch: the whole batch
      parameter  shape   norm by   uses         kept  made
      b          (2,)    gradient  add          32    8
      w          (3, 2)  product   dot_general  80    4
    """
    call = "explain_clipped_grad"
    check_microbatch(call, microbatch)
    check_choice(f"{call}: method", method, METHODS)
    question = Question(call, loss, argnums, shared_argnums, has_aux)

    def of_batch(*args: Any, **named: Any) -> Explanation:
        check_unnamed(call, named)
        problem = question.about(args)
        choice = choose(problem, method, microbatch)
        return Explanation(
            choice.method, choice.microbatch, _leaves(problem, choice)
        )

    return of_batch


def _leaves(problem: Problem, choice: Choice) -> list[ExplainedLeaf]:
    found = []
    entries = jax.tree_util.tree_flatten_with_path(problem.params)[0]
    width = min(choice.microbatch or problem.size, problem.size)
    for number, (path, leaf) in enumerate(entries):
        # One pass and two passes make whole gradients, and keep nothing of uses.
        way, uses, kept, made = "gradient", "", 0, leaf.nbytes
        if choice.method == "ghost" and choice.ghost:
            way, uses, kept, made = _from(choice.ghost, number)
        # DictKey("blocks"), SequenceKey(0) -> "blocks/0".
        name = prefix.name(path)
        found.append(
            ExplainedLeaf(name, leaf.shape, way, uses, width * kept, made)
        )
    return found


def _from(ghost: Ghost, leaf: int) -> tuple[str, str, int, int]:
    """The way of a parameter, its uses, and bytes kept and made of an example."""
    way = ghost.ways[leaf]
    uses = [ghost.uses[part.use] for part in way.parts]
    names = [use.name + (" in scan" if use.loops else "") for use in uses]
    # As if all that is kept and made had the dtype of the parameter.
    each = ghost.params[leaf].dtype.itemsize
    kept = each * sum(map(kept_numbers, uses))
    return way.name, ", ".join(dict.fromkeys(names)), kept, each * way.size
