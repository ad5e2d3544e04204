"""Nodes of a user's that check what is put into them, as dataclasses with a
`__post_init__` do. JAX makes a node anew in each `jax.tree.map`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.methods import METHODS

SHAPES = {"kernel": (4, 3), "bias": (3,)}
# A batch of gradients has another shape than the parameters in the user's node.
OF_BATCHES = {"clipped_grad"}


def check(**leaves):
    for name, leaf in leaves.items():
        assert isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
        assert leaf.shape == SHAPES[name]
        assert leaf.dtype == np.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: jax.Array
    bias: jax.Array

    def __post_init__(self):
        check(kernel=self.kernel, bias=self.bias)


@jax.tree_util.register_pytree_node_class
class Module:
    def __init__(self, kernel, bias):
        check(kernel=kernel, bias=bias)
        self.kernel, self.bias = kernel, bias

    def tree_flatten(self):
        return (self.kernel, self.bias), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def leaves(seed, scale):
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = jnp.asarray(scale * random.normal(size=shape), np.float32)
    return found


def label(path, leaf):
    return "matrix" if leaf.ndim > 1 else "vector"


def built(name):
    if name == "clip_by_group_norm":
        return optaxclip.clip_by_group_norm(1.0, label)
    if name == "aggc":
        return optaxclip.aggc(scope=label)
    return METHODS[name].make()


@pytest.mark.parametrize("node", [Layer, Module])
@pytest.mark.parametrize("name", sorted({*METHODS} - OF_BATCHES))
def test_only_arrays_of_the_leaves_come_into_a_node(name, node):
    method, params = built(name), leaves(0, 1.0)
    # A tuple keeps the order of the node's leaves, in which norms are summed.
    plain, strict = method.init((*params.values(),)), method.init(node(**params))
    for seed, update in ((1, method.update), (2, jax.jit(method.update))):
        grads = leaves(seed, 3.0)
        wanted, plain = update((*grads.values(),), plain, (*params.values(),))
        found, strict = update(node(**grads), strict, node(**params))
        assert type(found) is node
        for leaf, other in zip(jax.tree.leaves(found), wanted, strict=True):
            np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
@pytest.mark.parametrize("node", [Layer, Module])
def test_parameters_of_clipped_grad_may_be_in_a_node(node, method):
    def loss(model, x):
        return jnp.sum(jnp.tanh(x @ model.kernel + model.bias) ** 2)

    params, x = leaves(0, 1.0), jnp.ones((5, 4))
    grad = jax.jit(optaxclip.clipped_grad(loss, 0.1, method=method))
    found = grad(node(**params), x).grads
    assert type(found) is node
    # The norm of five equal gradients that are clipped to the limit.
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(found)))
    np.testing.assert_allclose(norm, 0.1, rtol=1e-5)


@pytest.mark.parametrize("node", [Layer, Module])
def test_limits_for_parts_of_a_tree_may_be_for_nodes(node):
    params = {"first": node(**leaves(0, 1.0)), "last": node(**leaves(1, 1.0))}
    clipper = optaxclip.clip_by_tensor_norm({"first": 0.5, "last": 2.0})
    found, _ = clipper.update(params, clipper.init(params))
    for name, limit in {"first": 0.5, "last": 2.0}.items():
        for leaf, before in zip(*map(jax.tree.leaves, (found[name], params[name]))):
            norm = np.linalg.norm(np.float64(before))
            wanted = np.float64(before) * min(1, limit / norm)
            np.testing.assert_allclose(leaf, wanted, rtol=1e-6)
