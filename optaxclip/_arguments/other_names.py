"""Names that people know from other libraries and papers, and what they are here.

OUR_NAMES              our arguments for another name of an argument
REMARKS                what errors add to our name
NO_ARGUMENTS           arguments that no function has, and what to do instead
FUNCTIONS              functions for another name of a function
OTHER_NAMES_IN_UPDATE  other names for two arguments of `update`
"""

# Our arguments that are limits. People try the name of one function in another, too.
_LIMITS = (
    "max_norm max_rms max_value max_delta max_logit clipping limit threshold cap rule"
)
# Our names for an argument, and other names that people try. Errors show the first of
# our names that the function has.
_OTHER_NAMES = {
    # Keras: clipnorm, clipvalue, global_clipnorm. Lightning: gradient_clip_val.
    # Hugging Face: max_grad_norm. TensorFlow Privacy: l2_norm_clip.
    _LIMITS: f"""{_LIMITS} clip clip_norm clip_value clipnorm clipvalue delta
        global_clipnorm grad_clip gradient_clip_val l2_clip_norm l2_norm_clip
        max_grad_norm max_l2_norm norm value""",
    # `jax.pmap` and `lax.psum` have axis_name.
    "mesh_axes": "axes axis_name axis_names mesh_axis",
    # torch's `clip_grad_norm_` has norm_type, and its `norm` has p.
    "ord": "norm_type order p",
    "eps": "epsilon stability_eps",
    # NumPy has a_max, torch max, and TensorFlow clip_value_max.
    "max_value": "a_max clip_value_max max upper",
    "min_value": "a_min clip_value_min min lower",
    "labels scope": "groups param_labels",
    "decay": "alpha beta momentum smoothing",
    # NumPy's `percentile` and `quantile` both call it q.
    "quantile": "percentile",
    "quantile percentile": "q",
    # jax_privacy has batch_argnums, microbatch_size and normalize_by, torch
    # error_if_nonfinite, and optax's `apply_if_finite` max_consecutive_errors.
    "shared_argnums": "batch_argnums",
    "nonfinite": "error_if_nonfinite",
    "max_consecutive": "max_consecutive_errors",
    "microbatch": "microbatch_size",
    "mean": "normalize_by",
    "scope": "per",
    "shrink": "rescale_to_unit_norm",
    # The limit in the paper of QK-Clip.
    "max_logit": "tau",
    # Numbers in the papers and code of AdaGC, AGC, SPAM and ZClip.
    "max_norm": "lambda_abs",
    "ratio": "lambda_rel",
    "clipping": "clip_factor",
    "threshold": "theta",
    "warmup": "warmup_steps",
    "z": "z_score z_thresh z_threshold",
    # In a function that counts deviations, a threshold is a number of them.
    f"z sigmas {_LIMITS}": "threshold",
    "noise_multiplier": "sigma stddev",
}
# Our names for each other name.
OUR_NAMES: dict[str, list[str]] = {}
for _ours, _others in _OTHER_NAMES.items():
    OUR_NAMES |= dict.fromkeys(_others.split(), _ours.split())
# Other names for `limit` and `value` in `update`. A chain hands every argument to all
# of its links, so names that may mean something else are left out.
_NAMES_OF_LIMIT = """clip_norm clipnorm global_clipnorm gradient_clip_val l2_clip_norm
    l2_norm_clip max_grad_norm max_l2_norm max_norm max_rms"""
OTHER_NAMES_IN_UPDATE = {
    "limit": frozenset(_NAMES_OF_LIMIT.split()),
    "value": frozenset({"loss", "loss_value", "losses", "train_loss"}),
}
# What the error adds to our name for an argument.
REMARKS = {
    # An average may be weighted from either end.
    "decay": ", the weight of the past: near 1",
    "quantile": ", a share in [0, 1]",
    "shared_argnums": ", the arguments that are not batches",
    "nonfinite": '="raise"',
    "shrink": "=optaxclip.shrinks.normalize",
    "noise_multiplier": ", the standard deviation over the sensitivity",
    "sigmas": ", in standard deviations",
    "z": ", in standard deviations",
}
# Arguments that people try and that no function has, with what to do instead.
NO_ARGUMENTS = {
    # optax masks any transformation.
    "mask": "Wrap the clipper: optax.masked({call}(...), mask).",
    "trainable": "Wrap the clipper: optax.masked({call}(...), mask).",
    "noise_multiplier": "optaxclip.add_noise(result, noise_multiplier, key) adds the "
    "noise.",
    "prefix": "optax.named_chain gives clippers names of their own in the keys.",
}
# Names that people try for a function, and what to use instead.
FUNCTIONS = {
    "agc": "adaptive_grad_clip",
    "apply_if_finite": "skip_nonfinite",
    "clip_by_norm": "clip_by_tensor_norm, or dropin.tensorflow_style.clip_by_norm",
    "clip_grad_norm": "clip_grads(grads, max_norm), or dropin.torch_style",
    "clip_grad_value": "clip_by_value, or dropin.torch_style.clip_grad_value",
    "clip_grads_with_norm": "dropin.torch_style.clip_grads_with_norm",
    "clip_gradient": "clip_cotangent",
    "clip_norm": "clip_by_global_norm",
    # Keras clips each tensor by clipnorm, and all together by global_clipnorm.
    "clipnorm": "clip_by_tensor_norm",
    "clipper": "clip_by_global_norm",
    "clipvalue": "clip_by_value",
    "dp_sgd": "clipped_grad(loss, max_norm, mean=False) and add_noise",
    "global_clipnorm": "clip_by_global_norm",
    "get_total_norm": "global_norm, or dropin.torch_style.get_total_norm",
    "ghost_clipping": 'clipped_grad(loss, max_norm, method="ghost")',
    "gradscaler": "skip_nonfinite(optax.chain(unscale, clip, optimizer)), as in "
    "examples/loss_scaling.py",
    "grad_clip": "clip_by_global_norm",
    "grad_norm": "global_norm(grads), or metrics(state) for a log",
    "gradient_clipping": "clip_by_global_norm",
    "make_private": "clipped_grad(loss, max_norm, mean=False) and add_noise",
    "muon_clip": "qk_clip",
    "norm": "global_norm",
    "privacyengine": "clipped_grad(loss, max_norm, mean=False) and add_noise",
    "skip_nan": "skip_nonfinite",
    "zero_nans": 'clip_by_global_norm(1.0, nonfinite="zero")',
}
