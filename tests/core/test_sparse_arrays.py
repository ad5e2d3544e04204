"""Sparse arrays of JAX. One that may hold an index twice is longer than its data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import optaxclip
from tests.methods import ALONE, METHODS

# Two numbers for one element: the vector is [0, 7, 0, 0, 0].
TWICE = sparse.BCOO((jnp.array([3.0, 4.0]), jnp.array([[1], [1]])), shape=(5,))
ONCE = jax.jit(lambda x: x.sum_duplicates(nse=x.nse))(TWICE)
# [[0, 7, 0], [0, 0, 0]]
ROWS = sparse.BCSR(
    (jnp.array([3.0, 4.0]), jnp.array([1, 1]), jnp.array([0, 2, 2])), shape=(2, 3)
)
COUNTED = [name for name, method in METHODS.items() if method.leaves != ALONE]
REFUSED = "the leaf 'w' is a BC(OO|SR) that may hold an index twice"


@pytest.mark.parametrize("array", [TWICE, ROWS], ids=["BCOO", "BCSR"])
@pytest.mark.parametrize("name", COUNTED)
def test_an_index_twice_is_refused_by_name(name, array):
    method = METHODS[name].make()
    state = method.init({"w": ONCE})
    # The clip that is wrapped may be the first to look.
    calls = f"({METHODS[name].function.__name__}|clip_by_global_norm)"
    for update in (method.update, jax.jit(method.update)):
        with pytest.raises(ValueError, match=f"^{calls}: {REFUSED}"):
            update({"w": array}, state, {"w": ONCE})


@pytest.mark.parametrize("name", ["clippy", "larc", "adaptive_grad_clip"])
def test_weights_with_an_index_twice_are_refused(name):
    method = METHODS[name].make()
    state = method.init({"w": ONCE})
    with pytest.raises(ValueError, match=f"^{name}: params: {REFUSED}"):
        method.update({"w": ONCE}, state, {"w": TWICE})


NORMS = {
    "global_norm": optaxclip.global_norm,
    "tensor_norm": optaxclip.tensor_norm,
    "unitwise_norm": optaxclip.unitwise_norm,
    "spectral_norm": optaxclip.spectral_norm,
    "group_norm": lambda tree: optaxclip.group_norm(tree, "all"),
    "clip_grads": lambda tree: optaxclip.clip_grads(tree, 1.0),
    "clip_cotangent": lambda tree: optaxclip.clip_cotangent(tree, max_norm=1.0),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_refuse_an_index_twice(name):
    with pytest.raises(ValueError, match=f"^{name}: {REFUSED}"):
        NORMS[name]({"w": TWICE})


SUMMED = {
    "BCOO": (TWICE, lambda x: x.sum_duplicates(nse=x.nse)),
    "BCSR": (ROWS, lambda x: x.to_bcoo().sum_duplicates(nse=x.nse)),
}


@pytest.mark.parametrize("kind", SUMMED)
def test_what_the_error_tells_is_clipped_as_a_dense_array(kind):
    array, summed = SUMMED[kind]
    found, norm = jax.jit(lambda x: optaxclip.clip_grads(summed(x), 2.0))(array)
    assert norm == 7.0
    wanted = np.float64(array.todense()) * 2 / 7
    np.testing.assert_allclose(found.todense(), wanted, rtol=1e-6)


def test_gradients_by_a_sparse_matrix_are_taken():
    def loss(matrix, x):
        return jnp.sum((matrix @ x) ** 2)

    dense = np.float32([[1, 0, 2], [0, 3, 0]])
    x = jnp.array([1.0, 2.0, -1.0])
    grads = sparse.grad(loss)(sparse.BCOO.fromdense(dense), x)
    # Of the elements that are there: 2 (A x) x'.
    wanted = 2 * np.outer(dense @ np.float64(x), x) * (dense != 0)
    norm = optaxclip.global_norm(grads)
    np.testing.assert_allclose(norm, np.linalg.norm(wanted), rtol=1e-6)
