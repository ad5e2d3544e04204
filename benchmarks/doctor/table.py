"""A row of the tables of trainings, and the halves that they are in."""

import random
from collections.abc import Callable
from typing import NamedTuple

from .loops import Problem, Rows
from .models import language, regression


class Training(NamedTuple):
    """One training, and what is wrong with it."""

    name: str
    rows: Callable[[], Rows]
    causes: tuple[str, ...] = ()  # of which one must come first. None if healthy


def numbered(
    name: str, *logs: Callable[[], Rows], causes: tuple[str, ...] = ()
) -> list[Training]:
    return [
        Training(f"{name} ({number})", rows, causes)
        for number, rows in enumerate(logs, start=1)
    ]


def on_both(
    name: str, rows: Callable[[Problem], Rows], seed: int, causes: tuple[str, ...] = ()
) -> list[Training]:
    """A training of the regression, and one of the language."""
    return numbered(
        name,
        lambda: rows(regression(seed)),
        lambda: rows(language(seed + 1)),
        causes=causes,
    )


def half_of(trainings: list[Training], half: str) -> list[Training]:
    """The half that limits are set on ("set"), or the other ("aside")."""
    if half == "all":
        return trainings
    names = sorted(training.name for training in trainings)
    names_of_set = random.Random(75).sample(names, len(names) // 2)
    halves: dict[str, list[Training]] = {"set": [], "aside": []}
    for training in trainings:
        is_of_set = training.name in names_of_set
        halves["set" if is_of_set else "aside"].append(training)
    return halves[half]
