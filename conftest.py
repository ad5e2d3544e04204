"""Which tests run, and the examples in docstrings: their names, how arrays print.

pytest                every promise: one case of each test, without the slow tests
pytest --all          every case of every test, as CI runs them
pytest FILE, -k NAME  every case of these tests
"""

import zlib

import numpy as np
import pytest


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case of every test")


def pytest_configure(config):
    if config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword:
        config.option.all = True


def pytest_collection_modifyitems(config, items):
    if config.option.all:
        return
    cases = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
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
