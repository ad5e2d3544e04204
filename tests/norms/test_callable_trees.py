"""Options in trees that can be called, as the modules of equinox can."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

pytestmark = pytest.mark.slow


@partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=[])
@dataclasses.dataclass
class Model:
    w: Any
    b: Any

    def __call__(self, x: Any) -> Any:
        return self.w * x + self.b


GRADS = Model(3 * jnp.ones((2, 2)), jnp.array([3.0, 4.0]))  # norms 6 and 5


def clipped(clipper, grads=GRADS):
    return clipper.update(grads, clipper.init(grads))[0]


@pytest.mark.parametrize(
    "limits",
    [
        Model(3.0, 0.5),
        Model(lambda step: 3.0, 0.5),
        Model(rules.minimum(3.0, 9.0), np.float32(0.5)),
    ],
    ids=["numbers", "schedule", "rule"],
)
def test_limits_in_a_callable_tree_are_its_leaves(limits):
    found = clipped(optaxclip.clip_by_tensor_norm(limits))
    np.testing.assert_allclose(found.w, np.full((2, 2), 1.5), rtol=1e-6)
    np.testing.assert_allclose(found.b, [0.3, 0.4], rtol=1e-6)


def test_limits_in_a_callable_tree_need_no_state():
    clipper = optaxclip.clip_by_tensor_norm(Model(3.0, 0.5))
    found, _ = clipper.update(GRADS, optax.EmptyState())
    np.testing.assert_allclose(found.b, [0.3, 0.4], rtol=1e-6)


def test_labels_in_a_callable_tree_are_its_leaves():
    labels = Model("matrix", "vector")
    norms = optaxclip.group_norm(GRADS, labels)
    assert {key: float(x) for key, x in norms.items()} == {"matrix": 6, "vector": 5}
    clipper = optaxclip.clip_by_group_norm({"matrix": 3.0, "vector": 0.5}, labels)
    np.testing.assert_allclose(clipped(clipper).b, [0.3, 0.4], rtol=1e-6)


def test_axes_and_layers_in_callable_trees_are_their_leaves():
    norms = optaxclip.unitwise_norm(GRADS, axis=Model(1, None))
    np.testing.assert_allclose(norms.w, np.full((2, 1), np.sqrt(18)), rtol=1e-6)
    norms = optaxclip.tensor_norm(GRADS, stacked=Model(1, None))
    np.testing.assert_allclose(norms.w, np.full((2, 1), np.sqrt(18)), rtol=1e-6)
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked=Model(1, None))
    np.testing.assert_allclose(clipped(clipper).w, np.full((2, 2), 0.5**0.5), rtol=1e-6)


def test_functions_that_are_nodes_to_jax_stay_functions():
    schedule = jax.tree_util.Partial(lambda share, step: share * 6.0, 0.5)
    found = clipped(optaxclip.clip_by_tensor_norm(schedule))
    np.testing.assert_allclose(found.w, np.full((2, 2), 1.5), rtol=1e-6)


def test_bounds_in_a_callable_tree_are_its_leaves():
    found = clipped(optaxclip.clip_by_value(Model(2.0, lambda step: 3.5)))
    np.testing.assert_array_equal(found.w, np.full((2, 2), 2.0))
    np.testing.assert_array_equal(found.b, [3.0, 3.5])
