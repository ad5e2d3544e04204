"""The trainings that the doctor is held against: how many, which, and their halves."""

import pytest

from benchmarks.doctor.broken import BROKEN, BROKEN_LATER
from benchmarks.doctor.healthy import HEALTHY
from benchmarks.doctor.table import half_of
from optaxclip.doctor._causes import CAUSES

NAMES = {cause.name for cause in CAUSES}


def ways(trainings):
    """The names without the number of the variant."""
    return {training.name.rpartition(" (")[0] for training in trainings}


def test_there_are_40_of_each_in_as_many_ways_as_the_page_says():
    assert len(BROKEN) == len(HEALTHY) == 40
    assert len(ways(BROKEN)) == 26 and len(ways(HEALTHY)) == 20
    for training in BROKEN:
        assert training.causes and set(training.causes) <= NAMES, training.name
    assert not any(training.causes for training in HEALTHY)


def test_every_cause_has_a_training_that_shows_it():
    trainings = [*BROKEN, *BROKEN_LATER]
    shown = {cause for training in trainings for cause in training.causes}
    assert shown == NAMES


@pytest.mark.parametrize("trainings", [BROKEN, HEALTHY])
def test_the_halves_are_disjoint_and_always_the_same(trainings):
    drawn = [training.name for training in half_of(trainings, "set")]
    aside = [training.name for training in half_of(trainings, "aside")]
    assert len(drawn) == len(aside) == 20 and not set(drawn) & set(aside)
    assert drawn == [training.name for training in half_of(trainings, "set")]
