"""A row of the tables of trainings, and the halves that they are in."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from .loops import Problem, Rows
from .models import language, regression

Train = Callable[[int], Rows]  # the log of a training with this seed


class Way(NamedTuple):
    """One way to train or to break, in one or two variants."""

    name: str
    variants: list[Train]
    causes: tuple[str, ...] = ()  # of which one must come first. None if healthy


class Training(NamedTuple):
    """One variant of a way."""

    name: str
    train: Train
    seed: int  # to which an offset is added
    causes: tuple[str, ...]


def trainings(ways: list[Way], first_seed: int) -> list[Training]:
    """All variants. The second one of a way has the next seed."""
    table: list[Training] = []
    for way in ways:
        for place, variant in enumerate(way.variants):
            name = f"{way.name} ({place + 1})"
            seed = first_seed + place
            table.append(Training(name, variant, seed, way.causes))
    return table


def with_each(train: Callable[[int, Any], Rows], *values: float) -> list[Train]:
    """A training with each value."""
    return [lambda seed, value=value: train(seed, value) for value in values]


def on_both(train: Callable[[Problem], Rows]) -> list[Train]:
    """A training of the regression, and one of the language."""
    return [lambda seed: train(regression(seed)), lambda seed: train(language(seed))]


def half_of(trainings: list[Training], half: str) -> list[Training]:
    """The half that limits are set on ("set"), or the other ("aside")."""
    if half == "all":
        return trainings
    names = sorted(training.name for training in trainings)
    names_of_set = random.Random(75).sample(names, len(names) // 2)
    is_set = half == "set"
    return [row for row in trainings if (row.name in names_of_set) == is_set]
