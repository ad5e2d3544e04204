"""Generates mutants: copies of a module, each with one small fault."""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

# Neighbours, since a test that tells < from <= tells it from > as well.
SWAPPED = (
    "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, BitAnd BitOr, Add Sub, "
    "Mult Div, LtE Lt, GtE Gt, NotEq Eq, IsNot Is, NotIn In, Or And, BitOr BitAnd, "
    "Sub Add, Div Mult, Pow Mult, FloorDiv Mult, Mod Mult"
)
OPERATORS = dict(pair.split() for pair in SWAPPED.split(", "))


class Mutant(NamedTuple):
    """A module with one fault."""

    name: str  # "function: the expression around the fault, as it reads with it"
    diff: str  # the line with the fault, before and after
    source: str  # of the whole module


def mutants(source: str) -> Iterator[Mutant]:
    """Yields the mutants of a module in the order of its source."""
    tree = ast.parse(source)
    right = ast.unparse(tree).splitlines()
    for function, text in _changes(tree, ""):
        wrong = ast.unparse(tree)
        pairs = zip(right, wrong.splitlines())
        before, after = next(pair for pair in pairs if pair[0] != pair[1])
        yield Mutant(f"{function}: {text}", f"-{before}\n+{after}", wrong)


def _changes(parent: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """Changes the tree, yields where it differs, and changes it back."""
    if isinstance(parent, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{parent.name}".lstrip(".")
    for child, put in _children(parent):
        for new in _variants(child):
            put(new)
            yield function, _first_line(new if isinstance(new, ast.Call) else parent)
        if function and _can_be_dropped(child):
            put(ast.Pass())
            yield function, f"without {_first_line(child)}"
        put(child)
        # Tests compare error texts only in part.
        if not isinstance(child, ast.Raise | ast.JoinedStr):
            yield from _changes(child, function)


def _children(parent: ast.AST) -> Iterator[tuple[ast.AST, Callable[[Any], None]]]:
    """Yields each child with the function that puts another in its place."""
    for field, value in ast.iter_fields(parent):
        if isinstance(value, ast.AST) and field not in ("annotation", "returns"):
            yield value, partial(setattr, parent, field)
        elif isinstance(value, list):
            for place, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield child, partial(value.__setitem__, place)


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.operator() | ast.cmpop() | ast.boolop():
            if name := OPERATORS.get(type(node).__name__):
                yield getattr(ast, name)()
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(type(value)(0 if value == 1 else value + 1))
        case ast.Call(func, args, keywords):
            if len(args) > 1:
                yield ast.Call(func, args[:-1], keywords)
            for place in range(len(keywords)):
                rest = keywords[:place] + keywords[place + 1 :]
                yield ast.Call(func, args, rest)


def _can_be_dropped(node: ast.AST) -> bool:
    """Returns whether names stay defined without this statement."""
    if isinstance(node, ast.Assign):
        return not _names(node.value).isdisjoint(_names(node.targets[0]))
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)  # a docstring
    return isinstance(node, ast.AugAssign | ast.If)


def _names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).strip().splitlines()[0]
