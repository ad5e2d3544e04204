"""Groups that have no leaf in this model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

# One configuration of a dense model and of one with a mixture of experts.
LIMITS = {"dense": 3.0, "experts": 0.5}
LABELS = {"mlp": "dense", "router": "experts", "experts": "experts"}
DENSE = {"mlp": {"w": 3 * jnp.ones((2, 2))}}  # norm 6
MIXTURE = DENSE | {"router": jnp.array([3.0]), "experts": jnp.array([[0.0, 4.0]])}


def by_path(path, leaf):
    return LABELS[path.partition("/")[0]]


@pytest.mark.parametrize("labels", [LABELS, by_path], ids=["tree", "function"])
@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_one_configuration_serves_a_dense_model_and_a_mixture(labels, call):
    clipper = optaxclip.clip_by_group_norm(LIMITS, labels, allow_missing=True)
    for model in (DENSE, MIXTURE):
        updates, _ = call(clipper.update)(model, clipper.init(model))
        np.testing.assert_allclose(updates["mlp"]["w"], np.full((2, 2), 1.5), 1e-6)
    # 3 and 4 together have the norm 5, ten times their limit.
    np.testing.assert_allclose(updates["router"], [0.3], 1e-6)
    np.testing.assert_allclose(updates["experts"], [[0.0, 0.4]], 1e-6)


def test_missing_labels_are_errors_unless_they_are_allowed():
    for labels, text in ((LABELS, "labels has a value for"), (by_path, "max_norm has")):
        with pytest.raises(ValueError, match=f"clip_by_group_norm: {text}"):
            optaxclip.clip_by_group_norm(LIMITS, labels).init(DENSE)


def test_a_leaf_needs_a_label_and_a_limit_also_where_labels_may_be_missing():
    labels = {"mlp": "dense"}
    clipper = optaxclip.clip_by_group_norm(LIMITS, labels, allow_missing=True)
    with pytest.raises(ValueError, match="labels has no value for the leaf 'experts'"):
        clipper.init(MIXTURE)
    limits = {"dense": 3.0}
    clipper = optaxclip.clip_by_group_norm(limits, by_path, allow_missing=True)
    with pytest.raises(ValueError, match="max_norm has no value for the label 'exp"):
        clipper.init(MIXTURE)


def test_whether_labels_may_be_missing_is_true_or_false():
    with pytest.raises(TypeError, match="allow_missing must be True or False"):
        optaxclip.clip_by_group_norm(1.0, LABELS, allow_missing="experts")
