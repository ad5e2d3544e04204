"""Examples in docstrings: the names that they use, and how arrays print."""

import numpy as np
import pytest


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
