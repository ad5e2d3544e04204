"""Every clipper by norm does what 30 lines of plain `jnp` do, on ordinary gradients,
also with the switch that turns off what the library knows of platforms.
"""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import reference
from tests.helpers import apply, random_tree
from tests.methods import METHODS, NORM

ROOT = Path(__file__).parents[2]
OF_ALL = {"all": reference.global_norm, "unit": reference.unitwise_norm}
MEANS = {2: 0.0, "rms": 0.5, "average": 1.0}
CLIPPERS = [
    name for name, method in METHODS.items() if method.limit and method.keeps == NORM
]


def norm_of(method):
    if method.norm == "tensor":
        return partial(reference.tensor_norm, mean=MEANS[method.ord])
    labels = {"kernel": 0, "bias": 1, "block": {"conv": 0, "gain": 1}}
    return OF_ALL.get(method.norm, partial(reference.group_norm, labels=labels))


def expected(method, limit, updates, params):
    norm = norm_of(method)
    norms = norm(updates)
    limits = jax.tree.map(lambda _: limit, norms)
    if method.floor is not None:
        weights = norm(params)
        limits = jax.tree.map(lambda w: limit * jnp.maximum(w, method.floor), weights)
    return reference.clip(updates, norms, limits)


@pytest.mark.parametrize("scale", [0.05, 1.0, 100.0])
@pytest.mark.parametrize("name", CLIPPERS)
def test_a_clipper_by_norm_does_what_the_reference_does(name, scale):
    method = METHODS[name]
    updates, params = random_tree("float32", 1, scale), random_tree("float32", 2)
    for limit in (0.0, 0.5, 20.0):
        clipped, _ = apply(method.make(limit), updates, params)
        wanted = expected(method, limit, updates, params)
        # Each of n squares and n sums may round once, and the root halves that. Ours
        # is 4 eps short on purpose, and at most 8 roundings come on top, two of them
        # of the norm of weights.
        size = sum(x.size for x in jax.tree.leaves(updates))
        rtol = (size + 12) * np.finfo(np.float32).eps
        jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol), clipped, wanted)


def test_the_page_shows_the_reference():
    text = (ROOT / "tests/reference.py").read_text()
    page = (ROOT / "docs/one_update.md").read_text()
    code = text[text.index("import jax") :]
    assert f"```python\n{code}```\n" in page


def test_what_the_page_names_is_where_it_says():
    page = (ROOT / "docs/one_update.md").read_text()
    found = re.findall(r"((?:`\w+`(?: and )?)+) in \[.*?\]\(\.\./(.*?)\)", page)
    assert len(found) > 10
    for names, path in found:
        # Where the package is installed, which need not be beside the tests.
        code = (Path(optaxclip.__file__).parents[1] / path).read_text()
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            assert re.search(rf"^(def|class) {name}\b", code, re.MULTILINE), name


@pytest.mark.slow
def test_plain_jnp_on_any_platform_keeps_the_promises():
    command = [sys.executable, "-m", "pytest", "-q", "--one-case", "-n", "0"]
    # This one is no test of itself.
    command += [__file__, "tests/core/test_contract.py", "-k", "not plain_jnp"]
    environment = os.environ | {"OPTAXCLIP_PLATFORM": "plain"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
