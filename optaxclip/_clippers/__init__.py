"""The methods, by what they look at.

by_norm          norms: of everything, tensors, units, groups
by_value         single elements
by_weights       norms in proportion to the weights
learned          norms under limits that follow the run
spam             spikes of single elements
spectral         singular values of matrices
qk_clip          attention logits
clip_by          a clipper of the user's own, and clipping once
recorders        nothing is clipped: norms, and steps that stand out
health           nothing is clipped: signs of each tensor, for the doctor
elements         shares of clipped elements, for clips of values
singular_values  singular values by matrix products alone
"""
