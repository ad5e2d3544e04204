"""Tests with the parameter dtype="float64" run with 64-bit types."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _float64_where_it_is_tested(request):
    parameters = getattr(request.node, "callspec", None)
    wanted = parameters and parameters.params.get("dtype") == "float64"
    with jax.enable_x64(bool(wanted)):
        yield
