"""Tests that end differently with our functions, and why.

A test is named as pytest names it below the folder that the package is installed in.
"""

_AGAIN = (
    "It clips what came out of the last clip again, 50 times, and wants what one clip "
    "gives to 1e-6. Each of ours multiplies twice and rounds twice: after 38 clips the "
    "elements of one unit have drifted apart by 1.1e-6."
)
_EPS = (
    "It wants a norm of 1 to 7 decimal places. Our factor is 3 float32 eps less than "
    "limit by norm, so that rounding never exceeds the limit: the norm is 0.9999996."
)
_PLACES = (
    "It wants 1.5 to 7 decimal places. Our factor is 3 float32 eps less than limit by "
    "norm, so that rounding never exceeds the limit: the sum is 1.4999998."
)
_ROUNDING = (
    "It wants a norm of at most the limit, exactly, of a tree with float16 and "
    "bfloat16 leaves. Rounding a leaf to its dtype can lengthen it: here by 4.8e-5 of "
    "the limit. `clip_pytree` itself exceeds it with other random seeds."
)
_MEAN = (
    "It wants the mean of clipped gradients to 2e-7, 1.7 float32 eps. Our factor is 3 "
    "eps less than limit by norm, so that rounding never exceeds the limit."
)
_OPTAX = "optax/transforms/_clipping_test.py::ClippingTest::test_"
_PRIVACY = "optax/contrib/_privacy_test.py::DifferentiallyPrivateAggregateTest::test_"
_PYTREE = "tests/clipping_test.py::ClipPyTreeTest::test_clip_pytree_"
_MIXED_TREES = (33, 35, 41, 43, 45, 47, 49, 51, 53, 55)

EXPLAINED: dict[str, dict[str, str]] = {
    "optax": {
        f"{_OPTAX}adaptive_grad_clip": _AGAIN,
        f"{_OPTAX}per_example_layer_norm_clip": _PLACES,
        **{f"{_PRIVACY}clipping_norm{i}": _MEAN for i in range(4)},
    },
    "jax_privacy": {
        f"{_PYTREE}clip_norm_zero_rescale": _EPS,
        **{f"{_PYTREE}has_bounded_norm{i}": _ROUNDING for i in _MIXED_TREES},
    },
}
