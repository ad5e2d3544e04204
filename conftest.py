"""Which tests run, and the examples in docstrings: their names, how arrays print.

pytest                every promise: one case of each test, without the slow tests
pytest --all          every case of every test, as CI runs them nightly
pytest FILE, -k NAME  every case of these tests
pytest --one-case     one case of each test, also of slow ones and those of a FILE
"""

import os
import zlib

import numpy as np
import pytest

# The example of `check_step` needs eight devices, also where only docstrings are run.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case of every test")
    parser.addoption("--one-case", action="store_true", help="run one of each test")


def pytest_configure(config):
    option = config.option
    named = config.args_source is pytest.Config.ArgsSource.ARGS or option.keyword
    option.all = option.all or bool(named and not option.one_case)


def test_of(item):
    """The name of a test. A docstring is one test, though each module that imports its
    function has it too.
    """
    if isinstance(item, pytest.DoctestItem):
        return item.dtest.docstring
    return item.nodeid.partition("[")[0]


def pytest_collection_modifyitems(config, items):
    if config.option.all:
        return
    cases = {}
    for item in items:
        if config.option.one_case or not item.get_closest_marker("slow"):
            cases.setdefault(test_of(item), []).append(item)
    # Which case depends on the name of the test, so that every method has its turn.
    kept = [own[zlib.crc32(name.encode()) % len(own)] for name, own in cases.items()]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


@pytest.fixture(autouse=True)
def names_of_examples(doctest_namespace):
    # Imported here, because tests/conftest.py sets flags before JAX is imported.
    import jax
    import jax.numpy as jnp
    import optax

    import optaxclip

    names = {"jax": jax, "jnp": jnp, "optax": optax, "optaxclip": optaxclip}
    doctest_namespace.update(names)
    with np.printoptions(precision=4, suppress=True):
        yield
