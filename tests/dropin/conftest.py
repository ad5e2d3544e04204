"""The fixture `torch`, for tests that run only where it is installed."""

import pytest


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")
